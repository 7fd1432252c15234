"""The windows as FlexAttention's block mask: listed blocks only, nothing lost that matters; forward on the CPU."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from trainshort import alibi
from trainshort.attention import LinearBias, attend, run_attention
from trainshort.attention.backends.flex import FLEX_BLOCK_SIZE, _make_score_mod, proven_block_mask
from trainshort.attention.backends.reference import visibility_mask
from trainshort.attention.call import AttentionCall


def written_out(mask, q_len, k_len):
    """Which (query, key) pairs the listed blocks contain, full blocks marked 2."""
    batch, heads, q_blocks = mask.kv_num_blocks.shape
    pairs = torch.zeros(
        batch, heads, q_blocks * FLEX_BLOCK_SIZE, -(-k_len // FLEX_BLOCK_SIZE) * FLEX_BLOCK_SIZE, dtype=torch.int8
    )
    for lists, mark in (
        ((mask.kv_num_blocks, mask.kv_indices), 1),
        ((mask.full_kv_num_blocks, mask.full_kv_indices), 2),
    ):
        for place in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, q_blocks))).tolist():
            b, h, i = place
            for j in lists[1][b, h, i, : lists[0][b, h, i]].tolist():
                tile = pairs[
                    b,
                    h,
                    i * FLEX_BLOCK_SIZE : (i + 1) * FLEX_BLOCK_SIZE,
                    j * FLEX_BLOCK_SIZE : (j + 1) * FLEX_BLOCK_SIZE,
                ]
                assert (tile == 0).all(), "a block listed twice"
                tile += mark
    return pairs[:, :, :q_len, :k_len]


@pytest.mark.parametrize("options", [{}, {"window": 200}, {"segment_ids": 150}], ids=["plain", "window", "segment_ids"])
@pytest.mark.parametrize("lengths", [(600, 600), (300, 777), (1, 1000), (128, 256)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
def test_blocks_left_out_carry_no_more_than_the_tolerance(lengths, options, causal):
    q_len, k_len = lengths
    tolerance = 1e-4
    q, k = torch.randn(2, 4, q_len, 16), torch.randn(2, 2, k_len, 16)
    slopes = torch.tensor([1.0, 0.25, 1 / 16, 0.0])
    if "segment_ids" in options:
        options = {"segment_ids": (torch.arange(k_len) // options["segment_ids"]).expand(2, -1)}
    right = None if causal else slopes * torch.tensor([1, 0.5, 4, 1])
    call = AttentionCall(q, k, k, LinearBias(slopes, right), tolerance=tolerance, causal=causal, **options)
    pairs = written_out(proven_block_mask(call), q_len, k_len)
    seen = visibility_mask(call, slice(0, q_len), slice(0, k_len)).expand_as(pairs)
    assert (seen | (pairs != 2)).all()  # full blocks are not masked, so they must be visible whole
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / 4
    distance, after = alibi.distances(q_len, k_len), (slopes if right is None else right).double()[:, None, None]
    scores = scores - torch.where(distance >= 0, slopes.double()[:, None, None], -after) * distance
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    assert (weights * (pairs == 0)).sum(-1).max() <= tolerance
    if not options:
        assert k_len < 600 or (pairs[:, 0] == 0)[seen[:, 0]].any()  # the steep head does skip
        assert ((pairs[:, 3] > 0) | ~seen[:, 3]).all()  # the head without slope does not


def test_values_that_are_not_finite_are_read_at_any_distance():
    q = torch.randn(1, 1, 512, 8)
    v = q.clone()
    v[0, 0, 3, 3] = math.inf
    mask = proven_block_mask(AttentionCall(q, q, v, LinearBias(torch.ones(1))))
    assert (written_out(mask, 512, 512)[0, 0].tril() > 0)[torch.ones(512, 512).tril() > 0].all()


def test_the_backend_leaves_out_what_its_tolerance_allows_and_says_so():
    """All scores equal, so that a key's weight is its bias alone: e^(−m·distance). Only the far keys have a value."""
    q, k, v = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 512, 16), torch.zeros(1, 1, 512, 16)
    v[:, :, :128] = 1.0
    bias = LinearBias(torch.tensor([0.02]))
    exact = attend(q, k, v, bias=bias, backend="reference")
    assert exact.min() > 1e-4
    whole = run_attention(AttentionCall(q, k, v, bias, tolerance=0.0), "flex")
    torch.testing.assert_close(whole.out, exact, rtol=1e-4, atol=0)
    assert whole.certificate.max() == 0
    skipped = run_attention(AttentionCall(q, k, v, bias, tolerance=0.5), "flex")
    assert (skipped.out == 0).all()
    assert exact.max() < skipped.certificate.max() == 0.5


@pytest.mark.slow
def test_flex_attention_reads_only_those_blocks():
    """The unread half of the keys is poison: a result that is a number shows that it was not touched."""
    q, k, v = (torch.randn(1, 2, 1024, 16) for _ in range(3))
    slopes = torch.tensor([1.0, 0.5])
    call = AttentionCall(q[:, :, -128:], k, v, LinearBias(slopes))
    mask = proven_block_mask(call)
    expected = attend(call.q, k, v, bias=call.bias, backend="reference")
    poisoned = v.clone()
    poisoned[:, :, :512] = math.nan
    out = torch.compile(flex_attention, dynamic=False)(
        call.q, k, poisoned, score_mod=_make_score_mod(call), block_mask=mask
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=5e-6)
