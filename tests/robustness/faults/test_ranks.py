"""Tests of runs with two ranks: if one rank fails, the other rank stops, and the run resumes without a difference."""

import os
import random
import re
import signal
import socket
import time

import psutil
import pytest
from harness import (
    HERE,
    STEPS,
    kill,
    metrics_size,
    read_result,
    wait_for,
)

from trainshort.train import checkpoint_files


def find_rank_processes(launcher) -> dict[int, psutil.Process]:
    """Return the processes of the ranks that torchrun has started, by rank."""
    processes = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        rank = process.environ().get("RANK")
        if rank is not None:
            processes[int(rank)] = process
    return processes


def finish(launcher) -> str:
    """Wait until torchrun has finished, and return its output."""
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    return output


def start_ranks(runner, out) -> list:
    """Start two ranks without torchrun, as forks of the zygote."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    return [runner.start(out, RANK=rank, LOCAL_RANK=rank, **environment) for rank in ("0", "1")]


def test_killed_rank_stops_the_other_rank(runner, tmp_path):
    out = tmp_path / "run"
    ranks = start_ranks(runner, out)
    assert wait_for(lambda: checkpoint_files.list_checkpoints(out), ranks[0])
    kill(ranks[1])
    assert ranks[0].wait(60) not in (0, None), ranks[0].communicate()[0]
    assert checkpoint_files.list_checkpoints(out)[-1].name < checkpoint_files.checkpoint_name(STEPS)

    for run in (out, tmp_path / "undisturbed"):
        for rank in start_ranks(runner, run):
            assert rank.wait() == 0, rank.communicate()[0]
    assert read_result(out) == read_result(tmp_path / "undisturbed")


@pytest.mark.fault
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_restarts_after_a_killed_rank(runner, tmp_path, strategy):
    kills = 4
    rng = random.Random(3)
    finish(runner.torchrun(tmp_path / "undisturbed", "--parallel", strategy))
    expected = read_result(tmp_path / "undisturbed")
    for number in range(kills):
        out = tmp_path / f"run-{number}"
        launcher = runner.torchrun(out, "--parallel", strategy, restarts=2)
        assert wait_for(lambda out=out: metrics_size(out) > 1000, launcher)
        time.sleep(rng.uniform(0, 0.3))
        process = find_rank_processes(launcher)[number % 2]
        os.kill(process.pid, signal.SIGKILL)
        output = finish(launcher)
        assert re.search(r"step \d+", output), "the output must say at which step the run resumed"
        assert read_result(out) == expected
    print(f"\n2 ranks, one killed ({strategy}): {kills} of {kills} restarted, bit-identical at the end")


@pytest.mark.fault
def test_non_finite_loss_on_one_rank_stops_both_ranks(runner, tmp_path):
    out = tmp_path / "run"
    launcher = runner.torchrun(out, driver=HERE / "nan_at.py", NAN_AT="20", NAN_RANK="1", NAN_VALUE="nan")
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode != 0
    for part in ("nan", "rank 1", "step 20"):
        assert part in output
    print("\nNaN on rank 1 of 2: both ranks stopped")


@pytest.mark.fault
def test_sigterm_to_torchrun_saves_a_checkpoint(runner, tmp_path):
    finish(runner.torchrun(tmp_path / "undisturbed"))
    out = tmp_path / "run"
    launcher = runner.torchrun(out)
    assert wait_for(lambda: metrics_size(out) > 1000, launcher)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=300)
    last_checkpoint = checkpoint_files.list_checkpoints(out)[-1]
    assert last_checkpoint.name in output
    assert checkpoint_files.find_corruption(last_checkpoint) is None
    assert last_checkpoint.name != read_result(tmp_path / "undisturbed")["step"]
    finish(runner.torchrun(out, "--resume"))
    assert read_result(out) == read_result(tmp_path / "undisturbed")
    print("\nSIGTERM to torchrun: both ranks saved, bit-identical after resume")
