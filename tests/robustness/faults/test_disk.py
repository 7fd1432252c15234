"""A disk that fills up during a save: a real, small file system."""

import os
import random
import subprocess

import pytest
from harness import logged, result

from trainshort.train import checkpoint_files


def mount(folder, kilobytes: int, *, again: bool = False) -> str | None:
    """Mount a tmpfs of this size, or change its size; returns why that is not possible."""
    folder.mkdir(exist_ok=True)
    options = f"{'remount,' if again else ''}size={kilobytes}k"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None


@pytest.fixture
def disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    if reason := mount(folder, 64):
        pytest.skip(f"cannot mount a small file system here: {reason}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.fault)])
def test_a_full_disk_loses_nothing(runner, undisturbed, disk, times, capsys):
    size = sum(len(data) for data in undisturbed["tensors"].values()) // 1024
    chance, saves = random.Random(times), 0
    for number in range(times):
        out = disk / f"run-{number}"
        # Room for one to three checkpoints and a part of the next; keeping three, the run must fill it.
        assert mount(disk, int(size * chance.uniform(1.3, 3.9)) + 40, again=True) is None
        process = runner.start(out, "--train.keep-checkpoints", "3")
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 2, text
        assert "Traceback" not in text
        assert f"Cannot save {out}/checkpoints/step-" in text or f"Cannot write {out}/metrics.jsonl" in text
        assert "the disk is full" in text
        saves += "Cannot save" in text
        whole = checkpoint_files.list_checkpoints(out)
        assert whole
        assert [checkpoint_files.find_corruption(folder) for folder in whole] == [None] * len(whole)
        assert logged(out)
        assert mount(disk, 40 * size, again=True) is None
        runner.finish(out, "--train.keep-checkpoints", "3")
        assert result(out) == undisturbed
        subprocess.run(["rm", "-r", str(out)], check=True)
    assert saves
    print(
        f"\ndisk full: {times} of {times} stopped with a message naming the path ({saves} in a save), "
        "checkpoints before it intact, bit-identical after room was made"
    )
