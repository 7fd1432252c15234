"""`trainshort generate`: text on standard output, the rest on standard error, mistakes in one sentence."""

import io
import os
import signal
import subprocess
import sys

import pytest
from helpers import make_run

from trainshort.cli.main import main
from trainshort.evaluate.significance import CARD_FORMAT
from trainshort.utils.io import write_with_checksum
from trainshort.utils.terminal import escape_control_characters


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("generate"))


@pytest.fixture(scope="module")
def rotary(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("rotary"), position="rotary")


def call(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(["generate", *map(str, argv)])
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def test_text_and_what_is_said_about_it(capsys, run):
    code, out, err = call(capsys, run, "the cat", "--tokens", 30, "--mode", "bounded", "--seed", 3)
    assert code == 0
    assert out.endswith("\n")
    assert "30 tokens" in err
    assert "tokens/s, context 37 (ended by: length)" in err
    assert "error certificate: " in err
    assert call(capsys, run, "the cat", "--tokens", 30, "--mode", "bounded", "--seed", 3)[1] == out
    assert call(capsys, run, "the cat", "--tokens", 30, "--mode", "bounded", "--seed", 4)[1] != out


def test_prompts_by_file_and_by_standard_input(capsys, run, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("the cat")
    expected = call(capsys, run, "the cat", "--tokens", 9)[1]
    assert call(capsys, run, "--prompt-file", tmp_path / "prompt.txt", "--tokens", 9)[1] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat")))
    assert call(capsys, run, "-", "--tokens", 9)[1] == expected


def test_several_prompts_and_samples(capsys, run):
    code, out, _ = call(capsys, run, "the", "a dog ran", "--samples", 2, "--tokens", 5)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("---")] == [f"--- sample {n} ---" for n in range(1, 5)]


def test_the_warning_past_the_length_that_is_known_to_be_good(capsys, run):
    unmeasured = call(capsys, run, "the cat", "--tokens", 30)[2]
    assert unmeasured.count("the context passes 16 tokens: the model was trained at that length") == 1
    known = {"length": 24, "open": True}
    card = {"format": CARD_FORMAT, "summary": "trained at 16, good to 24+", "no_worse": known}
    write_with_checksum(run / "extrapolation.json", card)
    try:
        measured = call(capsys, run, "the cat", "--tokens", 30)[2]
        assert "passes 24 tokens: trained at 16, good to 24+; longer lengths were not evaluated" in measured
        assert "passes" not in call(capsys, run, "the cat", "--tokens", 10)[2]
    finally:
        (run / "extrapolation.json").unlink()


def test_interactive_keeps_its_state(capsys, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n\nsat\n"))
    code, _, err = call(capsys, run, "--interactive", "--tokens", 6)
    assert code == 0
    assert "12 tokens" in err
    assert "Ctrl-D leaves" in err
    assert f"context {len('the cat') + 1 + 6 + len('sat') + 1 + 6}" in err


def test_models_from_elsewhere_that_are_not_alibi_are_told_what_to_do(capsys, tmp_path):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    code, _, err = call(capsys, tmp_path / "gpt2", "x")
    assert code == 2
    assert "is a model of type 'gpt2', with learned positions; trainshort convert makes an ALiBi model of it" in err
    code, _, err = call(capsys, "hf/gpt2", "x")
    assert code == 2
    assert "Run folder not found: hf/gpt2." in err
    assert "trainshort import hf/gpt2 --out runs/gpt2" in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_nothing_that_it_would_obey(capsys, run, monkeypatch):
    arguments = [run, "the cat", "--tokens", 200, "--no-stop-at-end", "--seed", 2]
    raw = call(capsys, *arguments)[1]
    assert "\x1b" in raw  # random weights make every byte; a file or pipe gets the text itself
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    call(capsys, *arguments)
    assert terminal.getvalue() == escape_control_characters(raw)
    assert "\x1b" not in terminal.getvalue()


def test_files_that_are_not_what_they_should_be(capsys, run, tmp_path, monkeypatch):
    (tmp_path / "latin").write_bytes("déjà".encode("latin-1"))
    assert "it is not UTF-8 text (byte 1)" in call(capsys, run, "--prompt-file", tmp_path / "latin")[2]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "Standard input is not UTF-8" in call(capsys, run, "-")[2]


def test_endless_needs_a_way_to_forget(capsys, rotary):
    code, _, err = call(capsys, rotary, "x", "--endless")
    assert code == 2
    assert "requires ALiBi or FoX, but this model uses rotary" in err
    assert "--mode window" in err


def test_a_run_without_its_tokenizer(capsys, run):
    names = ("tokenizer.json", "data.json")
    for name in names:
        (run / name).rename(run / f"{name}.away")
    try:
        code, _, err = call(capsys, run, "x")
    finally:
        for name in names:
            (run / f"{name}.away").rename(run / name)
    assert code == 2
    assert "has no tokenizer. Give --tokenizer FILE." in err


def test_endless_until_interrupted(run):
    command = [sys.executable, "-m", "trainshort", "generate", str(run), "the cat", "--endless"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    first = process.stdout.read(1)  # Waits until some text was written.
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert first + out
    assert b"(ended by: stopped)" in err
    assert b"error certificate: " in err
