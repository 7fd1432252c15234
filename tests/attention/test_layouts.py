"""Tests of every backend with unusual memory layouts and with values near the limits of floating-point numbers."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, both_implementations, needs_kernel, run_operator

from trainshort import alibi
from trainshort.attention import DenseBias, DistanceBias, LinearBias, attend
from trainshort.attention.call import AttentionCall
from trainshort.config.registries import backends

BACKENDS = [name for name in backends.names() if name not in ("reference", "flex")]

# ---- memory layouts: functions that return a tensor with the same shape, and usually with the same values


def strided_rows(x):
    """Return a tensor whose last dimension has the stride 2."""
    return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]


def heads_inside_tokens(x):
    """Return a tensor with the memory layout (batch, length, heads, dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def tokens_innermost(x):
    """Return a tensor with the memory layout (batch, heads, dim, length)."""
    return x.transpose(2, 3).clone(memory_format=torch.contiguous_format).transpose(2, 3)


def batch_innermost(x):
    """Return a tensor with the memory layout (heads, length, dim, batch)."""
    return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


def sliced(x):
    """Return a slice of a larger tensor. The rest of the larger tensor is NaN."""
    return torch.nn.functional.pad(x, (3, 2, 5, 1, 1, 1), value=torch.nan)[:, 1:-1, 5:-1, 3:-2]


def expanded(x):
    """Return a tensor in which all heads and batch entries share the same memory."""
    return x[:1, :1].expand_as(x)


def repeated_token(x):
    """Return a tensor in which all tokens share the same memory."""
    return x[:, :, :1].expand_as(x)


def repeated_number(x):
    """Return a tensor in which all dimensions of a token share the same memory."""
    return x[..., :1].expand_as(x)


def reversed_twice(x):
    """Return a tensor that was reversed, copied and reversed again."""
    return x.flip(2).contiguous().flip(2)


LAYOUTS = [
    strided_rows,
    heads_inside_tokens,
    tokens_innermost,
    batch_innermost,
    sliced,
    expanded,
    repeated_token,
    repeated_number,
    reversed_twice,
    torch.Tensor.contiguous,
]


def make_bias(kind, heads, q_len, k_len):
    """Return a bias whose tensor is not contiguous, or None."""
    match kind:
        case "linear":
            return LinearBias(alibi.slopes(2 * heads)[::2])
        case "distance":
            return DistanceBias(torch.randn(9, heads).T)
        case "dense":
            return DenseBias(torch.randn(heads, k_len, q_len).transpose(1, 2))
    return None


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    layouts=st.tuples(*(st.sampled_from(LAYOUTS) for _ in range(3))),
    shape=st.tuples(st.sampled_from([(1, 1), (4, 2), (3, 3)]), st.sampled_from([1, 7, 70, 210]), st.integers(0, 60)),
    dim=st.sampled_from([1, 2, 8, 20]),
    bias_kind=st.sampled_from(["none", "linear", "distance", "dense"]),
    needs_lse=st.booleans(),
    needs_grad=st.booleans(),
    has_segments=st.booleans(),
)
@example((strided_rows,) * 3, ((4, 2), 70, 0), 8, "dense", True, False, False)
@example((strided_rows,) * 3, ((3, 3), 70, 0), 8, "none", True, False, False)
@example((tokens_innermost,) * 3, ((3, 3), 70, 0), 1, "linear", False, True, False)
@settings(max_examples=60)
def test_memory_layout_does_not_change_results(
    backend, layouts, shape, dim, bias_kind, needs_lse, needs_grad, has_segments
):
    (heads, kv_heads), q_len, past = shape
    k_len = q_len + past
    leaves = [
        torch.randn(2, heads, q_len, dim),
        torch.randn(2, kv_heads, k_len, dim),
        torch.randn(2, kv_heads, k_len, dim),
    ]
    q, k, v = (layout(leaf.requires_grad_(needs_grad)) for layout, leaf in zip(layouts, leaves, strict=True))
    bias = make_bias(bias_kind, heads, q_len, k_len)
    segment_ids = torch.arange(k_len)[None].expand(2, -1) // 40 if has_segments else None
    call = AttentionCall(q, k, v, bias, segment_ids=segment_ids, needs_lse=needs_lse)
    if backends.get(backend).unsupported_reason(call):
        return

    options = {"bias": bias, "segment_ids": segment_ids, "return_stats": needs_lse}
    result = attend(q, k, v, backend=backend, **options)
    exact_result = attend(*(x.double().contiguous() for x in (q, k, v)), backend="reference", **options)
    actual = [result.out, result.lse] if needs_lse else [result]
    expected = [exact_result.out, exact_result.lse] if needs_lse else [exact_result]
    if needs_grad:
        grad_out = heads_inside_tokens(torch.randn(2, heads, q_len, dim))
        actual += torch.autograd.grad(actual[0], leaves, strided_rows(grad_out))
        expected += torch.autograd.grad(expected[0], leaves, grad_out.double())
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor.double(), expected_tensor.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["plain", "window", "segment_ids"])
def test_scores_below_minus_1e32(backend, case):
    for q_len in (2, 30, 400):  # the single-row, the one-tile and the multi-tile code of the kernel
        q, k, v = (torch.rand(1, 2, q_len, 8) + 1 for _ in range(3))
        q = q * 3e15
        k = k * -3e16
        options = {
            "bias": LinearBias(alibi.slopes(2)),
            "window": 5 if case == "window" else None,
            "segment_ids": (torch.arange(q_len) // 7)[None] if case == "segment_ids" else None,
        }
        if backends.get(backend).unsupported_reason(AttentionCall(q, k, v, **options)):
            return
        exact = attend(q.double(), k.double(), v.double(), backend="reference", **options)
        out = attend(q, k, v, backend=backend, **options)
        assert exact.isfinite().all()
        assert out.isfinite().all()
        # Float32 cannot represent the differences between such scores exactly. The error of the reference shows the
        # size of the rounding errors.
        reference_error = (attend(q, k, v, backend="reference", **options).double() - exact).abs().max()
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2 * reference_error + 1e-5)


@needs_kernel
@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("backend", ["windowed", "compiled"])
def test_causal_mask_is_exact_beyond_2_to_the_24_keys(q_len, backend):
    """Float32 cannot represent odd positions above 2^24."""
    k_len = 2**24 + 75
    window = 50
    q = torch.ones(1, 1, q_len, 1)
    k = torch.zeros(1, 1, k_len, 1)
    # The value of a key is its distance to the end.
    v = torch.arange(k_len, dtype=torch.float64).sub(k_len).float()[None, None, :, None]
    bias = LinearBias(torch.tensor([0.25]))
    out = attend(q, k, v, bias=bias, window=window, backend=backend, tolerance=0.0)
    last_keys = slice(-q_len - window, None)
    expected = attend(q, k[:, :, last_keys], v[:, :, last_keys], bias=bias, window=window, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-5)


@both_implementations
@pytest.mark.parametrize("tolerance", [1e-320, 1e-50, 1e-31, 1e-30, 1e-12])
def test_certificate_is_zero_only_if_no_key_was_skipped(implementation, tolerance):
    # The weights of distant keys are smaller than the smallest float32 number.
    q, k, v = (torch.randn(1, 2, 4000, 16) for _ in range(3))
    slopes = torch.full((2,), 0.2)
    _, _, first_keys, dropped_mass = run_operator(Problem(q, k, v, slopes), tolerance, implementation)
    assert torch.equal(dropped_mass == 0, first_keys == 0)
    certificate = attend(q, k, v, bias=LinearBias(slopes), tolerance=tolerance, return_stats=True).certificate
    assert (certificate > 0).all() == (tolerance >= 1e-30)
    assert (certificate <= tolerance).all()
