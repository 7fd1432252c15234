"""Several models at a time: what each makes is kept, a failure is named, and no worker outlives its command."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_experiments import tiny_scale, two_methods

from trainshort.errors import InputError
from trainshort.experiments.reproduce import jobs
from trainshort.experiments.reproduce.jobs import plan_jobs, run_locally
from trainshort.experiments.reproduce.local import _scheduling_key, evaluate_model, train_model
from trainshort.train.metrics_log import read_lines
from trainshort.train.run_folder import RunFolder

SCRIPT = """
import sys
from pathlib import Path
from test_side_by_side import two_tasks
from trainshort.reproduce.tasks import run_here
if __name__ == "__main__":
    run_here(two_tasks(Path(sys.argv[1]), 3000), Path(sys.argv[2]), print, jobs=2)
"""


def two_tasks(folder, steps=2):
    """ALiBi and sinusoidal, without costs."""
    demo = two_methods()
    cells = tuple(cell for cell in demo.cells if cell.variant.position in ("alibi", "sinusoidal") and not cell.is_cost)
    return plan_jobs([replace(demo, cells=cells)], tiny_scale(folder, steps=steps)).jobs[:2]


def test_all_are_done_and_a_failed_one_is_named(tmp_path):
    good, bad = two_tasks(tmp_path)
    (tmp_path / bad.name).mkdir()
    (tmp_path / bad.name / "other.txt").write_text("not a run")
    done: list[str] = []
    with pytest.raises(InputError, match=rf"1 models failed: {bad.name} \(.*no config\.json.*same command"):
        run_locally([good, bad], tmp_path, done.append, jobs=2)
    assert done == [good.name]
    assert jobs.is_finished(tmp_path, good)


def test_a_seed_is_done_before_the_next_and_its_longest_model_is_trained_first(tmp_path):
    model = two_tasks(tmp_path)[0]
    settings = [{"seed": 1, "length": 64}, {"seed": 1, "length": 128}, {"seed": 2, "length": 256}]
    short, long, later = (replace(model, config=model.config.replace(train=one)) for one in settings)
    waiting = [(later, train_model), (short, evaluate_model), (short, train_model), (long, train_model)]
    assert sorted(waiting, key=_scheduling_key) == [waiting[3], waiting[2], waiting[1], waiting[0]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_workers_save_and_stop_with_their_command(tmp_path, number):
    both = two_tasks(tmp_path, 3000)
    (tmp_path / "script.py").write_text(SCRIPT)
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(tmp_path / "runs")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    folders = [RunFolder(tmp_path / "runs" / task.name) for task in both]
    while process.poll() is None and not all(read_lines(folder.metrics) for folder in folders):
        time.sleep(0.05)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(number)
    process.wait(timeout=60)
    until = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    for folder, task in zip(folders, both, strict=True):
        saved = jobs.complete_checkpoints(folder.path)
        assert saved, f"{task.name} stopped without saving"
        assert 0 < jobs.checkpoint_step(saved[-1]) < 3000


def children(parent):
    """Processes started by this one, as Linux tells."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found]
