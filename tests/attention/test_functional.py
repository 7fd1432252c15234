"""The contract of `attend`, for every backend that can run here."""

import logging
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from trainshort import alibi, alibi_attention
from trainshort.attention import AttentionOutput, DenseBias, DistanceBias, LinearBias, attend, merge_by_lse
from trainshort.attention.backends.compiled import table_by_distance
from trainshort.attention.backends.flex import _make_score_mod
from trainshort.attention.backends.reference import materialize_bias
from trainshort.attention.call import AttentionBias, AttentionCall, validate
from trainshort.config.registries import backends
from trainshort.errors import InputError

# flex compiles for each new shape, which takes seconds: it has a file of its own.
QUICK = [name for name in backends.names() if name != "flex"]


def inputs(q_len=12, k_len=12, heads=4, kv_heads=None, dim=8, batch=2, dtype=torch.float32):
    q = torch.randn(batch, heads, q_len, dim, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads or heads, k_len, dim, dtype=dtype) for _ in range(2))
    return q, k, v


def run(name: str, q, k, v, **options) -> Tensor:
    """The backend's answer, or a skip with the backend's own reason."""
    reason = backends.get(name).unsupported_reason(AttentionCall(q, k, v, **options))
    if reason:
        pytest.skip(f"{name}: {reason}")
    out = attend(q, k, v, backend=name, **options)
    assert isinstance(out, Tensor)
    return out


@pytest.fixture(params=QUICK)
def backend(request):
    return request.param


@pytest.fixture(params=["none", "linear", "distance", "dense"])
def bias(request):
    def make(heads=4, q_len=12, k_len=12):
        match request.param:
            case "linear":
                return LinearBias(alibi.slopes(heads))
            case "distance":
                return DistanceBias(torch.linspace(0, -2, 7).repeat(heads, 1))
            case "dense":
                return DenseBias(torch.sin(torch.arange(heads * q_len * k_len).float()).view(heads, q_len, k_len))
        return None

    return make


def test_the_future_is_invisible(backend, bias):
    q, k, v = inputs()
    before = run(backend, q, k, v, bias=bias())
    k, v = k.clone(), v.clone()
    k[:, :, 7:] += 5
    v[:, :, 7:] -= 5
    after = attend(q, k, v, bias=bias(), backend=backend)
    torch.testing.assert_close(after[:, :, :7], before[:, :, :7], rtol=0, atol=1e-6)
    assert (after[:, :, 7:] - before[:, :, 7:]).abs().max() > 0.1


def test_slope_zero_equals_no_position(backend):
    q, k, v = inputs(q_len=200, k_len=300)
    zero = run(backend, q, k, v, bias=LinearBias(torch.zeros(4)))
    torch.testing.assert_close(zero, attend(q, k, v, backend="reference"), rtol=0, atol=1e-6)


def test_a_constant_added_to_a_row_changes_nothing(backend):
    q, k, v = inputs()
    values = torch.randn(4, 12, 12)
    plain = run(backend, q, k, v, bias=DenseBias(values))
    shifted = attend(q, k, v, bias=DenseBias(values + torch.randn(4, 12, 1)), backend=backend)
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-5)


def test_a_document_packed_second_equals_itself_alone(backend, bias):
    q, k, v = inputs()
    segment_ids = torch.tensor([[0] * 5 + [1] * 7] * 2)
    packed = run(backend, q, k, v, bias=bias(), segment_ids=segment_ids)
    inner = bias()
    if isinstance(inner, DenseBias):
        inner = DenseBias(inner.values[:, 5:, 5:])
    alone = attend(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], bias=inner, backend="reference")
    torch.testing.assert_close(packed[:, :, 5:], alone, rtol=0, atol=1e-6)


def test_documents_may_come_back(backend):
    """Same number, same document, wherever it stands: interleaved rows keep their true distances."""
    q, k, v = inputs(batch=1)
    segment_ids = torch.tensor([[0, 1] * 6])
    out = run(backend, q, k, v, bias=LinearBias(alibi.slopes(4)), segment_ids=segment_ids)
    expected = attend(q, k, v, bias=LinearBias(alibi.slopes(4)), segment_ids=segment_ids, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_a_window_of_one_returns_the_own_value(backend, bias):
    q, k, v = inputs()
    torch.testing.assert_close(run(backend, q, k, v, bias=bias(), window=1), v, rtol=0, atol=1e-6)


def test_a_window_hides_what_lies_before_it(backend, bias):
    q, k, v = inputs()
    before = run(backend, q, k, v, bias=bias(), window=4)
    k = k.clone()
    k[:, :, :5] += 3  # the row at 8 sees 5, 6, 7 and 8
    after = attend(q, k, v, bias=bias(), window=4, backend=backend)
    torch.testing.assert_close(after[:, :, 8:], before[:, :, 8:], rtol=0, atol=1e-6)
    assert (after[:, :, 7] - before[:, :, 7]).abs().max() > 1e-3


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 128), (16, 128), (130, 700), (5, 5)])
def test_a_chunk_equals_the_last_rows_of_the_whole(backend, q_len, k_len):
    q, k, v = inputs(k_len, k_len)
    bias = LinearBias(alibi.slopes(4))
    whole = attend(q, k, v, bias=bias, backend="reference")
    chunk = run(backend, q[:, :, -q_len:], k, v, bias=bias)
    torch.testing.assert_close(chunk, whole[:, :, -q_len:], rtol=0, atol=2e-6)


def test_a_short_call_leaves_nothing_behind_for_a_long_one(backend):
    bias = LinearBias(alibi.slopes(4))
    for length in (8, 64, 8):
        q, k, v = inputs(length, length)
        expected = attend(q, k, v, bias=bias, backend="reference")
        torch.testing.assert_close(run(backend, q, k, v, bias=bias), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (12, 3), (20, 5), (40, 8), (4, 1)])
def test_shared_key_heads_equal_repeated_ones(backend, bias, heads, kv_heads):
    q, k, v = inputs(heads=heads, kv_heads=kv_heads)
    shared = run(backend, q, k, v, bias=bias(heads))
    repeated = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    torch.testing.assert_close(shared, attend(q, *repeated, bias=bias(heads), backend="reference"), rtol=0, atol=1e-5)


def test_the_last_query_is_aligned_with_the_last_key(backend):
    """The causal mask is PyTorch's `causal_lower_right`, which is also the mask of FlashAttention."""
    q, k, v = inputs(q_len=5, k_len=12)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(5, 12))
    torch.testing.assert_close(run(backend, q, k, v), expected, rtol=0, atol=1e-6)


def test_all_statistics_are_filled_for_the_caller():
    q, k, v = inputs()
    result = attend(q, k, v, backend="reference", return_stats=True)
    assert isinstance(result, AttentionOutput)
    assert result.lse.shape == (2, 4, 12)
    assert torch.equal(result.certificate, torch.zeros(2, 4))  # the formula drops nothing


def test_ranges_of_keys_merge_into_the_whole(backend):
    q, k, v = inputs(q_len=9, k_len=40)
    reason = backends.get(backend).unsupported_reason(AttentionCall(q, k, v, needs_lse=True))
    if reason:
        pytest.skip(reason)
    near_out, near_lse, _ = attend(q, k[:, :, 31:], v[:, :, 31:], backend=backend, return_stats=True)
    far_scores = q @ k[:, :, :31].transpose(-1, -2) / math.sqrt(8)
    far_out, far_lse = far_scores.softmax(-1) @ v[:, :, :31], far_scores.logsumexp(-1)
    out, lse = merge_by_lse(near_out, near_lse, far_out, far_lse)
    whole, whole_lse, _ = attend(q, k, v, backend="reference", return_stats=True)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)


def test_alibi_attention_is_the_one_liner():
    q, k, v = inputs(300, 300)
    expected = attend(q, k, v, bias=LinearBias(alibi.slopes(4)), backend="reference")
    torch.testing.assert_close(alibi_attention(q, k, v), expected, rtol=0, atol=2e-6)
    halved = attend(q, k, v, bias=LinearBias(alibi.slopes(4) / 2), backend="reference")
    torch.testing.assert_close(alibi_attention(q, k, v, alibi.slopes(4) / 2), halved, rtol=0, atol=2e-6)


def test_learned_slopes_get_the_oracles_gradient():
    q, k, v = inputs(40, 40)
    grads = []
    for backend in ("auto", "windowed", "reference"):
        slopes = alibi.slopes(4).requires_grad_()
        out = attend(q, k, v, bias=LinearBias(slopes), backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), slopes)[0])
    assert grads[-1].abs().min() > 1e-4
    for found in grads[:-1]:
        torch.testing.assert_close(found, grads[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["flex"])
def test_backends_that_cannot_train_slopes_say_so(name):
    q, k, v = inputs()
    with pytest.raises(InputError, match=f"'{name}' does not support this call: .*use '(compiled|sdpa)'"):
        attend(q, k, v, bias=LinearBias(alibi.slopes(4).requires_grad_()), backend=name)


def test_dropout_drops_and_keeps_the_mean():
    q, k, v = inputs(q_len=4, k_len=64, batch=64)
    v = torch.ones_like(v)
    out = attend(q, k, v, dropout_p=0.5)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.02


def test_auto_takes_the_quick_backend_for_alibi_and_explains(caplog, monkeypatch):
    """Each backend that is chosen is told once, with those that were asked first and their reasons."""
    monkeypatch.setattr("trainshort.attention.functional._logged_messages", set())
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, logger="trainshort.attention"):
        for _ in range(2):
            attend(q, k, v, bias=LinearBias(alibi.slopes(4)))
            attend(q, k, v, bias=DenseBias(torch.zeros(4, 12, 12)))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("attention backend")]
    assert said[0] == "attention backend: windowed"
    assert said[1].startswith(
        "attention backend: sdpa (not windowed: it computes linear biases (ALiBi) and clocks (FoX) only; not compiled: "
        "it computes biases by distance (T5, ALiBi), clocks (FoX) or none"
    )
    assert "use 'sdpa'" not in said[1]  # advice for whoever named a backend that cannot
    assert len(said) == 2


def test_a_backend_is_one_class_and_one_line(monkeypatch):
    """A plug-in: registered under a name, ranked, asked whether it can, and run."""

    class Mine:
        rank = 1000

        def unsupported_reason(self, call):
            return None if call.window == 3 else "it knows windows of 3 only; use 'sdpa'"

        def run(self, call):
            return AttentionOutput(call.v * 2)

    monkeypatch.setattr(backends, "_entries", dict(backends.items()))
    backends.register("mine")(Mine())
    q, k, v = inputs()
    assert torch.equal(attend(q, k, v, window=3), v * 2)
    assert not torch.equal(attend(q, k, v, window=4), v * 2)
    with pytest.raises(InputError, match="'mine' does not support this call: it knows windows of 3 only; use 'sdpa'"):
        attend(q, k, v, backend="mine")
    Mine.skip_reason = lambda self, call: "it would rather not"
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    assert not torch.equal(attend(q, k, v, window=3), v * 2)
    assert torch.equal(attend(q, k, v, window=3, backend="mine"), v * 2)
    Mine.rank = lambda self, call: 1000
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    with pytest.raises(InputError, match="The rank of attention backend 'mine' is method; it must be a number"):
        attend(q, k, v, window=3)


@dataclass(frozen=True)
class StrangeBias(AttentionBias):
    values: Tensor


def test_a_bias_that_nobody_knows_is_an_error_everywhere():
    """No engine ignores such a bias silently."""
    q, k, v = inputs()
    call = AttentionCall(q, k, v, StrangeBias(torch.zeros(4)))
    for part in (lambda: attend(q, k, v, bias=call.bias), lambda: materialize_bias(call, slice(0, 12), slice(0, 12))):
        with pytest.raises(
            InputError, match="bias must be LinearBias, DistanceBias, DecayBias, DenseBias or None, got StrangeBias"
        ):
            part()
    for part in (
        lambda: _make_score_mod(call),
        lambda: table_by_distance(call, q),
        *(
            lambda backend=backend: backend.run(call)
            for backend in (backends.get("windowed"), backends.get("compiled"))
        ),
    ):
        with pytest.raises(InputError, match="got StrangeBias"):
            part()


@pytest.mark.parametrize("name", QUICK)
def test_any_scale(name):
    q, k, v = inputs(200, 230)
    bias = LinearBias(alibi.slopes(4))
    for scale in (0.01, 1.0, 3.0):
        factor = scale * math.sqrt(8)
        expected = attend(q * factor, k, v, bias=bias, backend="reference")
        torch.testing.assert_close(run(name, q, k, v, bias=bias, scale=scale), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(2, 4, 12)}, r"q must have shape \(batch, heads, length, dim\), got \(2, 4, 12\)"),
        ({"q": torch.randn(2, 4, 13, 8)}, "q has 13 tokens but k only 12"),
        ({"q": torch.randn(2, 4, 0, 8)}, "q is empty"),
        ({"q": torch.randn(2, 5, 12, 8)}, "5 query heads cannot share 4 key heads"),
        ({"q": torch.randn(2, 4, 12, 16)}, "must agree in batch and dim"),
        ({"q": torch.randn(2, 4, 12, 8).double()}, "share one floating-point dtype"),
        ({"q": torch.ones(2, 4, 12, 8, dtype=torch.long)}, "share one floating-point dtype"),
        ({"v": torch.randn(2, 4, 11, 8)}, "k and v must have the same shape"),
        ({"bias": LinearBias(torch.ones(3))}, r"one per query head, shape \(4,\); got \(3,\)"),
        ({"bias": LinearBias(torch.tensor([1, math.nan, 1, 1]))}, "slopes must be finite"),
        ({"bias": LinearBias(torch.tensor([1, math.inf, 1, 1]))}, "slopes must be finite"),
        ({"bias": DistanceBias(torch.ones(3, 5))}, r"shape \(heads=4, distances\)"),
        ({"bias": DenseBias(torch.ones(4, 5, 5))}, r"shape \(4, 12, 12\) here"),
        ({"bias": torch.ones(4)}, "bias must be LinearBias"),
        ({"window": 0}, "window must be at least 1"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"bias": LinearBias(torch.ones(4, device="meta"))}, "the bias is on meta, but q on cpu; move it there"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        ({"segment_ids": torch.zeros(2, 5)}, r"segment_ids must have shape \(batch, k_len\)"),
        ({"backend": "windoed"}, "Unknown attention backend 'windoed'. Did you mean 'windowed'"),
    ],
)
def test_mistakes_are_explained(change, message):
    arguments = dict(zip("qkv", inputs(), strict=True)) | change
    with pytest.raises(InputError, match=message):
        attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_the_oracle_takes_every_call():
    q, k, v = inputs()
    call = AttentionCall(q, k, v, LinearBias(alibi.slopes(4)), 3, torch.zeros(2, 12, dtype=torch.long), 0.1, True)
    validate(call)
    assert backends.get("reference").unsupported_reason(call) is None
