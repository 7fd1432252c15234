"""A reproduction that is killed in the middle goes on, and ends where one that was not killed ends."""

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

from trainshort.experiments.reproduce import jobs
from trainshort.experiments.reproduce.jobs import plan_jobs, run_job
from trainshort.train.metrics_log import read_lines
from trainshort.train.run_folder import RunFolder

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_reproduce_kill import one_task
from trainshort.reproduce.tasks import work
work(one_task(Path(sys.argv[2]), int(sys.argv[4])), Path(sys.argv[3]))
"""


def one_task(folder: Path, steps: int):
    return plan_jobs([two_methods()], tiny_scale(folder, steps=steps)).jobs[0]


def losses(root: Path, name: str) -> list[tuple[int, float]]:
    return [(line["step"], line["nll"]) for line in read_lines(RunFolder(root / name).metrics) if "nll" in line]


@pytest.mark.parametrize("steps", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_killed_in_the_middle_it_goes_on(tmp_path, steps):
    task = one_task(tmp_path, steps)
    run_job(task, tmp_path / "whole")
    here = Path(__file__).parent
    path = os.pathsep.join((str(here), str(here.parent), str(here.parents[1])))
    arguments = [sys.executable, "-c", SCRIPT, str(here.parent), str(tmp_path), str(tmp_path / "killed"), str(steps)]
    threads = str(torch.get_num_threads())  # results are bit-exact for one number of threads
    process = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads})
    metrics = RunFolder(tmp_path / "killed" / task.name).metrics
    try:
        while process.poll() is None and len(read_lines(metrics)) < steps // 3:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not jobs.is_finished(tmp_path / "killed", task)
    run_job(task, tmp_path / "killed")
    assert jobs.is_finished(tmp_path / "killed", task)
    assert losses(tmp_path / "killed", task.name) == losses(tmp_path / "whole", task.name)
    rows = [
        sorted((row.length, row.nll) for one in evaluations(tmp_path / kind / task.name) for row in one.rows)
        for kind in ("whole", "killed")
    ]
    assert rows[0] == rows[1]
