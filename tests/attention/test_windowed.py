"""Tests of the certificate of windowed attention: no query drops more softmax mass than its certificate says.

The tests run with the compiled kernel and with the implementation in PyTorch. The dropped softmax mass is computed from
all scores in float64.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, attend_windowed, both_implementations, needs_kernel, run_operator_by_row

from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.call import AttentionCall
from trainshort.config.registries import backends

INPUT_KINDS = [
    "normal",
    "huge far key",
    "constant keys",
    "zero queries",
    "identical tokens",
    "shifted keys",
    "growing keys",
    "clustered keys",
    "late cluster",
]


def make_inputs(kind, batch, heads, kv_heads, q_len, k_len, dim=16, query_scale=1.0, dtype=torch.float32):
    """Return random queries, keys and values that are difficult for the bound in different ways."""
    q = torch.randn(batch, heads, q_len, dim) * query_scale
    k, v = (torch.randn(batch, kv_heads, k_len, dim) for _ in range(2))
    match kind:
        case "huge far key":
            k[:, :, k_len // 5] *= 30
        case "constant keys":
            k = k[:, :, :1].expand_as(k).clone()
        case "zero queries":
            q.zero_()
        case "identical tokens":
            q, k, v = (x[:, :, :1].expand_as(x).clone() for x in (q, k, v))
        case "shifted keys":
            k += 20 * torch.randn(dim)
        case "growing keys":
            k *= torch.linspace(0, 3, k_len)[:, None]
        case "clustered keys":
            k = make_clusters(k)
        case "late cluster":
            # The sample of keys from which the kernel computes the centroids may not contain these keys.
            k[:, :, -3:] = 15 + k[:, :, -3:] / 100
    return q.to(dtype), k.to(dtype), v.to(dtype)


def make_clusters(x):
    """Return vectors in thirty clusters, as the keys of a trained model. `x` are random numbers for the deviations."""
    centers = 6 * torch.randn(30, 2) @ torch.randn(2, x.shape[-1])
    return centers[torch.randint(30, x.shape[:-1])] + x / 4


def exact_weights(q, k, slopes, rows=None):
    """Return the attention weights in float64.

    Args:
        q: The queries.
        k: The keys.
        slopes: The ALiBi slopes.
        rows: The queries whose weights are computed, if there are as many queries as keys. None means all queries.
    """
    if rows is None:
        rows = torch.arange(q.shape[2])
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q[:, :, rows].double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    distance = alibi.distances(q.shape[2], k.shape[2])[rows]
    scores = scores - slopes.double()[:, None, None] * distance
    return scores.masked_fill(distance < 0, -math.inf).softmax(-1)


def exact_dropped_mass(weights, first_keys):
    """Return the sum of the weights before the first key of each query."""
    is_skipped = torch.arange(weights.shape[-1]) < first_keys[..., None]
    return (weights * is_skipped).sum(-1)


def share_of_keys_read(first_keys, length):
    """Return the number of keys that all queries read, divided by the number of keys that they see."""
    positions = torch.arange(length)
    heads = first_keys.shape[1]
    return (positions - first_keys + 1).sum() / (heads * (positions + 1).sum())


@both_implementations
@given(
    kind=st.sampled_from(INPUT_KINDS),
    shape=st.tuples(
        st.integers(1, 2), st.sampled_from([(1, 1), (4, 2), (8, 8)]), st.integers(5, 700), st.integers(0, 300)
    ),
    query_scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-3, 0.3]),
    slope_kind=st.sampled_from(["paper", "steep", "zero", "negative", "mixed"]),
    seed=st.integers(0, 10_000),
)
@example(kind="normal", shape=(1, (8, 8), 1500, 0), query_scale=1.0, tolerance=1e-6, slope_kind="paper", seed=0)
@example(kind="huge far key", shape=(1, (8, 8), 1500, 0), query_scale=1.0, tolerance=1e-3, slope_kind="steep", seed=0)
@settings(max_examples=40)
def test_certificate_bounds_the_dropped_mass(implementation, kind, shape, query_scale, tolerance, slope_kind, seed):
    torch.manual_seed(seed)
    batch, (heads, kv_heads), q_len, past = shape
    q, k, v = make_inputs(kind, batch, heads, kv_heads, q_len, q_len + past, query_scale=query_scale)
    slopes = {
        "paper": alibi.slopes(heads),
        "steep": torch.full((heads,), 3.0),
        "zero": torch.zeros(heads),
        "negative": -alibi.slopes(heads) / 16,
        "mixed": torch.randn(heads) / 4,
    }[slope_kind]
    out, first_keys, dropped_bound = run_operator_by_row(Problem(q, k, v, slopes), tolerance, implementation)
    weights = exact_weights(q, k, slopes)
    assert (exact_dropped_mass(weights, first_keys) <= dropped_bound.double() + 1e-15).all()
    assert dropped_bound.max() <= tolerance * (1 + 1e-6)

    # The error of the output is at most 2 * tolerance * (largest norm of a value), plus rounding errors.
    exact = weights @ v.double().repeat_interleave(heads // kv_heads, 1)
    reference = attend(q, k, v, bias=LinearBias(slopes), backend="reference")
    reference_error = (reference.double() - exact).abs().max()
    max_norms = [x.double().norm(dim=-1).max() for x in (q, k, v)]
    score_error = 2**-23 * max_norms[0] * max_norms[1] / math.sqrt(q.shape[-1])
    rounding_error = 4 * reference_error + (1e-6 + score_error) * max_norms[2]
    assert (out.double() - exact).norm(dim=-1).max() <= 2 * tolerance * max_norms[2] + rounding_error


def check_certificate_of_some_rows(kind, dim, length, tolerance, implementation):
    """Check that the certificate bounds the dropped mass of about 40 queries of a long sequence."""
    q, k, v = make_inputs(kind, 1, 4, 4, length, length, dim=dim)
    slopes = alibi.slopes(4)
    _, first_keys, dropped_bound = run_operator_by_row(Problem(q, k, v, slopes), tolerance, implementation)
    rows = torch.arange(length - 1, 0, -max(1, length // 40))
    dropped_mass = exact_dropped_mass(exact_weights(q, k, slopes, rows), first_keys[..., rows])
    assert (dropped_mass <= dropped_bound[..., rows].double() + 1e-15).all()
    assert dropped_bound.max() <= tolerance * (1 + 1e-6)


@both_implementations
@pytest.mark.parametrize("dim", [1, 17, 128, 333, 1023, 1024])
def test_certificate_with_other_head_dimensions(implementation, dim):
    for kind in ("normal", "clustered keys"):
        check_certificate_of_some_rows(kind, dim, 600, 1e-6, implementation)


@both_implementations
def test_certificate_with_20000_keys(implementation):
    check_certificate_of_some_rows("normal", 128, 20_000, 1e-6, implementation)


@pytest.mark.slow
@both_implementations
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_certificate_with_20000_keys_of_every_kind(implementation, kind):
    for dim, tolerance in ((128, 1e-6), (33, 1e-3), (513, 0.3)):
        check_certificate_of_some_rows(kind, dim, 20_000, tolerance, implementation)


@both_implementations
def test_certificate_is_the_largest_bound_of_each_head(implementation):
    q, k, v = make_inputs("normal", 2, 4, 2, 500, 500)
    problem = Problem(q, k, v, torch.tensor([1.0, 0.5, 0.25, 0.0]))
    certificate = attend_windowed(problem, 1e-4, implementation).certificate
    _, _, dropped_bound = run_operator_by_row(problem, 1e-4, implementation)
    assert certificate is not None
    assert certificate.shape == (2, 4)
    assert torch.equal(certificate, dropped_bound.amax(-1))
    assert (certificate[:, :3] > 0).all()
    assert (certificate[:, 3] == 0).all()  # A head with slope 0 skips nothing.


@both_implementations
def test_tolerance_zero_skips_nothing_and_equals_sdpa(implementation):
    q, k, v = make_inputs("normal", 1, 8, 4, 600, 700, dim=64)
    slopes = alibi.slopes(8)
    out, first_keys, dropped_bound = run_operator_by_row(Problem(q, k, v, slopes), 0.0, implementation)
    assert (first_keys == 0).all()
    assert (dropped_bound == 0).all()
    torch.testing.assert_close(out, attend(q, k, v, bias=LinearBias(slopes), backend="sdpa"))


@pytest.mark.parametrize(
    ("implementation", "max_share"), [pytest.param("compiled", 0.42, marks=needs_kernel), ("torch", 0.62)]
)
def test_share_of_keys_read_at_4096_tokens(implementation, max_share):
    q, k, v = make_inputs("normal", 1, 8, 8, 4096, 4096, dim=64)
    _, first_keys, _ = run_operator_by_row(Problem(q, k, v, alibi.slopes(8)), 1e-6, implementation)
    assert share_of_keys_read(first_keys, 4096) < max_share


@needs_kernel
def test_clustered_keys_and_queries_are_skipped_almost_optimally():
    """The bound must depend on the size of the clusters. The norms of these keys and queries are large."""
    length = 8192
    q, k, v = make_inputs("clustered keys", 1, 4, 4, length, length, dim=64)
    q = make_clusters(q) / 16
    slopes = torch.full((4,), 1 / 32)
    _, first_keys, dropped_bound = run_operator_by_row(Problem(q, k, v, slopes), 1e-6, "compiled")

    rows = torch.arange(7, length, 500)
    weights = exact_weights(q, k, slopes, rows)
    assert (exact_dropped_mass(weights, first_keys[..., rows]) <= dropped_bound[..., rows]).all()
    # The smallest share of keys that contains all of the softmax mass except for the tolerance.
    is_needed = (weights.cumsum(-1) > 1e-6) & (torch.arange(length) <= rows[:, None])
    needed_share = is_needed.sum() / (4 * (rows + 1).sum())
    assert share_of_keys_read(first_keys, length) < 1.6 * needed_share


@both_implementations
def test_adding_a_vector_to_all_keys_does_not_change_the_output(implementation):
    """The kernel measures keys from centroids, so it also skips the same keys. The simple bound may skip fewer keys."""
    q, k, v = make_inputs("normal", 1, 4, 4, 1000, 1000)
    slopes = torch.full((4,), 0.2)
    _, first_keys, _ = run_operator_by_row(Problem(q, k, v, slopes), 1e-6, implementation)
    shifted_k = k + 5 * torch.randn(16)
    out, shifted_first_keys, _ = run_operator_by_row(Problem(q, shifted_k, v, slopes), 1e-6, implementation)
    exact = exact_weights(q, shifted_k, slopes) @ v.double()
    assert (out.double() - exact).abs().max() < 5e-5
    if implementation == "compiled":
        assert (first_keys - shifted_first_keys).abs().max() <= 64


@both_implementations
def test_gradient_errors_are_within_the_documented_bounds(implementation):
    """The bounds are in docs/windows.md. With the certificate ε and the largest norms V, K and Q:

    dv: 2ε Σ‖g‖      dq: 6ε ‖g‖ V K/√d      dk: 6ε Σ‖g‖ V Q/√d       (sums over queries, for the sum over keys)
    """
    dim = 16
    inputs = [x.requires_grad_() for x in make_inputs("normal", 1, 4, 4, 400, 400, dim, dtype=torch.float64)]
    q, k, v = inputs
    slopes = alibi.slopes(4)
    grad_out = torch.randn(1, 4, 400, dim, dtype=torch.float64)
    out, _, certificate = attend_windowed(Problem(q, k, v, slopes), 1e-3, implementation)
    assert certificate is not None
    epsilon = certificate.max().item()
    assert epsilon > 0

    grads = torch.autograd.grad(out, inputs, grad_out)
    exact_grads = torch.autograd.grad(attend(q, k, v, bias=LinearBias(slopes), backend="reference"), inputs, grad_out)
    error_q, error_k, error_v = (
        (grad - exact_grad).norm(dim=-1) for grad, exact_grad in zip(grads, exact_grads, strict=True)
    )
    max_q, max_k, max_v = (x.detach().norm(dim=-1).max() for x in inputs)
    grad_norm = grad_out.norm(dim=-1)
    grad_norm_sum = grad_norm.sum(-1)
    assert error_v.sum(-1).max() > 0  # Keys were skipped.
    assert (error_v.sum(-1) <= 2 * epsilon * grad_norm_sum).all()
    assert (error_q <= 6 * epsilon * grad_norm * max_v * max_k / math.sqrt(dim)).all()
    assert (error_k.sum(-1) <= 6 * epsilon * grad_norm_sum * max_v * max_q / math.sqrt(dim)).all()


@both_implementations
def test_rows_of_a_long_sequence_equal_reference(implementation):
    q, k, v = make_inputs("normal", 1, 2, 1, 20_000, 20_000)
    slopes = torch.tensor([1 / 16, 1 / 256])
    out, _, certificate = attend_windowed(Problem(q, k, v, slopes), 1e-6, implementation)
    for row in (0, 63, 64, 9_999, 19_999):
        exact = attend(
            q[:, :, row : row + 1].double(),
            k[:, :, : row + 1].double(),
            v[:, :, : row + 1].double(),
            bias=LinearBias(slopes),
            backend="reference",
        )
        assert (out[:, :, row : row + 1] - exact).abs().max() < 1e-5
    assert certificate is not None
    assert 0 < certificate.max() <= 1e-6


@pytest.mark.parametrize("tolerance", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("backend", ["auto", "windowed", "sdpa"])
def test_attend_respects_the_tolerance_and_returns_a_certificate(backend, tolerance):
    q, k, v = make_inputs("normal", 2, 4, 2, 700, 700)
    bias = LinearBias(torch.tensor([1.0, 0.5, 0.25, 0.125]))
    exact = attend(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    out, lse, certificate = attend(q, k, v, bias=bias, backend=backend, tolerance=tolerance, return_stats=True)
    assert lse.shape == (2, 4, 700)
    assert certificate.shape == (2, 4)
    assert certificate.max() <= tolerance
    can_skip_keys = backend != "sdpa" and tolerance > 0
    assert (certificate.max() > 0) == can_skip_keys
    assert (out - exact).norm(dim=-1).max() <= 2 * tolerance * v.norm(dim=-1).max() + 1e-5


@pytest.mark.parametrize("backend", ["auto", "windowed", "sdpa"])
def test_return_stats_does_not_change_the_output(backend):
    q, k, v = make_inputs("normal", 2, 4, 2, 700, 700)
    bias = LinearBias(torch.tensor([1.0, 0.5, 0.25, 0.125]))
    out = attend(q, k, v, bias=bias, backend=backend, return_stats=True).out
    assert torch.equal(out, attend(q, k, v, bias=bias, backend=backend))


@pytest.mark.parametrize(
    ("change", "expected_reason"),
    [
        ({"bias": None}, "use 'sdpa'"),
        ({"dropout_p": 0.1}, "it has no dropout"),
        ({"q": torch.zeros(1, 1, 4, 8, device="meta")}, "it runs on the CPU"),
    ],
)
def test_unsupported_calls_have_a_reason(change, expected_reason):
    arguments = {"q": torch.zeros(1, 1, 4, 8), "bias": LinearBias(torch.ones(1)), **change}
    q = arguments.pop("q")
    reason = backends.get("windowed").unsupported_reason(AttentionCall(q, q, q, **arguments))
    assert reason is not None
    assert expected_reason in reason
