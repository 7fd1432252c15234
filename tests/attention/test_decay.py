"""Clocks: a bias c_i − c_j through every backend that takes it, with its gradient, and windows proven for any clock."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, both, needs_kernel, read_and_promised

from trainshort import alibi
from trainshort.attention import DecayBias, LinearBias, attend, decay
from trainshort.config.registries import backends
from trainshort.errors import InputError

BACKENDS = [pytest.param("windowed", marks=needs_kernel), pytest.param("compiled", marks=needs_kernel)]
BACKENDS += ["windowed-torch", "sdpa", "reference"]


def forgetting(batch, heads, length, generator=None):
    """A clock as a forgetting transformer makes it: falls at every token, some heads fast and some slowly."""
    gates = torch.randn(batch, heads, length, generator=generator) * 2 + torch.linspace(0, 6, heads)[:, None]
    return torch.nn.functional.logsigmoid(gates.double()).cumsum(-1)


def exact_weights(q, k, clock):
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores + clock[..., -q.shape[2] :, None] - clock[..., None, :]
    return scores.masked_fill(alibi.distances(q.shape[2], k.shape[2]) < 0, -math.inf).softmax(-1)


def plain(q, k, v, clock):
    """As everybody writes it first: all in the inputs' dtype, the clock's readings too."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    clock = clock.to(q.dtype)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + clock[..., -q.shape[2] :, None] - clock[..., None, :]
    return scores.masked_fill(alibi.distances(q.shape[2], k.shape[2]) < 0, -math.inf).softmax(-1) @ v


def with_gradients(function, inputs, grad_out):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def draw(shape, dtype=torch.float32, seed=0):
    batch, heads, kv_heads, q_len, past, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q, grad_out = (torch.randn(batch, heads, q_len, dim, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, q_len + past, dim, generator=generator).to(dtype) for _ in range(2))
    return (q, k, v, forgetting(batch, heads, q_len + past, generator)), grad_out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 333, 70, 16), (1, 2, 2, 60, 0, 64), (2, 2, 1, 3, 400, 8)])
@pytest.mark.parametrize("name", BACKENDS)
def test_output_and_gradients_are_within_the_budget(name, shape, dtype):
    """At most twice what the plain formula loses; the clock's own gradient included."""
    inputs, grad_out = draw(shape, dtype)
    exact = with_gradients(
        lambda *x: attend(*x[:3], bias=DecayBias(x[3]), backend="reference"), [x.double() for x in inputs], grad_out
    )
    lost = with_gradients(plain, inputs, grad_out)
    ours = with_gradients(lambda *x: attend(*x[:3], bias=DecayBias(x[3]), backend=name), inputs, grad_out)
    for what, x, y, e in zip(("out", "q", "k", "v", "clock"), ours, lost, exact, strict=True):
        budget = 2 * (y.double() - e).norm()
        assert (x.double() - e).norm() <= budget, what


@pytest.mark.parametrize("name", BACKENDS)
def test_an_even_clock_is_alibi(name):
    (q, k, v, _), _ = draw((2, 4, 2, 300, 33, 16))
    slopes = alibi.slopes(4)
    clock = decay.decay_from_slopes(slopes, k.shape[2], 2)
    expected = attend(q, k, v, bias=LinearBias(slopes), backend="reference")
    torch.testing.assert_close(attend(q, k, v, bias=DecayBias(clock), backend=name), expected, rtol=0, atol=3e-6)
    shifted = DecayBias(clock + 1e6)  # only differences count, however late it is
    torch.testing.assert_close(attend(q, k, v, bias=shifted, backend=name), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_documents_windows_and_decoding(name):
    """ALiBi with packed documents is a clock, too: within a document only its own ticks count."""
    (q, k, v, clock), _ = draw((2, 4, 2, 300, 0, 16))
    segment_ids = torch.randint(0, 4, (2, 300), generator=torch.Generator().manual_seed(1)).sort(-1).values
    for options in ({"segment_ids": segment_ids}, {"window": 40}):
        expected = attend(q, k, v, bias=DecayBias(clock), backend="reference", **options)
        found = attend(q, k, v, bias=DecayBias(clock), backend=name, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
    whole = attend(q, k, v, bias=DecayBias(clock), backend="reference")
    for begin, end in ((0, 100), (100, 102), (102, 103), (103, 300)):
        seen = (q[:, :, begin:end], k[:, :, :end], v[:, :, :end])
        part = attend(*seen, bias=DecayBias(clock[..., :end]), backend=name)
        torch.testing.assert_close(part, whole[:, :, begin:end], rtol=0, atol=3e-6)


@both
@given(
    kind=st.sampled_from(["forgetting", "backwards", "standing", "up and down", "steep", "jump"]),
    shape=st.tuples(st.integers(1, 2), st.sampled_from([(1, 1), (4, 2)]), st.integers(5, 600), st.integers(0, 300)),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-3, 0.3]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=30)
def test_no_row_leaves_out_more_than_promised(implementation, kind, shape, scale, tolerance, seed):
    """Whatever the clock does."""
    torch.manual_seed(seed)
    batch, (heads, kv_heads), q_len, past = shape
    q, length = torch.randn(batch, heads, q_len, 16) * scale, q_len + past
    k, v = (torch.randn(batch, kv_heads, length, 16) for _ in range(2))
    ticks = torch.randn(batch, heads, length).double()
    clock = {
        "forgetting": forgetting(batch, heads, length),
        "backwards": ticks.abs().cumsum(-1) / 50,
        "standing": torch.zeros_like(ticks),
        "up and down": (ticks - 0.2).cumsum(-1),
        "steep": -5 * ticks.abs().cumsum(-1),
        "jump": -300 * (torch.arange(length) >= length // 2).double().expand_as(ticks) - 0.05 * torch.arange(length),
    }[kind]
    out, first, promised = read_and_promised(Problem(q, k, v, clock), tolerance, implementation)
    weights = exact_weights(q, k, clock)
    left_out = (weights * (torch.arange(length) < first[..., None])).sum(-1)
    assert (left_out <= promised.double() + 1e-15).all()
    assert promised.max() <= tolerance * (1 + 1e-6)
    exact = weights @ v.double().repeat_interleave(heads // kv_heads, 1)
    formula = attend(q, k, v, bias=DecayBias(clock), backend="reference").double()
    largest = v.double().norm(dim=-1).max()
    rounding = 4 * (formula - exact).abs().max() + (1e-6 + 1e-6 * scale) * largest
    assert (out.double() - exact).norm(dim=-1).max() <= 2 * tolerance * largest + rounding


@both
def test_a_falling_clock_skips_and_an_even_one_as_much_as_alibi(implementation):
    (q, k, v, _), _ = draw((1, 8, 8, 4096, 0, 64))
    positions, slopes = torch.arange(4096), alibi.slopes(8)

    def share(bias):
        _, first, _ = read_and_promised(Problem(q, k, v, bias), 1e-6, implementation)
        return float((positions - first + 1).sum() / (8 * (positions + 1).sum()))

    linear = share(slopes)
    assert share(decay.decay_from_slopes(slopes, 4096)) == pytest.approx(linear, rel=0.02)
    assert share(decay.decay_from_slopes(16 * slopes, 4096)) < linear / 2


@needs_kernel
def test_torch_compile_keeps_the_graph_whole():
    inputs, grad_out = draw((1, 2, 2, 150, 0, 16))

    def attention(q, k, v, clock):
        return attend(q, k, v, bias=DecayBias(clock), backend="windowed")

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for x, y in zip(
        with_gradients(compiled, inputs, grad_out), with_gradients(attention, inputs, grad_out), strict=True
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", BACKENDS[:3])
def test_gradients_by_finite_differences(name):
    (q, k, v, clock), _ = draw((1, 2, 1, 40, 3, 4), torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, clock)]
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x[:3], bias=DecayBias(x[3]), backend=name), leaves, fast_mode=True, atol=1e-6
    )


@both
def test_learned_slopes_keep_their_windows(implementation):
    """The gradient of a slope is a clock's."""
    (q, k, v, _), grad_out = draw((1, 4, 2, 700, 0, 16))
    slopes = 4 * alibi.slopes(4)

    def through(name, dtype):
        leaf = slopes.clone().requires_grad_()
        given = (x.to(dtype) for x in (q, k, v))
        out, _, left = attend(*given, bias=LinearBias(leaf), backend=name, return_stats=True)
        return torch.autograd.grad(out, leaf, grad_out.to(dtype))[0].double(), left

    exact, _ = through("reference", torch.float64)
    found, left = through("windowed" if implementation == "compiled" else "windowed-torch", torch.float32)
    assert 0 < left.max() <= 1e-6
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_flex_takes_clocks(tolerance):
    (q, k, v, clock), _ = draw((1, 2, 2, 300, 0, 16))
    expected = attend(q, k, v, bias=DecayBias(clock), backend="reference")
    found = attend(q, k, v, bias=DecayBias(clock), backend="flex", tolerance=tolerance)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)


def test_starts_in_small_integers():
    clock = -torch.arange(7.0, dtype=torch.float64)[None, None]
    starts = decay.proven_first_keys(torch.zeros(1, 1, 7, dtype=torch.float64), clock, math.exp(-3))
    assert starts.tolist() == [[[0, 0, 0, 0, 1, 2, 3]]]


def test_a_clock_that_is_none():
    (q, k, v, clock), _ = draw((2, 4, 2, 20, 0, 16))
    with pytest.raises(InputError, match=r"\(batch, heads, k_len\) = \(2, 4, 20\), got \(2, 4, 19\) of torch.float64"):
        attend(q, k, v, bias=DecayBias(clock[..., 1:]))
    with pytest.raises(InputError, match=r"must be a floating-point tensor .* got \(2, 4, 20\) of torch.int64"):
        attend(q, k, v, bias=DecayBias(clock.long()))
    clock[0, 1, 2] = math.nan
    with pytest.raises(InputError, match=r"DecayBias\.cumulative must be finite"):
        attend(q, k, v, bias=DecayBias(clock))


def test_every_backend_of_the_package_takes_clocks_or_says_why_not():
    (q, k, v, clock), _ = draw((1, 2, 2, 40, 0, 8))
    for name in ("reference", "sdpa", "windowed-torch", "flex"):
        assert backends.get(name).unsupported_reason(attend_call(q, k, v, clock)) is None, name


def attend_call(q, k, v, clock):
    from trainshort.attention import AttentionCall

    return AttentionCall(q, k, v, DecayBias(clock))
