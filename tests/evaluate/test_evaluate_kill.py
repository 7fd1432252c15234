"""Evaluations that are killed, for real and several times, end in the numbers of one that never was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from laboratory import make_run

from trainshort import cli
from trainshort.evaluate import results

KILLS = 5


def command(folder: Path) -> list[str]:
    words = ["evaluate", str(folder), "--lengths", "64,96", "--stride", "1", "--split", "train", "--max-tokens", "6000"]
    return [*words, "--batch-tokens", "512"]


@pytest.mark.fault
def test_a_killed_evaluation_goes_on_to_the_same_sums(tmp_path: Path):
    folders = [make_run(tmp_path, name) for name in ("whole", "killed")]
    with pytest.raises(SystemExit):
        cli.main(command(folders[0]))
    killed = 0
    for _ in range(KILLS):
        before = _scored(folders[1])
        process = subprocess.Popen(
            [sys.executable, "-m", "trainshort", *command(folders[1])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and _scored(folders[1]) <= before:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed == KILLS
    with pytest.raises(SystemExit):
        cli.main(command(folders[1]))
    (whole,), (resumed,) = (results.find(folder) for folder in folders)
    assert [row.tokens for row in resumed.rows] == [6000, 6000]
    for one, other in zip(whole.rows, resumed.rows, strict=True):
        # Passes may fall into other batches after a kill, and the kernels' rounding depends on the batch.
        assert other.nll == pytest.approx(one.nll, rel=1e-6)
    assert not list((folders[1] / "eval").glob("*.partial"))
    print(f"evaluation: {killed} kills, sums equal")


def _scored(folder: Path) -> int:
    """Bytes of losses and results on the disk, which only grow while an evaluation runs."""
    sizes = []
    for path in (folder / "eval").glob("*"):
        if path.suffix in (".partial", ".json"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue
    return sum(sizes)
