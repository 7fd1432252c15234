"""ring.c computes its bounds by itself, once per token: they are the ones of alibi.py, to rounding."""

import math

import pytest
import torch

from trainshort import alibi
from trainshort.model.cache.bounded import CAPACITY_MARGIN, MIN_BIAS_DROP, required_capacity
from trainshort.model.cache.ring_buffer import DecodeArgs, Ring, kernel_unavailable_reason, make_head_structs

pytestmark = pytest.mark.skipif(bool(kernel_unavailable_reason()), reason=str(kernel_unavailable_reason()))

TOLERANCES = (1e-3, 1e-6, 1e-12)
SLOPES = [1 / 2, 1 / 4, 1 / 16, 1 / 64]


def one_token(tolerance: float, seed: int, loud: float, dim: int = 24, count: int = 40, limit: int | None = None):
    """A token against two full rings, two query heads each; keys forgotten before had norms of 2 and 3."""
    torch.manual_seed(seed)
    stored, slopes = torch.randn(2, 2, count, dim), SLOPES
    rings = (Ring * 2)()
    for index, ring in enumerate(rings):
        ring.keys, ring.values = stored[0, index].data_ptr(), stored[1, index].data_ptr()
        ring.capacity = ring.count = count
        ring.far, ring.peak = 2.0 + index, 5.0 + index
    before = stored[0].clone()
    heads = make_head_structs(slopes, -math.inf)
    call = DecodeArgs.create(rings, heads, dim)
    call.tolerance, call.margin, call.settled = tolerance, CAPACITY_MARGIN, MIN_BIAS_DROP
    call.set_step(100_000, limit)
    q, k, v = torch.randn(1, 4, 1, dim) * loud, torch.randn(1, 2, 1, dim), torch.randn(1, 2, 1, dim)
    call.attend(q, k, v)
    return rings, heads, q[0, :, 0].double(), k[0, :, 0].double(), before.double()


@pytest.mark.parametrize("tolerance", TOLERANCES)
@pytest.mark.parametrize("loud", [0.1, 1.0, 6.0])
def test_the_bounds_of_the_compiled_ring_are_those_of_alibi(tolerance, loud):
    for seed in range(5):
        rings, heads, q, k, past = one_token(tolerance, seed, loud)
        count, dim = past.shape[1:]
        distances = torch.arange(count, 0, -1, dtype=torch.float64)  # slot 0 is the oldest: next is 0
        for i, head in enumerate(heads):
            ring, slope = rings[i // 2], torch.tensor(head.slope, dtype=torch.float64)
            own = q[i] @ k[i // 2] / math.sqrt(dim)
            scores = past[i // 2] @ q[i] / math.sqrt(dim) - slope * distances
            lse = torch.cat([own[None], scores]).logsumexp(0)
            reach = q[i].norm() / math.sqrt(dim)
            far, peak = 2.0 + i // 2, max(5.0 + i // 2, float(k[i // 2].norm()))
            mass = alibi.mass_beyond(reach * far - lse, slope, torch.tensor(count + 1))
            assert head.mass == pytest.approx(float(mass), rel=1e-5)
            assert head.above == int(not head.mass <= tolerance)
            assert head.excess == pytest.approx(float(reach * peak - lse), abs=1e-5)
        for index, ring in enumerate(rings):
            most = required_capacity(heads[2 * index : 2 * index + 2], tolerance)
            assert ring.wanted == (most if most > ring.capacity else 0)


def test_both_outcomes_were_among_them():
    """Rings that suffice and rings that must grow, rows above the tolerance and below it."""
    calls = [one_token(tolerance, 0, loud)[:2] for tolerance in TOLERANCES for loud in (0.1, 6.0)]
    assert {bool(ring.wanted) for rings, _ in calls for ring in rings} == {True, False}
    assert {head.above for _, heads in calls for head in heads} == {0, 1}


def test_a_limit_of_the_model_bounds_what_is_wanted():
    rings, heads, *_ = one_token(1e-12, 0, 6.0, limit=64)
    assert (
        [ring.wanted for ring in rings]
        == [required_capacity(heads[2 * i : 2 * i + 2], 1e-12, 64) for i in (0, 1)]
        == [63, 63]
    )
