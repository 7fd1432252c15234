"""A small table on a real Slurm: two nodes without GPUs, on this machine.

TRAINSHORT_SLURM_LAB names a script that is called as `SCRIPT start FOLDER` and `SCRIPT stop FOLDER`.
"""

import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace

import pytest
from helpers import evaluations
from tiny_experiments import tiny_scale

from trainshort.errors import InputError
from trainshort.experiments.experiments import select_experiments
from trainshort.experiments.reproduce import jobs
from trainshort.experiments.reproduce.jobs import plan_jobs, run_job
from trainshort.experiments.reproduce.local import SlurmConfig, run_on_cluster
from trainshort.train.metrics_log import read_lines
from trainshort.train.run_folder import RunFolder

LAB = os.environ.get("TRAINSHORT_SLURM_LAB")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LAB is None, reason="TRAINSHORT_SLURM_LAB names no script that starts a Slurm cluster"),
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed"),
]
SITE = SlurmConfig(gpus=0, cores=1, minutes=10, partition="main", setup=("export OMP_NUM_THREADS=1",))


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("slurm"))
    subprocess.run([str(LAB), "start", folder], check=True, stdout=subprocess.DEVNULL)
    yield
    subprocess.run([str(LAB), "stop", folder], check=True)


def table15(folder, steps=4):
    """The table's models at a scale that trains in seconds."""
    return plan_jobs(select_experiments(["table15"]), tiny_scale(folder, steps=steps)).jobs


def queue():
    listed = subprocess.run(["squeue", "--noheader", "--format=%A %T"], capture_output=True, text=True, check=True)
    return dict(line.split() for line in listed.stdout.splitlines())


def test_a_table_is_computed(tmp_path):
    wanted, done = table15(tmp_path), []
    assert len(wanted) == 2
    run_on_cluster(wanted, tmp_path / "runs", done.append, SITE)
    assert sorted(done) == sorted(task.name for task in wanted)
    assert all(jobs.is_finished(tmp_path / "runs", task) for task in wanted)


def test_what_the_cluster_has_not_is_told(tmp_path):
    task = table15(tmp_path)[0]
    with pytest.raises(InputError, match=r"Slurm did not take the jobs \(.*gres.*Say what it wants in a site file"):
        run_on_cluster([task], tmp_path / "runs", print, SITE.replace(gpus=1))
    with pytest.raises(InputError, match=r"Slurm did not take the jobs \(.*partition"):
        run_on_cluster([task], tmp_path / "runs", print, SITE.replace(partition="nowhere"))


def started(task, root, steps):
    while len(read_lines(RunFolder(root / task.name).metrics)) < steps:
        time.sleep(0.2)


def test_a_cancelled_job_is_named(tmp_path):
    task = table15(tmp_path, steps=100_000)[0]

    def cancel():
        started(task, tmp_path / "runs", 5)
        subprocess.run(["scancel", *queue()], check=True)

    threading.Thread(target=cancel, daemon=True).start()
    with pytest.raises(InputError, match=rf"1 jobs failed: {task.name} \(.*Their logs are in"):
        run_on_cluster([task], tmp_path / "runs", print, SITE)


def test_a_requeued_job_goes_on(tmp_path):
    """As after a preemption: Slurm ends the job and starts it again, with the same task."""
    steps = 600
    task = replace(table15(tmp_path, steps)[0], eval_lengths={})
    seen: list[int] = []

    def requeue():
        started(task, tmp_path / "runs", steps // 4)
        (job,) = queue()
        subprocess.run(["scontrol", "requeue", job], check=True)
        seen.append(len(read_lines(RunFolder(tmp_path / "runs" / task.name).metrics)))

    threading.Thread(target=requeue, daemon=True).start()
    run_on_cluster([task], tmp_path / "runs", print, SITE)
    assert steps // 4 <= seen[0] < steps
    sessions = read_lines(RunFolder(tmp_path / "runs" / task.name).sessions)
    assert [one["step"] > 0 for one in sessions] == [False, True]
    run_job(task, tmp_path / "whole")
    assert losses(tmp_path / "runs" / task.name) == losses(tmp_path / "whole" / task.name)
    assert not evaluations(tmp_path / "runs" / task.name)


def losses(folder):
    return [(line["step"], line["nll"]) for line in read_lines(RunFolder(folder).metrics) if "nll" in line]
