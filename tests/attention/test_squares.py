"""The cut into squares: every pair of query and key exactly once, and a self-test that really tests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainshort import alibi
from trainshort.attention import LinearBias, attend, squares
from trainshort.attention.op import Call


def pairs_covered(parts, q_len, k_len):
    count = torch.zeros(q_len, k_len, dtype=torch.long)
    for part in parts:
        for i in range(part.count):
            q, k = part.q_start + i * part.step, part.k_start + i * part.step
            block = torch.ones(part.q_len, part.k_len, dtype=torch.long)
            if part.diagonal:
                block = (alibi.distances(part.q_len, part.k_len) >= 0).long()
            count[q : q + part.q_len, k : k + part.k_len] += block
    return count


@given(q_len=st.integers(1, 90), past=st.integers(0, 40), tile=st.sampled_from([4, 8, 16, 1024]))
def test_every_causal_pair_is_computed_exactly_once(q_len, past, tile):
    parts = squares.parts(q_len, q_len + past, block=4, tile=tile)
    expected = (alibi.distances(q_len, q_len + past) >= 0).long()
    assert torch.equal(pairs_covered(parts, q_len, q_len + past), expected)


@given(q_len=st.integers(1, 60), past=st.integers(0, 20))
def test_mask_and_row_shift_add_up_to_the_bias(q_len, past):
    slopes = alibi.slopes(3)
    expected = alibi.bias(slopes, q_len, q_len + past)
    for part in squares.parts(q_len, q_len + past, block=4, tile=8):
        shift = part.row_shift(slopes)
        column = shift.transpose(1, 2) if isinstance(shift, torch.Tensor) else shift
        block = (part.mask(slopes)[0] + column).float().expand(3, part.q_len, part.k_len)
        for i in range(part.count):
            q, k = part.q_start + i * part.step, part.k_start + i * part.step
            torch.testing.assert_close(block, expected[:, q : q + part.q_len, k : k + part.k_len])


def test_far_from_the_start_the_error_stays_that_of_the_formula():
    """Where one row bias over the whole triangle would round at slope × length: here 2,000 × 0.5, that is 6e-5."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 4000, 16) for _ in range(3))
    q = q[:, :, -64:]
    bias = LinearBias(torch.tensor([0.5, 0.25]))
    exact = attend(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    error = (attend(q, k, v, bias=bias, backend="squares") - exact).abs().max()
    plain = (attend(q, k, v, bias=bias, backend="reference") - exact).abs().max()
    assert error <= 2 * plain


def test_the_self_test_notices_a_kernel_that_ignores_the_mask(monkeypatch):
    squares.row_mask_fault.cache_clear()
    assert squares.row_mask_fault() is None
    honest = squares.flash
    monkeypatch.setattr(squares, "flash", lambda q, k, v, attn_mask, scale: honest(q, k, v, scale=scale))
    squares.row_mask_fault.cache_clear()
    q = torch.randn(1, 2, 5, 8)
    reason = squares.Squares().unsupported(Call(q, q, q, LinearBias(alibi.slopes(2))))
    assert reason is not None
    assert "something else with a row mask; use 'sdpa'" in reason
    squares.row_mask_fault.cache_clear()


def test_the_self_test_notices_a_kernel_that_refuses(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("mask has the wrong shape")

    monkeypatch.setattr(squares, "flash", refuse)
    squares.row_mask_fault.cache_clear()
    assert "refuses a row mask (mask has the wrong shape)" in (squares.row_mask_fault() or "")
    squares.row_mask_fault.cache_clear()


@pytest.mark.parametrize("batch", [1, 3])
def test_strided_inputs_as_a_model_makes_them(batch):
    """Views with the token axis outside the head axis, batched blocks and a rest."""
    qkv = torch.randn(batch, 700, 12, 16).transpose(1, 2)
    q, k, v = qkv.split(4, dim=1)
    bias = LinearBias(alibi.slopes(4))
    expected = attend(q, k, v, bias=bias, backend="reference")
    torch.testing.assert_close(attend(q, k, v, bias=bias, backend="squares"), expected, rtol=0, atol=2e-6)
