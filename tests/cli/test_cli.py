"""Tests of the command line: help without torch, lists of names, and errors in one line."""

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


def run_command(capsys, *words: str) -> tuple[int, str, str]:
    """Run a command, and return its exit code, its standard output and its standard error."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_lists_all_commands(capsys):
    code, output, _ = run_command(capsys, "--help")
    assert code == 0
    assert all(name in output for name in COMMANDS)


def test_command_line_without_words_shows_help(capsys):
    _, help_output, _ = run_command(capsys, "--help")
    code, output, _ = run_command(capsys)
    assert code == 0
    assert output == help_output


HELP_COMMANDS = ["--help", *(f"{name} --help" for name in COMMANDS), "train demo-alibi --help"]


@pytest.mark.parametrize("command_line", HELP_COMMANDS)
def test_help_does_not_import_torch(command_line):
    process = run_python(f"""
import sys
from trainshort.cli.main import main
try:
    main({command_line.split()!r})
except SystemExit as error:
    assert not error.code, error.code
imported = {{"torch", "transformers", "matplotlib", "plotly", "grain"}} & set(sys.modules)
assert not imported, imported
""")
    assert process.returncode == 0, process.stderr
    assert "xample" in process.stdout


@pytest.mark.parametrize(
    ("kind", "expected_names"),
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
def test_list_shows_names_with_descriptions(capsys, kind, expected_names):
    code, output, _ = run_command(capsys, "list", kind)
    descriptions = dict(line.split(None, 1) for line in output.splitlines())
    assert code == 0
    assert set(expected_names) <= set(descriptions)
    assert all(len(description) > 10 for description in descriptions.values()), descriptions


def test_list_without_kind_shows_every_registry(capsys):
    code, output, _ = run_command(capsys, "list")
    names_by_kind = dict(line.split(None, 1) for line in output.splitlines())
    assert code == 0
    assert list(names_by_kind) == list(LISTABLE_REGISTRIES)
    assert "alibi" in names_by_kind["positions"]
    assert all(names_by_kind.values())


def test_every_registry_can_be_listed():
    package = Path(trainshort.__file__).parent
    pattern = r'(?m)^(\w+): "?Registry\['
    variable_names = [name for path in package.rglob("*.py") for name in re.findall(pattern, path.read_text())]
    variable_names.remove("methods")  # This registry has the same names as the registry `positions`.
    listable_names = [place.partition(":")[2] for place in LISTABLE_REGISTRIES.values()]
    assert sorted(variable_names) == sorted(listable_names)


def test_list_does_not_import_torch():
    process = run_python(
        "import sys\nfrom trainshort.cli.main import run\nrun(['list'])\nassert 'torch' not in sys.modules"
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("positions ")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "x.json"), RecursionError(), json.JSONDecodeError("bad", "{", 1)]
)
def test_file_error_is_reported_in_one_line(capsys, monkeypatch, error):
    def fail(argv):
        raise error

    monkeypatch.setattr(trainshort.cli.main, "run", fail)
    code, _, error_output = run_command(capsys, "list")
    assert code == 2
    assert len(error_output.splitlines()) == 1


def test_pydantic_error_is_reported_in_one_line(capsys, monkeypatch):
    class Model(BaseModel):
        number: int

    monkeypatch.setattr(trainshort.cli.main, "run", lambda argv: Model(number="x"))  # pyright: ignore[reportArgumentType]
    code, _, error_output = run_command(capsys, "list")
    assert code == 2
    assert error_output.startswith("trainshort: Invalid value of 'number' in Model: ")
    assert len(error_output.splitlines()) == 1


def test_show_prints_the_settings_of_a_recipe(capsys):
    code, output, _ = run_command(capsys, "show", "demo-alibi")
    assert code == 0
    assert json.loads(output)["model"]["position"] == "alibi"


def test_version_is_that_of_the_package(capsys):
    _, output, _ = run_command(capsys, "--version")
    assert output == f"trainshort {trainshort.__version__}\n"


def test_public_names_can_be_imported():
    for name in trainshort.__all__:
        assert getattr(trainshort, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        _ = trainshort.atend  # pyright: ignore[reportAttributeAccessIssue]
