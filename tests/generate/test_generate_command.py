"""`trainshort generate`: text on standard output, all messages on standard error, mistakes with exit code 2."""

import io
import os
import signal
import subprocess
import sys

import pytest
from helpers import make_run

from trainshort.cli.main import main
from trainshort.evaluate.significance import SUMMARY_FORMAT
from trainshort.utils.io import write_with_checksum
from trainshort.utils.terminal import escape_control_characters


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of a model with ALiBi and training length 16."""
    return make_run(tmp_path_factory.mktemp("generate"))


@pytest.fixture(scope="module")
def rotary_run(tmp_path_factory):
    """A run folder of a model with rotary positions."""
    return make_run(tmp_path_factory.mktemp("rotary"), position="rotary")


def run_command(capsys, *arguments):
    """Run `trainshort generate`. Return the exit code, the standard output and the standard error."""
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return exit_info.value.code or 0, captured.out, captured.err


def set_stdin(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_text_is_on_stdout_and_summary_on_stderr(capsys, run):
    arguments = [run, "the cat", "--tokens", 30, "--mode", "bounded"]
    code, out, err = run_command(capsys, *arguments, "--seed", 3)
    assert code == 0
    assert out.endswith("\n")
    assert "30 tokens" in err
    assert "context 37 (ended by: length)" in err
    assert "error certificate: " in err
    assert run_command(capsys, *arguments, "--seed", 3)[1] == out
    assert run_command(capsys, *arguments, "--seed", 4)[1] != out


def test_prompt_from_file_and_from_standard_input(capsys, run, tmp_path, monkeypatch):
    _, expected, _ = run_command(capsys, run, "the cat", "--tokens", 9)
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text("the cat")
    assert run_command(capsys, run, "--prompt-file", prompt_file, "--tokens", 9)[1] == expected
    set_stdin(monkeypatch, b"the cat")
    assert run_command(capsys, run, "-", "--tokens", 9)[1] == expected


def test_several_prompts_and_samples(capsys, run):
    code, out, _ = run_command(capsys, run, "the", "a dog ran", "--samples", 2, "--tokens", 5)
    assert code == 0
    headings = [line for line in out.splitlines() if line.startswith("---")]
    assert headings == [f"--- sample {number} ---" for number in range(1, 5)]


def test_warning_beyond_the_training_length_is_printed_once(capsys, run):
    err = run_command(capsys, run, "the cat", "--tokens", 30)[2]
    assert err.count("the context passes 16 tokens: ") == 1


def test_warning_beyond_the_evaluated_length(capsys, run):
    summary = {
        "format": SUMMARY_FORMAT,
        "summary": "trained at 16, good to 24+",
        "no_worse": {"length": 24, "open": True},
    }
    summary_file = run / "extrapolation.json"
    write_with_checksum(summary_file, summary)
    try:
        long_err = run_command(capsys, run, "the cat", "--tokens", 30)[2]
        short_err = run_command(capsys, run, "the cat", "--tokens", 10)[2]
    finally:
        summary_file.unlink()
    assert "the context passes 24 tokens: trained at 16, good to 24+" in long_err
    assert "passes" not in short_err


def test_interactive_mode_continues_one_text(capsys, run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n\nsat\n"))
    code, _, err = run_command(capsys, run, "--interactive", "--tokens", 6)
    assert code == 0
    assert "12 tokens" in err
    assert "Ctrl-D" in err
    # Each of the two lines ends with a newline and is followed by six generated tokens.
    context = len("the cat") + 1 + 6 + len("sat") + 1 + 6
    assert f"context {context}" in err


def test_folder_of_a_gpt2_model_is_rejected_with_a_hint(capsys, tmp_path):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    code, _, err = run_command(capsys, folder, "x")
    assert code == 2
    assert "gpt2" in err
    assert "trainshort convert" in err


def test_name_of_a_hub_model_is_rejected_with_a_hint(capsys):
    code, _, err = run_command(capsys, "hf/gpt2", "x")
    assert code == 2
    assert "trainshort import hf/gpt2 --out runs/gpt2" in err


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def test_control_characters_are_escaped_on_a_terminal(capsys, run, monkeypatch):
    """The random weights generate all bytes, including control characters."""
    arguments = [run, "the cat", "--tokens", 200, "--no-stop-at-end", "--seed", 2]
    file_output = run_command(capsys, *arguments)[1]
    assert "\x1b" in file_output
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run_command(capsys, *arguments)
    assert terminal.getvalue() == escape_control_characters(file_output)
    assert "\x1b" not in terminal.getvalue()


def test_prompts_that_are_not_utf8_are_rejected(capsys, run, tmp_path, monkeypatch):
    prompt_file = tmp_path / "latin.txt"
    prompt_file.write_bytes("déjà".encode("latin-1"))
    code, _, err = run_command(capsys, run, "--prompt-file", prompt_file)
    assert code == 2
    assert "latin.txt" in err
    assert "UTF-8" in err
    set_stdin(monkeypatch, b"\xff")
    code, _, err = run_command(capsys, run, "-")
    assert code == 2
    assert "UTF-8" in err


def test_endless_generation_requires_a_limited_cache(capsys, rotary_run):
    code, _, err = run_command(capsys, rotary_run, "x", "--endless")
    assert code == 2
    assert "rotary" in err
    assert "--mode window" in err


def test_run_without_tokenizer_is_rejected(capsys, run):
    names = ("tokenizer.json", "data.json")
    for name in names:
        (run / name).rename(run / f"{name}.moved")
    try:
        code, _, err = run_command(capsys, run, "x")
    finally:
        for name in names:
            (run / f"{name}.moved").rename(run / name)
    assert code == 2
    assert "--tokenizer" in err


def test_endless_generation_ends_with_ctrl_c(run):
    command = [sys.executable, "-m", "trainshort", "generate", str(run), "the cat", "--endless"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    first_byte = process.stdout.read(1)  # Waits until some text was written.
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert first_byte + out
    assert b"(ended by: stopped)" in err
    assert b"error certificate: " in err
