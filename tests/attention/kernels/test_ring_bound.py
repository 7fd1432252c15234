"""The compiled decode step computes the same error bounds and capacities as alibi.py and bounded.py."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from trainshort import alibi
from trainshort.model.cache.bounded import CAPACITY_MARGIN, MIN_BIAS_DROP, required_capacity
from trainshort.model.cache.ring_buffer import DecodeArgs, RingBuffer, kernel_unavailable_reason, make_head_structs

pytestmark = pytest.mark.skipif(kernel_unavailable_reason() is not None, reason=str(kernel_unavailable_reason()))

TOLERANCES = (1e-3, 1e-6, 1e-12)
SLOPES = [1 / 2, 1 / 4, 1 / 16, 1 / 64]

# The norms that the ring buffers have recorded before the decode step.
MAX_EVICTED_NORMS = (2.0, 3.0)
MAX_NORMS = (5.0, 6.0)


class Step(NamedTuple):
    """The inputs and results of one decode step."""

    ring_buffers: Any
    heads: Any
    q: Tensor
    k: Tensor
    cached_keys: Tensor


def run_decode_step(
    tolerance: float, seed: int, query_scale: float, dim: int = 24, count: int = 40, window: int | None = None
) -> Step:
    """Run a decode step with two full ring buffers of two query heads each, after 100,000 tokens."""
    torch.manual_seed(seed)
    stored = torch.randn(2, 2, count, dim)
    cached_keys = stored[0].clone()
    ring_buffers = (RingBuffer * 2)()
    for index, ring_buffer in enumerate(ring_buffers):
        ring_buffer.keys = stored[0, index].data_ptr()
        ring_buffer.values = stored[1, index].data_ptr()
        ring_buffer.capacity = count
        ring_buffer.count = count
        ring_buffer.max_evicted_norm = MAX_EVICTED_NORMS[index]
        ring_buffer.max_norm = MAX_NORMS[index]
    heads = make_head_structs(SLOPES, max_excess=-math.inf)
    args = DecodeArgs.create(ring_buffers, heads, dim)
    args.tolerance = tolerance
    args.capacity_margin = CAPACITY_MARGIN
    args.min_bias_drop = MIN_BIAS_DROP
    args.set_step(100_000, window)
    q = torch.randn(1, 4, 1, dim) * query_scale
    k = torch.randn(1, 2, 1, dim)
    v = torch.randn(1, 2, 1, dim)
    args.attend(q, k, v)
    return Step(ring_buffers, heads, q[0, :, 0].double(), k[0, :, 0].double(), cached_keys.double())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tolerance", TOLERANCES)
@pytest.mark.parametrize("query_scale", [0.1, 1.0, 6.0])
def test_compiled_bounds_equal_those_of_alibi(tolerance, query_scale, seed):
    step = run_decode_step(tolerance, seed, query_scale)
    count, dim = step.cached_keys.shape[1:]
    # `next` is 0, so slot 0 contains the oldest key.
    distances = torch.arange(count, 0, -1, dtype=torch.float64)
    for head, state in enumerate(step.heads):
        kv_head = head // 2
        q = step.q[head]
        own_key = step.k[kv_head]
        slope = torch.tensor(state.slope, dtype=torch.float64)
        own_score = q @ own_key / math.sqrt(dim)
        scores = step.cached_keys[kv_head] @ q / math.sqrt(dim) - slope * distances
        lse = torch.cat([own_score[None], scores]).logsumexp(0)
        scaled_norm = q.norm() / math.sqrt(dim)

        excess = scaled_norm * MAX_EVICTED_NORMS[kv_head] - lse
        evicted_mass = alibi.mass_beyond(excess, slope, torch.tensor(count + 1))
        assert state.certificate == pytest.approx(float(evicted_mass), rel=1e-5)
        assert state.rows_above_tolerance == int(state.certificate > tolerance)
        max_norm = max(MAX_NORMS[kv_head], float(own_key.norm()))
        assert state.max_excess == pytest.approx(float(scaled_norm * max_norm - lse), abs=1e-5)

    for kv_head, ring_buffer in enumerate(step.ring_buffers):
        required = required_capacity(step.heads[2 * kv_head : 2 * kv_head + 2], tolerance)
        must_grow = required > ring_buffer.capacity
        assert ring_buffer.requested_capacity == (required if must_grow else 0)


def test_inputs_cover_both_outcomes():
    """Some ring buffers must grow and others not, and some queries are above the tolerance and others not."""
    steps = [run_decode_step(tolerance, 0, scale) for tolerance in TOLERANCES for scale in (0.1, 6.0)]
    must_grow = {bool(ring_buffer.requested_capacity) for step in steps for ring_buffer in step.ring_buffers}
    rows_above = {state.rows_above_tolerance for step in steps for state in step.heads}
    assert must_grow == {True, False}
    assert rows_above == {0, 1}


def test_sliding_window_limits_the_capacity():
    step = run_decode_step(1e-12, 0, 6.0, window=64)
    for kv_head, ring_buffer in enumerate(step.ring_buffers):
        required = required_capacity(step.heads[2 * kv_head : 2 * kv_head + 2], 1e-12, 64)
        assert ring_buffer.requested_capacity == required == 63
