"""Something else in the place of every kind of file, under every command that reads it: one sentence, no waiting."""

import itertools
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from trainshort.cli.main import main

RUN = Path("runs/tiny")
LAST = RUN / "checkpoints" / "step-000000008"
FILES = (
    RUN / "config.json",
    RUN / "metrics.jsonl",
    RUN / "sessions.jsonl",
    RUN / "extrapolation.json",
    RUN / "eval" / "*.json",
    RUN / "analysis" / "reach.json",
    LAST / "manifest.json",
    LAST / "state.json",
    LAST / "config.json",
    LAST / "model" / "whole.safetensors",
    Path("data/tiny/meta.json"),
    Path("data/tiny/tokenizer.json"),
    Path("data/tiny/valid.bin"),
)
KINDS = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "looping link": lambda path: path.symlink_to(path.name),
    "empty": Path.touch,
    "cut": lambda path: path.write_text('{"format": 2, "step'),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00{}" * 9),
    "deep": lambda path: path.write_text("[" * 200_000 + "]" * 200_000 + "\n"),
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
ALL = list(itertools.product(FILES, KINDS, COMMANDS))
SAMPLE = random.Random(0).sample(ALL, 20)


@pytest.fixture
def place(tiny_run, tmp_path, monkeypatch):
    shutil.copytree(tiny_run, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def replace_file(pattern: Path, kind: str) -> None:
    """Put something of another kind in the place of the one file that matches `pattern`."""
    (path,) = Path().glob(str(pattern))
    path.unlink()
    KINDS[kind](path)


def ends_in_words(command: str, capsys) -> bool:
    """Whether a command ends by itself, with success or with exit 2 and something said."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"{command} hangs")))
    signal.alarm(120)
    try:
        with pytest.raises(SystemExit) as ended:
            main(command.split())
    finally:
        signal.alarm(0)
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert ended.value.code in (0, None) or (ended.value.code == 2 and "trainshort: " in told), told
    return ended.value.code == 2


@pytest.mark.parametrize(("file", "kind", "command"), SAMPLE, ids=str)
def test_what_is_not_a_file_of_ours_is_told(place, capsys, file, kind, command):
    replace_file(file, kind)
    ends_in_words(COMMANDS[command], capsys)


@pytest.mark.fault
@pytest.mark.parametrize("command", COMMANDS)
def test_every_kind_in_place_of_every_file(tiny_run, tmp_path, monkeypatch, capsys, command):
    refused = 0
    for number, (file, kind) in enumerate(itertools.product(FILES, KINDS)):
        shutil.copytree(tiny_run, tmp_path / str(number))
        monkeypatch.chdir(tmp_path / str(number))
        replace_file(file, kind)
        refused += ends_in_words(COMMANDS[command], capsys)
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(tmp_path / str(number))
    assert refused >= 2 * len(KINDS)  # two files at least that it cannot do without
    print(f"\n{command}: {len(FILES) * len(KINDS)} damages, {refused} refused in words, 0 tracebacks, 0 hangs")


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
def test_an_output_folder_that_cannot_be_made_is_one_sentence(place, capsys, command, out):
    assert ends_in_words(f"{command} --out {out}", capsys)
