"""Run by torchrun from test_parallel.py: trains one config after another on all ranks.

Argument: a JSON file with a list of {"config": ..., "out": ..., "nodes": ...}.
bfloat16 counts as fast here, so that it is tried on any machine.
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


def check_together() -> None:
    """A failure on one rank is a failure on all, and rank 0's answer is everybody's."""
    with parallel.init_distributed() as world:
        assert world.all_reduce_sum([1.0, float(world.rank)]) == [2.0, 1.0]
        assert world.all_gather([float(world.rank)]) == [[0.0], [1.0]]
        assert world.broadcast_from_rank0(lambda: world.rank) == 0
        order = []
        world.rank0_first("order", lambda: order.append(world.rank))
        assert order == [world.rank]
        for failing in range(2):
            told = "no" if world.rank == failing else f"Rank {failing} could not go on; its message says why."
            with pytest.raises(InputError, match=f"^{told}$"):
                world.run_on_all_ranks(lambda failing=failing: refuse() if world.rank == failing else None)
        with pytest.raises(InputError, match=r"^no$"):
            world.rank0_first("failing", refuse)


def refuse() -> None:
    raise InputError("no")


def main() -> None:
    torch.set_num_threads(1)
    check_together()
    parallel.bfloat16_unsupported_reason = lambda device: None
    for job in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["LOCAL_WORLD_SIZE"] = str(2 // job.get("nodes", 1))
        train(RunConfig.parse(job["config"]), Path(job["out"]), resume=True, quiet=True)


if __name__ == "__main__":
    main()
