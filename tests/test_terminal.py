"""Nothing that a model, a file or a path name holds is obeyed by the terminal."""

import pytest

from trainshort.terminal import printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\x00\x7f\x9b31m", r"a\rb\x00\x7f\x9b31m"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("\udcff", r"\udcff"),
        ("two\nlines\tπ 語 👩\u200d💻 \u00a0", "two\nlines\tπ 語 👩\u200d💻 \u00a0"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped_and_all_else_stays(text, shown):
    assert printable(text) == shown


def test_what_is_said_is_escaped(capsys):
    say("no run at \x1b[31mred")
    assert capsys.readouterr().err == "trainshort: no run at \\x1b[31mred\n"
