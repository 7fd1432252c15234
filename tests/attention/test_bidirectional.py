"""Tests of attention without a causal mask (`causal=False`), for every backend that supports it."""

import math

import pytest
import torch
import torch.nn.functional as F

from trainshort import alibi, alibi_attention
from trainshort.attention import AttentionCall, BiasKind, DecayBias, DistanceBias, LinearBias, attend
from trainshort.attention.backends.windowed_torch import count_query_tiles
from trainshort.config.registries import backends
from trainshort.errors import InputError

BACKENDS = [name for name in backends.names() if name != "flex"]
with_backends = pytest.mark.parametrize("backend", BACKENDS)
with_windowed_backends = pytest.mark.parametrize("backend", ["windowed", "windowed-torch"])


def randn(*shape, seed=0, dtype=torch.float32):
    """Return random normal numbers that depend only on the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def attend_or_skip(backend, q, k, v, **options):
    """Call `attend` without a causal mask, or skip the test if the backend does not support the call."""
    reason = backends.get(backend).unsupported_reason(AttentionCall(q, k, v, causal=False, **options))
    if reason:
        pytest.skip(f"{backend}: {reason}")
    return attend(q, k, v, causal=False, backend=backend, **options)


def make_cumulative_decay(batch, heads, length):
    """Return the cumulative log decay of random forget gates."""
    return F.logsigmoid(randn(batch, heads, length, seed=4)).double().cumsum(-1)


@pytest.mark.parametrize("heads", [8, 12])
@with_backends
def test_output_equals_formula_of_jina_bert_and_mosaic_bert(backend, heads):
    """Both models add −slope·|i − j| to the scores, with the same slopes on both sides."""
    batch = 2
    length = 150
    dim = 16
    q, k, v = (randn(batch, heads, length, dim, seed=seed) for seed in range(3))
    is_padding = torch.arange(length) >= torch.tensor([[length], [90]])

    slopes = [2.0 ** -(n + 1) for n in range(8)]
    if heads == 12:
        # The remaining slopes are every second slope of 16 heads.
        slopes += [2.0 ** (-0.5 * (n + 1)) for n in range(0, 8, 2)]
    positions = torch.arange(length)
    distance = (positions[None] - positions[:, None]).abs()
    bias = -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(dim) + bias
    expected = scores.masked_fill(is_padding[:, None, None], -math.inf).softmax(-1) @ v.double()

    out = attend_or_skip(backend, q, k, v, bias=LinearBias(alibi.slopes(heads)), segment_ids=is_padding.long())
    is_token = ~is_padding[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out.double()[is_token], expected[is_token], rtol=0, atol=2e-6)
    if backend == "reference":
        alibi_out = alibi_attention(q, k, v, causal=False, key_padding_mask=is_padding)
        torch.testing.assert_close(alibi_out.double()[is_token], expected[is_token], rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", [None, LinearBias(torch.zeros(4))], ids=["none", "slope 0"])
@with_backends
def test_output_without_slopes_equals_full_attention(backend, bias):
    q, k, v = (randn(2, 4, 130, 16, seed=seed) for seed in range(3))
    torch.testing.assert_close(attend_or_skip(backend, q, k, v, bias=bias), F.scaled_dot_product_attention(q, k, v))


@with_backends
def test_infinite_slopes_hide_one_side(backend):
    """Head 0 sees only the left side, head 1 sees only the right side, and head 2 sees only the own key."""
    left_slopes = torch.tensor([0.1, math.inf, math.inf, 0.2])
    right_slopes = torch.tensor([math.inf, 0.1, math.inf, 0.3])
    q, k, v = (randn(1, 4, 200, 8, seed=seed).requires_grad_() for seed in range(3))
    out = attend_or_skip(backend, q, k, v, bias=LinearBias(left_slopes, right_slopes))

    bias = LinearBias(torch.tensor([0.1]))
    left_out = attend(*(x[:, :1] for x in (q, k, v)), bias=bias, backend="reference")
    torch.testing.assert_close(out[:, :1], left_out, rtol=0, atol=1e-6)
    reversed_inputs = (x[:, 1:2].flip(2) for x in (q, k, v))
    right_out = attend(*reversed_inputs, bias=bias, backend=backend).flip(2)
    torch.testing.assert_close(out[:, 1:2], right_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(out[:, 2], v[:, 2], rtol=0, atol=1e-6)

    (left_grad,) = torch.autograd.grad(out[0, 0, 100].sum(), v, retain_graph=True)
    assert left_grad[0, 0, 101:].eq(0).all()
    assert left_grad[0, 0, :101].ne(0).any()
    (right_grad,) = torch.autograd.grad(out[0, 1, 100].sum(), v)
    assert right_grad[0, 1, :100].eq(0).all()
    assert right_grad[0, 1, 100:].ne(0).any()


@pytest.mark.parametrize(
    "options", [{}, {"window": 30}, {"segment_ids": 70}, {"window": 9, "segment_ids": 50}], ids=str
)
@pytest.mark.parametrize("bias_kind", ["slopes", "table", "decay"])
@pytest.mark.parametrize("backend", ["windowed", "windowed-torch", "compiled", "sdpa"])
def test_output_and_gradients_equal_reference(backend, bias_kind, options):
    """The gradients include the biases of both sides. There are fewer key heads than query heads, and more keys."""
    q = randn(2, 4, 120, 16)
    grad_out = randn(2, 4, 120, 16, seed=1)
    k, v = (randn(2, 2, 150, 16, seed=seed) for seed in (2, 3))
    options = dict(options)
    if "segment_ids" in options:
        options["segment_ids"] = (torch.arange(150) // options["segment_ids"]).expand(2, -1)
    decay = make_cumulative_decay(2, 4, 150)
    bias_type, left_values, right_values = {
        "slopes": (LinearBias, alibi.slopes(4), alibi.slopes(4).flip(0)),
        "table": (DistanceBias, randn(4, 9), randn(4, 6, seed=5)),
        "decay": (DecayBias, decay, 0.3 * decay),
    }[bias_kind]
    call = AttentionCall(q, k, v, bias_type(left_values, right_values), causal=False, **options)
    reason = backends.get(backend).unsupported_reason(call)
    if reason:
        pytest.skip(reason)

    def run(backend, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        bias_tensors = [x.clone().requires_grad_() for x in (left_values, right_values)]
        bias = bias_type(*bias_tensors)
        out = attend(*inputs, bias=bias, causal=False, backend=backend, tolerance=0.0, **options)
        return [out, *torch.autograd.grad(out, [*inputs, *bias_tensors], grad_out.to(dtype))]

    for actual, exact in zip(run(backend, torch.float32), run("reference", torch.float64), strict=True):
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(actual.double() / scale, exact.double() / scale, rtol=0, atol=5e-6)


def make_two_sided_bias(bias, length):
    """Return a `LinearBias` as a tensor in float64."""
    distance = alibi.distances(length, length).double()
    left_slopes = bias.slopes.double()[:, None, None]
    right_slopes = bias.right.double()[:, None, None]
    values = -torch.where(distance > 0, left_slopes * distance, -right_slopes * distance)
    return torch.where(distance == 0, 0.0, values)


@with_windowed_backends
def test_certificate_bounds_the_mass_dropped_on_both_sides(backend):
    q, k, v = (randn(1, 4, 900, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    bias = LinearBias(torch.tensor([0.5, 0.05, 0.02, 0.2]), torch.tensor([0.1, 0.2, 0.02, math.inf]))
    call = AttentionCall(q, k, v, bias, tolerance=1e-2, causal=False)
    certificate = backends.get(backend).run(call).certificate
    assert certificate is not None
    _, lse, first_keys, _ = torch.ops.trainshort.attention(
        q,
        k,
        v,
        bias.slopes,
        BiasKind.SLOPES.value,
        None,  # segment_ids
        None,  # window
        call.softmax_scale,
        call.tolerance,
        backend == "windowed",
        bias.right,
    )
    exact_lse = (q @ k.transpose(-1, -2) * call.softmax_scale + make_two_sided_bias(bias, 900)).logsumexp(-1)
    dropped_mass = -torch.expm1(lse - exact_lse)
    # PyTorch's kernel approximates the exponential function, also in float64.
    rounding_error = 1e-12 if backend == "windowed" else 2e-7
    assert (dropped_mass.amax(-1) <= certificate + rounding_error).all()
    assert (certificate <= call.tolerance).all()
    assert (dropped_mass.amax(-1) > 1e-9).any(), "no key was skipped"
    left_tiles = count_query_tiles(900)
    assert (first_keys[..., :left_tiles] > 0).any(), "no key was skipped on the left"
    assert (first_keys[..., left_tiles:] > 0).any(), "no key was skipped on the right"


@with_windowed_backends
@pytest.mark.parametrize("bias_kind", [BiasKind.SLOPES, BiasKind.DECAY], ids=["slopes", "decay"])
def test_operator_passes_opcheck(backend, bias_kind):
    q, k, v = (randn(2, 4, 50, 16, seed=seed).requires_grad_() for seed in range(3))
    segment_ids = (torch.arange(50) // 20).expand(2, -1)
    if bias_kind == BiasKind.SLOPES:
        left_bias = alibi.slopes(4)
        right_bias = left_bias.flip(0)
    else:
        left_bias = (-torch.rand(2, 4, 50, dtype=torch.float64)).cumsum(-1)
        right_bias = 2 * left_bias
    compiled = backend == "windowed"
    settings = (bias_kind.value, segment_ids, 20, 0.25)  # bias_kind, segment_ids, window, scale
    arguments = (q, k, v, left_bias, *settings, 1e-6, compiled, right_bias)
    torch.library.opcheck(torch.ops.trainshort.attention.default, arguments)

    results = [x.detach() for x in torch.ops.trainshort.attention(*arguments)[:3]]
    inputs = [x.detach() for x in (q, k, v)]
    arguments = (randn(2, 4, 50, 16), *inputs, left_bias, *settings, *results, compiled, right_bias)
    torch.library.opcheck(torch.ops.trainshort.attention_backward.default, arguments)


@with_windowed_backends
def test_gradients_equal_finite_differences(backend):
    q = randn(1, 2, 20, 4, seed=2, dtype=torch.float64).requires_grad_()
    k = randn(1, 1, 20, 4, seed=1, dtype=torch.float64).requires_grad_()
    left_slopes = torch.tensor([0.3, 0.1], dtype=torch.float64, requires_grad=True)
    right_slopes = torch.tensor([0.05, 0.2], dtype=torch.float64, requires_grad=True)

    def function(q, k, left_slopes, right_slopes):
        return attend(q, k, k, bias=LinearBias(left_slopes, right_slopes), causal=False, backend=backend)

    assert torch.autograd.gradcheck(function, (q, k, left_slopes, right_slopes), atol=1e-5)


def test_torch_compile():
    inputs = tuple(randn(1, 4, 64, 16, seed=seed).requires_grad_() for seed in range(3))

    def function(q, k, v):
        return attend(q, k, v, bias=LinearBias(alibi.slopes(4)), causal=False)

    out = torch.compile(function, fullgraph=True)(*inputs)
    expected = function(*inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    grads = torch.autograd.grad(out.sum(), inputs)
    expected_grads = torch.autograd.grad(expected.sum(), inputs)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bias_kind", ["slopes", "decay", "table"])
def test_flex_equals_reference(bias_kind):
    q, k, v = (randn(1, 2, 400, 16, seed=seed) for seed in range(3))
    decay = make_cumulative_decay(1, 2, 400)
    bias = {
        "slopes": LinearBias(torch.tensor([0.5, math.inf]), torch.tensor([0.3, 0.2])),
        "decay": DecayBias(decay, 0.5 * decay),
        "table": DistanceBias(randn(2, 9), randn(2, 6, seed=5)),
    }[bias_kind]
    expected = attend(q, k, v, bias=bias, causal=False, backend="reference")
    torch.testing.assert_close(attend_or_skip("flex", q, k, v, bias=bias), expected, rtol=0, atol=5e-6)


def test_invalid_biases_are_rejected():
    q, k, v = (randn(1, 2, 30, 8, seed=seed) for seed in range(3))
    slopes = torch.tensor([0.1, 0.2])
    infinite_slopes = torch.tensor([0.1, math.inf])
    with pytest.raises(InputError, match="bias for the right side requires causal=False"):
        attend(q, k, v, bias=LinearBias(slopes, slopes))
    with pytest.raises(InputError, match="slopes must be finite, got"):
        attend(q, k, v, bias=LinearBias(infinite_slopes))
    with pytest.raises(InputError, match="slopes must be finite, or inf"):
        attend(q, k, v, bias=LinearBias(slopes, -infinite_slopes), causal=False)
    with pytest.raises(InputError, match=r"slopes must have .* shape \(2,\), got \(3,\)"):
        attend(q, k, v, bias=LinearBias(slopes, torch.ones(3)), causal=False)


@pytest.mark.parametrize("backend", ["windowed", "windowed-torch", "compiled"])
def test_split_segments_are_rejected_without_causal_mask(backend):
    q, k, v = (randn(1, 2, 30, 8, seed=seed) for seed in range(3))
    options = {"bias": LinearBias(torch.tensor([0.1, 0.2])), "segment_ids": torch.arange(30)[None] // 10 % 2}
    with pytest.raises(InputError, match=f"'{backend}' does not support .* each segment is contiguous"):
        attend(q, k, v, **options, causal=False, backend=backend)
    attend(q, k, v, **options, backend=backend)  # With a causal mask, the segments are supported.


@pytest.mark.parametrize("bias_kind", ["slopes", "decay", "table", "none"])
def test_auto_supports_split_segments_after_contiguous_segments(bias_kind):
    """Contiguous and split segments have the same shape, but the cached backend choice must differ."""
    q, k, v = (randn(2, 2, 40, 8, seed=seed).requires_grad_() for seed in range(3))
    bias = {
        "slopes": LinearBias(torch.tensor([0.1, 0.2])),
        "decay": DecayBias(make_cumulative_decay(2, 2, 40)),
        "table": DistanceBias(randn(2, 9)),
        "none": None,
    }[bias_kind]
    contiguous_ids = torch.arange(40).expand(2, -1) // 10
    split_ids = torch.stack([contiguous_ids[0], contiguous_ids[0] % 2])
    for segment_ids in (contiguous_ids, split_ids, contiguous_ids):
        options = {"bias": bias, "segment_ids": segment_ids, "causal": False}
        out = attend(q, k, v, **options)
        expected = attend(q, k, v, **options, backend="reference")
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-5)


def test_compiled_graph_rejects_split_segments():
    q, k, v = (randn(1, 2, 40, 8, seed=seed) for seed in range(3))
    split_ids = torch.arange(40)[None] // 10 % 2

    def function(segment_ids):
        return attend(q, k, v, bias=LinearBias(torch.tensor([0.1, 0.2])), segment_ids=segment_ids, causal=False)

    with pytest.raises(InputError, match="does not support this call: it supports causal=False only if"):
        torch.compile(function)(split_ids)


@pytest.mark.parametrize("segment_ids", [None, torch.arange(40)[None] // 20], ids=["one segment", "two segments"])
def test_padding_at_several_places(segment_ids):
    """The padding is at the start, at the end and between the segments."""
    q, k, v = (randn(1, 2, 40, 8, seed=seed) for seed in range(3))
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[:, :3] = True
    mask[:, 35:] = True
    if segment_ids is not None:
        mask[:, 18:22] = True
    out = alibi_attention(q, k, v, key_padding_mask=mask, segment_ids=segment_ids, causal=False)

    distance = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    scores = q @ k.transpose(-1, -2) / 8**0.5 - alibi.slopes(2)[:, None, None] * distance
    if segment_ids is None:
        segment_ids = torch.zeros(1, 40, dtype=torch.long)
    is_visible = ~mask[:, None, None] & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    expected = scores.masked_fill(~is_visible, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(out[:, :, ~mask[0]], expected[:, :, ~mask[0]], rtol=0, atol=2e-6)
