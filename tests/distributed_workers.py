"""Train runs on several processes. test_parallel.py starts this program with torchrun.

The argument is a JSON file with a list of jobs: {"config": ..., "out": ..., "nodes": ...}. This program treats bfloat16
as supported on every machine, so that bfloat16 is tested.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from trainshort.config.run_config import RunConfig
from trainshort.errors import InputError
from trainshort.train import parallel
from trainshort.train.loop import train


def raise_input_error() -> None:
    """Raise `InputError` with the message "no"."""
    raise InputError("no")


def check_communication() -> None:
    """Check the methods of `World` on two ranks."""
    with parallel.init_distributed() as world:
        assert world.all_reduce_sum([1.0, float(world.rank)]) == [2.0, 1.0]
        assert world.all_gather([float(world.rank)]) == [[0.0], [1.0]]
        assert world.broadcast_from_rank0(lambda: world.rank) == 0
        calls = []
        world.rank0_first("first", lambda: calls.append(world.rank))
        assert calls == [world.rank]
        for failing_rank in range(2):
            check_failure_on_one_rank(world, failing_rank)
        with pytest.raises(InputError, match=r"^no$"):
            world.rank0_first("failing", raise_input_error)


def check_failure_on_one_rank(world: parallel.World, failing_rank: int) -> None:
    """Check that all ranks raise an error if a function fails on one rank."""

    def fail_on_one_rank() -> None:
        if world.rank == failing_rank:
            raise_input_error()

    expected_message = "^no$" if world.rank == failing_rank else f"^Rank {failing_rank} has failed"
    with pytest.raises(InputError, match=expected_message):
        world.run_on_all_ranks(fail_on_one_rank)


def main() -> None:
    """Check the communication, then train all runs in the JSON file."""
    torch.set_num_threads(1)
    check_communication()
    parallel.bfloat16_unsupported_reason = lambda device: None
    jobs = json.loads(Path(sys.argv[1]).read_text())
    for job in jobs:
        ranks_per_node = 2 // job["nodes"]
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
        train(RunConfig.parse(job["config"]), Path(job["out"]), resume=True, quiet=True)


if __name__ == "__main__":
    main()
