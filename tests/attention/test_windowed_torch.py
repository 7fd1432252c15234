"""Tests of the implementation of windowed attention in PyTorch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, run_operator

from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.backends import windowed_torch
from trainshort.attention.call import AttentionCall
from trainshort.config.registries import backends


@given(q_len=st.integers(1, 500), past=st.integers(0, 300), window=st.sampled_from([None, 100]))
@settings(max_examples=20)
def test_masks_and_shifts_add_up_to_the_bias(q_len, past, window):
    """Each visible pair of query and key must also belong to exactly one key range."""
    slopes = alibi.slopes(3)
    k_len = q_len + past
    q = torch.zeros(1, 3, q_len, 8)
    k, v = (torch.zeros(1, 3, k_len, 8) for _ in range(2))
    call = AttentionCall(q, k, v, LinearBias(slopes), window, tolerance=0.0)
    expected = alibi.bias(slopes, q_len, k_len)
    if window:
        expected = expected.masked_fill(alibi.distances(q_len, k_len) >= window, -math.inf)

    bias = torch.full((3, q_len, k_len), -math.inf)
    first_keys = windowed_torch.compute_first_keys(call, 0.0)
    masks = windowed_torch._Masks(call, torch.float32)
    for key_range in windowed_torch._key_ranges(call, first_keys):
        mask, shift = masks.get(key_range)
        if isinstance(shift, torch.Tensor):
            shift = shift[..., None]
        block = bias[key_range.heads, key_range.rows, key_range.keys]
        assert block.isinf().all()  # No other key range has written this block.
        block.copy_((mask[0] + shift).expand_as(block))
    torch.testing.assert_close(bias, expected)


def test_error_at_late_positions_is_small():
    """A mask with slope * absolute position would have an error of 6e-5 here."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 4000, 16) for _ in range(3))
    q = q[:, :, -64:]
    slopes = torch.tensor([0.5, 0.25])
    exact = attend(q.double(), k.double(), v.double(), bias=LinearBias(slopes), backend="reference")
    out, *_ = run_operator(Problem(q, k, v, slopes), 0.0, "torch")
    reference_error = (attend(q, k, v, bias=LinearBias(slopes), backend="reference") - exact).abs().max()
    assert (out - exact).abs().max() <= 2 * reference_error


@pytest.fixture
def without_kernel(monkeypatch):
    """Simulate a process in which the kernel cannot be built and the self-test of PyTorch's kernel has not run yet."""
    module = "trainshort.attention.backends.ctypes_call"
    monkeypatch.setattr(f"{module}.traceable_kernel_unavailable_reason", lambda dtype: "there is no C compiler here")
    monkeypatch.setattr(f"{module}.has_kernel", lambda head_dim, dtype: False)
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    windowed_torch.row_mask_unsupported_reason.cache_clear()
    yield
    windowed_torch.row_mask_unsupported_reason.cache_clear()


def test_self_test_runs_in_inference_mode(without_kernel):
    q = torch.randn(1, 2, 300, 8)
    bias = LinearBias(alibi.slopes(2))
    expected = attend(q, q, q, bias=bias, backend="reference")
    with torch.inference_mode():
        out = attend(q, q, q, bias=bias, backend="windowed")
    assert out.is_inference()
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_self_test_detects_a_kernel_that_ignores_the_mask(without_kernel, monkeypatch):
    assert windowed_torch.row_mask_unsupported_reason() is None
    windowed_torch.row_mask_unsupported_reason.cache_clear()
    original_flash = windowed_torch.flash

    def flash_without_mask(q, k, v, attn_mask, scale):
        return original_flash(q, k, v, scale=scale)

    monkeypatch.setattr(windowed_torch, "flash", flash_without_mask)
    q = torch.randn(1, 2, 5, 8)
    reason = backends.get("windowed").unsupported_reason(AttentionCall(q, q, q, LinearBias(alibi.slopes(2))))
    assert reason == windowed_torch.WRONG_ROW_MASK_RESULT


def test_self_test_detects_a_kernel_that_rejects_the_mask(without_kernel, monkeypatch):
    def reject_mask(*args, **kwargs):
        raise RuntimeError("mask has the wrong shape")

    monkeypatch.setattr(windowed_torch, "flash", reject_mask)
    reason = windowed_torch.row_mask_unsupported_reason()
    assert reason is not None
    assert "mask has the wrong shape" in reason
