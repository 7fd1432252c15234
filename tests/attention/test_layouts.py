"""Every backend over every way a tensor can lie in memory, and at the edge of what numbers hold."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, both, needs_kernel, operate

from trainshort import alibi
from trainshort.attention import DenseBias, DistanceBias, LinearBias, attend
from trainshort.attention.call import AttentionCall
from trainshort.config.registries import backends

BACKENDS = [name for name in backends.names() if name not in ("reference", "flex")]


def strided_rows(x):
    return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]


def heads_inside(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def tokens_innermost(x):
    return x.transpose(2, 3).clone(memory_format=torch.contiguous_format).transpose(2, 3)


def batch_innermost(x):
    return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


def sliced(x):
    return torch.nn.functional.pad(x, (3, 2, 5, 1, 1, 1), value=torch.nan)[:, 1:-1, 5:-1, 3:-2]


def expanded(x):
    """All heads and batch entries are one."""
    return x[:1, :1].expand_as(x)


def repeated_token(x):
    return x[:, :, :1].expand_as(x)


def one_number(x):
    return x[..., :1].expand_as(x)


def backwards(x):
    return x.flip(2).contiguous().flip(2)


LAYOUTS = [strided_rows, heads_inside, tokens_innermost, batch_innermost, sliced, expanded, repeated_token, one_number]
LAYOUTS += [backwards, torch.Tensor.contiguous]


def make_bias(kind, heads, q_len, k_len):
    match kind:
        case "linear":
            return LinearBias(alibi.slopes(2 * heads)[::2])  # itself a view
        case "distance":
            return DistanceBias(torch.randn(9, heads).T)
        case "dense":
            return DenseBias(torch.randn(heads, k_len, q_len).transpose(1, 2))
    return None


@pytest.mark.parametrize("name", BACKENDS)
@given(
    layouts=st.tuples(*(st.sampled_from(LAYOUTS) for _ in range(3))),
    shape=st.tuples(st.sampled_from([(1, 1), (4, 2), (3, 3)]), st.sampled_from([1, 7, 70, 210]), st.integers(0, 60)),
    dim=st.sampled_from([1, 2, 8, 20]),
    kind=st.sampled_from(["none", "linear", "distance", "dense"]),
    lse=st.booleans(),
    train=st.booleans(),
    packed=st.booleans(),
)
@example((strided_rows,) * 3, ((4, 2), 70, 0), 8, "dense", True, False, False)
@example((strided_rows,) * 3, ((3, 3), 70, 0), 8, "none", True, False, False)
@example((tokens_innermost,) * 3, ((3, 3), 70, 0), 1, "linear", False, True, False)
@settings(max_examples=60)
def test_any_layout_gives_the_same_numbers(name, layouts, shape, dim, kind, lse, train, packed):
    (heads, kv_heads), q_len, past = shape
    shapes = (heads, q_len), (kv_heads, q_len + past), (kv_heads, q_len + past)
    leaves = [torch.randn(2, *one, dim) for one in shapes]
    q, k, v = (layout(x.requires_grad_(train)) for layout, x in zip(layouts, leaves, strict=True))
    bias = make_bias(kind, heads, q_len, q_len + past)
    segment_ids = torch.arange(q_len + past)[None].expand(2, -1) // 40 if packed else None
    if backends.get(name).unsupported_reason(AttentionCall(q, k, v, bias, segment_ids=segment_ids, needs_lse=lse)):
        return
    found = attend(q, k, v, bias=bias, segment_ids=segment_ids, backend=name, return_stats=lse)
    plain = [x.double().contiguous() for x in (q, k, v)]
    exact = attend(*plain, bias=bias, segment_ids=segment_ids, backend="reference", return_stats=lse)
    found, exact = ([x.out, x.lse] if lse else [x] for x in (found, exact))
    if train:
        grad_out = heads_inside(torch.randn(2, heads, q_len, dim))
        found += torch.autograd.grad(found[0], leaves, strided_rows(grad_out))
        exact += torch.autograd.grad(exact[0], leaves, grad_out.double())
    for ours, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"segment_ids": True}], ids=["plain", "window", "segment_ids"])
def test_scores_far_below_zero(name, options):
    """Scores of -1e32 and lower, in rows of any length, one, five and many at a time."""
    for q_len in (2, 30, 400):
        q, k, v = (torch.rand(1, 2, q_len, 8) + 1 for _ in range(3))
        q, k = q * 3e15, k * -3e16
        asked = {"bias": LinearBias(alibi.slopes(2)), "window": options.get("window")}
        asked["segment_ids"] = (torch.arange(q_len) // 7)[None] if "segment_ids" in options else None
        if backends.get(name).unsupported_reason(AttentionCall(q, k, v, **asked)):
            return
        expected = attend(q.double(), k.double(), v.double(), backend="reference", **asked)
        out = attend(q, k, v, backend=name, **asked)
        near = attend(q, k, v, backend="reference", **asked)
        assert expected.isfinite().all()
        assert out.isfinite().all()
        # Scores this size differ from key to key by more than a float can tell apart exactly: compare winners.
        torch.testing.assert_close(
            out.double(), expected, rtol=0, atol=2 * (near.double() - expected).abs().max() + 1e-5
        )


@needs_kernel
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("backend", ["windowed", "compiled"])
def test_the_future_stays_invisible_past_two_to_the_24(rows, backend):
    """As float32, positions from there on would be even numbers only."""
    length, window = 2**24 + 75, 50
    k = torch.zeros(1, 1, length, 1)
    v = (
        torch.arange(length, dtype=torch.float64).sub(length).float()[None, None, :, None]
    )  # a key's distance to the end
    bias = LinearBias(torch.tensor([0.25]))
    q = torch.ones(1, 1, rows, 1)
    out = attend(q, k, v, bias=bias, window=window, backend=backend, tolerance=0.0)
    near = slice(-rows - window, None)
    expected = attend(q, k[:, :, near], v[:, :, near], bias=bias, window=window, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-5)


@both
@pytest.mark.parametrize("tolerance", [1e-320, 1e-50, 1e-31, 1e-30, 1e-12])
def test_a_certificate_of_zero_means_that_nothing_was_left_out(implementation, tolerance):
    """Far keys weigh less than the smallest float here."""
    q, k, v = (torch.randn(1, 2, 4000, 16) for _ in range(3))
    slopes = torch.full((2,), 0.2)
    _, _, first, dropped = operate(Problem(q, k, v, slopes), tolerance, implementation)
    assert torch.equal(dropped == 0, first == 0)
    certificate = attend(q, k, v, bias=LinearBias(slopes), tolerance=tolerance, return_stats=True).certificate
    assert (certificate > 0).all() == (tolerance >= 1e-30)
    assert (certificate <= tolerance).all()
