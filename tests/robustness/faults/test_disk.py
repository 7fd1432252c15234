"""Tests of a disk that becomes full while a checkpoint is saved. The tests use a small file system in memory."""

import os
import random
import subprocess

import pytest
from harness import assert_checkpoints_are_complete, metrics_size, read_result

from trainshort.train import checkpoint_files


def mount(folder, kilobytes: int, *, remount: bool = False) -> str | None:
    """Mount a file system in memory, or change its size.

    Returns:
        None, or the reason why the file system cannot be mounted.
    """
    folder.mkdir(exist_ok=True)
    options = f"size={kilobytes}k"
    if remount:
        options = f"remount,{options}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True)
    return process.stderr.strip() if process.returncode else None


@pytest.fixture
def disk(tmp_path):
    """Return the folder of a small file system, or skip the test."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system requires root")
    folder = tmp_path / "disk"
    reason = mount(folder, 64)
    if reason is not None:
        pytest.skip(f"cannot mount a file system: {reason}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.fault)])
def test_run_continues_after_a_full_disk(runner, undisturbed_result, disk, times, capsys):
    checkpoint_kilobytes = sum(len(content) for content in undisturbed_result["tensors"].values()) // 1024
    rng = random.Random(times)
    failed_saves = 0
    for number in range(times):
        out = disk / f"run-{number}"
        # There is space for one to three checkpoints and a part of the next. The run keeps three checkpoints.
        disk_kilobytes = int(checkpoint_kilobytes * rng.uniform(1.3, 3.9)) + 40
        assert mount(disk, disk_kilobytes, remount=True) is None
        process = runner.start(out, "--train.keep-checkpoints", "3")
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 2, output
        assert "Traceback" not in output
        assert "the disk is full" in output
        is_failed_save = f"{out}/checkpoints/step-" in output
        assert is_failed_save or f"{out}/metrics.jsonl" in output
        failed_saves += is_failed_save
        assert checkpoint_files.list_checkpoints(out)
        assert_checkpoints_are_complete(out)
        assert metrics_size(out) > 0

        assert mount(disk, 40 * checkpoint_kilobytes, remount=True) is None
        runner.finish(out, "--train.keep-checkpoints", "3")
        assert read_result(out) == undisturbed_result
        subprocess.run(["rm", "-r", str(out)], check=True)
    assert failed_saves
    print(f"\ndisk full: {times} of {times} stopped with a message ({failed_saves} in a save), then bit-identical")
