"""Helpers for tests of the attention kernel and of its replacement in PyTorch.

Most of these tests run with both implementations. On a machine on which the kernel cannot be built, the tests of the
kernel are skipped with the reason.
"""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from trainshort.attention import AttentionOutput, BiasKind, LinearBias, attend
from trainshort.attention.backends.ctypes_call import kernel_unavailable_reason
from trainshort.attention.backends.windowed_torch import QUERY_TILE

# `make sanitize` sets this variable, so that the run fails instead of skipping all tests of the kernel.
if os.environ.get("TRAINSHORT_TEST_REQUIRE_KERNELS") and kernel_unavailable_reason() is not None:
    raise RuntimeError(f"The compiled kernels are not available: {kernel_unavailable_reason()}.")

needs_kernel = pytest.mark.skipif(kernel_unavailable_reason() is not None, reason=str(kernel_unavailable_reason()))

both_implementations = pytest.mark.parametrize(
    "implementation", [pytest.param("compiled", marks=needs_kernel), "torch"]
)
"""Runs a test with the compiled kernel and with the implementation in PyTorch."""

BACKENDS = {"compiled": "windowed", "torch": "windowed-torch"}
"""The name of the backend that uses each implementation."""


class Problem(NamedTuple):
    """The inputs of one attention call.

    Attributes:
        q: The queries.
        k: The keys.
        v: The values.
        bias: Slopes of shape (heads,), a distance table of shape (heads, k_len), or a cumulative log decay of shape
            (batch, heads, k_len).
        segment_ids: The segment that each key belongs to, or None.
        window: The size of a sliding window, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    segment_ids: Tensor | None = None
    window: int | None = None


def attend_windowed(problem: Problem, tolerance: float, implementation: str) -> AttentionOutput:
    """Call `attend` with the backend of an implementation. The bias of the problem must be slopes."""
    return attend(
        problem.q,
        problem.k,
        problem.v,
        bias=LinearBias(problem.bias),
        segment_ids=problem.segment_ids,
        window=problem.window,
        tolerance=tolerance,
        backend=BACKENDS[implementation],
        return_stats=True,
    )


def run_operator(problem: Problem, tolerance: float, implementation: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call the PyTorch operator.

    Returns:
        The output, the log-sum-exp, the first key that each query tile read, and an upper bound on the softmax mass
        that each query tile dropped.
    """
    kind_by_dimensions = {1: BiasKind.SLOPES, 2: BiasKind.TABLE, 3: BiasKind.DECAY}
    kind = kind_by_dimensions[problem.bias.dim()]
    scale = problem.q.shape[3] ** -0.5
    return torch.ops.trainshort.attention(
        problem.q,
        problem.k,
        problem.v,
        problem.bias,
        kind.value,
        problem.segment_ids,
        problem.window,
        scale,
        tolerance,
        implementation == "compiled",
    )


def run_operator_by_row(problem: Problem, tolerance: float, implementation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Call the PyTorch operator.

    Returns:
        The output, the first key of each query, and an upper bound on the softmax mass that each query dropped.
    """
    out, _, first_keys, dropped_mass = run_operator(problem, tolerance, implementation)
    tile_of_row = torch.arange(problem.q.shape[2]) // QUERY_TILE
    return out, first_keys[..., tile_of_row].long(), dropped_mass[..., tile_of_row]
