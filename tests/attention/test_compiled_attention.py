"""Tests of the backend `compiled`: equality with the reference, gradients of distance tables, and skipped keys."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, needs_kernel, run_operator

from trainshort import alibi
from trainshort.attention import BiasKind, DenseBias, DistanceBias, LinearBias, attend
from trainshort.attention.backends.compiled import table_by_distance
from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.attention.backends.windowed_torch import QUERY_TILE
from trainshort.attention.call import AttentionCall
from trainshort.attention.functional import choose_backend
from trainshort.config.registries import backends


def run_with_gradients(backend, inputs, bias_type, bias_tensor, grad_out, **options):
    """Return the output of `attend`, and the gradients of q, k, v and the bias tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, bias_tensor)]
    q, k, v, bias_leaf = leaves
    out = attend(q, k, v, bias=bias_type(bias_leaf), backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


@needs_kernel
@given(
    heads=st.sampled_from([(1, 1), (6, 3), (4, 1)]),
    lengths=st.tuples(st.integers(1, 600), st.sampled_from([0, 1, 100, 333])),
    table_length=st.sampled_from([1, 9, 129, 2000]),
    window=st.sampled_from([None, None, 1, 17, 150]),
    has_segments=st.booleans(),
    is_linear=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_output_and_gradients_equal_reference(heads, lengths, table_length, window, has_segments, is_linear, seed):
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    q_len, past = lengths
    k_len = q_len + past
    q = torch.randn(2, query_heads, q_len, 8, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, k_len, 8, dtype=torch.float64) for _ in range(2))
    segment_ids = (torch.rand(2, k_len) < 0.03).cumsum(1) * 5 - 2 if has_segments else None
    if is_linear:
        # The reference multiplies slopes by distances in float32. The products are exact for slopes with few bits.
        bias_type = LinearBias
        bias_tensor = torch.randint(1, 256, (query_heads,)) / 256
    else:
        bias_type = DistanceBias
        bias_tensor = torch.randn(query_heads, table_length).double()
    options = {"window": window, "segment_ids": segment_ids}
    grad_out = torch.randn(q.shape, dtype=torch.float64)
    expected = run_with_gradients("reference", (q, k, v), bias_type, bias_tensor, grad_out, **options)
    actual = run_with_gradients("compiled", (q, k, v), bias_type, bias_tensor, grad_out, **options)
    names = ("out", "grad q", "grad k", "grad v", "grad bias")
    for name, actual_tensor, expected_tensor in zip(names, actual, expected, strict=True):
        if is_linear and name == "grad bias":
            # The reference computes the gradient of slopes in float32.
            torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-3, rtol=1e-4)
        else:
            torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-9, rtol=1e-7)


def plain_attention(q, k, v, table):
    """Compute attention with a distance table and the plain formula, entirely in the dtype of the inputs."""
    distance = alibi.distances(q.shape[2], k.shape[2])
    bias = table[:, distance.clamp(0, table.shape[1] - 1)].masked_fill(distance < 0, -math.inf)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias.to(q.dtype)
    return scores.softmax(-1) @ v


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_error_of_table_gradient_is_at_most_twice_the_error_of_the_plain_formula(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(4, 8, 500, 16).to(dtype) for _ in range(3)]
    table = torch.randn(8, 129)
    grad_out = torch.randn(4, 8, 500, 16).to(dtype)
    leaf = table.clone().requires_grad_()
    (plain,) = torch.autograd.grad(plain_attention(*inputs, leaf), leaf, grad_out)
    actual = run_with_gradients("compiled", inputs, DistanceBias, table, grad_out)[-1]
    float64_inputs = [x.double() for x in inputs]
    exact = run_with_gradients("reference", float64_inputs, DistanceBias, table.double(), grad_out)[-1]
    plain_error = (plain.double() - exact).square().mean().sqrt()
    error = (actual.double() - exact).square().mean().sqrt()
    assert error <= 2 * plain_error


@needs_kernel
def test_auto_chooses_backend_by_type_of_bias():
    q = torch.randn(1, 4, 40, 8, requires_grad=True)

    def chosen_backend(bias):
        return choose_backend(AttentionCall(q, q, q, bias))

    assert chosen_backend(DistanceBias(torch.randn(4, 9, requires_grad=True))) is backends.get("compiled")
    assert chosen_backend(LinearBias(alibi.slopes(4).requires_grad_())) is backends.get("windowed")
    assert chosen_backend(LinearBias(alibi.slopes(4))) is backends.get("windowed")
    assert chosen_backend(DenseBias(torch.randn(4, 40, 40))) is backends.get("sdpa")


@needs_kernel
@pytest.mark.parametrize(
    ("cpu_capability", "mkl_lacks_avx512", "expected"),
    [("AVX2", False, "compiled"), ("AVX512", False, "sdpa"), ("AVX512", True, "compiled")],
)
def test_auto_without_bias_prefers_sdpa_only_with_avx512(cpu_capability, mkl_lacks_avx512, expected, monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: cpu_capability)
    monkeypatch.setattr("trainshort.attention.backends.compiled.mkl_lacks_avx512", lambda: mkl_lacks_avx512)
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    q = torch.randn(1, 4, 40, 8)
    assert choose_backend(AttentionCall(q, q, q)) is backends.get(expected)


@needs_kernel
def test_single_query_equals_reference():
    inputs = [torch.randn(2, 4, length, 16) for length in (1, 700, 700)]
    bias = DistanceBias(torch.randn(4, 129))
    out, lse, _ = attend(*inputs, bias=bias, backend="compiled", return_stats=True)
    expected_out, expected_lse, _ = attend(*inputs, bias=bias, backend="reference", return_stats=True)
    torch.testing.assert_close(out, expected_out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@needs_kernel
def test_results_do_not_depend_on_number_of_threads():
    inputs = [torch.randn(1, heads, 700, 32) for heads in (6, 3, 3)]
    table = torch.randn(6, 129)
    grad_out = torch.randn(1, 6, 700, 32)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append(run_with_gradients("compiled", inputs, DistanceBias, table, grad_out))
        finally:
            torch.set_num_threads(1)
    for result in results[1:]:
        for tensor, expected in zip(result, results[0], strict=True):
            assert torch.equal(tensor, expected)


@needs_kernel
def test_operator_with_table_passes_opcheck():
    q, k, v = (torch.randn(2, 4, 50, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(4, 50, requires_grad=True)
    settings = (BiasKind.TABLE.value, None, 20, 0.25)  # bias_kind, segment_ids, window, scale
    arguments = (q, k, v, table, *settings, 0.0, True)
    torch.library.opcheck(torch.ops.trainshort.attention.default, arguments)

    out, lse, first_keys, _ = (x.detach() for x in torch.ops.trainshort.attention(*arguments))
    inputs = [x.detach() for x in (q, k, v, table)]
    arguments = (torch.randn_like(q), *inputs, *settings, out, lse, first_keys, True)
    torch.library.opcheck(torch.ops.trainshort.attention_backward.default, arguments)


@needs_kernel
def test_gradients_with_trained_table_equal_finite_differences():
    inputs = [torch.randn(1, heads, 40, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    table = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, table):
        return attend(q, k, v, bias=DistanceBias(table), window=30, backend="compiled")

    assert torch.autograd.gradcheck(function, (*inputs, table), fast_mode=True)


@needs_kernel
def test_nan_affects_only_queries_that_see_it():
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    v[0, 0, 200] = torch.nan
    out = attend(q, k, v, bias=DistanceBias(torch.randn(2, 9)), backend="compiled")
    assert out[0, 0, :200].isfinite().all()
    assert out[0, 0, 200:].isnan().all()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize(
    ("k_len", "expected"),
    [(5, [[0, 1, 2, 2, 2], [3, 4, 5, 5, 5]]), (2, [[0, 1], [3, 4]])],
    ids=["longer text", "shorter text"],
)
def test_table_is_cut_or_extended_to_length_of_text(k_len, expected):
    q = torch.randn(1, 2, k_len, 8)
    table = torch.arange(6.0).reshape(2, 3)
    call = AttentionCall(q, q, q, DistanceBias(table))
    assert table_by_distance(call, table).tolist() == expected


@pytest.mark.parametrize(
    ("change", "expected_reason"),
    [
        ({"bias": DenseBias(torch.zeros(1, 4, 4))}, "use 'sdpa'"),
        ({"dropout_p": 0.1}, "it has no dropout"),
        ({"q": torch.zeros(1, 1, 4, 8, device="meta")}, "it runs on the CPU"),
    ],
)
def test_unsupported_calls_have_a_reason(change, expected_reason):
    arguments = {"q": torch.zeros(1, 1, 4, 8), "bias": DistanceBias(torch.ones(1, 3)), **change}
    q = arguments.pop("q")
    reason = backends.get("compiled").unsupported_reason(AttentionCall(q, q, q, **arguments))
    assert reason is not None
    assert expected_reason in reason


def test_auto_chooses_sdpa_without_the_kernel(monkeypatch):
    monkeypatch.setattr(
        "trainshort.attention.backends.ctypes_call.traceable_kernel_unavailable_reason",
        lambda dtype: "there is no C compiler here",
    )
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    q = torch.randn(1, 2, 20, 8, requires_grad=True)
    call = AttentionCall(q, q, q, DistanceBias(torch.ones(2, 3, requires_grad=True)))
    reason = backends.get("compiled").unsupported_reason(call)
    assert "there is no C compiler here" in (reason or "")
    assert choose_backend(call) is backends.get("sdpa")


# ---- skipped keys


def make_table(shape, distance, x):
    """Return a distance table of a given shape. `x` has one number between 0 and 1 for each head, shape (heads, 1)."""
    match shape:
        case "power":
            return -(0.1 + x) * distance ** (0.4 + x)
        case "peak at 90":
            return -(0.2 + x) * (distance - 90).abs()
        case "log":
            return -(2 + 6 * x) * torch.log1p(distance)
        case "waves":
            return -0.3 * distance + 25 * torch.cos(distance / (20 + 60 * x))
        case "late peak":
            return -0.5 * distance + 60 * torch.exp(-((distance - 300) ** 2) / 50) * x.round()
        case "constant tail":
            return -(0.2 * distance).clamp(max=5 + 40 * x)
    raise ValueError(shape)


TABLE_SHAPES = ["constant tail", "late peak", "log", "peak at 90", "power", "waves"]


@needs_kernel
@given(
    shape=st.sampled_from(TABLE_SHAPES),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    lengths=st.tuples(st.integers(193, 600), st.sampled_from([0, 70])),
    query_scale=st.sampled_from([0.1, 1.0, 4.0]),
    tolerance=st.sampled_from([1e-2, 1e-6]),
    has_segments=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_certificate_bounds_the_dropped_mass(shape, heads, lengths, query_scale, tolerance, has_segments, seed):
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    q_len, past = lengths
    k_len = q_len + past
    q = torch.randn(1, query_heads, q_len, 16) * query_scale
    k, v = (torch.randn(1, kv_heads, k_len, 16) for _ in range(2))
    table = make_table(shape, torch.arange(float(k_len)), torch.rand(query_heads, 1))
    segment_ids = (torch.rand(1, k_len) < 0.01).cumsum(1) if has_segments else None
    out, _, first_keys, dropped_bound = run_operator(Problem(q, k, v, table, segment_ids), tolerance, "compiled")

    # The exact weights in float64.
    call = AttentionCall(q.double(), k.double(), v.double(), DistanceBias(table.double()), None, segment_ids)
    rows = slice(0, q_len)
    keys = slice(0, k_len)
    repeated_k = call.k.repeat_interleave(call.heads_per_kv_head, 1)
    repeated_v = call.v.repeat_interleave(call.heads_per_kv_head, 1)
    scores = call.q @ repeated_k.transpose(-1, -2) * call.softmax_scale + materialize_bias(call, rows, keys)
    weights = scores.masked_fill(~visibility_mask(call, rows, keys), -math.inf).softmax(-1)

    # The exact mass before the first key of each query, and the largest mass of each query tile.
    first_key_of_row = first_keys.long()[..., torch.arange(q_len) // QUERY_TILE]
    is_skipped = torch.arange(k_len) < first_key_of_row[..., None]
    dropped_mass = (weights * is_skipped).sum(-1)
    padded_mass = F.pad(dropped_mass, (0, -q_len % QUERY_TILE))
    tile_mass = padded_mass.unflatten(2, (-1, QUERY_TILE)).amax(-1)
    assert (tile_mass <= dropped_bound * (1 + 1e-5)).all()
    assert dropped_bound.max() <= tolerance

    error = (out.double() - weights @ repeated_v).norm(dim=-1).max()
    assert error <= 2 * tolerance * v.norm(dim=-1).max() + 1e-5


@needs_kernel
def test_keys_are_skipped_if_the_table_falls_far_enough():
    q, k, v = torch.randn(3, 1, 2, 1000, 16)
    distance = torch.arange(1000.0)

    def skips_keys(table, tolerance=1e-6):
        first_keys = run_operator(Problem(q, k, v, table), tolerance, "compiled")[2]
        return bool(first_keys.any())

    half = torch.full((2, 1), 0.5)
    for shape in ("power", "peak at 90", "waves", "late peak"):
        assert skips_keys(make_table(shape, distance, half))
    assert skips_keys(make_table("constant tail", distance, half))  # The tail is at -25.
    assert not skips_keys(make_table("constant tail", distance, torch.zeros(2, 1)))  # The tail is at -5.
    logarithmic_table = -1.5 * torch.log1p(distance).expand(2, -1)
    assert not skips_keys(logarithmic_table)
    assert skips_keys(4 * logarithmic_table, tolerance=1e-2)


@needs_kernel
def test_gradients_with_skipped_keys_equal_reference():
    torch.manual_seed(5)
    inputs = [torch.randn(2, heads, 700, 16) for heads in (4, 2, 2)]
    table = make_table("power", torch.arange(700.0), torch.rand(4, 1))
    grad_out = torch.randn(2, 4, 700, 16)
    certificate = attend(*inputs, bias=DistanceBias(table), backend="compiled", return_stats=True).certificate
    assert certificate is not None
    assert 0 < float(certificate.max()) <= 1e-6

    actual = run_with_gradients("compiled", inputs, DistanceBias, table, grad_out)
    float64_inputs = [x.double() for x in inputs]
    exact = run_with_gradients("reference", float64_inputs, DistanceBias, table.double(), grad_out)
    for actual_tensor, exact_tensor in zip(actual, exact, strict=True):
        torch.testing.assert_close(actual_tensor.double(), exact_tensor, atol=2e-4, rtol=1e-4)
