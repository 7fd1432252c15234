"""The machine that a result comes from: what it is, and what it can do at best."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from trainshort.bench.measure import version
from trainshort.runs import provenance

PEERS = ("transformers", "x-transformers")
SIDE = 1024
NUMBERS = 64 * 2**20
"""Float32 numbers that are read for the memory's rate: more than any processor's cache holds."""


def describe(seconds: float = 1.0) -> dict[str, Any]:
    """Origin as every result has it, with the peers' versions, the memory's size, and two measured rates."""
    made = provenance(threads=torch.get_num_threads())
    made["versions"] |= {name: version(name) for name in PEERS}
    made["machine"] |= {
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "matmul_rate": matmul_rate(seconds),
        "read_rate": read_rate(seconds),
    }
    return made


def matmul_rate(seconds: float = 1.0) -> float:
    """Floating-point operations per second of a large float32 matrix product: what this machine can do at best."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return 2 * SIDE**3 / _best(lambda: torch.mm(a, b), seconds)


def read_rate(seconds: float = 1.0) -> float:
    """Bytes per second at which memory is read, by summing numbers with all threads."""
    numbers = torch.ones(NUMBERS)
    return 4 * NUMBERS / _best(numbers.sum, seconds)


def _best(work: Callable[[], object], seconds: float) -> float:
    """The quickest of all runs within some seconds, after one that warms up."""
    work()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
