"""Several jobs at the same time: results are kept, failures are named, and workers end with the main process."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tiny_experiments import tiny_scale, two_methods

from trainshort.errors import InputError
from trainshort.experiments.reproduce.jobs import (
    Job,
    checkpoint_step,
    complete_checkpoints,
    evaluate_model,
    is_finished,
    plan_jobs,
    run_locally,
    train_model,
)
from trainshort.experiments.reproduce.local import _scheduling_key
from trainshort.train.metrics_log import read_lines
from trainshort.train.run_folder import RunFolder

HERE = Path(__file__).parent

# More training steps than the test waits for.
MANY_STEPS = 3000

# The arguments are the folder of the text and the folder of the runs.
SCRIPT = """
import sys
from pathlib import Path
from test_side_by_side import MANY_STEPS, make_two_jobs
from trainshort.experiments.reproduce.jobs import run_locally
if __name__ == "__main__":
    run_locally(make_two_jobs(Path(sys.argv[1]), MANY_STEPS), Path(sys.argv[2]), print, max_parallel_jobs=2)
"""


def make_two_jobs(folder: Path, steps: int = 2) -> list[Job]:
    """Return the jobs of ALiBi and sinusoidal, without costs.

    Args:
        folder: The folder of the text.
        steps: The number of training steps.
    """
    demo = two_methods()
    cells = tuple(cell for cell in demo.cells if not cell.is_cost)
    return plan_jobs([replace(demo, cells=cells)], tiny_scale(folder, steps=steps)).jobs[:2]


def test_failed_job_is_named_and_other_results_are_kept(tmp_path):
    good_job, bad_job = make_two_jobs(tmp_path)
    (tmp_path / bad_job.name).mkdir()
    (tmp_path / bad_job.name / "other.txt").write_text("not a run")
    done: list[str] = []
    with pytest.raises(InputError, match=rf"1 models failed: {bad_job.name} \(.*config\.json.*same command"):
        run_locally([good_job, bad_job], tmp_path, done.append, max_parallel_jobs=2)
    assert done == [good_job.name]
    assert is_finished(tmp_path, good_job)


def test_seeds_are_finished_one_after_the_other_and_long_models_are_trained_first(tmp_path):
    job = make_two_jobs(tmp_path)[0]

    def with_train_settings(**settings: int) -> Job:
        return replace(job, config=job.config.replace(train=settings))

    short = with_train_settings(seed=1, length=64)
    long = with_train_settings(seed=1, length=128)
    second_seed = with_train_settings(seed=2, length=256)
    expected = [(long, train_model), (short, train_model), (short, evaluate_model), (second_seed, train_model)]
    waiting = [expected[3], expected[2], expected[1], expected[0]]
    assert sorted(waiting, key=_scheduling_key) == expected


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_workers_save_and_stop_if_the_main_process_ends(tmp_path, signal_number):
    jobs = make_two_jobs(tmp_path, MANY_STEPS)
    folders = [RunFolder(tmp_path / "runs" / job.name) for job in jobs]
    process = start_script(tmp_path)
    while not all(read_lines(folder.metrics) for folder in folders):
        assert process.poll() is None, "The script ended before it was stopped."
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children()
    assert len(workers) >= 2

    process.send_signal(signal_number)
    process.wait(timeout=60)
    _, running_workers = psutil.wait_procs(workers, timeout=60)
    assert not running_workers
    for folder in folders:
        checkpoints = complete_checkpoints(folder.path)
        assert checkpoints, f"{folder.path.name} stopped without saving a checkpoint."
        assert 0 < checkpoint_step(checkpoints[-1]) < MANY_STEPS


def start_script(folder: Path) -> subprocess.Popen:
    """Start a process that trains two models at the same time."""
    # A file is needed, because the worker processes import the main module again.
    script = folder / "script.py"
    script.write_text(SCRIPT)
    import_path = os.pathsep.join((str(HERE), str(HERE.parent), str(HERE.parents[1])))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), str(folder / "runs")],
        env={**os.environ, "PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
