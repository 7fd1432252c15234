"""Tests of every backend against the backend `reference` in float64, for the output and all gradients.

The error of a backend may be at most twice the error of the plain formula in the same dtype. Both errors are root mean
squares over several random inputs of the same shape. A single input would not be enough, because the error of the plain
formula is sometimes zero by chance.
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainshort import alibi
from trainshort.attention import DenseBias, DistanceBias, LinearBias, attend
from trainshort.attention.call import AttentionCall
from trainshort.config.registries import backends

BACKENDS = [name for name in backends.names() if name not in ("reference", "flex")]

# The errors are measured over at least this many output values.
MIN_VALUES = 20_000


def plain_attention(q, k, v, bias_tensor):
    """Compute attention with the plain formula, entirely in the dtype of the inputs."""
    heads_per_kv_head = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(heads_per_kv_head, 1)
    v = v.repeat_interleave(heads_per_kv_head, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias_tensor.to(q.dtype)
    return scores.softmax(-1) @ v


def run_with_gradients(function, inputs, grad_out):
    """Return the output of a function and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def make_bias_tensor(bias, q_len, k_len, heads, causal=True):
    """Return the bias and the causal mask as one tensor."""
    distance = alibi.distances(q_len, k_len)
    match bias:
        case LinearBias(slopes, right_slopes):
            if right_slopes is None:
                right_slopes = slopes
            left = slopes[:, None, None] * distance
            right = -right_slopes[:, None, None] * distance
            values = -torch.where(distance >= 0, left, right)
        case DistanceBias(table, right_table):
            if right_table is None:
                right_table = table
            left = table[:, distance.clamp(0, table.shape[1] - 1)]
            right = right_table[:, (-distance).clamp(0, right_table.shape[1] - 1)]
            values = torch.where(distance >= 0, left, right)
        case DenseBias(values):
            pass
        case _:
            values = torch.zeros(heads, q_len, k_len)
    if causal:
        values = values.masked_fill(distance < 0, -math.inf)
    return values


def make_inputs(shape, bias_kind, dtype, generator):
    """Return random inputs (q, k, v), a bias and a gradient of the output."""
    batch, kv_heads, heads_per_kv_head, q_len, past, dim = shape
    heads = kv_heads * heads_per_kv_head
    k_len = q_len + past

    def randn(*size):
        return torch.randn(*size, generator=generator)

    q, grad_out = (randn(batch, heads, q_len, dim).to(dtype) for _ in range(2))
    k, v = (randn(batch, kv_heads, k_len, dim).to(dtype) for _ in range(2))
    biases = {
        "none": None,
        "linear": LinearBias(alibi.slopes(heads)),
        "distance": DistanceBias(randn(heads, 9)),
        "dense": DenseBias(randn(heads, q_len, k_len)),
        "two slopes": LinearBias(alibi.slopes(heads), alibi.slopes(heads).flip(0)),
        "two tables": DistanceBias(randn(heads, 9), randn(heads, 5)),
    }
    return (q, k, v), biases[bias_kind], grad_out


def check_errors(backend, shape, bias_kind, dtype, seed, causal=True):
    """Check that a backend's errors are at most twice the errors of the plain formula."""
    batch, kv_heads, heads_per_kv_head, q_len, past, dim = shape
    heads = kv_heads * heads_per_kv_head
    generator = torch.Generator().manual_seed(seed)

    # The first input has the given batch size. A second, larger batch contains all further random inputs.
    number_of_inputs = math.ceil(MIN_VALUES / (batch * kv_heads * q_len * dim))
    batch_sizes = [batch]
    if number_of_inputs > 1:
        batch_sizes.append(batch * (number_of_inputs - 1))

    def run_attend(name, inputs, bias, grad_out):
        def function(q, k, v):
            return attend(q, k, v, bias=bias, causal=causal, backend=name)

        return run_with_gradients(function, inputs, grad_out)

    plain_squares = torch.zeros(4, dtype=torch.float64)
    backend_squares = torch.zeros(4, dtype=torch.float64)
    for batch_size in batch_sizes:
        inputs, bias, grad_out = make_inputs((batch_size, *shape[1:]), bias_kind, dtype, generator)
        q, k, v = inputs
        call = AttentionCall(q.requires_grad_(), k, v, bias, causal=causal)
        if backends.get(backend).unsupported_reason(call):
            return
        bias_tensor = make_bias_tensor(bias, q_len, q_len + past, heads, causal)

        exact = run_attend("reference", [x.double() for x in inputs], bias, grad_out)
        plain = run_with_gradients(partial(plain_attention, bias_tensor=bias_tensor), inputs, grad_out)
        actual = run_attend(backend, inputs, bias, grad_out)
        assert {x.dtype for x in actual} == {dtype}
        plain_squares += sum_squared_errors(plain, exact)
        backend_squares += sum_squared_errors(actual, exact)

    names = ("out", "grad q", "grad k", "grad v")
    for name, plain_error, error in zip(names, plain_squares.sqrt(), backend_squares.sqrt(), strict=True):
        assert error <= 2 * plain_error, f"{name}: error {error:.2e}, error of the plain formula {plain_error:.2e}"


def sum_squared_errors(results, exact_results):
    """Return the sum of the squared errors of each tensor."""
    sums = [(result.double() - exact).square().sum() for result, exact in zip(results, exact_results, strict=True)]
    return torch.stack(sums)


with_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
with_backends = pytest.mark.parametrize("backend", BACKENDS)

# (batch, kv_heads, heads_per_kv_head, q_len, past, dim)
SHAPES = st.tuples(
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 300),
    st.sampled_from([0, 0, 1, 17, 200]),
    st.sampled_from([8, 16, 64]),
)
with_causal_cases = given(
    shape=SHAPES,
    bias_kind=st.sampled_from(["none", "linear", "linear", "distance", "dense"]),
    seed=st.integers(0, 1000),
)


@with_dtypes
@with_backends
@with_causal_cases
@example(shape=(1, 4, 1, 700, 0, 32), bias_kind="linear", seed=1)
@example(shape=(1, 2, 3, 257, 500, 16), bias_kind="linear", seed=2)
@settings(max_examples=12)
def test_causal_errors(backend, dtype, shape, bias_kind, seed):
    check_errors(backend, shape, bias_kind, dtype, seed)


@with_dtypes
@with_backends
@given(
    shape=SHAPES,
    bias_kind=st.sampled_from(["none", "linear", "two slopes", "two tables", "dense"]),
    seed=st.integers(0, 1000),
)
@example(shape=(1, 4, 1, 500, 0, 32), bias_kind="two slopes", seed=1)
@settings(max_examples=5)
def test_bidirectional_errors(backend, dtype, shape, bias_kind, seed):
    check_errors(backend, shape, bias_kind, dtype, seed, causal=False)


@pytest.mark.slow
@with_dtypes
@with_backends
@with_causal_cases
@example(shape=(1, 8, 1, 1300, 0, 32), bias_kind="linear", seed=1)
@example(shape=(2, 2, 3, 257, 1100, 16), bias_kind="linear", seed=2)
@settings(max_examples=100)
def test_causal_errors_with_many_shapes(backend, dtype, shape, bias_kind, seed):
    check_errors(backend, shape, bias_kind, dtype, seed)


@with_backends
def test_gradients_equal_finite_differences(backend):
    # 140 queries are more than the diagonal block of the PyTorch implementation for some heads.
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64, requires_grad=True) for length in (140, 143, 143))
    bias = LinearBias(alibi.slopes(2))
    reason = backends.get(backend).unsupported_reason(AttentionCall(q, k, v, bias))
    if reason:
        pytest.skip(reason)

    def function(q, k, v):
        return attend(q, k, v, bias=bias, backend=backend)

    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("backend", ["sdpa", "windowed", "reference"])
def test_bfloat16_weights_at_16384_keys_equal_float32_weights(backend):
    """The products of slopes and positions must not be rounded to bfloat16.

    The attention weights are measured with an identity matrix as values, for 128 keys at a time.
    """
    k_len = 16_384
    heads = 8
    dim = 128
    measured_keys = 2048
    q = torch.randn(1, heads, 1, dim).bfloat16()
    k = torch.randn(1, heads, k_len, dim).bfloat16()
    bias = LinearBias(alibi.slopes(heads))
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(dim) + alibi.bias(bias.slopes, 1, k_len)
    exact_weights = scores.softmax(-1)[0, :, 0, -measured_keys:]
    assert exact_weights.sum(-1).min() > 0.99  # The other keys have less than 1 % of the softmax mass.

    weight_parts = []
    v = torch.zeros(1, heads, k_len, dim, dtype=torch.bfloat16)
    for start in range(k_len - measured_keys, k_len, dim):
        v[:, :, start : start + dim] = torch.eye(dim, dtype=v.dtype)
        weight_parts.append(attend(q, k, v, bias=bias, backend=backend).float())
        v[:, :, start : start + dim] = 0
    weights = torch.cat(weight_parts, -1)[0, :, 0]
    total_variation = (weights - exact_weights).abs().sum(-1) / 2
    assert total_variation.max() < 0.005
