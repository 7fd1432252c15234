"""Command lines: every mistake is the usage and one sentence, every option has one default."""

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
    """Cook something.

    Examples:
      cook soup
    """

    dish: Annotated[str, Arg(metavar="DISH", positional=True)]
    """What to cook."""
    extras: Annotated[tuple[str, ...], Arg(positional=True)] = ()
    """What goes with it."""
    minutes: int = 10
    """How long."""
    salt: float | None = None
    """Grams. Default: to taste."""
    pan: Path = Path("pan")
    """Where."""
    heat: Literal["low", "high"] = "low"
    """How hot."""
    sizes: tuple[int, ...] = ()
    """Of the pieces."""
    pair: tuple[float, float] = (0.5, 1.0)
    """Two numbers."""
    quick_look: bool = False
    """Only look."""
    lid: bool = True
    """With its lid."""
    foil: str | None = None
    """Something around it."""
    herbs: Annotated[tuple[str, ...], Arg(names=True)] = ()
    """By name."""
    rest: int = 0
    """Minutes afterwards."""
    courses: list[int] | None = None
    """A list, as a plug-in's settings may have one."""


PARSER = Parser("cook", options_from_dataclass(Cook), Cook.__doc__ or "")


def parse(line: str) -> Cook:
    return Cook(**PARSER.parse(line.split()))


def test_words_become_values():
    assert parse("soup") == Cook("soup")
    line = (
        "soup bread - -5 --minutes 3 --salt=-2.5 --pan x/y --heat high --sizes 1 2 3 --pair 1 2 --quick_look --no-lid"
    )
    assert parse(line + " --foil tin") == Cook(
        "soup", ("bread", "-", "-5"), 3, -2.5, Path("x/y"), "high", (1, 2, 3), (1.0, 2.0), True, False, "tin"
    )
    assert parse("--minutes 3 soup -- --minutes").extras == ("--minutes",)
    assert parse("soup --salt None --quick-look=false").sizes == ()
    assert parse("soup --courses 1 2").courses == (1, 2)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "DISH is missing: What to cook."),
        ("soup --minute 3", "Unknown setting 'minute'. Did you mean 'minutes'? See cook --help."),
        ("soup -x", "Unknown setting '-x'. See cook --help."),
        ("soup --minutes", "--minutes needs a value: --minutes N."),
        ("soup --minutes --lid", "--minutes needs a value: --minutes N."),
        ("soup --pair 1", "--pair needs 2 values: --pair X X."),
        ("soup --minutes 1.5", "--minutes is a whole number, got '1.5'."),
        ("soup --salt much", "--salt is a number, got 'much'."),
        ("soup --sizes", "--sizes needs a value: --sizes N."),
        ("soup --sizes 1 two", "--sizes is a whole number, got 'two'."),
        ("soup --heat hihg", "--heat is one of low, high; got 'hihg'. Did you mean 'high'?"),
        ("soup --lid=maybe", "--lid is true or false, got 'maybe'."),
        ("soup --no-minutes", "Unknown setting 'no-minutes'. Did you mean 'minutes'? See cook --help."),
    ],
)
def test_a_mistake_is_one_sentence_after_the_usage(line, told):
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert str(caught.value) == told
    assert caught.value.usage == "usage: cook DISH [EXTRAS ...] [options]"


def test_commas_may_stand_between_names_and_numbers():
    assert parse("soup --herbs dill,sage mint --sizes 1,2 3") == Cook(
        "soup", sizes=(1, 2, 3), herbs=("dill", "sage", "mint")
    )
    assert parse("soup,bread") == Cook("soup,bread")  # only where names or numbers are expected
    for empty in ("--herbs ,", "--sizes ,"):
        with pytest.raises(UsageError, match="names nothing, got ','"):
            parse(f"soup {empty}")


def test_a_default_of_zero_is_shown():
    assert "Minutes afterwards. Default: 0." in PARSER.help()


def test_a_word_too_many_is_told():
    parser = Parser("cook", [one for one in options_from_dataclass(Cook) if one.name != "extras"], "")
    with pytest.raises(UsageError, match="'bread' is one word too many"):
        parser.parse(["soup", "bread"])


def test_help_shows_names_and_one_default_each(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("soup --help")
    assert not ended.value.code
    text = " ".join(capsys.readouterr().out.split())
    for piece in (
        "usage: cook DISH [EXTRAS ...] [options]",
        "Cook something. Examples: cook soup",
        "DISH What to cook.",
        "--minutes N How long. Default: 10.",
        "--salt X Grams. Default: to taste.",
        "--pan PATH Where. Default: pan.",
        "--heat low|high How hot. Default: low.",
        "--sizes N ... Of the pieces.",
        "--pair X X Two numbers. Default: 0.5 1.0.",
        "--quick-look Only look.",
        "--no-lid Turn this off: with its lid.",
        "--foil TEXT Something around it.",
    ):
        assert piece in text, piece


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_has_boxes_types_or_two_defaults(name, capfd):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert not ended.value.code
    text = capfd.readouterr().out
    assert text.startswith(f"usage: trainshort {name}")
    assert not set("╭│╰") & set(text)
    assert "(default:" not in text
    assert "None" not in text.replace("None of", "")
    assert "xample" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_sentence_and_exit_2(name, capfd):
    with pytest.raises(SystemExit) as ended:
        main([name, *(["demo-alibi"] if name == "train" else []), "--no-such-thing", "1"])
    assert ended.value.code == 2
    err = capfd.readouterr().err.splitlines()
    assert err[0].startswith(f"usage: trainshort {name}")
    assert err[1].startswith("trainshort: Unknown setting 'no-such-thing'.")
    assert len(err) == 2


def test_help_imports_little():
    code = "import sys, trainshort.cli.main; print(len({'tyro', 'torch', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0\n", done
