"""For tests of compiled code and what stands in for it: both take the same inputs, and where compiled code cannot be
built its tests are skipped, with the reason (`make test-bare`)."""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from trainshort.attention import BiasKind, LinearBias, attend
from trainshort.attention.backends.ctypes_call import kernel_unavailable_reason
from trainshort.attention.backends.windowed_torch import QUERY_TILE

# Set by `make sanitize`, which must not pass because all tests were skipped.
if os.environ.get("TRAINSHORT_TEST_REQUIRE_KERNELS") and kernel_unavailable_reason() is not None:
    raise RuntimeError(f"The compiled kernels are not available: {kernel_unavailable_reason()}.")

needs_kernel = pytest.mark.skipif(kernel_unavailable_reason() is not None, reason=str(kernel_unavailable_reason()))
both = pytest.mark.parametrize("implementation", [pytest.param("compiled", marks=needs_kernel), "torch"])
BACKENDS = {"compiled": "windowed", "torch": "windowed-torch"}


class Problem(NamedTuple):
    """Inputs of windowed attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    segment_ids: Tensor | None = None
    window: int | None = None


def attend_windowed(problem: Problem, tolerance: float, implementation: str) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and certificate by one of the two."""
    q, k, v, slopes, segment_ids, window = problem
    options = {
        "segment_ids": segment_ids,
        "window": window,
        "tolerance": tolerance,
        "backend": BACKENDS[implementation],
    }
    return attend(q, k, v, bias=LinearBias(slopes), return_stats=True, **options)


def operate(problem: Problem, tolerance: float, implementation: str) -> tuple[Tensor, ...]:
    """The bare operator: output, log-sum-exp, each panel's first key, and the mass that may lie before it."""
    q, k, v, bias, segment_ids, window = problem
    kind = {1: BiasKind.SLOPES, 2: BiasKind.TABLE, 3: BiasKind.DECAY}[bias.dim()]
    return torch.ops.trainshort.attention(
        q, k, v, bias, kind.value, segment_ids, window, q.shape[3] ** -0.5, tolerance, implementation == "compiled"
    )


def read_and_promised(problem: Problem, tolerance: float, implementation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, each row's first key, and each row's promise."""
    out, _, first, dropped = operate(problem, tolerance, implementation)
    panel = torch.arange(problem.q.shape[2]) // QUERY_TILE
    return out, first[..., panel].long(), dropped[..., panel]
