"""Nothing that a model, a file or a path name holds is obeyed by the terminal."""

import ast
import logging
import sys
from pathlib import Path

import pytest

import trainshort
from trainshort.utils.terminal import (
    escape_control_characters,
    new_console,
    print_line,
    print_status,
    show_log_messages,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\x00\x7f\x9b31m", r"a\rb\x00\x7f\x9b31m"),
        ("\udcff", r"\udcff"),
        ("two\nlines\tπ 語 👩\u200d💻 \u00a0", "two\nlines\tπ 語 👩\u200d💻 \u00a0"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped_and_all_else_stays(text, shown):
    assert escape_control_characters(text) == shown


def test_what_is_said_is_escaped(capsys):
    print_status("no run at \x1b[31mred")
    assert capsys.readouterr().err == "trainshort: no run at \\x1b[31mred\n"


def test_log_messages_are_shown_while_the_command_line_runs(capsys):
    log = logging.getLogger("trainshort.example")
    with show_log_messages():
        log.info("loading \x1b[31mred")
    log.info("silent")
    assert capsys.readouterr().err == "trainshort: loading \\x1b[31mred\n"


NAME = "run\x1b[2J\x1b]0;title\x07[/b]"
"""A folder's name: what a terminal would obey, and what rich would take for markup that was never opened."""


def test_names_in_results_are_escaped_at_a_terminal_alone(capsys, monkeypatch):
    print_line(NAME)
    assert capsys.readouterr().out == NAME + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_line(NAME)
    assert capsys.readouterr().out == escape_control_characters(NAME) + "\n"


def test_a_console_shows_brackets_as_they_are():
    console = new_console(width=60)
    with console.capture() as captured:
        console.print("run[/b]: 3 lengths", highlight=False)
    assert captured.get() == "run[/b]: 3 lengths\n"


def test_commands_print_through_these_alone():
    """A path name reaches the terminal as it is by a plain `print`, or by a console of rich's own."""
    package = Path(trainshort.__file__).parent
    allowed = {"terminal.py", "cli.py", "commands/parser.py", "commands/names.py", "utils/timing.py"}
    for path in package.rglob("*.py"):
        name, code = path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        made = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "Console"]
        assert name == "terminal.py" or not made, f"{name}:{made}: use new_console"
        plain = [
            f"{name}:{node.lineno}"
            for node in calls
            if isinstance(node.func, ast.Name) and node.func.id == "print" and node.args
            if not any(word in ast.unparse(node) for word in ("printable(", "shown("))
        ]
        assert name in allowed or not plain, f"{plain}: use tell or say"
