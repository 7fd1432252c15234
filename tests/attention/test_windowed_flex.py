"""Tests of the block masks with which the backend `flex` skips keys. They run on the CPU."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from trainshort import alibi
from trainshort.attention import LinearBias, attend, run_attention
from trainshort.attention.backends.flex import FLEX_BLOCK_SIZE, _make_score_mod, proven_block_mask
from trainshort.attention.backends.reference import visibility_mask
from trainshort.attention.call import AttentionCall

SKIPPED = 0
MASKED = 1
FULL = 2


def expand_block_mask(mask, q_len, k_len):
    """Return whether the block of each query and key is SKIPPED, MASKED or FULL: (batch, heads, q_len, k_len)."""
    batch, heads, q_blocks = mask.kv_num_blocks.shape
    k_blocks = -(-k_len // FLEX_BLOCK_SIZE)
    kinds = torch.full((batch, heads, q_blocks, k_blocks), SKIPPED, dtype=torch.int8)
    block_lists = [
        (MASKED, mask.kv_num_blocks, mask.kv_indices),
        (FULL, mask.full_kv_num_blocks, mask.full_kv_indices),
    ]
    for kind, counts, indices in block_lists:
        for b, h, i in torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(q_blocks)).tolist():
            for j in indices[b, h, i, : counts[b, h, i]].tolist():
                assert kinds[b, h, i, j] == SKIPPED, "a block is listed twice"
                kinds[b, h, i, j] = kind
    pairs = kinds.repeat_interleave(FLEX_BLOCK_SIZE, 2).repeat_interleave(FLEX_BLOCK_SIZE, 3)
    return pairs[:, :, :q_len, :k_len]


@pytest.mark.parametrize("options", [{}, {"window": 200}, {"segment_ids": 150}], ids=["plain", "window", "segment_ids"])
@pytest.mark.parametrize("lengths", [(600, 600), (300, 777), (1, 1000), (128, 256)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_skipped_blocks_have_at_most_the_tolerated_mass(lengths, options, causal):
    q_len, k_len = lengths
    tolerance = 1e-4
    q = torch.randn(2, 4, q_len, 16)
    k = torch.randn(2, 2, k_len, 16)
    slopes = torch.tensor([1.0, 0.25, 1 / 16, 0.0])
    right_slopes = None if causal else slopes * torch.tensor([1, 0.5, 4, 1])
    if "segment_ids" in options:
        options = {"segment_ids": (torch.arange(k_len) // options["segment_ids"]).expand(2, -1)}
    bias = LinearBias(slopes, right_slopes)
    call = AttentionCall(q, k, k, bias, tolerance=tolerance, causal=causal, **options)

    kinds = expand_block_mask(proven_block_mask(call), q_len, k_len)
    is_visible = visibility_mask(call, slice(0, q_len), slice(0, k_len)).expand_as(kinds)
    # FlexAttention does not mask full blocks, so all their keys must be visible.
    assert (is_visible | (kinds != FULL)).all()

    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / 4
    distance = alibi.distances(q_len, k_len)
    left_slope = slopes.double()[:, None, None]
    right_slope = left_slope if right_slopes is None else right_slopes.double()[:, None, None]
    scores = scores - torch.where(distance >= 0, left_slope, -right_slope) * distance
    weights = scores.masked_fill(~is_visible, -math.inf).softmax(-1)
    assert (weights * (kinds == SKIPPED)).sum(-1).max() <= tolerance

    if not options:
        if k_len >= 600:  # Blocks are skipped in the head with the largest slope.
            assert (kinds[:, 0] == SKIPPED)[is_visible[:, 0]].any()
        # No block is skipped in the head with slope 0.
        assert ((kinds[:, 3] != SKIPPED) | ~is_visible[:, 3]).all()


def test_values_that_are_not_finite_are_never_skipped():
    q = torch.randn(1, 1, 512, 8)
    v = q.clone()
    v[0, 0, 3, 3] = math.inf
    mask = proven_block_mask(AttentionCall(q, q, v, LinearBias(torch.ones(1))))
    kinds = expand_block_mask(mask, 512, 512)[0, 0]
    is_visible = torch.ones(512, 512).tril() > 0
    assert (kinds[is_visible] != SKIPPED).all()


def test_backend_skips_keys_within_the_tolerance_and_returns_the_certificate():
    # All scores are equal, so the weight of a key depends only on its distance. Only the distant keys have a value.
    q = torch.zeros(1, 1, 16, 16)
    k = torch.zeros(1, 1, 512, 16)
    v = torch.zeros(1, 1, 512, 16)
    v[:, :, :128] = 1.0
    bias = LinearBias(torch.tensor([0.02]))
    exact = attend(q, k, v, bias=bias, backend="reference")
    assert exact.min() > 1e-4

    result = run_attention(AttentionCall(q, k, v, bias, tolerance=0.0), "flex")
    torch.testing.assert_close(result.out, exact, rtol=1e-4, atol=0)
    assert result.certificate.max() == 0

    result = run_attention(AttentionCall(q, k, v, bias, tolerance=0.5), "flex")
    assert (result.out == 0).all()
    assert exact.max() < result.certificate.max() == 0.5


@pytest.mark.slow
def test_flex_attention_does_not_read_skipped_blocks():
    """The values of skipped keys are NaN. A finite output shows that the keys were not read."""
    q, k, v = (torch.randn(1, 2, 1024, 16) for _ in range(3))
    call = AttentionCall(q[:, :, -128:], k, v, LinearBias(torch.tensor([1.0, 0.5])))
    expected = attend(call.q, k, v, bias=call.bias, backend="reference")
    v_with_nan = v.clone()
    v_with_nan[:, :, :512] = math.nan
    compiled_flex_attention = torch.compile(flex_attention, dynamic=False)
    out = compiled_flex_attention(
        call.q, k, v_with_nan, score_mod=_make_score_mod(call), block_mask=proven_block_mask(call)
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=5e-6)
