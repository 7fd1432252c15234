"""Tests of run folders that were moved to another place: they can be used without their data from any folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainshort.cli.main import main
from trainshort.train.run_data import RUN_DATA_FILE

TEXT = Path(__file__).parents[1] / "text.txt"
TRAIN_COMMAND = (
    "train demo-alibi --corpus text.txt --tokenizer bpe --data.vocab-size 280 --width 16 --heads 2 --layers 1 "
    "--length 16 --batch 4 --steps 4 --quiet --out run"
)


def run_command(*words: str) -> None:
    """Run a command that must succeed."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert not caught.value.code


def error_of_command(capsys, *words: str) -> str:
    """Run a command that must fail with exit code 2, and return what it prints on standard error."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def moved_run(tmp_path, monkeypatch):
    """Return a run folder that was moved to another place. Its data and its text were deleted.

    The working directory is the parent folder of the run. It also contains the text file other.txt.
    """
    home = tmp_path / "home"
    away = tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    shutil.copy(TEXT, home)
    run_command(*TRAIN_COMMAND.split())
    shutil.move(home / "run", away / "run")
    shutil.rmtree(home)
    monkeypatch.chdir(away)
    (away / "other.txt").write_text("the man had a canal and a plan for it\n" * 40)
    return away / "run"


def test_moved_run_can_be_used_without_its_data(moved_run, monkeypatch):
    run_command("evaluate", "run", "--data", "other.txt", "--lengths", "1x", "2x")
    run_command("analyze", "run", "--only", "reach", "--data", "other.txt", "--lengths", "1x", "--samples", "4")
    working_folder = moved_run / "elsewhere"
    working_folder.mkdir()
    monkeypatch.chdir(working_folder)
    run_command("generate", str(moved_run), "a man", "--tokens", "5")
    (checkpoint,) = (moved_run / "checkpoints").glob("step-*")
    run_command("generate", str(checkpoint), "a man", "--tokens", "5")
    assert not list(working_folder.iterdir())


def test_missing_training_data_is_reported(moved_run, capsys):
    message = error_of_command(capsys, "evaluate", "run")
    assert "Cannot open the training data of run" in message
    assert "--data FILE" in message
    assert not (moved_run.parent / "data").exists()


def test_missing_tokenizer_is_reported(moved_run, capsys):
    (moved_run / "tokenizer.json").unlink()
    for words in (("evaluate", "run", "--data", "other.txt"), ("generate", "run", "a"), ("analyze", "run")):
        message = error_of_command(capsys, *words)
        assert message.startswith("trainshort: run was copied without its tokenizer.json")
        assert len(message.splitlines()) == 1


def test_other_tokenizer_is_rejected(moved_run, capsys):
    text = (moved_run / "tokenizer.json").read_text()
    (moved_run / "tokenizer.json").write_text(text.replace("\n", " ") + " ")
    message = error_of_command(capsys, "generate", "run", "a")
    assert "is not the tokenizer that the run was trained with" in message


def test_modified_data_description_is_rejected(moved_run, capsys):
    text = (moved_run / RUN_DATA_FILE).read_text()
    (moved_run / RUN_DATA_FILE).write_text(text.replace('"vocab_size": 280', '"vocab_size": 281'))
    message = error_of_command(capsys, "generate", "run", "a")
    assert f"Checksum mismatch in run/{RUN_DATA_FILE}" in message


def test_run_finds_its_data_from_another_working_directory(tmp_path, monkeypatch):
    home = tmp_path / "home"
    away = tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    shutil.copy(TEXT, home)
    run_command(*TRAIN_COMMAND.split())
    monkeypatch.chdir(away)
    run_command("evaluate", "../home/run", "--lengths", "1x")
    assert not list(away.iterdir())


def test_signal_after_the_last_checkpoint_is_ignored(tmp_path):
    """The run is finished when the signals arrive, so the exit code is 0."""
    shutil.copy(TEXT, tmp_path)
    code = """
import os, signal, sys
from trainshort.cli.main import main
from trainshort.train import checkpoint

best_checkpoint = checkpoint.best_checkpoint

def send_signals_and_find_best(run):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return best_checkpoint(run)

checkpoint.best_checkpoint = send_signals_and_find_best
main(sys.argv[1:])
"""
    process = subprocess.run(
        [sys.executable, "-c", code, *TRAIN_COMMAND.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "run: 4 steps" in process.stdout
