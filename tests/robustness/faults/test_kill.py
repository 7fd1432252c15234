"""Runs that are killed, at random moments and inside saves, and asked to stop: the end is bit-identical."""

import os
import random
import signal
import time
from collections import Counter
from itertools import count

import pytest
from harness import HERE, kill, logged, result, saving, wait_for

from trainshort.train import checkpoint_files

FULL = pytest.mark.fault


def kill_at_random(runner, out, chance) -> bool:
    """SIGKILL some time after the loop began; whether it hit."""
    before = logged(out)
    process = runner.start(out)
    if wait_for(lambda: logged(out) not in (0, before), process):
        time.sleep(chance.uniform(0, 0.25))
    running = process.poll() is None
    kill(process)
    return running


def kill_when_saving(runner, out, chance) -> bool:
    """SIGKILL as soon as a save is seen on the disk."""
    seen = chance.randint(1, 5)
    process = runner.start(out)
    wait_for(lambda: logged(out), process)
    for _ in range(seen):
        wait_for(lambda: not saving(out), process)
        wait_for(lambda: saving(out), process)
    running = process.poll() is None
    kill(process)
    return running


def kill_inside_a_save(runner, out, chance) -> bool:
    """SIGKILL by itself, just before one of its fsyncs and renames."""
    process = runner.start(out, driver=HERE / "die_in_save.py", DIE_AT=str(chance.randint(1, 45)))
    process.communicate(timeout=300)
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=FULL)])
def test_a_killed_run_ends_in_the_same_bits(runner, undisturbed, tmp_path, kills):
    ways = [kill_at_random, kill_when_saving, kill_inside_a_save]
    chance, hits, in_save, finished = random.Random(kills), Counter(), 0, 0
    for number in count():
        out = tmp_path / f"run-{finished}"
        way = ways[number % len(ways)]
        if way(runner, out, chance):
            hits[way.__name__] += 1
            in_save += saving(out)
            assert_whole(out)
        if sum(hits.values()) == kills:
            break
        if (
            checkpoint_files.list_checkpoints(out)
            and checkpoint_files.list_checkpoints(out)[-1].name == undisturbed["step"]
        ):
            assert result(out) == undisturbed
            finished += 1
    runner.finish(out)
    assert result(out) == undisturbed
    print(
        f"\nSIGKILL: {kills} of {kills} kills ({dict(hits)}; {in_save} left half a save) in {finished + 1} runs, "
        "all ended in the bits of an undisturbed run"
    )


def assert_whole(out) -> None:
    """Whatever was killed, what has the name of a checkpoint is one."""
    damaged = {path: checkpoint_files.find_corruption(path) for path in checkpoint_files.list_checkpoints(out)}
    assert not any(damaged.values()), damaged


@pytest.mark.parametrize("stops", [2, pytest.param(20, marks=FULL)])
def test_a_stopped_run_saves_and_ends_in_the_same_bits(runner, undisturbed, tmp_path, stops):
    chance, done, finished = random.Random(stops), Counter(), 0
    while sum(done.values()) < stops:
        out = tmp_path / f"run-{finished}"
        before = logged(out)
        process = runner.start(out)
        wait_for(lambda before=before, out=out: logged(out) not in (0, before), process)
        time.sleep(chance.uniform(0, 0.2))
        number = signal.SIGINT if sum(done.values()) % 4 == 1 else signal.SIGTERM
        process.send_signal(number)
        text, _ = process.communicate(timeout=300)
        if process.returncode == 0:  # it was through before the signal came
            assert result(out) == undisturbed
            finished += 1
            continue
        assert process.returncode == 128 + number, text
        assert "Traceback" not in text
        last = checkpoint_files.list_checkpoints(out)[-1]
        step = int(last.name.removeprefix("step-"))
        assert f"Stopped after step {step}. Saved {last}. Continue with --resume." in text.replace("\n", " ")
        assert checkpoint_files.find_corruption(last) is None
        done[number.name] += 1
    runner.finish(out)
    assert result(out) == undisturbed
    print(f"\nSIGTERM and Ctrl-C: {stops} of {stops} saved and exited cleanly ({dict(done)}), bit-identical at the end")


def test_a_second_signal_stops_at_once(runner, tmp_path):
    """The loop is held up by a first signal it cannot answer (the process is frozen), then gets both together."""
    out = tmp_path / "run"
    process = runner.start(out, "--train.steps", "100000", "--train.save_every", "0")
    assert wait_for(lambda: logged(out), process)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    text, _ = process.communicate(timeout=300)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "once more stops at once" in text
    assert "Saved" not in text
    assert checkpoint_files.list_checkpoints(out) == []
