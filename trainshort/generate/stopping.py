"""Stop texts across token boundaries: text is held back as long as it could be the beginning of one.

stop "END":   push "the E" -> "the "    push "N" -> ""    push "T" -> "ENT"    push " END." -> " ", and stopped
"""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of the stop texts is complete; what follows it is dropped."""

    def __init__(self, stops: Sequence[str], held: str = "") -> None:
        self.stops = tuple(stops)
        self.held = held
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop text."""
        if not self.stops or self.stopped:
            return "" if self.stopped else text
        text = self.held + text
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.held, self.stopped = "", True
            return text[: min(found)]
        safe = len(text) - max(_overlap(text, stop) for stop in self.stops)
        self.held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        text, self.held = self.held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that begins `stop`: "the E", "END" gives 1."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
