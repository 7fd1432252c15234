"""Tests of the README: every command and every Python example runs, in the order of the page."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MINUTES = ("make demo", "make test", "trainshort reproduce --only table5")
"""Commands that take minutes. `make test` runs this test itself, and slow tests run the others."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Return the lines of the console blocks without comments."""
    lines = [line.split("  #")[0].strip() for block in blocks("console") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_readme_is_short_and_starts_with_two_commands():
    lines = README.splitlines()
    assert len(lines) < 150
    first_lines = "\n".join(lines[:15])
    assert "make demo" in first_lines
    assert "make test" in first_lines


def test_every_command_is_known():
    from trainshort.cli.main import COMMANDS

    names = {shlex.split(command)[1] for command in commands() if command.startswith("trainshort ")}
    assert names <= set(COMMANDS)
    assert {"train", "evaluate", "generate", "prepare"} <= names


def test_the_commands_run_one_after_the_other(tmp_path):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran = 0
    for command in commands():
        if command.startswith(MINUTES):
            continue
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran >= 6


@pytest.mark.slow
@pytest.mark.parametrize("start", [word for word in MINUTES if word != "make test"])
def test_the_commands_that_take_minutes_run(start, tmp_path):
    """In an empty folder, with the Makefile of this one; `--old-file` keeps make from installing anything."""
    (command,) = {command for command in commands() if command.startswith(start)}
    make = f"make --file {ROOT / 'Makefile'} --old-file .venv/.installed"
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        re.sub("^make", make, command), shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    (page,) = (tmp_path / "report").rglob("index.html")
    assert "<html" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_the_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})  # the README's own code is what is under test
