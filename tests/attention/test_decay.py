"""Tests of decay biases: every backend, the gradient of the cumulative log decay, and the keys that can be skipped."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import BACKENDS as WINDOWED_BACKENDS
from kernel_helpers import Problem, both_implementations, needs_kernel, run_operator_by_row

from trainshort import alibi
from trainshort.attention import AttentionCall, DecayBias, LinearBias, attend, decay
from trainshort.config.registries import backends
from trainshort.errors import InputError

KERNEL_BACKENDS = [pytest.param("windowed", marks=needs_kernel), pytest.param("compiled", marks=needs_kernel)]
with_backends = pytest.mark.parametrize("backend", [*KERNEL_BACKENDS, "windowed-torch", "sdpa", "reference"])
with_trainable_backends = pytest.mark.parametrize("backend", [*KERNEL_BACKENDS, "windowed-torch"])


def make_cumulative_decay(batch, heads, length, generator=None):
    """Return the cumulative log decay of random forget gates. The first heads fall fast, and the last heads slowly."""
    gates = torch.randn(batch, heads, length, generator=generator) * 2 + torch.linspace(0, 6, heads)[:, None]
    return torch.nn.functional.logsigmoid(gates.double()).cumsum(-1)


def make_inputs(shape, dtype=torch.float32, seed=0):
    """Return random inputs (q, k, v, cumulative) and a gradient of the output."""
    batch, heads, kv_heads, q_len, past, dim = shape
    k_len = q_len + past
    generator = torch.Generator().manual_seed(seed)
    q, grad_out = (torch.randn(batch, heads, q_len, dim, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, k_len, dim, generator=generator).to(dtype) for _ in range(2))
    return (q, k, v, make_cumulative_decay(batch, heads, k_len, generator)), grad_out


def attend_with_decay(q, k, v, cumulative, backend, **options):
    """Call `attend` with a decay bias."""
    return attend(q, k, v, bias=DecayBias(cumulative), backend=backend, **options)


def plain_weights(q, k, cumulative):
    """Return the attention weights of the plain formula, entirely in the dtype of the queries."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    cumulative = cumulative.to(q.dtype)
    bias = cumulative[..., -q.shape[2] :, None] - cumulative[..., None, :]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    is_future = alibi.distances(q.shape[2], k.shape[2]) < 0
    return scores.masked_fill(is_future, -math.inf).softmax(-1)


def plain_attention(q, k, v, cumulative):
    """Compute attention with the plain formula, entirely in the dtype of the queries."""
    repeated_v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return plain_weights(q, k, cumulative) @ repeated_v


def run_with_gradients(function, inputs, grad_out):
    """Return the output of a function and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 333, 70, 16), (1, 2, 2, 60, 0, 64), (2, 2, 1, 3, 400, 8)])
@with_backends
def test_errors_are_at_most_twice_the_errors_of_the_plain_formula(backend, shape, dtype):
    inputs, grad_out = make_inputs(shape, dtype)
    float64_inputs = [x.double() for x in inputs]
    exact = run_with_gradients(lambda *x: attend_with_decay(*x, backend="reference"), float64_inputs, grad_out)
    plain = run_with_gradients(plain_attention, inputs, grad_out)
    actual = run_with_gradients(lambda *x: attend_with_decay(*x, backend=backend), inputs, grad_out)
    names = ("out", "grad q", "grad k", "grad v", "grad cumulative")
    for name, actual_tensor, plain_tensor, exact_tensor in zip(names, actual, plain, exact, strict=True):
        plain_error = (plain_tensor.double() - exact_tensor).norm()
        assert (actual_tensor.double() - exact_tensor).norm() <= 2 * plain_error, name


@with_backends
def test_linear_decay_equals_alibi(backend):
    (q, k, v, _), _ = make_inputs((2, 4, 2, 300, 33, 16))
    slopes = alibi.slopes(4)
    cumulative = decay.decay_from_slopes(slopes, k.shape[2], 2)
    expected = attend(q, k, v, bias=LinearBias(slopes), backend="reference")
    torch.testing.assert_close(attend_with_decay(q, k, v, cumulative, backend), expected, rtol=0, atol=3e-6)
    # Only differences of the values matter, so adding a large constant changes nothing.
    out = attend_with_decay(q, k, v, cumulative + 1e6, backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


@with_backends
@pytest.mark.parametrize("case", ["segments", "window"])
def test_segments_and_window_equal_reference(backend, case):
    (q, k, v, cumulative), _ = make_inputs((2, 4, 2, 300, 0, 16))
    if case == "segments":
        segment_ids = torch.randint(0, 4, (2, 300), generator=torch.Generator().manual_seed(1)).sort(-1).values
        options = {"segment_ids": segment_ids}
    else:
        options = {"window": 40}
    expected = attend_with_decay(q, k, v, cumulative, "reference", **options)
    out = attend_with_decay(q, k, v, cumulative, backend, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


@with_backends
def test_chunks_of_queries_equal_one_call(backend):
    (q, k, v, cumulative), _ = make_inputs((2, 4, 2, 300, 0, 16))
    expected = attend_with_decay(q, k, v, cumulative, "reference")
    for start, end in ((0, 100), (100, 102), (102, 103), (103, 300)):
        out = attend_with_decay(q[:, :, start:end], k[:, :, :end], v[:, :, :end], cumulative[..., :end], backend)
        torch.testing.assert_close(out, expected[:, :, start:end], rtol=0, atol=3e-6)


def make_decay_of_kind(kind, batch, heads, length):
    """Return a cumulative log decay that falls, rises or jumps."""
    random = torch.randn(batch, heads, length).double()
    match kind:
        case "forget gates":
            return make_cumulative_decay(batch, heads, length)
        case "rising":
            return random.abs().cumsum(-1) / 50
        case "constant":
            return torch.zeros_like(random)
        case "up and down":
            return (random - 0.2).cumsum(-1)
        case "steep":
            return -5 * random.abs().cumsum(-1)
        case "jump":
            positions = torch.arange(length)
            is_second_half = (positions >= length // 2).double()
            return -300 * is_second_half.expand_as(random) - 0.05 * positions
    raise ValueError(kind)


@both_implementations
@given(
    kind=st.sampled_from(["forget gates", "rising", "constant", "up and down", "steep", "jump"]),
    shape=st.tuples(st.integers(1, 2), st.sampled_from([(1, 1), (4, 2)]), st.integers(5, 600), st.integers(0, 300)),
    query_scale=st.sampled_from([0.01, 1.0, 8.0]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-3, 0.3]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=30)
def test_certificate_bounds_the_dropped_mass(implementation, kind, shape, query_scale, tolerance, seed):
    torch.manual_seed(seed)
    batch, (heads, kv_heads), q_len, past = shape
    k_len = q_len + past
    q = torch.randn(batch, heads, q_len, 16) * query_scale
    k, v = (torch.randn(batch, kv_heads, k_len, 16) for _ in range(2))
    cumulative = make_decay_of_kind(kind, batch, heads, k_len)
    out, first_keys, dropped_bound = run_operator_by_row(Problem(q, k, v, cumulative), tolerance, implementation)

    weights = plain_weights(q.double(), k.double(), cumulative)
    is_skipped = torch.arange(k_len) < first_keys[..., None]
    dropped_mass = (weights * is_skipped).sum(-1)
    assert (dropped_mass <= dropped_bound.double() + 1e-15).all()
    assert dropped_bound.max() <= tolerance * (1 + 1e-6)

    exact = weights @ v.double().repeat_interleave(heads // kv_heads, 1)
    reference_error = (attend_with_decay(q, k, v, cumulative, "reference").double() - exact).abs().max()
    max_value_norm = v.double().norm(dim=-1).max()
    rounding_error = 4 * reference_error + (1e-6 + 1e-6 * query_scale) * max_value_norm
    assert (out.double() - exact).norm(dim=-1).max() <= 2 * tolerance * max_value_norm + rounding_error


@both_implementations
def test_linear_decay_skips_as_many_keys_as_alibi(implementation):
    (q, k, v, _), _ = make_inputs((1, 8, 8, 4096, 0, 64))
    slopes = alibi.slopes(8)
    positions = torch.arange(4096)

    def share_of_keys_read(bias):
        _, first_keys, _ = run_operator_by_row(Problem(q, k, v, bias), 1e-6, implementation)
        return float((positions - first_keys + 1).sum() / (8 * (positions + 1).sum()))

    alibi_share = share_of_keys_read(slopes)
    assert share_of_keys_read(decay.decay_from_slopes(slopes, 4096)) == pytest.approx(alibi_share, rel=0.02)
    assert share_of_keys_read(decay.decay_from_slopes(16 * slopes, 4096)) < alibi_share / 2


@needs_kernel
def test_torch_compile_has_no_graph_break():
    inputs, grad_out = make_inputs((1, 2, 2, 150, 0, 16))

    def function(q, k, v, cumulative):
        return attend_with_decay(q, k, v, cumulative, "windowed")

    compiled_function = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled_function, inputs, grad_out)
    expected = run_with_gradients(function, inputs, grad_out)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert torch.equal(actual_tensor, expected_tensor)


@with_trainable_backends
def test_gradients_equal_finite_differences(backend):
    inputs, _ = make_inputs((1, 2, 1, 40, 3, 4), torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(
        lambda *x: attend_with_decay(*x, backend=backend), leaves, fast_mode=True, atol=1e-6
    )


@both_implementations
def test_trained_slopes_have_gradients_and_skip_keys(implementation):
    """The gradient of slopes is computed with a decay bias."""
    (q, k, v, _), grad_out = make_inputs((1, 4, 2, 700, 0, 16))

    def run(backend, dtype):
        slopes = (4 * alibi.slopes(4)).requires_grad_()
        inputs = (x.to(dtype) for x in (q, k, v))
        out, _, certificate = attend(*inputs, bias=LinearBias(slopes), backend=backend, return_stats=True)
        (grad,) = torch.autograd.grad(out, slopes, grad_out.to(dtype))
        return grad.double(), certificate

    exact_grad, _ = run("reference", torch.float64)
    grad, certificate = run(WINDOWED_BACKENDS[implementation], torch.float32)
    assert 0 < certificate.max() <= 1e-6
    torch.testing.assert_close(grad, exact_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_flex_equals_reference(tolerance):
    inputs, _ = make_inputs((1, 2, 2, 300, 0, 16))
    expected = attend_with_decay(*inputs, backend="reference")
    out = attend_with_decay(*inputs, backend="flex", tolerance=tolerance)
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


def test_proven_first_keys_have_known_values():
    cumulative = -torch.arange(7.0, dtype=torch.float64)[None, None]
    excess = torch.zeros(1, 1, 7, dtype=torch.float64)
    first_keys = decay.proven_first_keys(excess, cumulative, math.exp(-3))
    assert first_keys.tolist() == [[[0, 0, 0, 0, 1, 2, 3]]]


def test_invalid_cumulative_decay_is_rejected():
    (q, k, v, cumulative), _ = make_inputs((2, 4, 2, 20, 0, 16))
    with pytest.raises(InputError, match=r"\(batch, heads, k_len\) = \(2, 4, 20\), got \(2, 4, 19\)"):
        attend(q, k, v, bias=DecayBias(cumulative[..., 1:]))
    with pytest.raises(InputError, match=r"must be a floating-point tensor .* torch.int64"):
        attend(q, k, v, bias=DecayBias(cumulative.long()))
    cumulative[0, 1, 2] = math.nan
    with pytest.raises(InputError, match=r"DecayBias\.cumulative must be finite"):
        attend(q, k, v, bias=DecayBias(cumulative))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "windowed-torch", "flex"])
def test_backend_supports_decay_bias(backend):
    (q, k, v, cumulative), _ = make_inputs((1, 2, 2, 40, 0, 8))
    call = AttentionCall(q, k, v, DecayBias(cumulative))
    assert backends.get(backend).unsupported_reason(call) is None
