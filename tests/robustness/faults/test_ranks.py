"""Two ranks under torchrun, one of them killed or poisoned: torchrun restarts both, and the end is bit-identical."""

import os
import random
import signal
import socket
import time

import psutil
import pytest
from harness import HERE, kill, logged, result, wait_for

from trainshort.train import checkpoint_files


def workers(launcher) -> dict[int, psutil.Process]:
    """The ranks' processes, by rank."""
    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        rank = process.environ().get("RANK")
        if rank is not None:
            found[int(rank)] = process
    return found


def finish(launcher) -> str:
    text, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, text
    return text


def both(runner, out):
    """Two ranks as torchrun would start them, by forks, which are there at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [runner.start(out, RANK=rank, LOCAL_RANK=rank, **place, **sizes) for rank in ("0", "1")]


def test_a_killed_rank_ends_the_other_and_nothing_is_lost(runner, tmp_path):
    """The quick form of the next, without torchrun."""
    out = tmp_path / "run"
    ranks = both(runner, out)
    assert wait_for(lambda: checkpoint_files.list_checkpoints(out), ranks[0])
    kill(ranks[1])
    assert ranks[0].wait(60) not in (0, None), ranks[0].communicate()[0]
    assert checkpoint_files.list_checkpoints(out)[-1].name < checkpoint_files.checkpoint_name(80)
    for run in (out, tmp_path / "undisturbed"):
        for rank in both(runner, run):
            assert rank.wait() == 0, rank.communicate()[0]
    assert result(out) == result(tmp_path / "undisturbed")


@pytest.mark.fault
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_is_replaced(runner, tmp_path, strategy):
    kills, chance = 4, random.Random(3)
    finish(runner.torchrun(tmp_path / "undisturbed", "--parallel", strategy))
    expected = result(tmp_path / "undisturbed")
    for number in range(kills):
        out = tmp_path / f"run-{number}"
        launcher = runner.torchrun(out, "--parallel", strategy, restarts=2)
        assert wait_for(lambda out=out: logged(out) > 1000, launcher)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(workers(launcher)[number % 2].pid, signal.SIGKILL)
        text = finish(launcher)
        assert "Continuing" in text, text
        assert result(out) == expected
    print(f"\n2 ranks, one killed ({strategy}): {kills} of {kills} recovered, bit-identical at the end")


@pytest.mark.fault
def test_a_nan_on_the_second_rank_is_named_and_stops_both(runner, tmp_path):
    out = tmp_path / "run"
    launcher = runner.torchrun(out, driver=HERE / "nan_at.py", NAN_AT="20", NAN_RANK="1", NAN_VALUE="nan")
    text, _ = launcher.communicate(timeout=300)
    assert launcher.returncode != 0
    assert "The loss is nan on rank 1 at step 20." in text
    print("\nNaN on rank 1 of 2: named, both stopped")


@pytest.mark.fault
def test_torchrun_that_is_told_to_stop_saves(runner, tmp_path):
    finish(runner.torchrun(tmp_path / "undisturbed"))
    out = tmp_path / "run"
    launcher = runner.torchrun(out)
    assert wait_for(lambda: logged(out) > 1000, launcher)
    launcher.send_signal(signal.SIGTERM)
    text, _ = launcher.communicate(timeout=300)
    assert "Stopped after step" in text
    saved = checkpoint_files.list_checkpoints(out)[-1]
    assert checkpoint_files.find_corruption(saved) is None
    assert saved.name != result(tmp_path / "undisturbed")["step"]
    finish(runner.torchrun(out, "--resume"))
    assert result(out) == result(tmp_path / "undisturbed")
    print("\nSIGTERM to torchrun: both ranks saved, bit-identical after resume")
