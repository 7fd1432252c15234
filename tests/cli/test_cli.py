"""The command line: quick help without torch, names, and mistakes told in one sentence."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import trainshort
import trainshort.cli.main
from trainshort.cli.list_show import LISTABLE_REGISTRIES
from trainshort.cli.main import COMMANDS, main


def call(capsys, *argv):
    """Exit code and what was printed."""
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_help_lists_the_commands(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    assert call(capsys)[1] == out


@pytest.mark.parametrize("line", ["--help", *(f"{name} --help" for name in COMMANDS), "train demo-alibi --help"])
def test_help_does_not_import_torch(line):
    code = f"""
import sys
from trainshort.cli.main import main
try:
    main({line.split()!r})
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {{"torch", "transformers", "matplotlib", "plotly", "grain"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "xample" in done.stdout


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        ("positions", ["none", "sinusoidal", "learned", "rotary", "t5", "alibi"]),
        ("corpora", ["sotu", "stdlib", "wikitext-2", "wikitext-103", "bookcorpus"]),
        ("recipes", ["demo-alibi", "demo-sinusoidal"]),
        ("presets", ["wikitext103", "books", "cc100"]),
        ("backends", ["reference", "sdpa", "windowed", "flex"]),
        ("tokenizers", ["bytes", "words", "bpe"]),
        ("analyses", ["reach", "cost"]),
        ("experiments", ["demo", "table5", "fig1"]),
        ("scales", ["laptop", "gpu", "paper"]),
        ("claims", []),
    ],
)
def test_list_names_and_describes(capsys, kind, some):
    code, out, _ = call(capsys, "list", kind)
    lines = dict(line.split(None, 1) for line in out.splitlines())
    assert code == 0
    assert set(some) <= set(lines)
    assert all(len(line) > 10 for line in lines.values()), lines


def test_list_alone_shows_every_registry(capsys):
    code, out, _ = call(capsys, "list")
    lines = dict(line.split(None, 1) for line in out.splitlines())
    assert code == 0
    assert list(lines) == list(LISTABLE_REGISTRIES)
    assert "alibi" in lines["positions"]
    assert all(lines.values())
    package = Path(trainshort.__file__).parent
    pattern = r'(?m)^(\w+): "?Registry\['
    made = [name for path in package.rglob("*.py") for name in re.findall(pattern, path.read_text())]
    made.remove("methods")  # the settings of what `positions` holds
    assert sorted(made) == sorted(place.partition(":")[2] for place in LISTABLE_REGISTRIES.values())


def test_names_are_listed_without_torch():
    code = "import sys\nfrom trainshort.cli.main import run\nrun(['list'])\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("positions ")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "x.json"), RecursionError(), json.JSONDecodeError("bad", "{", 1)]
)
def test_an_error_of_a_file_is_one_line_and_exit_code_2(capsys, monkeypatch, error):
    def fail(argv):
        raise error

    monkeypatch.setattr(trainshort.cli.main, "run", fail)
    with pytest.raises(SystemExit) as ended:
        trainshort.cli.main.main(["list"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_pydantic_error_is_one_line_and_exit_code_2(capsys, monkeypatch):
    class Model(BaseModel):
        number: int

    monkeypatch.setattr(trainshort.cli.main, "run", lambda argv: Model(number="x"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(SystemExit) as ended:
        trainshort.cli.main.main(["list"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("trainshort: A Model has an invalid value at 'number': ")


def test_show_prints_a_recipes_settings(capsys):
    code, out, _ = call(capsys, "show", "demo-alibi")
    assert code == 0
    assert json.loads(out)["model"]["position"] == "alibi"


def test_version_is_the_packages(capsys):
    assert call(capsys, "--version")[1] == f"trainshort {trainshort.__version__}\n"


def test_public_names_are_importable():
    for name in trainshort.__all__:
        assert getattr(trainshort, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        _ = trainshort.atend  # pyright: ignore[reportAttributeAccessIssue]
