"""A job that was killed continues, and its results equal those of a job that was not killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import evaluations
from tiny_experiments import tiny_scale, two_methods

from trainshort.experiments.reproduce.jobs import Job, is_finished, plan_jobs, run_job
from trainshort.train.metrics_log import read_lines
from trainshort.train.run_folder import RunFolder

HERE = Path(__file__).parent

# The arguments are the folder of the text, the folder of the runs, and the number of training steps.
SCRIPT = """
import sys
from pathlib import Path
from test_reproduce_kill import make_job
from trainshort.experiments.reproduce.jobs import run_job
run_job(make_job(Path(sys.argv[1]), int(sys.argv[3])), Path(sys.argv[2]))
"""


def make_job(folder: Path, steps: int) -> Job:
    """Return the job of the demo's ALiBi model.

    Args:
        folder: The folder of the text.
        steps: The number of training steps.
    """
    return plan_jobs([two_methods()], tiny_scale(folder, steps=steps)).jobs[0]


def read_training_losses(root: Path, name: str) -> list[tuple[int, float]]:
    """Return the step and the loss of each training step in the metrics log."""
    records = read_lines(RunFolder(root / name).metrics)
    return [(record["step"], record["nll"]) for record in records if "nll" in record]


def read_evaluation_losses(root: Path, name: str) -> list[tuple[int, float]]:
    """Return the length and the loss of each evaluation."""
    losses = [(row.length, row.nll) for evaluation in evaluations(root / name) for row in evaluation.rows]
    return sorted(losses)


def kill_after_steps(arguments: list[str], metrics: Path, steps: int) -> None:
    """Run the script, and kill it after some training steps.

    Args:
        arguments: The arguments of the script.
        metrics: The metrics log of the run.
        steps: The number of training steps.
    """
    import_path = os.pathsep.join((str(HERE), str(HERE.parent), str(HERE.parents[1])))
    threads = str(torch.get_num_threads())  # Results are bit-identical only with the same number of threads.
    environment = {**os.environ, "PYTHONPATH": import_path, "OMP_NUM_THREADS": threads}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], env=environment)
    try:
        while len(read_lines(metrics)) < steps:
            assert process.poll() is None, "The script ended before it was killed."
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("steps", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_killed_job_equals_uninterrupted_job(tmp_path, steps):
    job = make_job(tmp_path, steps)
    uninterrupted = tmp_path / "uninterrupted"
    killed = tmp_path / "killed"

    run_job(job, uninterrupted)
    metrics = RunFolder(killed / job.name).metrics
    kill_after_steps([str(tmp_path), str(killed), str(steps)], metrics, steps // 3)
    assert not is_finished(killed, job)
    run_job(job, killed)

    assert is_finished(killed, job)
    assert read_training_losses(killed, job.name) == read_training_losses(uninterrupted, job.name)
    assert read_evaluation_losses(killed, job.name) == read_evaluation_losses(uninterrupted, job.name)
