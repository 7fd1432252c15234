"""Tests of `trainshort bench` and `trainshort tune`, which run programs of a source checkout."""

from pathlib import Path

import pytest

from trainshort.cli.main import main

ROOT = Path(__file__).parents[2]


def exit_code(*words: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_command_requires_a_source_checkout(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert exit_code(command, "--quick") == 2
    assert f"trainshort {command} requires a source checkout" in capfd.readouterr().err
    assert exit_code(command, "--help") == 0
    assert capfd.readouterr().out.startswith(f"usage: trainshort {command}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "option"), [("bench", "--backends"), ("tune", "--tokens")])
def test_command_runs_the_program_of_the_checkout(command, option, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    assert exit_code(command, "--help") == 0
    assert option in capfd.readouterr().out
    assert exit_code(command, "--no-such-option") == 2
