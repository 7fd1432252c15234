"""The kernel with a bias by distance: the same as the oracle, its gradient included; what it leaves out is proven."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import needs_kernel

from trainshort import alibi
from trainshort.attention import BiasKind, DenseBias, DistanceBias, LinearBias, attend
from trainshort.attention.backends.compiled import table_by_distance
from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.attention.call import AttentionCall
from trainshort.attention.functional import choose_backend
from trainshort.config.registries import backends


def with_gradients(backend, tensors, make_bias, values, grad_out, **options):
    """Output, and the gradients of q, k, v and what the bias is made of."""
    q, k, v, values = (x.detach().clone().requires_grad_() for x in (*tensors, values))
    out = attend(q, k, v, bias=make_bias(values), backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, values), grad_out.to(out.dtype))]


@needs_kernel
@given(
    heads=st.sampled_from([(1, 1), (6, 3), (4, 1)]),
    lengths=st.tuples(st.integers(1, 600), st.sampled_from([0, 1, 100, 333])),
    distances=st.sampled_from([1, 9, 129, 2000]),
    window=st.sampled_from([None, None, 1, 17, 150]),
    packed=st.booleans(),
    linear=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_every_gradient_is_the_oracles(heads, lengths, distances, window, packed, linear, seed):
    torch.manual_seed(seed)
    q_len, k_len = lengths[0], sum(lengths)
    shapes = ((heads[0], q_len), (heads[1], k_len), (heads[1], k_len))
    tensors = [torch.randn(2, *shape, 8, dtype=torch.float64) for shape in shapes]
    segment_ids = (torch.rand(2, k_len) < 0.03).cumsum(1) * 5 - 2 if packed else None
    # The oracle multiplies slopes by distances in float32: exact for slopes of few bits, but not so their gradients.
    values = torch.randint(1, 256, (heads[0],)) / 256 if linear else torch.randn(heads[0], distances).double()
    make_bias = LinearBias if linear else DistanceBias
    options = {"window": window, "segment_ids": segment_ids}
    grad_out = torch.randn(tensors[0].shape, dtype=torch.float64)
    exact = with_gradients("reference", tensors, make_bias, values, grad_out, **options)
    ours = with_gradients("compiled", tensors, make_bias, values, grad_out, **options)
    for name, o, e in zip(("out", "q", "k", "v", "bias"), ours, exact, strict=True):
        assert o.shape == e.shape
        atol, rtol = (1e-3, 1e-4) if linear and name == "bias" else (1e-9, 1e-7)
        torch.testing.assert_close(o, e, atol=atol, rtol=rtol)


def plainly(q, k, v, bias):
    """The formula as everybody writes it first, all in the inputs' dtype."""
    distance = alibi.distances(q.shape[2], k.shape[2])
    values = bias.table[:, distance.clamp(0, bias.table.shape[1] - 1)].masked_fill(distance < 0, -math.inf)
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + values.to(q.dtype)).softmax(-1) @ v


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_gradient_of_the_bias_loses_no_more_than_twice_what_the_plain_formula_loses(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(4, 8, 500, 16).to(dtype) for _ in range(3)]
    table, grad_out = torch.randn(8, 129), torch.randn(4, 8, 500, 16).to(dtype)
    leaf = table.clone().requires_grad_()
    (plain,) = torch.autograd.grad(plainly(*tensors, DistanceBias(leaf)), leaf, grad_out)
    ours = with_gradients("compiled", tensors, DistanceBias, table, grad_out)[-1]
    exact = with_gradients("reference", [x.double() for x in tensors], DistanceBias, table.double(), grad_out)[-1]
    lost, spent = ((x.double() - exact).square().mean().sqrt() for x in (plain, ours))
    assert spent <= 2 * lost


@needs_kernel
def test_it_serves_what_torchs_fast_kernel_cannot_train():
    q = torch.randn(1, 4, 40, 8, requires_grad=True)
    assert choose_backend(AttentionCall(q, q, q, DistanceBias(torch.randn(4, 9, requires_grad=True)))) is backends.get(
        "compiled"
    )
    assert choose_backend(AttentionCall(q, q, q, LinearBias(alibi.slopes(4).requires_grad_()))) is backends.get(
        "windowed"
    )
    assert choose_backend(AttentionCall(q, q, q, LinearBias(alibi.slopes(4)))) is backends.get("windowed")
    assert choose_backend(AttentionCall(q, q, q, DenseBias(torch.randn(4, 40, 40)))) is backends.get("sdpa")


@needs_kernel
def test_without_a_bias_it_serves_where_torchs_vectors_are_no_wider(monkeypatch):
    q = torch.randn(1, 4, 40, 8)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert choose_backend(AttentionCall(q, q, q)) is backends.get("compiled")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    for narrow, backend in ((False, "sdpa"), (True, "compiled")):
        monkeypatch.setattr("trainshort.attention.backends.compiled.mkl_lacks_avx512", lambda narrow=narrow: narrow)
        monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
        assert choose_backend(AttentionCall(q, q, q)) is backends.get(backend)


@needs_kernel
def test_one_query_against_a_long_past():
    tensors = [torch.randn(2, 4, n, 16) for n in (1, 700, 700)]
    bias = DistanceBias(torch.randn(4, 129))
    out, lse, _ = attend(*tensors, bias=bias, backend="compiled", return_stats=True)
    expected, expected_lse, _ = attend(*tensors, bias=bias, backend="reference", return_stats=True)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@needs_kernel
def test_the_number_of_threads_changes_no_bit():
    tensors = [torch.randn(1, heads, 700, 32) for heads in (6, 3, 3)]
    values, grad_out = torch.randn(6, 129), torch.randn(1, 6, 700, 32)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append(with_gradients("compiled", tensors, DistanceBias, values, grad_out))
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def operate_on_table(q, k, v, table, segment_ids, tolerance):
    kind = BiasKind.TABLE.value
    return torch.ops.trainshort.attention(q, k, v, table, kind, segment_ids, None, 0.25, tolerance, True)


@needs_kernel
def test_operators_with_a_table_are_as_torch_wants_them():
    q, k, v = (torch.randn(2, 4, 50, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(4, 50, requires_grad=True)
    arguments = (q, k, v, table, BiasKind.TABLE.value, None, 20, 0.25, 0.0, True)
    torch.library.opcheck(torch.ops.trainshort.attention.default, arguments)
    out, lse, first, _ = (x.detach() for x in torch.ops.trainshort.attention(*arguments))
    leaves = [x.detach() for x in (q, k, v)]
    rest = (table.detach(), BiasKind.TABLE.value, None, 20, 0.25, out, lse, first, True)
    torch.library.opcheck(torch.ops.trainshort.attention_backward.default, (torch.randn_like(q), *leaves, *rest))


@needs_kernel
def test_gradcheck_with_a_trained_table():
    leaves = [torch.randn(1, heads, 40, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    table = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, table):
        return attend(q, k, v, bias=DistanceBias(table), window=30, backend="compiled")

    assert torch.autograd.gradcheck(function, (*leaves, table), fast_mode=True)


@needs_kernel
def test_a_value_that_is_not_finite_stays_in_the_rows_that_see_it():
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    v[0, 0, 200] = torch.nan
    out = attend(q, k, v, bias=DistanceBias(torch.randn(2, 9)), backend="compiled")
    assert out[0, 0, :200].isfinite().all()
    assert out[0, 0, 200:].isnan().all()
    assert out[0, 1].isfinite().all()


def test_tables_are_cut_and_continued():
    q = torch.randn(1, 2, 5, 8)
    table = torch.arange(6.0).reshape(2, 3)
    call = AttentionCall(q, q, q, DistanceBias(table))
    assert table_by_distance(call, call.bias.table).tolist() == [[0, 1, 2, 2, 2], [3, 4, 5, 5, 5]]
    call = AttentionCall(q[:, :, :2], q[:, :, :2], q[:, :, :2], DistanceBias(table))
    assert table_by_distance(call, call.bias.table).tolist() == [[0, 1], [3, 4]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": DenseBias(torch.zeros(1, 4, 4))}, "it computes biases by distance (T5, ALiBi), clocks (FoX) or none"),
        ({"dropout_p": 0.1}, "it has no dropout"),
        ({"q": torch.zeros(1, 1, 4, 8, device="meta")}, "it runs on the CPU"),
    ],
)
def test_it_says_why_it_cannot(change, reason):
    fields = {"q": torch.zeros(1, 1, 4, 8), "bias": DistanceBias(torch.ones(1, 3)), **change}
    call = AttentionCall(fields["q"], fields["q"], fields["q"], fields["bias"], dropout_p=fields.get("dropout_p", 0.0))
    said = backends.get("compiled").unsupported_reason(call)
    assert said is not None
    assert reason in said


def test_without_the_kernel_sdpa_takes_over(monkeypatch):
    monkeypatch.setattr(
        "trainshort.attention.backends.ctypes_call.traceable_kernel_unavailable_reason",
        lambda dtype: "there is no C compiler here",
    )
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    q = torch.randn(1, 2, 20, 8, requires_grad=True)
    call = AttentionCall(q, q, q, DistanceBias(torch.ones(2, 3, requires_grad=True)))
    assert backends.get("compiled").unsupported_reason(call) == (
        "it needs the compiled kernel, and there is no C compiler here; use 'sdpa'"
    )
    assert choose_backend(call) is backends.get("sdpa")


TABLES = {
    "power": lambda d, x: -(0.1 + x) * d ** (0.4 + x),
    "away from a centre": lambda d, x: -(0.2 + x) * (d - 90).abs(),
    "log": lambda d, x: -(2 + 6 * x) * torch.log1p(d),
    "waves": lambda d, x: -0.3 * d + 25 * torch.cos(d / (20 + 60 * x)),
    "late summit": lambda d, x: -0.5 * d + 60 * torch.exp(-((d - 300) ** 2) / 50) * x.round(),
    "constant tail": lambda d, x: -(0.2 * d).clamp(max=5 + 40 * x),
}


@needs_kernel
@given(
    kind=st.sampled_from(sorted(TABLES)),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    lengths=st.tuples(st.integers(193, 600), st.sampled_from([0, 70])),
    loud=st.sampled_from([0.1, 1.0, 4.0]),
    tolerance=st.sampled_from([1e-2, 1e-6]),
    packed=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_what_a_table_lets_it_leave_out_is_no_more_than_promised(kind, heads, lengths, loud, tolerance, packed, seed):
    """The true mass before each panel's first key, in float64, is within the certificate, and that within the
    tolerance; whatever the table's shape."""
    torch.manual_seed(seed)
    q_len, k_len = lengths[0], sum(lengths)
    q, k, v = (torch.randn(1, h, n, 16) for h, n in ((heads[0], q_len), (heads[1], k_len), (heads[1], k_len)))
    q = q * loud
    table = TABLES[kind](torch.arange(float(k_len)), torch.rand(heads[0], 1))
    segment_ids = (torch.rand(1, k_len) < 0.01).cumsum(1) if packed else None
    out, _, first, dropped = operate_on_table(q, k, v, table, segment_ids, tolerance)
    call = AttentionCall(q.double(), k.double(), v.double(), DistanceBias(table.double()), None, segment_ids)
    rows, keys = slice(0, q_len), slice(0, k_len)
    scores = call.q @ call.k.repeat_interleave(call.heads_per_kv_head, 1).transpose(-1, -2) * call.softmax_scale
    scores = scores + materialize_bias(call, rows, keys)
    weights = scores.masked_fill(~visibility_mask(call, rows, keys), -math.inf).softmax(-1)
    starts = first.long()[..., torch.arange(q_len) // 24]
    lost = weights.cumsum(-1).gather(-1, (starts - 1).clamp(min=0)[..., None])[..., 0] * (starts > 0)
    by_panel = torch.nn.functional.pad(lost, (0, -q_len % 24)).unflatten(2, (-1, 24)).amax(-1)
    assert bool((by_panel <= dropped * (1 + 1e-5)).all())
    assert float(dropped.max()) <= tolerance
    bound = 2 * tolerance * float(v.norm(dim=-1).max()) + 1e-5
    exact = weights @ call.v.repeat_interleave(call.heads_per_kv_head, 1)
    assert float((out.double() - exact).norm(dim=-1).max()) <= bound


@needs_kernel
def test_tables_that_fall_skip_and_others_do_not():
    q, k, v = torch.randn(3, 1, 2, 1000, 16)
    distance, one = torch.arange(1000.0), torch.ones(2, 1)
    read = {}
    for kind, values in TABLES.items():
        table = values(distance, one * 0.5)
        first = operate_on_table(q, k, v, table, None, 1e-6)[2]
        read[kind] = int(first.amax())
    assert min(read[kind] for kind in ("power", "away from a centre", "waves", "late summit")) > 0
    assert read["constant tail"] > 0  # e^-25 times a thousand keys
    flat, plain = TABLES["constant tail"](distance, one * 0), -1.5 * torch.log1p(distance).expand(2, -1)
    assert not operate_on_table(q, k, v, flat, None, 1e-6)[2].any()
    assert not operate_on_table(q, k, v, plain, None, 1e-6)[2].any()
    assert operate_on_table(q, k, v, 4 * plain, None, 1e-2)[2].any()


@needs_kernel
def test_gradients_where_a_table_skips():
    torch.manual_seed(5)
    tensors = [torch.randn(2, heads, 700, 16) for heads in (4, 2, 2)]
    table, grad_out = TABLES["power"](torch.arange(700.0), torch.rand(4, 1)), torch.randn(2, 4, 700, 16)
    ours = with_gradients("compiled", tensors, DistanceBias, table, grad_out)
    exact = with_gradients("reference", [x.double() for x in tensors], DistanceBias, table.double(), grad_out)
    certificate = attend(*tensors, bias=DistanceBias(table), backend="compiled", return_stats=True).certificate
    assert 0 < float(certificate.max()) <= 1e-6
    for o, e in zip(ours, exact, strict=True):
        torch.testing.assert_close(o.double(), e, atol=2e-4, rtol=1e-4)
