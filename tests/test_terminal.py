"""Nothing that a model, a file or a path name holds is obeyed by the terminal."""

import ast
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

import trainshort
from trainshort.terminal import new_console, printable, say, tell


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


NAME = "run\x1b[2J\x1b]0;title\x07[/b]"
"""A folder's name: what a terminal would obey, and what rich would take for markup that was never opened."""


def test_names_in_results_are_escaped_at_a_terminal_alone(capsys, monkeypatch):
    tell(NAME)
    assert capsys.readouterr().out == NAME + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tell(NAME)
    assert capsys.readouterr().out == printable(NAME) + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_shows_names_as_they_are_and_keeps_its_own_colours(terminal):
    console = new_console(force_terminal=terminal, color_system="standard" if terminal else None, width=60)
    table = Table(title=NAME)
    table.add_column(NAME, style="red")
    table.add_row(NAME)
    with console.capture() as captured:
        console.print(f"{NAME}: 3 lengths", highlight=False)
        console.print(table)
        console.print(Text(NAME.replace("\a", "")))  # bells rich leaves out by itself
    found = captured.get()
    assert found.count("\x1b[2J") == (0 if terminal else 5)
    assert found.count(printable(NAME)) == (4 if terminal else 0)
    assert found.count(printable("\x1b[2J")) == (5 if terminal else 0)
    assert ("\x1b[31m" in found) == terminal


def test_commands_print_through_these_alone():
    """A path name reaches the terminal as it is by a plain `print`, or by a console of rich's own."""
    package = Path(trainshort.__file__).parent
    allowed = {"terminal.py", "cli.py", "commands/parser.py", "commands/names.py", "utils/timing.py"}
    for path in package.rglob("*.py"):
        name, code = path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        made = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "Console"]
        assert not made, f"{name}:{made}: use new_console"
        plain = [
            f"{name}:{node.lineno}"
            for node in calls
            if isinstance(node.func, ast.Name) and node.func.id == "print" and node.args
            if not any(word in ast.unparse(node) for word in ("printable(", "shown("))
        ]
        assert name in allowed or not plain, f"{plain}: use tell or say"
