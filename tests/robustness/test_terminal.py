"""Tests of terminal output: text from models, files and path names cannot control the terminal."""

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
    ("text", "escaped"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\x00\x7f\x9b31m", r"a\rb\x00\x7f\x9b31m"),
        ("\udcff", r"\udcff"),
        ("two\nlines\tπ 語 👩\u200d💻 \u00a0", "two\nlines\tπ 語 👩\u200d💻 \u00a0"),
    ],
)
def test_control_characters_are_escaped_and_all_other_text_stays(text, escaped):
    assert escape_control_characters(text) == escaped


def test_status_messages_are_escaped(capsys):
    print_status("no run at \x1b[31mred")
    assert capsys.readouterr().err == "trainshort: no run at \\x1b[31mred\n"


def test_log_messages_are_shown_while_the_command_line_runs(capsys):
    log = logging.getLogger("trainshort.example")
    with show_log_messages():
        log.info("loading \x1b[31mred")
    log.info("silent")
    assert capsys.readouterr().err == "trainshort: loading \\x1b[31mred\n"


# The name of a folder that contains escape sequences of a terminal and markup of rich.
NAME = "run\x1b[2J\x1b]0;title\x07[/b]"


def test_results_are_escaped_only_on_a_terminal(capsys, monkeypatch):
    print_line(NAME)
    assert capsys.readouterr().out == NAME + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_line(NAME)
    assert capsys.readouterr().out == escape_control_characters(NAME) + "\n"


def test_console_prints_brackets_literally():
    console = new_console(width=60)
    with console.capture() as captured:
        console.print("run[/b]: 3 lengths", highlight=False)
    assert captured.get() == "run[/b]: 3 lengths\n"


# Files that may call `print` directly. They print constant text, or text that is escaped elsewhere.
FILES_WITH_PLAIN_PRINT = {
    "cli/list_show.py",
    "cli/main.py",
    "cli/parser.py",
    "utils/terminal.py",
    "utils/timing.py",
}

PACKAGE = Path(trainshort.__file__).parent


def find_calls(path: Path, function: str) -> list[ast.Call]:
    """Return all calls of a function in a Python file. Calls of methods of the same name are not returned."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == function]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_output_is_escaped(path):
    """A plain `print`, or a console that is not made by `new_console`, would print path names unescaped."""
    name = path.relative_to(PACKAGE).as_posix()
    if name != "utils/terminal.py":
        consoles = [call.lineno for call in find_calls(path, "Console")]
        assert not consoles, f"{name}:{consoles}: use new_console"
    if name not in FILES_WITH_PLAIN_PRINT:
        for call in find_calls(path, "print"):
            code = ast.unparse(call)
            is_escaped = "escape_control_characters(" in code or "escape_for_output(" in code
            assert is_escaped or not call.args, f"{name}:{call.lineno}: use print_line or print_status"
