"""Evaluations that are killed, for real and several times, end in the numbers of one that never was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import evaluations, make_run

from trainshort.cli.main import main


def command(folder: Path, tokens: int) -> list[str]:
    words = ["evaluate", str(folder), "--lengths", "64,96", "--stride", "1", "--split", "train"]
    return [*words, "--max-tokens", str(tokens), "--batch-tokens", "512"]


@pytest.mark.parametrize(("kills", "tokens"), [(1, 1200), pytest.param(5, 6000, marks=pytest.mark.fault)])
def test_a_killed_evaluation_goes_on_to_the_same_sums(tmp_path: Path, kills: int, tokens: int):
    folders = [make_run(tmp_path, name) for name in ("whole", "killed")]
    with pytest.raises(SystemExit):
        main(command(folders[0], tokens))
    killed = 0
    for _ in range(kills):
        before = _scored(folders[1])
        process = subprocess.Popen(
            [sys.executable, "-m", "trainshort", *command(folders[1], tokens)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and _scored(folders[1]) <= before:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed == kills
    with pytest.raises(SystemExit):
        main(command(folders[1], tokens))
    (whole,), (resumed,) = (evaluations(folder) for folder in folders)
    assert [row.tokens for row in resumed.rows] == [tokens, tokens]
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
