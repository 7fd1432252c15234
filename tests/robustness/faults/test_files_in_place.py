"""Tests of invalid files in a run folder or a dataset: every command ends with success or with one clear error."""

import itertools
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from trainshort.cli.main import main

RUN = Path("runs/tiny")
CHECKPOINT = RUN / "checkpoints" / "step-000000008"

# The files that are replaced.
FILES = (
    RUN / "config.json",
    RUN / "metrics.jsonl",
    RUN / "sessions.jsonl",
    RUN / "extrapolation.json",
    RUN / "eval" / "*.json",
    RUN / "analysis" / "reach.json",
    CHECKPOINT / "manifest.json",
    CHECKPOINT / "state.json",
    CHECKPOINT / "config.json",
    CHECKPOINT / "model" / "whole.safetensors",
    Path("data/tiny/meta.json"),
    Path("data/tiny/tokenizer.json"),
    Path("data/tiny/valid.bin"),
)

# Functions that create an invalid file.
INVALID_FILES = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "broken link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "empty": Path.touch,
    "incomplete": lambda path: path.write_text('{"format": 2, "step'),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00{}" * 9),
    "nested too deeply": lambda path: path.write_text("[" * 200_000 + "]" * 200_000 + "\n"),
    "null": lambda path: path.write_text("null\n"),
    "list": lambda path: path.write_text("[]\n"),
    "long number": lambda path: path.write_text('{"format": ' + "9" * 1_000_000 + "}\n"),
}

COMMANDS = {
    "report": "report runs --out page",
    "evaluate": f"evaluate {RUN} --lengths 1x 2x",
    "analyze": f"analyze {RUN} --only reach --samples 4 --lengths 1x",
    "generate": f"generate {RUN} the --tokens 3",
    "resume": f"train {RUN} --resume --train.steps 9 --quiet",
}

ALL_CASES = list(itertools.product(FILES, INVALID_FILES, COMMANDS))
SOME_CASES = random.Random(0).sample(ALL_CASES, 20)


@pytest.fixture
def workspace(tiny_run, tmp_path, monkeypatch) -> None:
    """Copy the folder with the small run, and make the copy the current folder."""
    shutil.copytree(tiny_run, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def replace_file(pattern: Path, kind: str) -> None:
    """Replace the only file that matches `pattern` by an invalid file."""
    (path,) = Path().glob(str(pattern))
    path.unlink()
    INVALID_FILES[kind](path)


def run_command(command: str, capsys) -> bool:
    """Run a command, and check that it ends with success, or with exit code 2 and a message.

    Returns:
        True if the exit code is 2.
    """

    def raise_timeout(number, frame):
        raise TimeoutError(f"{command} does not end")

    signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(120)
    try:
        with pytest.raises(SystemExit) as exit_info:
            main(command.split())
    finally:
        signal.alarm(0)
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    code = exit_info.value.code or 0
    assert code in (0, 2), stderr
    if code == 2:
        assert "trainshort: " in stderr
    return code == 2


@pytest.mark.parametrize(("file", "kind", "command"), SOME_CASES, ids=str)
def test_command_with_an_invalid_file_ends_with_success_or_an_error(workspace, capsys, file, kind, command):
    replace_file(file, kind)
    run_command(COMMANDS[command], capsys)


@pytest.mark.fault
@pytest.mark.parametrize("command", COMMANDS)
def test_command_with_all_invalid_files(tiny_run, tmp_path, monkeypatch, capsys, command):
    errors = 0
    for number, (file, kind) in enumerate(itertools.product(FILES, INVALID_FILES)):
        folder = tmp_path / str(number)
        shutil.copytree(tiny_run, folder)
        monkeypatch.chdir(folder)
        replace_file(file, kind)
        errors += run_command(COMMANDS[command], capsys)
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
    # Every command requires at least two of the files.
    assert errors >= 2 * len(INVALID_FILES)
    print(f"\n{command}: {len(FILES) * len(INVALID_FILES)} invalid files, {errors} errors, no traceback")


@pytest.mark.parametrize("out", ["/proc/foo", "text.txt", "text.txt/inside"])
@pytest.mark.parametrize(
    "command",
    [
        "report runs",
        f"evaluate {RUN} --lengths 1x",
        "train demo-alibi --steps 1 --data.folder data/tiny",
        "prepare text.txt --tokenizer bytes",
    ],
)
def test_impossible_output_folder_raises_error(workspace, capsys, command, out):
    assert run_command(f"{command} --out {out}", capsys)
