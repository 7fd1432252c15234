"""Tests of the command-line parser: values, defaults, help texts and error messages."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from trainshort.cli.main import COMMANDS, main
from trainshort.cli.parser import Arg, Parser, UsageError, options_from_dataclass


@dataclass(frozen=True)
class Cook:
    """Cook a dish

    Examples:
      cook soup
    """

    dish: Annotated[str, Arg(metavar="DISH", positional=True)]
    """Cook this dish"""
    extras: Annotated[tuple[str, ...], Arg(positional=True)] = ()
    """Serve these extras with the dish"""
    minutes: int = 10
    """Cook for this many minutes"""
    salt: float | None = None
    """Add this many grams of salt (default: to taste)"""
    pan: Path = Path("pan")
    """Use this pan"""
    heat: Literal["low", "high"] = "low"
    """Set the heat"""
    sizes: tuple[int, ...] = ()
    """Cut pieces of these sizes"""
    pair: tuple[float, float] = (0.5, 1.0)
    """Use two numbers"""
    quick_look: bool = False
    """Only look"""
    lid: bool = True
    """Use the lid"""
    foil: str | None = None
    """Wrap the dish in this foil"""
    herbs: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Add these herbs"""
    rest: int = 0
    """Rest for this many minutes."""
    courses: list[int] | None = None
    """Choose the courses"""


PARSER = Parser("cook", options_from_dataclass(Cook), Cook.__doc__ or "")


def parse(command_line: str) -> Cook:
    """Parse a command line, which is split at spaces."""
    return Cook(**PARSER.parse(command_line.split()))


def test_words_are_converted_to_the_types_of_the_fields():
    assert parse("soup") == Cook("soup")
    command_line = (
        "soup bread - -5 --minutes 3 --salt=-2.5 --pan x/y --heat high --sizes 1 2 3 --pair 1 2 "
        "--quick_look --no-lid --foil tin"
    )
    assert parse(command_line) == Cook(
        dish="soup",
        extras=("bread", "-", "-5"),
        minutes=3,
        salt=-2.5,
        pan=Path("x/y"),
        heat="high",
        sizes=(1, 2, 3),
        pair=(1.0, 2.0),
        quick_look=True,
        lid=False,
        foil="tin",
    )
    assert parse("--minutes 3 soup -- --minutes").extras == ("--minutes",)
    assert parse("soup --salt None --quick-look=false") == Cook("soup", salt=None, quick_look=False)
    assert parse("soup --courses 1 2").courses == (1, 2)


@pytest.mark.parametrize(
    ("command_line", "message_parts"),
    [
        ("", ["DISH is required", "Cook this dish"]),
        ("soup --minute 3", ["'minute'", "Did you mean 'minutes'?", "cook --help"]),
        ("soup -x", ["'-x'", "cook --help"]),
        ("soup --minutes", ["--minutes requires a value", "--minutes N"]),
        ("soup --minutes --lid", ["--minutes requires a value", "--minutes N"]),
        ("soup --pair 1", ["--pair requires 2 values", "--pair X X"]),
        ("soup --minutes 1.5", ["--minutes", "expected an integer", "'1.5'"]),
        ("soup --salt much", ["--salt", "expected a number", "'much'"]),
        ("soup --sizes", ["--sizes requires a value", "--sizes N"]),
        ("soup --sizes 1 two", ["--sizes", "expected an integer", "'two'"]),
        ("soup --heat hihg", ["--heat", "expected one of low, high", "'hihg'", "Did you mean 'high'?"]),
        ("soup --lid=maybe", ["--lid", "expected true or false", "'maybe'"]),
        ("soup --no-minutes", ["'no-minutes'", "Did you mean 'minutes'?", "cook --help"]),
        ("soup --herbs ,", ["--herbs requires at least one value", "','"]),
        ("soup --sizes ,", ["--sizes requires at least one value", "','"]),
    ],
)
def test_invalid_command_line_raises_usage_error(command_line, message_parts):
    with pytest.raises(UsageError) as caught:
        parse(command_line)
    message = str(caught.value)
    assert all(part in message for part in message_parts), message
    assert "\n" not in message
    assert caught.value.usage == "usage: cook DISH [EXTRAS ...] [options]"


def test_commas_separate_names_and_numbers():
    command = parse("soup --herbs dill,sage mint --sizes 1,2 3")
    assert command == Cook("soup", sizes=(1, 2, 3), herbs=("dill", "sage", "mint"))


def test_commas_do_not_separate_other_texts():
    assert parse("soup,bread") == Cook("soup,bread")


def test_help_shows_default_of_zero():
    assert "Rest for this many minutes (default: 0)" in PARSER.help()


def test_unexpected_argument_raises_usage_error():
    options = [option for option in options_from_dataclass(Cook) if option.name != "extras"]
    with pytest.raises(UsageError, match="Unexpected argument 'bread'"):
        Parser("cook", options, "").parse(["soup", "bread"])


def test_help_shows_options_and_one_default_each(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("soup --help")
    assert not caught.value.code
    help_text = " ".join(capsys.readouterr().out.split())
    expected_parts = (
        "usage: cook DISH [EXTRAS ...] [options]",
        "Cook a dish Examples: cook soup",
        "DISH Cook this dish",
        "--minutes N Cook for this many minutes (default: 10)",
        "--salt X Add this many grams of salt (default: to taste)",
        "--pan PATH Use this pan (default: pan)",
        "--heat low|high Set the heat (default: low)",
        "--sizes N ... Cut pieces of these sizes",
        "--pair X X Use two numbers (default: 0.5 1.0)",
        "--quick-look Only look",
        "--no-lid Turn off: Use the lid",
        "--foil TEXT Wrap the dish in this foil",
    )
    for expected_part in expected_parts:
        assert expected_part in help_text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_is_plain_text_with_examples(command, capfd):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert not caught.value.code
    help_text = capfd.readouterr().out
    assert help_text.startswith(f"usage: trainshort {command}")
    assert not set("╭│╰") & set(help_text)
    assert "None" not in help_text.replace("None of", "")
    assert "xample" in help_text


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_option_is_reported_in_one_line(command, capfd):
    recipe = ["demo-alibi"] if command == "train" else []
    with pytest.raises(SystemExit) as caught:
        main([command, *recipe, "--no-such-thing", "1"])
    assert caught.value.code == 2
    error_lines = capfd.readouterr().err.splitlines()
    assert error_lines[0].startswith(f"usage: trainshort {command}")
    assert error_lines[1].startswith("trainshort: Unknown setting 'no-such-thing'.")
    assert len(error_lines) == 2


def test_importing_the_command_line_imports_no_large_packages():
    code = "import sys, trainshort.cli.main; print(len({'tyro', 'torch', 'numpy', 'rich'} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "0\n", process
