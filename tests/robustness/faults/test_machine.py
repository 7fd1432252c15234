"""Tests of a machine that lacks a resource: a read-only disk, a full disk, too few open files, missing permissions."""

import os
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

# Shell commands that run before a command of trainshort.
MOUNT_SMALL_DISK = "mkdir small; mount -t tmpfs -o size={}k tmpfs small"
MOUNT_READ_ONLY = "mount --bind . . && mount -o remount,ro,bind . && cd $PWD"


@cache
def why_no_mounts() -> str | None:
    """Return why this test cannot mount file systems in a private namespace, or None if it can."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"]
    try:
        process = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return process.stderr.strip() if process.returncode else None


@pytest.fixture
def workspace(tiny_run, tmp_path) -> Path:
    """Return a copy of the folder with the small run."""
    return shutil.copytree(tiny_run, tmp_path / "here")


def run_command(
    workspace: Path,
    command: str,
    *,
    setup: str | None = None,
    max_open_files: int | None = None,
    launcher: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Run a command of trainshort in a new process.

    Args:
        workspace: The current folder of the command.
        command: The command.
        setup: A shell command that mounts a file system. Other processes do not see the file system.
        max_open_files: The limit of open files.
        launcher: A program that starts the command, with its arguments.

    Returns:
        The exit code, and everything that was printed.
    """
    arguments = [*launcher, sys.executable, "-m", "trainshort", *command.split()]
    if setup is not None:
        reason = why_no_mounts()
        if reason is not None:
            pytest.skip(f"cannot mount a file system: {reason}")
        arguments = ["unshare", "-m", "sh", "-c", f'{setup} && exec "$@"', "sh", *arguments]

    def limit_open_files() -> None:
        if max_open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, max_open_files))

    process = subprocess.run(
        arguments,
        cwd=workspace,
        env=ENVIRONMENT | {"MPLCONFIGDIR": os.fspath(workspace.parent)},
        capture_output=True,
        text=True,
        preexec_fn=limit_open_files,
        timeout=300,
    )
    return process.returncode, process.stdout + process.stderr


def run_failing_command(workspace: Path, command: str, **options) -> str:
    """Run a command that must end with exit code 2, and return its error message. The options are those of above."""
    code, output = run_command(workspace, command, **options)
    assert code == 2, output
    assert "Traceback" not in output, output
    last_line = output.splitlines()[-1]
    assert last_line.startswith("trainshort: ")
    return last_line


@pytest.mark.parametrize("command", COMMANDS)
def test_read_only_file_system_raises_error(workspace, command):
    message = run_failing_command(workspace, f"{COMMANDS[command]} --out new", setup=MOUNT_READ_ONLY)
    for part in ("folder new", "read-only", "--out"):
        assert part in message


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
def test_full_disk_raises_error(workspace, command, kilobytes, file):
    setup = MOUNT_SMALL_DISK.format(kilobytes)
    message = run_failing_command(workspace, f"{COMMANDS[command]} --out small/new", setup=setup)
    assert " small/new/" in message
    assert f"{file}: the disk is full." in message


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_need_at_most_sixteen_open_files(workspace, command):
    code, output = run_command(workspace, f"{COMMANDS[command]} --out new", max_open_files=16)
    assert code == 0, output


@pytest.mark.parametrize(("command", "max_open_files"), [("train", 5), ("evaluate", 7), ("report", 5)])
def test_too_few_open_files_raise_error(workspace, command, max_open_files):
    message = run_failing_command(workspace, f"{COMMANDS[command]} --out new", max_open_files=max_open_files)
    assert "too many" in message.lower()


@pytest.mark.parametrize(
    ("command", "folder"), [("evaluate", "runs/tiny/eval"), ("report", "runs"), ("report", "runs/tiny")]
)
def test_folder_without_permission_raises_error(workspace, command, folder):
    launcher: tuple[str, ...] = ()
    if os.geteuid() == 0:
        # root can read all folders, unless it gives up the capabilities for this.
        if shutil.which("setpriv") is None:
            pytest.skip("the program setpriv is not installed")
        capabilities = "-dac_override,-dac_read_search"
        launcher = ("setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}")
    (workspace / folder).chmod(0)
    try:
        message = run_failing_command(workspace, COMMANDS[command], launcher=launcher)
    finally:
        (workspace / folder).chmod(0o700)
    assert folder in message
    assert "permission denied" in message
