"""The windows in plain PyTorch: masks that add up to the bias, a self-test that really tests, and inference mode."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, operate

from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.backends import windowed_torch
from trainshort.attention.call import AttentionCall
from trainshort.config.registries import backends


@given(q_len=st.integers(1, 500), past=st.integers(0, 300), window=st.sampled_from([None, 100]))
@settings(max_examples=20)
def test_masks_and_row_shifts_add_up_to_the_bias(q_len, past, window):
    """And every pair of query and key that can matter is in exactly one part."""
    slopes, k_len = alibi.slopes(3), q_len + past
    tensors = torch.zeros(1, 3, q_len, 8), *(torch.zeros(1, 3, k_len, 8) for _ in range(2))
    call = AttentionCall(*tensors, LinearBias(slopes), window, tolerance=0.0)
    expected = alibi.bias(slopes, q_len, k_len)
    if window:
        expected = expected.masked_fill(alibi.distances(q_len, k_len) >= window, -math.inf)
    found = torch.full((3, q_len, k_len), -math.inf)
    first = windowed_torch.first_keys(call, 0.0)
    masks = windowed_torch._Masks(call, torch.float32)
    for part in windowed_torch._parts(call, first):
        mask, shift = masks.get(part)
        column = shift[..., None] if isinstance(shift, torch.Tensor) else shift
        block = found[part.heads, part.rows, part.keys]
        assert block.isinf().all()
        block.copy_((mask[0] + column).expand_as(block))
    torch.testing.assert_close(found, expected)


def test_far_from_the_start_the_error_stays_that_of_the_formula():
    """Where one row bias over the whole triangle would round at slope × length: here 2,000 × 0.5, that is 6e-5."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 4000, 16) for _ in range(3))
    q = q[:, :, -64:]
    slopes = torch.tensor([0.5, 0.25])
    exact = attend(q.double(), k.double(), v.double(), bias=LinearBias(slopes), backend="reference")
    ours, *_ = operate(Problem(q, k, v, slopes), 0.0, "torch")
    plain = (attend(q, k, v, bias=LinearBias(slopes), backend="reference") - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * plain


@pytest.fixture
def forgetful(monkeypatch):
    """A process that has no kernel and has not tried torch's yet."""
    monkeypatch.setattr(
        "trainshort.attention.backends.ctypes_call.traceable_kernel_unavailable_reason",
        lambda dtype: "there is no C compiler here",
    )
    monkeypatch.setattr("trainshort.attention.backends.ctypes_call.has_kernel", lambda width, dtype: False)
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    windowed_torch.row_mask_unsupported_reason.cache_clear()
    yield
    windowed_torch.row_mask_unsupported_reason.cache_clear()


def test_the_self_test_runs_in_inference_mode(forgetful):
    q = torch.randn(1, 2, 300, 8)
    expected = attend(q, q, q, bias=LinearBias(alibi.slopes(2)), backend="reference")
    with torch.inference_mode():
        out = attend(q, q, q, bias=LinearBias(alibi.slopes(2)), backend="windowed")
    assert out.is_inference()
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_the_self_test_notices_a_kernel_that_ignores_the_mask(forgetful, monkeypatch):
    assert windowed_torch.row_mask_unsupported_reason() is None
    windowed_torch.row_mask_unsupported_reason.cache_clear()
    honest = windowed_torch.flash
    monkeypatch.setattr(windowed_torch, "flash", lambda q, k, v, attn_mask, scale: honest(q, k, v, scale=scale))
    q = torch.randn(1, 2, 5, 8)
    reason = backends.get("windowed").unsupported_reason(AttentionCall(q, q, q, LinearBias(alibi.slopes(2))))
    assert "something else with a row mask; use 'sdpa'" in (reason or "")


def test_the_self_test_notices_a_kernel_that_refuses(forgetful, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("mask has the wrong shape")

    monkeypatch.setattr(windowed_torch, "flash", refuse)
    assert "refuses a row mask (mask has the wrong shape)" in (windowed_torch.row_mask_unsupported_reason() or "")
