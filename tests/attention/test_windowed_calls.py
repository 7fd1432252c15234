"""Every way `windowed` is called, in both implementations: grouped heads, documents, windows, chunks, decoding, dtypes,
inputs that are not finite, torch.compile, and any number of threads."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, attend_windowed, both, needs_kernel

from trainshort import alibi
from trainshort.attention import BiasKind, LinearBias, attend
from trainshort.attention.kernels import build

FLOAT32_EPS = torch.finfo(torch.float32).eps


def with_gradients(function, leaves, grad_out):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def check_against_oracle(tensors, slopes, window, segment_ids, implementation):
    """Twice what the plain formula loses in the same dtype, plus roundings (see test_engines.py for the budget)."""
    dim, dtype = tensors[0].shape[-1], tensors[0].dtype
    grad_out = torch.randn(tensors[0].shape).to(dtype)

    def reference(*x):
        return attend(*x, bias=LinearBias(slopes), window=window, segment_ids=segment_ids, backend="reference")

    def ours(*x):
        return attend_windowed(Problem(*x, slopes, segment_ids, window), 1e-6, implementation)[0]

    exact = with_gradients(reference, [x.double() for x in tensors], grad_out)
    plain = with_gradients(reference, tensors, grad_out)
    for what, e, p, o in zip(
        ("out", "grad q", "grad k", "grad v"), exact, plain, with_gradients(ours, tensors, grad_out), strict=True
    ):
        assert o.dtype == dtype
        lost, spent = ((x.double() - e).square().mean().sqrt().item() for x in (p, o))
        rounding = 2 * FLOAT32_EPS * max(dim**0.5, e.abs().max().item())
        if dtype != torch.float32:  # torch's kernel rounds the weights to half precision, the oracle does not
            lost += torch.finfo(dtype).eps * e.abs().max().item() / 8
        assert spent <= 2 * lost + rounding, f"{what}: {spent:.2e} spent, {lost:.2e} lost by the plain formula"


@both
@given(
    heads=st.sampled_from([(1, 1), (6, 3), (4, 1), (8, 8)]),
    lengths=st.tuples(st.integers(1, 400), st.sampled_from([0, 1, 100, 333])),
    dim=st.sampled_from([1, 8, 20, 64, 80]),
    window=st.sampled_from([None, None, 1, 17, 150]),
    packed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_any_call_is_within_the_budget_of_the_oracle(implementation, heads, lengths, dim, window, packed, dtype, seed):
    torch.manual_seed(seed)
    q_len, k_len = lengths[0], sum(lengths)
    q = torch.randn(2, heads[0], q_len, dim).to(dtype)
    k, v = (torch.randn(2, heads[1], k_len, dim).to(dtype) for _ in range(2))
    segment_ids = (torch.rand(2, k_len) < 0.03).cumsum(1) * 5 - 2 if packed else None
    check_against_oracle((q, k, v), alibi.slopes(heads[0]), window, segment_ids, implementation)


@both
def test_documents_may_come_back(implementation):
    """Numbers need not ascend: a document interrupted by another one goes on where it stopped."""
    segment_ids = torch.tensor([7, 7, 3, 3, 7, 3, 7, 9]).repeat_interleave(40)[None]
    tensors = [torch.randn(1, 2, 320, 16) for _ in range(3)]
    check_against_oracle(tensors, alibi.slopes(2), None, segment_ids, implementation)


@both
def test_transposed_and_sliced_inputs(implementation):
    """As a model hands them over: heads inside tokens, one tensor for q, k and v; and rows that are not contiguous."""
    joined = torch.randn(2, 300, 3, 4, 16)
    views = [x.transpose(1, 2) for x in joined.unbind(2)]
    check_against_oracle(views, alibi.slopes(4), None, None, implementation)
    columns = [torch.randn(1, 2, 16, 100).transpose(2, 3) for _ in range(3)]
    check_against_oracle(columns, alibi.slopes(2), None, None, implementation)


@both
def test_chunks_and_single_tokens_equal_one_pass(implementation):
    q, k, v = (torch.randn(1, 4, 700, 32) for _ in range(3))
    slopes = alibi.slopes(4)
    whole, whole_lse, _ = attend_windowed(Problem(q, k, v, slopes, None, None), 1e-6, implementation)
    starts = [0, 1, 2, 5, 140, 333, 334, 600, 700]
    for start, end in itertools.pairwise(starts):
        problem = Problem(q[:, :, start:end], k[:, :, :end], v[:, :, :end], slopes, None, None)
        out, lse, _ = attend_windowed(problem, 1e-6, implementation)
        torch.testing.assert_close(out, whole[:, :, start:end], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, whole_lse[:, :, start:end], rtol=1e-5, atol=1e-5)


@both
def test_decoding_a_batch_of_different_lengths(implementation):
    """Three sequences of 5, 90 and 200 tokens, padded in front; padding is a document of its own."""
    lengths, room = (5, 90, 200), 200
    q = torch.randn(3, 4, 1, 16)
    k, v = (torch.randn(3, 2, room, 16) for _ in range(2))
    slopes = alibi.slopes(4)
    segment_ids = torch.stack([torch.arange(room) >= room - n for n in lengths]).long()
    out, _, _ = attend_windowed(Problem(q, k, v, slopes, segment_ids, None), 1e-6, implementation)
    for i, n in enumerate(lengths):
        own = (q[i : i + 1], k[i : i + 1, :, room - n :], v[i : i + 1, :, room - n :])
        alone = attend(*own, bias=LinearBias(slopes), backend="reference")
        torch.testing.assert_close(out[i : i + 1], alone)


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_is_never_skipped(implementation, value, which):
    """Row by row against the oracle on what the row can see: not a number where it has none, and close elsewhere."""
    tensors = {name: torch.randn(1, 2, 500, 8) for name in "qkv"}
    tensors[which][0, 0, 30, 3] = value
    slopes = torch.tensor([1.0, 0.5])  # so steep that key 30 is far outside every later window
    q, k, v = tensors.values()
    out, _, _ = attend_windowed(Problem(q, k, v, slopes, None, None), 1e-6, implementation)
    for row in (0, 29, 30, 31, 60, 200, 499):
        seen = (q[:, :, row : row + 1], k[:, :, : row + 1], v[:, :, : row + 1])
        oracle = attend(*seen, bias=LinearBias(slopes), backend="reference")[0, :, 0]
        ours = out[0, :, row]
        if implementation == "torch" and row < 30:
            continue  # torch's kernel multiplies hidden values by zero, so a row may be NaN by its future
        assert torch.equal(ours.isfinite(), oracle.isfinite()), f"row {row}: {ours} where the oracle has {oracle}"
        torch.testing.assert_close(ours, oracle, equal_nan=True, atol=1e-5, rtol=1e-5)


@both
def test_operators_are_registered_as_torch_wants_them(implementation):
    q, k, v = (torch.randn(2, 4, 50, 16, requires_grad=True) for _ in range(3))
    segment_ids = (torch.rand(2, 50) < 0.1).cumsum(1)
    compiled = implementation == "compiled"
    arguments = (q, k, v, alibi.slopes(4), BiasKind.SLOPES.value, segment_ids, 20, 0.25, 1e-6, compiled)
    torch.library.opcheck(torch.ops.trainshort.attention.default, arguments)
    out, lse, first, _ = (x.detach() for x in torch.ops.trainshort.attention(*arguments))
    leaves = [x.detach() for x in (q, k, v)]
    settings = (alibi.slopes(4), BiasKind.SLOPES.value, segment_ids, 20, 0.25)
    arguments = (torch.randn_like(q), *leaves, *settings, out, lse, first, compiled)
    torch.library.opcheck(torch.ops.trainshort.attention_backward.default, arguments)


@both
def test_gradcheck(implementation):
    leaves = [torch.randn(1, heads, 40, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    segment_ids = (torch.arange(40) // 15)[None]

    def function(*x):
        return attend_windowed(Problem(*x, alibi.slopes(4), segment_ids, 12), 0.0, implementation)[0]

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", ["windowed", "auto"])
def test_torch_compile_keeps_the_graph_whole(backend):
    q, k, v = (torch.randn(1, 4, 70, 16, requires_grad=True) for _ in range(3))
    slopes = alibi.slopes(4)

    def function(q, k, v):
        return attend(q * 2, k, v, bias=LinearBias(slopes), backend=backend).sin()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    grad_out = torch.randn(1, 4, 70, 16)
    eager = with_gradients(function, (q, k, v), grad_out)
    for e, c in zip(eager, with_gradients(compiled, (q, k, v), grad_out), strict=True):
        torch.testing.assert_close(c, e)


@needs_kernel
@pytest.mark.parametrize("pool", ["torch's", "own"])
def test_the_number_of_threads_changes_no_bit(pool, monkeypatch):
    if pool == "own":
        monkeypatch.setattr(build, "find_gomp_parallel", lambda: None)
    else:
        assert build.find_gomp_parallel() is not None
    q, k, v = (torch.randn(1, heads, 700, 32) for heads in (6, 3, 3))
    grad_out = torch.randn_like(q)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            ours = with_gradients(
                lambda *x: attend_windowed(Problem(*x, alibi.slopes(6), None, None), 1e-6, "compiled")[0],
                (q, k, v),
                grad_out,
            )
        finally:
            torch.set_num_threads(1)
        results.append(ours)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
