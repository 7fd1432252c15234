"""What reaches a person's terminal: one way to say something, and text that can do nothing but be read. No torch."""

import re
import sys

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
