"""A run folder is whole: moved away from its data it evaluates, analyzes and generates, from any working directory."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainshort.cli.main import main
from trainshort.train.run_data import RUN_DATA_FILE

TEXT = Path(__file__).parents[1] / "text.txt"
WORDS = (
    "train demo-alibi --corpus text.txt --tokenizer bpe --data.vocab-size 280 --width 16 --heads 2 --layers 1 "
    "--length 16 --batch 4 --steps 4 --quiet --out run"
)


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(list(words))
    assert not done.value.code


def refused(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as done:
        main(list(words))
    assert done.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A run folder in another place, its data and text gone."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    shutil.copy(TEXT, tmp_path / "home")
    command(*WORDS.split())
    (tmp_path / "away").mkdir()
    shutil.move(tmp_path / "home" / "run", tmp_path / "away" / "run")
    shutil.rmtree(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "away")
    (tmp_path / "away" / "other.txt").write_text("the man had a canal and a plan for it\n" * 40)
    return tmp_path / "away" / "run"


def test_a_moved_run_evaluates_analyzes_and_generates_without_its_data(moved, monkeypatch, capsys):
    command("evaluate", "run", "--data", "other.txt", "--lengths", "1x", "2x")
    command("analyze", "run", "--only", "reach", "--data", "other.txt", "--lengths", "1x", "--samples", "4")
    (moved / "elsewhere").mkdir()
    monkeypatch.chdir(moved / "elsewhere")
    command("generate", str(moved), "a man", "--tokens", "5")
    (checkpoint,) = (moved / "checkpoints").glob("step-*")
    command("generate", str(checkpoint), "a man", "--tokens", "5")
    assert not list((moved / "elsewhere").iterdir())


def test_its_own_text_is_told_to_be_missing(moved, capsys):
    told = refused(capsys, "evaluate", "run")
    assert "The training data of run is not here: " in told
    assert told.endswith("Or give a text: --data FILE.\n")
    assert not (moved.parent / "data").exists()


def test_a_run_copied_without_its_tokenizer_is_one_sentence(moved, capsys):
    (moved / "tokenizer.json").unlink()
    for words in (("evaluate", "run", "--data", "other.txt"), ("generate", "run", "a"), ("analyze", "run")):
        told = refused(capsys, *words)
        assert told == (
            "trainshort: run was copied without its tokenizer.json, and without it its tokens mean nothing. "
            "Copy that file too.\n"
        )


def test_another_tokenizer_is_refused(moved, capsys):
    text = (moved / "tokenizer.json").read_text()
    (moved / "tokenizer.json").write_text(text.replace("\n", " ") + " ")
    assert "is not the tokenizer that the run was trained with" in refused(capsys, "generate", "run", "a")


def test_a_damaged_description_is_told(moved, capsys):
    text = (moved / RUN_DATA_FILE).read_text()
    (moved / RUN_DATA_FILE).write_text(text.replace('"vocab_size": 280', '"vocab_size": 281'))
    assert "was changed after it was written" in refused(capsys, "generate", "run", "a")


def test_a_run_finds_its_data_from_another_working_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "home").mkdir()
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    shutil.copy(TEXT, tmp_path / "home")
    command(*WORDS.split())
    monkeypatch.chdir(tmp_path / "away")
    command("evaluate", "../home/run", "--lengths", "1x")
    assert not list((tmp_path / "away").iterdir())


def test_a_signal_after_the_last_save_changes_nothing(tmp_path):
    """The command holds its handler to the end: the run is finished, and says so by exit code 0."""
    shutil.copy(TEXT, tmp_path)
    code = (
        "import os, signal, sys; from trainshort import checkpoint, cli\n"
        "best = checkpoint.best\n"
        "def late(run):\n"
        "    [os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGINT)]\n"
        "    return best(run)\n"
        "checkpoint.best = late\n"
        "cli.main(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", code, *WORDS.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "run: 4 steps" in done.stdout
