"""Attention to both sides: what an encoder asks of `attend`, for every backend that can."""

import math

import pytest
import torch
import torch.nn.functional as F

from trainshort import alibi, alibi_attention
from trainshort.attention import AttentionCall, BiasKind, DecayBias, DistanceBias, LinearBias, attend
from trainshort.config.registries import backends
from trainshort.errors import InputError

BACKENDS = [name for name in backends.names() if name != "flex"]
both = pytest.mark.parametrize("name", ["windowed", "windowed-torch"])


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(name, q, k, v, **options):
    if reason := backends.get(name).unsupported_reason(AttentionCall(q, k, v, causal=False, **options)):
        pytest.skip(f"{name}: {reason}")
    return attend(q, k, v, causal=False, backend=name, **options)


@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_formula_of_jina_bert_and_mosaic_bert(name, heads):
    """Both add −m·|i − j| to q·k/√d before the softmax, m from the paper's rule with its filling for counts that are no
    power of two (12 heads: those of 8, then every second of 16), the same on either side, and −∞ (there the smallest
    float) on keys that are padding. Written out here in float64."""
    batch, length, dim = 2, 150, 16
    q, k, v = (randn(batch, heads, length, dim, seed=seed) for seed in range(3))
    padding = torch.arange(length) >= torch.tensor([[length], [90]])
    eight = [2.0 ** -(n + 1) for n in range(8)]
    slopes = torch.tensor(eight + [2.0 ** (-0.5 * (n + 1)) for n in range(0, 8, 2)] if heads == 12 else eight)
    place = torch.arange(length)
    bias = -slopes.double()[:, None, None] * (place[None] - place[:, None]).abs()
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(dim) + bias
    expected = scores.masked_fill(padding[:, None, None], -math.inf).softmax(-1) @ v.double()
    ours = run(name, q, k, v, bias=LinearBias(alibi.slopes(heads)), segment_ids=padding.long())
    real = ~padding[:, None, :, None].expand_as(ours)
    torch.testing.assert_close(ours.double()[real], expected[real], rtol=0, atol=2e-6)
    if name == "reference":
        simple = alibi_attention(q, k, v, causal=False, key_padding_mask=padding)
        torch.testing.assert_close(simple.double()[real], expected[real], rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", [None, LinearBias(torch.zeros(4))], ids=["none", "slope 0"])
@pytest.mark.parametrize("name", BACKENDS)
def test_without_slopes_it_is_plain_full_attention(name, bias):
    q, k, v = (randn(2, 4, 130, 16, seed=seed) for seed in range(3))
    torch.testing.assert_close(run(name, q, k, v, bias=bias), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_head_that_sees_one_side(name):
    """Infinite slopes: head 0 is causal, head 1 sees its own key and what follows, head 2 itself alone."""
    infinite = math.inf
    bias = LinearBias(torch.tensor([0.1, infinite, infinite, 0.2]), torch.tensor([infinite, 0.1, infinite, 0.3]))
    q, k, v = (randn(1, 4, 200, 8, seed=seed).requires_grad_() for seed in range(3))
    out = run(name, q, k, v, bias=bias)
    causal = attend(*(x[:, :1] for x in (q, k, v)), bias=LinearBias(torch.tensor([0.1])), backend="reference")
    torch.testing.assert_close(out[:, :1], causal, rtol=0, atol=1e-6)
    mirrored = (x[:, 1:2].flip(2) for x in (q, k, v))
    backwards = attend(*mirrored, bias=LinearBias(torch.tensor([0.1])), backend=name)
    torch.testing.assert_close(out[:, 1:2], backwards.flip(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(out[:, 2], v[:, 2], rtol=0, atol=1e-6)
    before, after = (torch.autograd.grad(out[0, head, 100].sum(), v, retain_graph=True)[0][0, head] for head in (0, 1))
    assert before[101:].eq(0).all()
    assert before[:101].ne(0).any()
    assert after[:100].eq(0).all()
    assert after[100:].ne(0).any()


@pytest.mark.parametrize(
    "options", [{}, {"window": 30}, {"segment_ids": 70}, {"window": 9, "segment_ids": 50}], ids=str
)
@pytest.mark.parametrize("kind", ["slopes", "table", "clock"])
@pytest.mark.parametrize("name", ["windowed", "windowed-torch", "compiled", "sdpa"])
def test_what_is_trained_and_what_is_hidden(name, kind, options):
    """Outputs and all gradients, those of the biases of both sides too, with grouped heads and a past."""
    q, grad_out = randn(2, 4, 120, 16), randn(2, 4, 120, 16, seed=1)
    k, v = (randn(2, 2, 150, 16, seed=seed) for seed in (2, 3))
    options = dict(options)
    if "segment_ids" in options:
        options["segment_ids"] = (torch.arange(150) // options["segment_ids"]).expand(2, -1)
    forget = F.logsigmoid(randn(2, 4, 150, seed=4)).double().cumsum(-1)
    make, first, second = {
        "slopes": (LinearBias, alibi.slopes(4), alibi.slopes(4).flip(0)),
        "table": (DistanceBias, randn(4, 9), randn(4, 6, seed=5)),
        "clock": (DecayBias, forget, 0.3 * forget),
    }[kind]

    def gradients(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        biases = [x.clone().requires_grad_() for x in (first, second)]
        out = attend(*leaves, bias=make(*biases), causal=False, backend=backend, tolerance=0.0, **options)
        return [out, *torch.autograd.grad(out, [*leaves, *biases], grad_out.to(dtype))]

    if reason := backends.get(name).unsupported_reason(
        AttentionCall(q, k, v, make(first, second), causal=False, **options)
    ):
        pytest.skip(reason)
    for ours, exact in zip(gradients(name, torch.float32), gradients("reference", torch.float64), strict=True):
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours.double() / scale, exact.double() / scale, rtol=0, atol=5e-6)


@both
def test_the_certificate_covers_what_both_sides_left_out(name):
    """In float64 the mass left out of a row shows in its log-sum-exp: 1 − e^(ours − exact)."""
    q, k, v = (randn(1, 4, 900, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    bias = LinearBias(torch.tensor([0.5, 0.05, 0.02, 0.2]), torch.tensor([0.1, 0.2, 0.02, math.inf]))
    call = AttentionCall(q, k, v, bias, tolerance=1e-2, causal=False)
    certificate = backends.get(name).run(call).certificate
    _, lse, first, _ = torch.ops.trainshort.attention(
        q,
        k,
        v,
        bias.slopes,
        BiasKind.SLOPES.value,
        None,
        None,
        call.softmax_scale,
        1e-2,
        name == "windowed",
        bias.right,
    )
    exact = (q @ k.transpose(-1, -2) * call.softmax_scale + two_sided(bias, 900)).logsumexp(-1)
    mass = -torch.expm1(lse - exact)
    rounding = 1e-12 if name == "windowed" else 2e-7  # torch's kernel takes a short exponential in any precision
    assert (mass.amax(-1) <= certificate + rounding).all()
    assert (certificate <= 1e-2).all()
    assert (mass.amax(-1) > 1e-9).any(), "something must have been skipped"
    halves = first[..., : -(-900 // 24)], first[..., -(-900 // 24) :]
    assert all((half > 0).any() for half in halves), "on either side"


def two_sided(bias, length):
    distance = alibi.distances(length, length).double()
    left, right = (x.double()[:, None, None] for x in (bias.slopes, bias.right))
    return torch.where(distance == 0, 0.0, -torch.where(distance > 0, left * distance, -right * distance))


@both
def test_torch_knows_the_operator_with_two_sides(name):
    q, k, v = (randn(2, 4, 50, 16, seed=seed).requires_grad_() for seed in range(3))
    segment_ids = (torch.arange(50) // 20).expand(2, -1)
    clock = (-torch.rand(2, 4, 50, dtype=torch.float64)).cumsum(-1)
    slopes = alibi.slopes(4)
    for kind, bias, right in ((BiasKind.SLOPES, slopes, slopes.flip(0)), (BiasKind.DECAY, clock, 2 * clock)):
        settings = (kind.value, segment_ids, 20, 0.25)
        arguments = (q, k, v, bias, *settings, 1e-6, name == "windowed", right)
        torch.library.opcheck(torch.ops.trainshort.attention.default, arguments)
        results = [x.detach() for x in torch.ops.trainshort.attention(*arguments)[:3]]
        leaves = [x.detach() for x in (q, k, v)]
        arguments = (randn(2, 4, 50, 16), *leaves, bias, *settings, *results, name == "windowed", right)
        torch.library.opcheck(torch.ops.trainshort.attention_backward.default, arguments)


@both
def test_gradients_by_finite_differences(name):
    leaves = [randn(1, heads, 20, 4, seed=heads, dtype=torch.float64).requires_grad_() for heads in (2, 1)]
    slopes = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([0.3, 0.1], [0.05, 0.2])]

    def function(q, k, left, right):
        return attend(q, k, k, bias=LinearBias(left, right), causal=False, backend=name)

    assert torch.autograd.gradcheck(function, (*leaves, *slopes), atol=1e-5)


def test_compiled_by_torch():
    q, k, v = (randn(1, 4, 64, 16, seed=seed).requires_grad_() for seed in range(3))

    def function(q, k, v):
        return attend(q, k, v, bias=LinearBias(alibi.slopes(4)), causal=False)

    ours = torch.compile(function, fullgraph=True)(q, k, v)
    torch.testing.assert_close(ours, function(q, k, v), rtol=0, atol=1e-6)
    grads = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (ours, function(q, k, v)))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slopes", "clock", "table"])
def test_flex(kind):
    q, k, v = (randn(1, 2, 400, 16, seed=seed) for seed in range(3))
    clock = F.logsigmoid(randn(1, 2, 400, seed=4)).double().cumsum(-1)
    bias = {
        "slopes": LinearBias(torch.tensor([0.5, math.inf]), torch.tensor([0.3, 0.2])),
        "clock": DecayBias(clock, 0.5 * clock),
        "table": DistanceBias(randn(2, 9), randn(2, 6, seed=5)),
    }[kind]
    expected = attend(q, k, v, bias=bias, causal=False, backend="reference")
    torch.testing.assert_close(run("flex", q, k, v, bias=bias), expected, rtol=0, atol=5e-6)


def test_what_is_refused():
    q, k, v = (randn(1, 2, 30, 8, seed=seed) for seed in range(3))
    slopes, infinite = torch.tensor([0.1, 0.2]), torch.tensor([0.1, math.inf])
    with pytest.raises(InputError, match="a bias for the right side needs causal=False"):
        attend(q, k, v, bias=LinearBias(slopes, slopes))
    with pytest.raises(InputError, match="slopes must be finite, got"):
        attend(q, k, v, bias=LinearBias(infinite))
    with pytest.raises(InputError, match="slopes must be finite, or inf where a head does not see that side, got"):
        attend(q, k, v, bias=LinearBias(slopes, -infinite), causal=False)
    with pytest.raises(InputError, match=r"one per query head, shape \(2,\); got \(3,\)"):
        attend(q, k, v, bias=LinearBias(slopes, torch.ones(3)), causal=False)


@pytest.mark.parametrize("name", ["windowed", "windowed-torch", "compiled"])
def test_a_document_that_another_interrupts_is_refused_by_backends_that_cannot(name):
    q, k, v = (randn(1, 2, 30, 8, seed=seed) for seed in range(3))
    given = {"bias": LinearBias(torch.tensor([0.1, 0.2])), "segment_ids": torch.arange(30)[None] // 10 % 2}
    with pytest.raises(InputError, match=f"Attention backend '{name}' does not support .* each segment is contiguous"):
        attend(q, k, v, **given, causal=False, backend=name)
    attend(q, k, v, **given, backend=name)  # of the left alone it is none of anybody's business


@pytest.mark.parametrize("kind", ["slopes", "clock", "table", "none"])
def test_auto_reads_documents_in_pieces_by_another_backend(kind):
    """Whatever was chosen for the same shapes before: with whole documents, the kernel."""
    q, k, v = (randn(2, 2, 40, 8, seed=seed).requires_grad_() for seed in range(3))
    bias = {
        "slopes": LinearBias(torch.tensor([0.1, 0.2])),
        "clock": DecayBias(F.logsigmoid(randn(2, 2, 40, seed=4)).double().cumsum(-1)),
        "table": DistanceBias(randn(2, 9)),
        "none": None,
    }[kind]
    whole = torch.arange(40).expand(2, -1) // 10
    broken = torch.stack([whole[0], whole[0] % 2])
    for segment_ids in (whole, broken, whole):
        given = {"bias": bias, "segment_ids": segment_ids, "causal": False}
        ours, exact = (attend(q, k, v, **given, backend=name) for name in ("auto", "reference"))
        torch.testing.assert_close(ours, exact, rtol=0, atol=2e-6)
        grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, exact))
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_graph_meets_documents_in_pieces():
    q, k, v = (randn(1, 2, 40, 8, seed=seed) for seed in range(3))
    broken = torch.arange(40)[None] // 10 % 2

    def function(segment_ids):
        return attend(q, k, v, bias=LinearBias(torch.tensor([0.1, 0.2])), segment_ids=segment_ids, causal=False)

    with pytest.raises(
        InputError,
        match="kernel does not support this call: it supports causal=False only if",
    ):
        torch.compile(function)(broken)


@pytest.mark.parametrize("segment_ids", [None, torch.arange(40)[None] // 20])
def test_padding_in_several_places(segment_ids):
    """In front, between documents and behind: those are whole, so proven windows read them."""
    q, k, v = (randn(1, 2, 40, 8, seed=seed) for seed in range(3))
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[:, :3] = mask[:, 35:] = True
    if segment_ids is not None:
        mask[:, 18:22] = True
    ours = alibi_attention(q, k, v, key_padding_mask=mask, segment_ids=segment_ids, causal=False)
    scores = q @ k.transpose(-1, -2) / 8**0.5
    far = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    scores = scores - alibi.slopes(2)[:, None, None] * far
    apart = torch.zeros(1, 40, dtype=torch.long) if segment_ids is None else segment_ids
    seen = ~mask[:, None, None] & (apart[:, None, :, None] == apart[:, None, None, :])
    exact = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(ours[:, :, ~mask[0]], exact[:, :, ~mask[0]], rtol=0, atol=2e-6)
