"""A machine that has run out of something: no place to write to, no room left, no file that may still be opened."""

import os
import re
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from harness import ENVIRONMENT

COMMANDS = {
    "train": "train demo-alibi --steps 1 --data.folder data/tiny --quiet --model.layers 1 --model.width 16",
    "evaluate": "evaluate runs/tiny --lengths 1x 2x",
    "analyze": "analyze runs/tiny --only reach --samples 4 --lengths 1x",
    "prepare": "prepare text.txt --tokenizer bytes",
    "report": "report runs",
}
FULL = "mkdir small; mount -t tmpfs -o size={}k tmpfs small"
READ_ONLY = "mount --bind . . && mount -o remount,ro,bind . && cd $PWD"


@cache
def no_mounts() -> str | None:
    """Why nothing can be mounted here where only this process sees it."""
    try:
        done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else None


@pytest.fixture
def place(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "here")


def ran(
    place: Path, command: str, *, before: str | None = None, descriptors: int | None = None, under: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Exit code and all that was printed; `before` is done in a name space of its own, which is gone afterwards."""
    if before and (why := no_mounts()):
        pytest.skip(f"cannot mount a file system here: {why}")
    words = [*under, sys.executable, "-m", "trainshort", *command.split()]
    if before:
        words = ["unshare", "-m", "sh", "-c", f'{before} && exec "$@"', "sh", *words]

    def limit() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    done = subprocess.run(
        words,
        cwd=place,
        env=ENVIRONMENT | {"MPLCONFIGDIR": os.fspath(place.parent)},
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def told(code: int, text: str) -> str:
    """The one sentence that a command ended with."""
    assert code == 2, text
    assert "Traceback" not in text, text
    return text.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_file_system(place, command):
    line = told(*ran(place, f"{COMMANDS[command]} --out new", before=READ_ONLY))
    assert line.startswith("trainshort: The folder new")
    assert re.search(r"cannot be (made|written to): the file system is read-only\. Choose another --out\.$", line)


@pytest.mark.parametrize(
    ("command", "kilobytes", "file"),
    [
        ("report", 4, "headline.png"),
        ("evaluate", 40, ".png"),
        ("evaluate", 4, ".partial"),
        ("prepare", 4, "tokenizer.json"),
        ("train", 40, "checkpoints/step-000000001"),
    ],
)
def test_a_disk_that_fills_up(place, command, kilobytes, file):
    line = told(*ran(place, f"{COMMANDS[command]} --out small/new", before=FULL.format(kilobytes)))
    assert line.startswith(("trainshort: Cannot write small/new/", "trainshort: Cannot save small/new/"))
    assert f"{file}: the disk is full. " in line


@pytest.mark.parametrize("command", COMMANDS)
def test_sixteen_open_files_are_enough(place, command):
    code, text = ran(place, f"{COMMANDS[command]} --out new", descriptors=16)
    assert code == 0, text


@pytest.mark.parametrize(("command", "descriptors"), [("train", 5), ("evaluate", 7), ("report", 5)])
def test_too_few_open_files(place, command, descriptors):
    line = told(*ran(place, f"{COMMANDS[command]} --out new", descriptors=descriptors))
    assert "too many" in line.lower()


@pytest.mark.parametrize(
    ("command", "folder"), [("evaluate", "runs/tiny/eval"), ("report", "runs"), ("report", "runs/tiny")]
)
def test_a_folder_that_may_not_be_looked_into(place, command, folder):
    under: tuple[str, ...] = ()
    if os.geteuid() == 0:  # whom no mode keeps out, unless the right to that is given up
        if shutil.which("setpriv") is None:
            pytest.skip("there is no setpriv here")
        given_up = "-dac_override,-dac_read_search"
        under = ("setpriv", f"--bounding-set={given_up}", f"--inh-caps={given_up}")
    (place / folder).chmod(0)
    try:
        line = told(*ran(place, COMMANDS[command], under=under))
    finally:
        (place / folder).chmod(0o700)
    expected_start = "trainshort: The operating system reported an error: permission denied"
    assert re.match(rf"{expected_start} \(file {folder}\b.*\)\.$", line)
