"""Run jobs on a real Slurm cluster: two nodes without GPUs on this machine.

The environment variable TRAINSHORT_SLURM_LAB names a script. The script is called as `SCRIPT start FOLDER` and
`SCRIPT stop FOLDER`.
"""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import evaluations
from tiny_experiments import tiny_scale

from trainshort.errors import InputError
from trainshort.experiments.experiments import select_experiments
from trainshort.experiments.reproduce.jobs import Job, is_finished, plan_jobs, run_job
from trainshort.experiments.reproduce.slurm import SlurmConfig, run_on_cluster
from trainshort.train.metrics_log import read_lines
from trainshort.train.run_folder import RunFolder

CLUSTER_SCRIPT = os.environ.get("TRAINSHORT_SLURM_LAB")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CLUSTER_SCRIPT is None, reason="TRAINSHORT_SLURM_LAB names no script that starts a cluster"),
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed"),
]
CONFIG = SlurmConfig(gpus=0, cores=1, minutes=10, partition="main", setup=("export OMP_NUM_THREADS=1",))


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory) -> Iterator[None]:
    """Start the cluster, and stop it after the tests."""
    folder = str(tmp_path_factory.mktemp("slurm"))
    subprocess.run([str(CLUSTER_SCRIPT), "start", folder], check=True, stdout=subprocess.DEVNULL)
    yield
    subprocess.run([str(CLUSTER_SCRIPT), "stop", folder], check=True)


def make_jobs(folder: Path, steps: int = 4) -> list[Job]:
    """Return the two jobs of Table 15, at a scale that trains in seconds."""
    return plan_jobs(select_experiments(["table15"]), tiny_scale(folder, steps=steps)).jobs


def queued_job_ids() -> list[str]:
    """Return the IDs of all jobs in the Slurm queue."""
    command = ["squeue", "--noheader", "--format=%A"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return process.stdout.split()


def wait_for_steps(job: Job, root: Path, steps: int) -> None:
    """Wait until a job has done some training steps."""
    while len(read_lines(RunFolder(root / job.name).metrics)) < steps:
        time.sleep(0.2)


def read_training_losses(folder: Path) -> list[tuple[int, float]]:
    """Return the step and the loss of each training step in the metrics log."""
    records = read_lines(RunFolder(folder).metrics)
    return [(record["step"], record["nll"]) for record in records if "nll" in record]


def test_all_jobs_of_a_table_are_finished(tmp_path):
    jobs = make_jobs(tmp_path)
    assert len(jobs) == 2
    done: list[str] = []
    run_on_cluster(jobs, tmp_path / "runs", done.append, CONFIG)
    assert sorted(done) == sorted(job.name for job in jobs)
    assert all(is_finished(tmp_path / "runs", job) for job in jobs)


def test_request_that_the_cluster_rejects_is_an_error(tmp_path):
    job = make_jobs(tmp_path)[0]
    with pytest.raises(InputError, match=r"Slurm rejected the jobs: .*gres.*site file"):
        run_on_cluster([job], tmp_path / "runs", print, CONFIG.replace(gpus=1))
    with pytest.raises(InputError, match=r"Slurm rejected the jobs: .*partition"):
        run_on_cluster([job], tmp_path / "runs", print, CONFIG.replace(partition="nowhere"))


def test_cancelled_job_is_named(tmp_path):
    job = make_jobs(tmp_path, steps=100_000)[0]

    def cancel_job() -> None:
        wait_for_steps(job, tmp_path / "runs", 5)
        subprocess.run(["scancel", *queued_job_ids()], check=True)

    threading.Thread(target=cancel_job, daemon=True).start()
    with pytest.raises(InputError, match=rf"1 jobs failed: {job.name} \(.*log files are in"):
        run_on_cluster([job], tmp_path / "runs", print, CONFIG)


def test_requeued_job_equals_uninterrupted_job(tmp_path):
    # After a preemption, Slurm ends the job and starts it again with the same arguments.
    steps = 600
    job = replace(make_jobs(tmp_path, steps)[0], eval_lengths={})
    folder = tmp_path / "runs" / job.name
    steps_before_requeue: list[int] = []

    def requeue_job() -> None:
        wait_for_steps(job, tmp_path / "runs", steps // 4)
        (job_id,) = queued_job_ids()
        subprocess.run(["scontrol", "requeue", job_id], check=True)
        steps_before_requeue.append(len(read_lines(RunFolder(folder).metrics)))

    threading.Thread(target=requeue_job, daemon=True).start()
    run_on_cluster([job], tmp_path / "runs", print, CONFIG)
    assert steps // 4 <= steps_before_requeue[0] < steps
    sessions = read_lines(RunFolder(folder).sessions)
    assert [session["step"] > 0 for session in sessions] == [False, True]

    run_job(job, tmp_path / "uninterrupted")
    assert read_training_losses(folder) == read_training_losses(tmp_path / "uninterrupted" / job.name)
    assert not evaluations(folder)
