"""Tests of `attend` that every backend must pass. The backend `flex` compiles for seconds and has its own test file."""

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

BACKENDS = [name for name in backends.names() if name != "flex"]


def make_inputs(q_len=12, k_len=12, heads=4, kv_heads=None, dim=8, batch=2):
    """Return random queries, keys and values."""
    if kv_heads is None:
        kv_heads = heads
    q = torch.randn(batch, heads, q_len, dim)
    k = torch.randn(batch, kv_heads, k_len, dim)
    v = torch.randn(batch, kv_heads, k_len, dim)
    return q, k, v


def attend_or_skip(backend: str, q, k, v, **options) -> Tensor:
    """Call `attend`, or skip the test with the reason if the backend does not support the call."""
    reason = backends.get(backend).unsupported_reason(AttentionCall(q, k, v, **options))
    if reason:
        pytest.skip(f"{backend}: {reason}")
    out = attend(q, k, v, backend=backend, **options)
    assert isinstance(out, Tensor)
    return out


@pytest.fixture(params=BACKENDS)
def backend(request):
    """The name of a backend."""
    return request.param


@pytest.fixture(params=["none", "linear", "distance", "dense"])
def make_bias(request):
    """A function that returns a bias of one type, or None."""

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


def test_future_keys_have_no_effect(backend, make_bias):
    q, k, v = make_inputs()
    original = attend_or_skip(backend, q, k, v, bias=make_bias())
    changed_k = k.clone()
    changed_v = v.clone()
    changed_k[:, :, 7:] += 5
    changed_v[:, :, 7:] -= 5
    changed = attend(q, changed_k, changed_v, bias=make_bias(), backend=backend)
    torch.testing.assert_close(changed[:, :, :7], original[:, :, :7], rtol=0, atol=1e-6)
    assert (changed[:, :, 7:] - original[:, :, 7:]).abs().max() > 0.1


def test_slope_zero_equals_no_bias(backend):
    q, k, v = make_inputs(q_len=200, k_len=300)
    out = attend_or_skip(backend, q, k, v, bias=LinearBias(torch.zeros(4)))
    torch.testing.assert_close(out, attend(q, k, v, backend="reference"), rtol=0, atol=1e-6)


def test_constant_added_to_all_scores_of_a_query_has_no_effect(backend):
    q, k, v = make_inputs()
    values = torch.randn(4, 12, 12)
    constants = torch.randn(4, 12, 1)
    out = attend_or_skip(backend, q, k, v, bias=DenseBias(values))
    out_with_constants = attend(q, k, v, bias=DenseBias(values + constants), backend=backend)
    torch.testing.assert_close(out_with_constants, out, rtol=0, atol=1e-5)


def test_second_segment_equals_separate_sequence(backend, make_bias):
    q, k, v = make_inputs()
    segment_ids = torch.tensor([[0] * 5 + [1] * 7] * 2)
    packed = attend_or_skip(backend, q, k, v, bias=make_bias(), segment_ids=segment_ids)
    separate_bias = make_bias()
    if isinstance(separate_bias, DenseBias):
        separate_bias = DenseBias(separate_bias.values[:, 5:, 5:])
    separate = attend(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], bias=separate_bias, backend="reference")
    torch.testing.assert_close(packed[:, :, 5:], separate, rtol=0, atol=1e-6)


def test_interleaved_segments(backend):
    q, k, v = make_inputs(batch=1)
    segment_ids = torch.tensor([[0, 1] * 6])
    bias = LinearBias(alibi.slopes(4))
    out = attend_or_skip(backend, q, k, v, bias=bias, segment_ids=segment_ids)
    expected = attend(q, k, v, bias=bias, segment_ids=segment_ids, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_window_of_one_returns_the_value_of_the_own_key(backend, make_bias):
    q, k, v = make_inputs()
    out = attend_or_skip(backend, q, k, v, bias=make_bias(), window=1)
    torch.testing.assert_close(out, v, rtol=0, atol=1e-6)


def test_keys_before_the_window_have_no_effect(backend, make_bias):
    q, k, v = make_inputs()
    original = attend_or_skip(backend, q, k, v, bias=make_bias(), window=4)
    changed_k = k.clone()
    changed_k[:, :, :5] += 3  # The query at position 8 sees the keys 5 to 8.
    changed = attend(q, changed_k, v, bias=make_bias(), window=4, backend=backend)
    torch.testing.assert_close(changed[:, :, 8:], original[:, :, 8:], rtol=0, atol=1e-6)
    assert (changed[:, :, 7] - original[:, :, 7]).abs().max() > 1e-3


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 128), (16, 128), (130, 700), (5, 5)])
def test_chunk_of_queries_equals_last_rows_of_one_call(backend, q_len, k_len):
    q, k, v = make_inputs(k_len, k_len)
    bias = LinearBias(alibi.slopes(4))
    full_out = attend(q, k, v, bias=bias, backend="reference")
    chunk_out = attend_or_skip(backend, q[:, :, -q_len:], k, v, bias=bias)
    torch.testing.assert_close(chunk_out, full_out[:, :, -q_len:], rtol=0, atol=2e-6)


def test_calls_of_different_lengths_are_independent(backend):
    bias = LinearBias(alibi.slopes(4))
    for length in (8, 64, 8):
        q, k, v = make_inputs(length, length)
        expected = attend(q, k, v, bias=bias, backend="reference")
        torch.testing.assert_close(attend_or_skip(backend, q, k, v, bias=bias), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (12, 3), (20, 5), (40, 8), (4, 1)])
def test_grouped_query_attention_equals_repeated_key_heads(backend, make_bias, heads, kv_heads):
    q, k, v = make_inputs(heads=heads, kv_heads=kv_heads)
    out = attend_or_skip(backend, q, k, v, bias=make_bias(heads))
    repeated_k = k.repeat_interleave(heads // kv_heads, dim=1)
    repeated_v = v.repeat_interleave(heads // kv_heads, dim=1)
    expected = attend(q, repeated_k, repeated_v, bias=make_bias(heads), backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_last_query_is_aligned_with_last_key(backend):
    """The causal mask is PyTorch's `causal_lower_right`, which is also the mask of FlashAttention."""
    q, k, v = make_inputs(q_len=5, k_len=12)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(5, 12))
    torch.testing.assert_close(attend_or_skip(backend, q, k, v), expected, rtol=0, atol=1e-6)


def test_return_stats_fills_all_fields():
    q, k, v = make_inputs()
    result = attend(q, k, v, backend="reference", return_stats=True)
    assert isinstance(result, AttentionOutput)
    assert result.lse.shape == (2, 4, 12)
    assert torch.equal(result.certificate, torch.zeros(2, 4))  # This backend drops no key.


def test_merged_key_ranges_equal_one_call(backend):
    q, k, v = make_inputs(q_len=9, k_len=40)
    reason = backends.get(backend).unsupported_reason(AttentionCall(q, k, v, needs_lse=True))
    if reason:
        pytest.skip(reason)
    near_out, near_lse, _ = attend(q, k[:, :, 31:], v[:, :, 31:], backend=backend, return_stats=True)
    far_scores = q @ k[:, :, :31].transpose(-1, -2) / math.sqrt(8)
    far_out = far_scores.softmax(-1) @ v[:, :, :31]
    far_lse = far_scores.logsumexp(-1)
    out, lse = merge_by_lse(near_out, near_lse, far_out, far_lse)
    expected_out, expected_lse, _ = attend(q, k, v, backend="reference", return_stats=True)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


def test_alibi_attention_equals_attend_with_linear_bias():
    q, k, v = make_inputs(300, 300)
    slopes = alibi.slopes(4)
    expected = attend(q, k, v, bias=LinearBias(slopes), backend="reference")
    torch.testing.assert_close(alibi_attention(q, k, v), expected, rtol=0, atol=2e-6)
    expected = attend(q, k, v, bias=LinearBias(slopes / 2), backend="reference")
    torch.testing.assert_close(alibi_attention(q, k, v, slopes / 2), expected, rtol=0, atol=2e-6)


def test_gradients_of_trained_slopes_equal_reference():
    q, k, v = make_inputs(40, 40)

    def slope_gradient(backend):
        slopes = alibi.slopes(4).requires_grad_()
        out = attend(q, k, v, bias=LinearBias(slopes), backend=backend)
        return torch.autograd.grad(out.square().sum(), slopes)[0]

    expected = slope_gradient("reference")
    assert expected.abs().min() > 1e-4
    for backend in ("auto", "windowed"):
        torch.testing.assert_close(slope_gradient(backend), expected, rtol=1e-4, atol=1e-5)


def test_flex_rejects_trained_slopes_on_the_cpu():
    q, k, v = make_inputs()
    bias = LinearBias(alibi.slopes(4).requires_grad_())
    with pytest.raises(InputError, match=r"'flex' does not support this call: .*use '(compiled|sdpa)'"):
        attend(q, k, v, bias=bias, backend="flex")


def test_dropout_keeps_the_mean():
    q, k, v = make_inputs(q_len=4, k_len=64, batch=64)
    out = attend(q, k, torch.ones_like(v), dropout_p=0.5)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.02


def test_auto_logs_each_chosen_backend_once_with_reasons(caplog, monkeypatch):
    monkeypatch.setattr("trainshort.attention.functional._logged_messages", set())
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    q, k, v = make_inputs()
    with caplog.at_level(logging.INFO, logger="trainshort.attention"):
        for _ in range(2):
            attend(q, k, v, bias=LinearBias(alibi.slopes(4)))
            attend(q, k, v, bias=DenseBias(torch.zeros(4, 12, 12)))
    records = [record.getMessage() for record in caplog.records]
    messages = [message for message in records if message.startswith("attention backend")]
    assert len(messages) == 2
    assert messages[0] == "attention backend: windowed"
    assert messages[1].startswith("attention backend: sdpa (not windowed: ")
    assert "; not compiled: " in messages[1]
    # The advice is only for users who named a backend.
    assert "use 'sdpa'" not in messages[1]


@pytest.fixture
def custom_backend_class(monkeypatch):
    """A backend class, registered under the name "mine". The backend supports only windows of 3."""

    class CustomBackend:
        rank = 1000

        def unsupported_reason(self, call):
            return None if call.window == 3 else "it supports only windows of 3; use 'sdpa'"

        def run(self, call):
            return AttentionOutput(call.v * 2)

    monkeypatch.setattr(backends, "_entries", dict(backends.items()))
    monkeypatch.setattr("trainshort.attention.functional._backend_cache", {})
    backends.register("mine")(CustomBackend())
    return CustomBackend


def test_custom_backend_with_highest_rank_is_chosen_if_it_supports_the_call(custom_backend_class):
    q, k, v = make_inputs()
    assert torch.equal(attend(q, k, v, window=3), v * 2)
    assert not torch.equal(attend(q, k, v, window=4), v * 2)
    with pytest.raises(InputError, match="'mine' does not support this call: it supports only windows of 3"):
        attend(q, k, v, backend="mine")


def test_backend_with_skip_reason_is_used_only_if_named(custom_backend_class, monkeypatch):
    monkeypatch.setattr(custom_backend_class, "skip_reason", lambda self, call: "it is slower", raising=False)
    q, k, v = make_inputs()
    assert not torch.equal(attend(q, k, v, window=3), v * 2)
    assert torch.equal(attend(q, k, v, window=3, backend="mine"), v * 2)


def test_rank_that_is_no_number_is_rejected(custom_backend_class, monkeypatch):
    monkeypatch.setattr(custom_backend_class, "rank", lambda self, call: 1000)
    q, k, v = make_inputs()
    with pytest.raises(InputError, match="rank of attention backend 'mine' must be a number, got method"):
        attend(q, k, v, window=3)


@dataclass(frozen=True)
class UnknownBias(AttentionBias):
    """A bias type that no backend knows."""

    values: Tensor


def test_unknown_bias_type_is_rejected_everywhere():
    q, k, v = make_inputs()
    call = AttentionCall(q, k, v, UnknownBias(torch.zeros(4)))
    functions = [
        lambda: attend(q, k, v, bias=call.bias),
        lambda: materialize_bias(call, slice(0, 12), slice(0, 12)),
        lambda: _make_score_mod(call),
        lambda: table_by_distance(call, q),
        lambda: backends.get("windowed").run(call),
        lambda: backends.get("compiled").run(call),
    ]
    for function in functions:
        with pytest.raises(InputError, match=r"bias must be LinearBias, .* or None, got UnknownBias"):
            function()


def test_scale(backend):
    q, k, v = make_inputs(200, 230)
    bias = LinearBias(alibi.slopes(4))
    for scale in (0.01, 1.0, 3.0):
        # The default scale is 1 / sqrt(8).
        scaled_q = q * scale * math.sqrt(8)
        expected = attend(scaled_q, k, v, bias=bias, backend="reference")
        out = attend_or_skip(backend, q, k, v, bias=bias, scale=scale)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(2, 4, 12)}, r"q must have shape \(batch, heads, length, dim\), got \(2, 4, 12\)"),
        ({"q": torch.randn(2, 4, 13, 8)}, "13 queries and 12 keys"),
        ({"q": torch.randn(2, 4, 0, 8)}, "q is empty"),
        ({"q": torch.randn(2, 5, 12, 8)}, "5 query heads and 4 key heads"),
        ({"q": torch.randn(2, 4, 12, 16)}, "q and k must have the same batch and dim"),
        ({"q": torch.randn(2, 4, 12, 8).double()}, "q is torch.float64 on cpu, k is torch.float32 on cpu"),
        ({"q": torch.ones(2, 4, 12, 8, dtype=torch.long)}, "q must have a floating-point dtype, got torch.int64"),
        ({"v": torch.randn(2, 4, 11, 8)}, "k and v must have the same shape"),
        ({"bias": LinearBias(torch.ones(3))}, r"slopes must have .* shape \(4,\), got \(3,\)"),
        ({"bias": LinearBias(torch.tensor([1, math.nan, 1, 1]))}, "slopes must be finite"),
        ({"bias": LinearBias(torch.tensor([1, math.inf, 1, 1]))}, "slopes must be finite"),
        ({"bias": DistanceBias(torch.ones(3, 5))}, r"shape \(heads=4, distances\), got \(3, 5\)"),
        ({"bias": DenseBias(torch.ones(4, 5, 5))}, r"shape \(4, 12, 12\) or .*, got \(4, 5, 5\)"),
        ({"bias": torch.ones(4)}, "bias must be LinearBias"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"bias": LinearBias(torch.ones(4, device="meta"))}, "same device, got meta and cpu"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        ({"tolerance": 1.5}, "tolerance must be at least 0 and less than 1, got 1.5"),
        ({"tolerance": -1e-6}, "tolerance must be at least 0 and less than 1, got -1e-06"),
        ({"segment_ids": torch.zeros(2, 5)}, r"segment_ids must have shape \(batch, k_len\)"),
        ({"backend": "windoed"}, "Unknown attention backend 'windoed'. Did you mean 'windowed'"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    q, k, v = make_inputs()
    arguments = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(InputError, match=message):
        attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_reference_supports_all_options_together():
    q, k, v = make_inputs()
    call = AttentionCall(
        q,
        k,
        v,
        bias=LinearBias(alibi.slopes(4)),
        window=3,
        segment_ids=torch.zeros(2, 12, dtype=torch.long),
        dropout_p=0.1,
        needs_lse=True,
    )
    validate(call)
    assert backends.get("reference").unsupported_reason(call) is None
