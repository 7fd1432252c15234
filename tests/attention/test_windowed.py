"""The promise of proven windows: what is left out is at most what was allowed, for any input, in both implementations.

The float64 reference tells the true mass of the keys that a row did not read; the promise is checked against it.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, attend_windowed, both, needs_kernel, read_and_promised

from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.call import AttentionCall
from trainshort.config.registries import backends
from trainshort.errors import InputError

KINDS = [
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


def inputs(kind, batch, heads, kv_heads, q_len, k_len, dim=16, scale=1.0, dtype=torch.float32):
    """Random inputs, bent the way an adversary would."""
    q = torch.randn(batch, heads, q_len, dim) * scale
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
            k = clustered(k)
        case "late cluster":  # a sample of the keys may miss it
            k[:, :, -3:] = 15 + k[:, :, -3:] / 100
    return q.to(dtype), k.to(dtype), v.to(dtype)


def clustered(x):
    """As in a trained model: thirty kinds of token, in a plane, far apart, with a little of their own each."""
    kinds = 6 * torch.randn(30, 2) @ torch.randn(2, x.shape[-1])
    return kinds[torch.randint(30, x.shape[:-1])] + x / 4


def exact_weights(q, k, slopes):
    """The softmax, written out in float64."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    distance = alibi.distances(q.shape[2], k.shape[2])
    return (scores - slopes.double()[:, None, None] * distance).masked_fill(distance < 0, -math.inf).softmax(-1)


def exact_weights_of_rows(q, k, slopes, rows):
    """The same for some rows of a long sequence."""
    scores = q[:, :, rows].double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    distance = rows[:, None] - torch.arange(k.shape[2])
    return (scores - slopes.double()[:, None, None] * distance).masked_fill(distance < 0, -math.inf).softmax(-1)


@both
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(
        st.integers(1, 2), st.sampled_from([(1, 1), (4, 2), (8, 8)]), st.integers(5, 700), st.integers(0, 300)
    ),
    scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-3, 0.3]),
    slopes=st.sampled_from(["paper", "steep", "zero", "negative", "mixed"]),
    seed=st.integers(0, 10_000),
)
@example(kind="normal", shape=(1, (8, 8), 1500, 0), scale=1.0, tolerance=1e-6, slopes="paper", seed=0)
@example(kind="huge far key", shape=(1, (8, 8), 1500, 0), scale=1.0, tolerance=1e-3, slopes="steep", seed=0)
@settings(max_examples=40)
def test_no_row_leaves_out_more_than_promised(implementation, kind, shape, scale, tolerance, slopes, seed):
    torch.manual_seed(seed)
    batch, (heads, kv_heads), q_len, past = shape
    q, k, v = inputs(kind, batch, heads, kv_heads, q_len, q_len + past, scale=scale)
    slopes = {
        "paper": alibi.slopes(heads),
        "steep": torch.full((heads,), 3.0),
        "zero": torch.zeros(heads),
        "negative": -alibi.slopes(heads) / 16,
        "mixed": torch.randn(heads) / 4,
    }[slopes]
    out, first, promised = read_and_promised(Problem(q, k, v, slopes, None, None), tolerance, implementation)
    weights = exact_weights(q, k, slopes)
    left_out = (weights * (torch.arange(k.shape[2]) < first[..., None])).sum(-1)
    assert (left_out <= promised.double() + 1e-15).all()
    assert promised.max() <= tolerance * (1 + 1e-6)

    group = heads // kv_heads
    exact = weights @ v.double().repeat_interleave(group, 1)
    plain = attend(q, k, v, bias=LinearBias(slopes), backend="reference")
    largest = v.double().norm(dim=-1).max()
    # Of a dozen numbers the plain formula's are at times all nearly right; but no float32 score is better than its ulp.
    ulp = 2**-23 * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() / math.sqrt(q.shape[-1])
    rounding = 4 * (plain.double() - exact).abs().max() + (1e-6 + ulp) * largest
    assert (out.double() - exact).norm(dim=-1).max() <= 2 * tolerance * largest + rounding


def check_promise(kind, dim, length, tolerance, implementation):
    """Rows here and there of one long text, against the exact weights."""
    q, k, v = inputs(kind, 1, 4, 4, length, length, dim=dim)
    slopes = alibi.slopes(4)
    _, first, promised = read_and_promised(Problem(q, k, v, slopes, None, None), tolerance, implementation)
    rows = torch.arange(length - 1, 0, -max(1, length // 40))
    weights = exact_weights_of_rows(q, k, slopes, rows)
    left_out = (weights * (torch.arange(length) < first[..., rows, None])).sum(-1)
    assert (left_out <= promised[..., rows].double() + 1e-15).all()
    assert promised.max() <= tolerance * (1 + 1e-6)


@both
@pytest.mark.parametrize("dim", [1, 17, 128, 333, 1023, 1024])
def test_the_promise_at_other_widths(implementation, dim):
    for kind in ("normal", "clustered keys"):
        check_promise(kind, dim, 600, 1e-6, implementation)


@both
def test_the_promise_at_the_papers_width_over_20000_keys(implementation):
    check_promise("normal", 128, 20_000, 1e-6, implementation)


@pytest.mark.slow
@both
@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_over_20000_keys_of_any_kind(implementation, kind):
    for dim, tolerance in ((128, 1e-6), (33, 1e-3), (513, 0.3)):
        check_promise(kind, dim, 20_000, tolerance, implementation)


@both
def test_certificate_is_the_largest_promise_of_each_head(implementation):
    q, k, v = inputs("normal", 2, 4, 2, 500, 500)
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0])
    problem = Problem(q, k, v, slopes, None, None)
    _, _, certificate = attend_windowed(problem, 1e-4, implementation)
    _, _, promised = read_and_promised(problem, 1e-4, implementation)
    assert certificate.shape == (2, 4)
    assert torch.equal(certificate, promised.amax(-1))
    assert (certificate[:, :3] > 0).all()  # steep heads do leave something out here
    assert (certificate[:, 3] == 0).all()  # and a head without slope nothing


@both
def test_tolerance_zero_reads_everything_and_equals_sdpa(implementation):
    q, k, v = inputs("normal", 1, 8, 4, 600, 700, dim=64)
    problem = Problem(q, k, v, alibi.slopes(8), None, None)
    out, first, promised = read_and_promised(problem, 0.0, implementation)
    assert (first == 0).all()
    assert (promised == 0).all()
    torch.testing.assert_close(out, attend(q, k, v, bias=LinearBias(alibi.slopes(8)), backend="sdpa"))


@pytest.mark.parametrize(
    ("implementation", "share"), [pytest.param("compiled", 0.42, marks=needs_kernel), ("torch", 0.62)]
)
def test_it_skips_at_all(implementation, share):
    """Most of a flat promise is easy to keep by reading everything; this is what reading less means at 4,096 tokens."""
    q, k, v = inputs("normal", 1, 8, 8, 4096, 4096, dim=64)
    problem = Problem(q, k, v, alibi.slopes(8), None, None)
    _, first, _ = read_and_promised(problem, 1e-6, implementation)
    positions = torch.arange(4096)
    assert (positions - first + 1).sum() / (8 * (positions + 1).sum()) < share


@needs_kernel
def test_clusters_of_keys_are_skipped_by_their_own_size():
    """Keys and queries far from zero and from each other: their norms alone would make every row read nearly all."""
    q, k, v = inputs("clustered keys", 1, 4, 4, 8192, 8192, dim=64)
    q = clustered(q) / 16
    slopes = torch.full((4,), 1 / 32)
    _, first, promised = read_and_promised(Problem(q, k, v, slopes, None, None), 1e-6, "compiled")
    positions = torch.arange(8192)
    share = (positions - first + 1).sum() / (4 * (positions + 1).sum())
    rows = torch.arange(7, 8192, 500)
    weights = exact_weights_of_rows(q, k, slopes, rows)
    assert ((weights * (positions < first[..., rows, None])).sum(-1) <= promised[..., rows]).all()
    needed = ((weights.cumsum(-1) > 1e-6) & (positions <= rows[:, None])).sum() / (4 * (rows + 1).sum())
    assert share < 1.6 * needed


@both
def test_shifting_all_keys_costs_nothing(implementation):
    """Adding one vector to all keys leaves the softmax alone. The kernel measures keys from their mean, so its windows
    stay; the simpler bound of the other one may widen, but must not break."""
    q, k, v = inputs("normal", 1, 4, 4, 1000, 1000)
    slopes = torch.full((4,), 0.2)
    _, first, _ = read_and_promised(Problem(q, k, v, slopes, None, None), 1e-6, implementation)
    shifted = k + 5 * torch.randn(16)
    out, first_shifted, _ = read_and_promised(Problem(q, shifted, v, slopes, None, None), 1e-6, implementation)
    exact = exact_weights(q, shifted, slopes) @ v.double()
    assert (out.double() - exact).abs().max() < 5e-5
    if implementation == "compiled":
        assert (first - first_shifted).abs().max() <= 64


@both
def test_gradient_error_is_bounded_by_the_mass_left_out(implementation):
    """In float64, where rounding cannot hide anything; the bounds are those of docs/windows.md. V, K, Q: largest norms.

    dv: 2ε Σ‖g‖      dq: 6ε ‖g‖ V K/√d      dk: 6ε Σ‖g‖ V Q/√d       (sums over queries, for the sum over keys)
    """
    tolerance, dim = 1e-3, 16
    leaves = [x.requires_grad_() for x in inputs("normal", 1, 4, 4, 400, 400, dim, dtype=torch.float64)]
    q, k, v = leaves
    slopes = alibi.slopes(4)
    grad_out = torch.randn(1, 4, 400, dim, dtype=torch.float64)
    out, _, certificate = attend_windowed(Problem(q, k, v, slopes, None, None), tolerance, implementation)
    assert certificate.max() > 0
    ours = torch.autograd.grad(out, leaves, grad_out)
    exact = torch.autograd.grad(attend(*leaves, bias=LinearBias(slopes), backend="reference"), leaves, grad_out)
    error_q, error_k, error_v = ((a - b).norm(dim=-1) for a, b in zip(ours, exact, strict=True))
    g, largest = grad_out.norm(dim=-1), [x.detach().norm(dim=-1).max() for x in leaves]
    epsilon = certificate.max().item()
    assert error_v.sum(-1).max() > 0  # something was left out, and it shows
    assert (error_v.sum(-1) <= 2 * epsilon * g.sum(-1)).all()
    assert (error_q <= 6 * epsilon * g * largest[2] * largest[1] / math.sqrt(dim)).all()
    assert (error_k.sum(-1) <= 6 * epsilon * g.sum(-1) * largest[2] * largest[0] / math.sqrt(dim)).all()


@both
def test_a_very_long_run_by_its_last_rows(implementation):
    """20,000 tokens: rows here and there against the oracle, which sees one row at a time."""
    q, k, v = inputs("normal", 1, 2, 1, 20_000, 20_000)
    slopes = torch.tensor([1 / 16, 1 / 256])
    out, _, certificate = attend_windowed(Problem(q, k, v, slopes, None, None), 1e-6, implementation)
    for row in (0, 63, 64, 9_999, 19_999):
        exact = attend(
            q[:, :, row : row + 1].double(),
            k[:, :, : row + 1].double(),
            v[:, :, : row + 1].double(),
            bias=LinearBias(slopes),
            backend="reference",
        )
        assert (out[:, :, row : row + 1] - exact).abs().max() < 1e-5
    assert 0 < certificate.max() <= 1e-6


@pytest.mark.parametrize("backend", ["auto", "windowed", "sdpa"])
def test_attend_takes_a_tolerance_and_returns_a_certificate(backend):
    q, k, v = inputs("normal", 2, 4, 2, 700, 700)
    bias = LinearBias(torch.tensor([1.0, 0.5, 0.25, 0.125]))
    exact = attend(q.double(), k.double(), v.double(), bias=bias, backend="reference")
    for tolerance in (0.0, 1e-6, 0.1):
        out, lse, certificate = attend(q, k, v, bias=bias, backend=backend, tolerance=tolerance, return_stats=True)
        assert lse.shape == (2, 4, 700)
        assert certificate.shape == (2, 4)
        assert certificate.max() <= tolerance
        assert (certificate.max() > 0) == (backend != "sdpa" and tolerance > 0)
        assert (out - exact).norm(dim=-1).max() <= 2 * tolerance * v.norm(dim=-1).max() + 1e-5
    out = attend(q, k, v, bias=bias, backend=backend, return_stats=True).out
    assert torch.equal(out, attend(q, k, v, bias=bias, backend=backend))


def test_mistakes_are_told_in_words():
    q, k, v = inputs("normal", 1, 2, 2, 8, 8)
    with pytest.raises(InputError, match=r"tolerance is a share of softmax mass, at least 0 and less than 1; got 1\.5"):
        attend(q, k, v, bias=LinearBias(alibi.slopes(2)), tolerance=1.5)
    with pytest.raises(InputError, match="at least 0 and less than 1; got -1e-06"):
        attend(q, k, v, tolerance=-1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": None}, "it computes linear biases"),
        ({"dropout_p": 0.1}, "it has no dropout"),
        ({"q": torch.zeros(1, 1, 4, 8, device="meta")}, "it runs on the CPU"),
    ],
)
def test_it_says_why_it_cannot(change, reason):
    fields = {"q": torch.zeros(1, 1, 4, 8), "bias": LinearBias(torch.ones(1)), **change}
    call = AttentionCall(fields["q"], fields["q"], fields["q"], fields["bias"], dropout_p=fields.get("dropout_p", 0.0))
    said = backends.get("windowed").unsupported_reason(call)
    assert said is not None
    assert reason in said
