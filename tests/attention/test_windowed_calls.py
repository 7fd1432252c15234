"""Tests of the calls that windowed attention supports, with the compiled kernel and with the implementation in PyTorch.

The calls use grouped-query attention, segments, sliding windows, chunks of queries, several dtypes, values that are not
finite, torch.compile and several threads.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, attend_windowed, both_implementations, needs_kernel

from trainshort import alibi
from trainshort.attention import BiasKind, LinearBias, attend
from trainshort.attention.kernels import build

FLOAT32_EPS = torch.finfo(torch.float32).eps


def run_with_gradients(function, inputs, grad_out):
    """Return the output of a function and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def root_mean_square(x):
    return x.square().mean().sqrt().item()


def check_errors(inputs, slopes, window, segment_ids, implementation):
    """Check that the errors are at most twice the errors of the reference in the same dtype, plus rounding errors."""
    dim = inputs[0].shape[-1]
    dtype = inputs[0].dtype
    grad_out = torch.randn(inputs[0].shape).to(dtype)

    def run_reference(q, k, v):
        return attend(q, k, v, bias=LinearBias(slopes), window=window, segment_ids=segment_ids, backend="reference")

    def run_windowed(q, k, v):
        return attend_windowed(Problem(q, k, v, slopes, segment_ids, window), 1e-6, implementation).out

    exact_results = run_with_gradients(run_reference, [x.double() for x in inputs], grad_out)
    reference_results = run_with_gradients(run_reference, inputs, grad_out)
    actual_results = run_with_gradients(run_windowed, inputs, grad_out)
    names = ("out", "grad q", "grad k", "grad v")
    for name, exact, reference, actual in zip(names, exact_results, reference_results, actual_results, strict=True):
        assert actual.dtype == dtype
        reference_error = root_mean_square(reference.double() - exact)
        error = root_mean_square(actual.double() - exact)
        largest_value = exact.abs().max().item()
        rounding_error = 2 * FLOAT32_EPS * max(dim**0.5, largest_value)
        if dtype != torch.float32:
            # PyTorch's kernel rounds the weights to half precision, and the reference does not.
            reference_error += torch.finfo(dtype).eps * largest_value / 8
        message = f"{name}: error {error:.2e}, error of the reference {reference_error:.2e}"
        assert error <= 2 * reference_error + rounding_error, message


@both_implementations
@given(
    heads=st.sampled_from([(1, 1), (6, 3), (4, 1), (8, 8)]),
    lengths=st.tuples(st.integers(1, 400), st.sampled_from([0, 1, 100, 333])),
    dim=st.sampled_from([1, 8, 20, 64, 80]),
    window=st.sampled_from([None, None, 1, 17, 150]),
    has_segments=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_errors_of_random_calls(implementation, heads, lengths, dim, window, has_segments, dtype, seed):
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    q_len, past = lengths
    k_len = q_len + past
    q = torch.randn(2, query_heads, q_len, dim).to(dtype)
    k, v = (torch.randn(2, kv_heads, k_len, dim).to(dtype) for _ in range(2))
    segment_ids = (torch.rand(2, k_len) < 0.03).cumsum(1) * 5 - 2 if has_segments else None
    check_errors((q, k, v), alibi.slopes(query_heads), window, segment_ids, implementation)


@both_implementations
def test_segments_that_are_interrupted_by_other_segments(implementation):
    segment_ids = torch.tensor([7, 7, 3, 3, 7, 3, 7, 9]).repeat_interleave(40)[None]
    inputs = [torch.randn(1, 2, 320, 16) for _ in range(3)]
    check_errors(inputs, alibi.slopes(2), None, segment_ids, implementation)


@both_implementations
def test_transposed_inputs(implementation):
    # One tensor for q, k and v, with the heads inside the tokens, as in a model.
    qkv = torch.randn(2, 300, 3, 4, 16)
    inputs = [x.transpose(1, 2) for x in qkv.unbind(2)]
    check_errors(inputs, alibi.slopes(4), None, None, implementation)
    # Rows that are not contiguous.
    inputs = [torch.randn(1, 2, 16, 100).transpose(2, 3) for _ in range(3)]
    check_errors(inputs, alibi.slopes(2), None, None, implementation)


@both_implementations
def test_chunks_of_queries_equal_one_call(implementation):
    q, k, v = (torch.randn(1, 4, 700, 32) for _ in range(3))
    slopes = alibi.slopes(4)
    expected_out, expected_lse, _ = attend_windowed(Problem(q, k, v, slopes), 1e-6, implementation)
    boundaries = [0, 1, 2, 5, 140, 333, 334, 600, 700]
    for start, end in itertools.pairwise(boundaries):
        problem = Problem(q[:, :, start:end], k[:, :, :end], v[:, :, :end], slopes)
        out, lse, _ = attend_windowed(problem, 1e-6, implementation)
        torch.testing.assert_close(out, expected_out[:, :, start:end], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse[:, :, start:end], rtol=1e-5, atol=1e-5)


@both_implementations
def test_decode_step_of_left_padded_batch(implementation):
    """The padding is a segment of its own."""
    lengths = (5, 90, 200)
    k_len = max(lengths)
    q = torch.randn(3, 4, 1, 16)
    k, v = (torch.randn(3, 2, k_len, 16) for _ in range(2))
    slopes = alibi.slopes(4)
    segment_ids = torch.stack([torch.arange(k_len) >= k_len - length for length in lengths]).long()
    out = attend_windowed(Problem(q, k, v, slopes, segment_ids), 1e-6, implementation).out
    for i, length in enumerate(lengths):
        sequence_k = k[i : i + 1, :, k_len - length :]
        sequence_v = v[i : i + 1, :, k_len - length :]
        expected = attend(q[i : i + 1], sequence_k, sequence_v, bias=LinearBias(slopes), backend="reference")
        torch.testing.assert_close(out[i : i + 1], expected)


@both_implementations
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_values_that_are_not_finite_are_never_skipped(implementation, value, name):
    tensors = {"q": torch.randn(1, 2, 500, 8), "k": torch.randn(1, 2, 500, 8), "v": torch.randn(1, 2, 500, 8)}
    tensors[name][0, 0, 30, 3] = value
    q, k, v = tensors.values()
    slopes = torch.tensor([1.0, 0.5])  # Key 30 lies far outside of the windows of the last queries.
    out = attend_windowed(Problem(q, k, v, slopes), 1e-6, implementation).out
    for row in (0, 29, 30, 31, 60, 200, 499):
        if implementation == "torch" and row < 30:
            continue  # PyTorch's kernel multiplies hidden values by zero, so hidden values can also cause NaN.
        # The reference gets only the keys that the query sees.
        row_q = q[:, :, row : row + 1]
        expected = attend(row_q, k[:, :, : row + 1], v[:, :, : row + 1], bias=LinearBias(slopes), backend="reference")
        actual_row = out[0, :, row]
        expected_row = expected[0, :, 0]
        assert torch.equal(actual_row.isfinite(), expected_row.isfinite()), f"row {row}"
        torch.testing.assert_close(actual_row, expected_row, equal_nan=True, atol=1e-5, rtol=1e-5)


@both_implementations
def test_operator_passes_opcheck(implementation):
    q, k, v = (torch.randn(2, 4, 50, 16, requires_grad=True) for _ in range(3))
    segment_ids = (torch.rand(2, 50) < 0.1).cumsum(1)
    compiled = implementation == "compiled"
    # bias, bias_kind, segment_ids, window, scale
    settings = (alibi.slopes(4), BiasKind.SLOPES.value, segment_ids, 20, 0.25)
    arguments = (q, k, v, *settings, 1e-6, compiled)
    torch.library.opcheck(torch.ops.trainshort.attention.default, arguments)

    out, lse, first_keys, _ = (x.detach() for x in torch.ops.trainshort.attention(*arguments))
    inputs = [x.detach() for x in (q, k, v)]
    arguments = (torch.randn_like(q), *inputs, *settings, out, lse, first_keys, compiled)
    torch.library.opcheck(torch.ops.trainshort.attention_backward.default, arguments)


@both_implementations
def test_gradients_equal_finite_differences(implementation):
    inputs = [torch.randn(1, heads, 40, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    segment_ids = (torch.arange(40) // 15)[None]

    def function(q, k, v):
        return attend_windowed(Problem(q, k, v, alibi.slopes(4), segment_ids, 12), 0.0, implementation).out

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["windowed", "auto"])
def test_torch_compile_has_no_graph_break(backend):
    inputs = tuple(torch.randn(1, 4, 70, 16, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(1, 4, 70, 16)
    slopes = alibi.slopes(4)

    def function(q, k, v):
        return attend(q * 2, k, v, bias=LinearBias(slopes), backend=backend).sin()

    compiled_function = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled_function, inputs, grad_out)
    expected = run_with_gradients(function, inputs, grad_out)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor)


@needs_kernel
@pytest.mark.parametrize("thread_pool", ["openmp", "own"])
def test_results_do_not_depend_on_number_of_threads(thread_pool, monkeypatch):
    if thread_pool == "own":
        monkeypatch.setattr(build, "find_gomp_parallel", lambda: None)
    else:
        assert build.find_gomp_parallel() is not None
    inputs = tuple(torch.randn(1, heads, 700, 32) for heads in (6, 3, 3))
    grad_out = torch.randn_like(inputs[0])

    def function(q, k, v):
        return attend_windowed(Problem(q, k, v, alibi.slopes(6)), 1e-6, "compiled").out

    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append(run_with_gradients(function, inputs, grad_out))
        finally:
            torch.set_num_threads(1)
    for result in results[1:]:
        for tensor, expected in zip(result, results[0], strict=True):
            assert torch.equal(tensor, expected)
