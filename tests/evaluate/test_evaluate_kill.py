"""Test that a killed evaluation can be resumed, and gives the same losses as an uninterrupted evaluation."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import evaluations, make_run

from trainshort.cli.main import main


def evaluate_command(run_folder: Path, num_tokens: int) -> list[str]:
    """Return the arguments of `trainshort` for an evaluation that takes some time."""
    options = ["--lengths", "64,96", "--stride", "1", "--split", "train", "--batch-tokens", "512"]
    return ["evaluate", str(run_folder), *options, "--max-tokens", str(num_tokens)]


@pytest.mark.parametrize(("num_kills", "num_tokens"), [(1, 1200), pytest.param(5, 6000, marks=pytest.mark.fault)])
def test_killed_evaluation_equals_uninterrupted_evaluation(tmp_path: Path, num_kills: int, num_tokens: int):
    uninterrupted_run = make_run(tmp_path, "uninterrupted")
    killed_run = make_run(tmp_path, "killed")
    with pytest.raises(SystemExit):
        main(evaluate_command(uninterrupted_run, num_tokens))

    for _ in range(num_kills):
        bytes_before = _result_bytes(killed_run)
        process = subprocess.Popen(
            [sys.executable, "-m", "trainshort", *evaluate_command(killed_run, num_tokens)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and _result_bytes(killed_run) <= bytes_before:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the evaluation ended before it was killed"
    with pytest.raises(SystemExit):
        main(evaluate_command(killed_run, num_tokens))

    (expected,) = evaluations(uninterrupted_run)
    (resumed,) = evaluations(killed_run)
    assert [row.tokens for row in resumed.rows] == [num_tokens, num_tokens]
    for expected_row, resumed_row in zip(expected.rows, resumed.rows, strict=True):
        # After a kill, the passes are split into other batches, which changes the rounding.
        assert resumed_row.nll == pytest.approx(expected_row.nll, rel=1e-6)
    assert not list((killed_run / "eval").glob("*.partial"))


def _result_bytes(run_folder: Path) -> int:
    """Return the size of all losses and results on the disk. The size grows while an evaluation runs."""
    total = 0
    for path in (run_folder / "eval").glob("*"):
        if path.suffix in (".partial", ".json"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue  # The evaluation has renamed or removed the file.
    return total
