"""Tests of runs that are killed or stopped at random moments: the result is the same as without interruptions."""

import os
import random
import signal
import time
from collections import Counter
from itertools import count

import pytest
from harness import (
    HERE,
    assert_checkpoints_are_complete,
    has_partial_checkpoint,
    kill,
    metrics_size,
    read_result,
    wait_for,
)

from trainshort.train import checkpoint_files

FULL = pytest.mark.fault


def wait_for_training(process, out, size_before: int) -> bool:
    """Wait until a run has logged metrics. Return False if the run has ended before."""
    return wait_for(lambda: metrics_size(out) not in (0, size_before), process)


def kill_at_random_time(runner, out, rng) -> bool:
    """Start a run and kill it at a random time after training has started. Return whether the run was still running."""
    size_before = metrics_size(out)
    process = runner.start(out)
    if wait_for_training(process, out, size_before):
        time.sleep(rng.uniform(0, 0.25))
    was_running = process.poll() is None
    kill(process)
    return was_running


def kill_while_saving(runner, out, rng) -> bool:
    """Start a run and kill it as soon as it saves a checkpoint. Return whether the run was still running."""
    saves = rng.randint(1, 5)
    process = runner.start(out)
    wait_for(lambda: metrics_size(out), process)
    for _ in range(saves):
        wait_for(lambda: not has_partial_checkpoint(out), process)
        wait_for(lambda: has_partial_checkpoint(out), process)
    was_running = process.poll() is None
    kill(process)
    return was_running


def kill_before_fsync_or_rename(runner, out, rng) -> bool:
    """Start a run that kills itself before a random call of fsync or rename. Return whether the run was killed."""
    process = runner.start(out, driver=HERE / "die_in_save.py", DIE_AT=str(rng.randint(1, 45)))
    process.communicate(timeout=300)
    return process.returncode == -signal.SIGKILL


def is_finished(out, undisturbed_result) -> bool:
    """Return whether a run has saved its last checkpoint."""
    checkpoints = checkpoint_files.list_checkpoints(out)
    return bool(checkpoints) and checkpoints[-1].name == undisturbed_result["step"]


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=FULL)])
def test_killed_run_equals_uninterrupted_run(runner, undisturbed_result, tmp_path, kills):
    methods = [kill_at_random_time, kill_while_saving, kill_before_fsync_or_rename]
    rng = random.Random(kills)
    hits = Counter()
    interrupted_saves = 0
    finished_runs = 0
    for number in count():
        out = tmp_path / f"run-{finished_runs}"
        kill_run = methods[number % len(methods)]
        if kill_run(runner, out, rng):
            hits[kill_run.__name__] += 1
            interrupted_saves += has_partial_checkpoint(out)
            assert_checkpoints_are_complete(out)
        if hits.total() == kills:
            break
        # A run can finish before it is killed. The next kill then uses a new run.
        if is_finished(out, undisturbed_result):
            assert read_result(out) == undisturbed_result
            finished_runs += 1
    runner.finish(out)
    assert read_result(out) == undisturbed_result
    print(
        f"\nSIGKILL: {kills} kills ({dict(hits)}; {interrupted_saves} during a save) in {finished_runs + 1} runs, "
        "all results bit-identical"
    )


@pytest.mark.parametrize("stops", [2, pytest.param(20, marks=FULL)])
def test_stopped_run_saves_and_equals_uninterrupted_run(runner, undisturbed_result, tmp_path, stops):
    rng = random.Random(stops)
    signals = Counter()
    finished_runs = 0
    while signals.total() < stops:
        out = tmp_path / f"run-{finished_runs}"
        size_before = metrics_size(out)
        process = runner.start(out)
        wait_for_training(process, out, size_before)
        time.sleep(rng.uniform(0, 0.2))
        number = signal.SIGINT if signals.total() % 4 == 1 else signal.SIGTERM
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
        if process.returncode == 0:  # The run finished before the signal arrived.
            assert read_result(out) == undisturbed_result
            finished_runs += 1
            continue
        assert process.returncode == 128 + number, output
        assert "Traceback" not in output
        last_checkpoint = checkpoint_files.list_checkpoints(out)[-1]
        for part in (str(last_checkpoint), "--resume"):
            assert part in output.replace("\n", " ")
        assert checkpoint_files.find_corruption(last_checkpoint) is None
        signals[number.name] += 1
    runner.finish(out)
    assert read_result(out) == undisturbed_result
    print(f"\nSIGTERM and Ctrl-C: {stops} of {stops} saved ({dict(signals)}), bit-identical at the end")


def test_second_signal_stops_immediately(runner, tmp_path):
    """The process is frozen before both signals are sent. It cannot react to the first signal before the second one."""
    out = tmp_path / "run"
    process = runner.start(out, "--train.steps", "100000", "--train.save_every", "0")
    assert wait_for(lambda: metrics_size(out), process)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "SIGINT: saving, then stopping" in output or "SIGTERM: saving, then stopping" in output
    assert "Saved" not in output
    assert checkpoint_files.list_checkpoints(out) == []
