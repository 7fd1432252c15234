"""What reaches a person's terminal: one way to say something, and text that can do nothing but be read. No torch."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls but for tab and line end, overrides of direction, and halves of characters (bytes of odd path names)."""


def printable(text: str) -> str:
    r"""Text from a model, a file or a path name with everything that a terminal would obey shown escaped.

    A clear-screen of four bytes becomes the seven characters \x1b[2J; line ends, tabs and every script stay.
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def first_sentence(error: Exception) -> str:
    """What a library says of an error, as far as its first full stop, to stand in parentheses."""
    line = re.sub(r"\s+", " ", str(error)).strip()
    return re.split(r"\.(?: |$)", line, maxsplit=1)[0][:240] or type(error).__name__


def say(message: str) -> None:
    """Tell the user something beside the result, on standard error."""
    print(f"trainshort: {printable(message)}", file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str | None) -> Iterator[None]:
    """Show at a terminal what is waited for, until it is over: nothing of it stays, so a refusal is one sentence."""
    if what is None or not sys.stderr.isatty():
        yield
        return
    with new_console(stderr=True).status(printable(what)):
        yield


def shown(text: str) -> str:
    """Text as standard output gets it: as it is, but harmless at a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def tell(message: str) -> None:
    """A line of a command's result, on standard output."""
    print(shown(message), flush=True)


def new_console(**options: Any) -> "Console":
    """rich's, for text with names from anywhere: brackets are no markup, and at a terminal escapes are shown."""
    return _harmless()(markup=False, **options)


@cache
def _harmless() -> "type[Console]":
    from rich.console import Console  # here, because --help needs no rich
    from rich.segment import Segment

    class Harmless(Console):
        def render_str(self, text: str, **options: Any) -> "Text":
            """Before anything is laid out, so that columns fit what is shown."""
            return super().render_str(printable(text) if self.is_terminal else text, **options)

        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
            """What came as rich's own objects."""
            for text, style, control in super().render(renderable, options):
                yield Segment(printable(text) if self.is_terminal and not control else text, style, control)

    return Harmless
