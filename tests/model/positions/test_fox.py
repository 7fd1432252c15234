"""Tests of the Forgetting Transformer: the gates equal their formula, also with caches and in parts."""

import pytest
import torch

from trainshort import alibi
from trainshort.attention import DecayBias, attend
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.model.cache import BatchedCache, Cache
from trainshort.model.positions import LayerInput, build_position
from trainshort.model.positions.fox import Fox
from trainshort.model.transformer import TransformerLM

GATE_SETTINGS = [
    {},
    {"negate_gate": True},
    {"gate": "bias_only"},
    {"gate": "fixed", "init": "alibi"},
    {"init": "alibi"},
]


def make_fox(**settings) -> Fox:
    """Create the position method for a model with 2 layers, 4 heads and width 16."""
    torch.manual_seed(0)
    config = {"width": 16, "heads": 4, "layers": 2, "position": "fox", "position_settings": settings}
    method = build_position(ModelConfig.parse(config))
    assert isinstance(method, Fox)
    return method


def make_model(**settings) -> TransformerLM:
    """Create a small model whose weights are large enough that its gates differ from token to token."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=64, layers=2, width=32, heads=4, position="fox", position_settings=settings)
    model = TransformerLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def compute_bias(method: Fox, x: torch.Tensor, layer: int) -> DecayBias:
    """Compute the bias of a layer for a text that starts at position 0."""
    batch, length, _ = x.shape
    position_ids = torch.arange(length).expand(batch, length)
    layer_input = LayerInput(layer=layer, x=x, length=length, position_ids=position_ids, method_cache={})
    bias = method.content_bias(layer_input)
    assert isinstance(bias, DecayBias)
    return bias


@pytest.mark.parametrize("settings", GATE_SETTINGS, ids=str)
def test_bias_is_the_sum_of_log_gates(settings):
    method = make_fox(**settings)
    x = torch.randn(2, 9, 16)
    bias = compute_bias(method, x, layer=1)

    gate_logits = method.shift.double().view(2, 4)[1].expand(2, 9, 4)
    if method.weight is not None:
        gate_logits = gate_logits + x.double() @ method.weight[1].double().T
    if settings.get("negate_gate"):
        gate_logits = -gate_logits
    log_gates = torch.log(torch.sigmoid(gate_logits))
    for query in range(9):
        for key in range(query + 1):
            expected = log_gates[:, key + 1 : query + 1].sum(1)
            score_change = bias.cumulative[:, :, query] - bias.cumulative[:, :, key]
            torch.testing.assert_close(score_change, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_bias_equals_data_dependent_alibi_of_x_transformers():
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    reference = x_transformers.DataDependentAlibi(16, 4)
    method = make_fox()
    method.weight[1].copy_(reference.to_forget_gates[0].weight)
    method.shift.view(2, 4)[1].copy_(reference.to_forget_gates[0].bias)

    x = torch.randn(2, 30, 16)
    q, k, v = torch.randn(3, 2, 4, 30, 8)
    is_future = torch.ones(30, 30).triu(1).bool()
    mask = reference(x).masked_fill(is_future, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    bias = compute_bias(method, x, layer=1)
    torch.testing.assert_close(attend(q, k, v, bias=bias), expected, rtol=1e-5, atol=1e-5)


def test_initial_gates():
    """`shift` contains the gate biases of all heads of layer 0, then those of layer 1."""
    log_gate = torch.nn.functional.logsigmoid
    assert make_fox().shift.tolist() == [0] * 8  # The gates are sigmoid(0) = 0.5.

    # A log gate of -slope is the same as ALiBi with this slope.
    torch.testing.assert_close(log_gate(make_fox(init="alibi").shift[:4]), -alibi.slopes(4))
    negated = make_fox(init="alibi", negate_gate=True)
    torch.testing.assert_close(log_gate(-negated.shift[4:]), -alibi.slopes(4))

    # With a decay time of n tokens, the scores fall by 1 over n tokens.
    decay_times = make_fox(gate="bias_only", min_decay_time=2, max_decay_time=16)
    torch.testing.assert_close(log_gate(decay_times.shift[:4]), -1 / torch.tensor([2.0, 4, 8, 16]))


def test_parameters_of_each_kind_of_gate():
    assert {name for name, _ in make_fox().named_parameters()} == {"shift", "weight"}
    assert {name for name, _ in make_fox(gate="bias_only").named_parameters()} == {"shift"}
    assert not list(make_fox(gate="fixed").parameters())


def test_fixed_gates_are_not_saved_and_stay_in_float32():
    fixed = make_fox(gate="fixed")
    assert not fixed.state_dict()
    assert fixed.to(torch.bfloat16).shift.dtype == torch.float32
    with torch.device("meta"):
        on_meta_device = make_fox(gate="fixed")
    assert torch.equal(on_meta_device.to_empty(device="cpu").shift, fixed.shift)


def test_fixed_gates_with_alibi_slopes_equal_alibi():
    fox_model = make_model(gate="fixed", init="alibi")
    alibi_model = TransformerLM(fox_model.config.replace(position="alibi", position_settings=None)).eval()
    alibi_model.load_state_dict(fox_model.state_dict())
    tokens = torch.randint(64, (2, 200))
    torch.testing.assert_close(fox_model(tokens), alibi_model(tokens), rtol=0, atol=2e-5)


@torch.no_grad()
def test_cached_texts_of_different_lengths_continue_with_their_own_decay():
    model = make_model()
    tokens = torch.randint(64, (2, 60))
    expected = model(tokens)
    short_cache = Cache()
    long_cache = Cache()
    model(tokens[:1, :20], cache=short_cache)
    model(tokens[1:, :40], cache=long_cache)
    next_tokens = torch.stack([tokens[0, 20:25], tokens[1, 40:45]])
    logits = model(next_tokens, cache=BatchedCache([short_cache, long_cache]))
    torch.testing.assert_close(logits, torch.stack([expected[0, 20:25], expected[1, 40:45]]), rtol=0, atol=1e-5)


def test_recording_attention_calls_in_parts_does_not_change_them():
    model = make_model()
    tokens = torch.randint(64, (1, 50))
    calls = attention_calls(model, tokens)
    part_length = 20
    calls_in_parts = attention_calls(model, tokens, part_length)
    for call, call_in_parts in zip(calls, calls_in_parts, strict=True):
        torch.testing.assert_close(call_in_parts.bias.cumulative, call.bias.cumulative, rtol=0, atol=1e-4)
        torch.testing.assert_close(call_in_parts.q, call.q, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": "half"}, "gate"),
        ({"min_decay_time": 0}, r"min_decay_time.*greater than 0"),
        ({"min_decay_time": 300}, "min_decay_time must not be larger than max_decay_time, got 300 and 256"),
    ],
)
def test_invalid_setting_is_named(settings, message):
    with pytest.raises(InputError, match=message):
        make_fox(**settings)
