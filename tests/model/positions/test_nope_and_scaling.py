"""Tests of heads and layers without positions (NoPE), and of scores that are scaled with the length."""

import math

import pytest
import torch
from torch import Tensor

from trainshort import alibi
from trainshort.attention import DecayBias, DenseBias, DistanceBias, LinearBias
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.model.cache import Cache
from trainshort.model.positions import LengthScaling, zero_bias_for_nope_heads
from trainshort.model.transformer import TransformerLM

# Position methods that work inside the layers. Only these methods can be combined with NoPE heads and layers.
LAYER_METHODS = ["alibi", "rotary", "t5", "kerple", "fox", "fire"]


def make_model(position: str = "alibi", **changes) -> TransformerLM:
    """Create a small model with 4 heads and large weights."""
    torch.manual_seed(0)
    config = {"vocab_size": 64, "layers": 2, "width": 32, "heads": 4, "position": position, **changes}
    model = TransformerLM(ModelConfig.parse(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def copy_with_settings(model: TransformerLM, **changes) -> TransformerLM:
    """Create a model with the weights of another model and changed settings."""
    changed_model = TransformerLM(model.config.replace(**changes)).eval()
    weights = {name: weight for name, weight in model.state_dict().items() if name in changed_model.state_dict()}
    changed_model.load_state_dict(weights)
    return changed_model


# ---- NoPE heads


def test_queries_of_nope_heads_are_not_rotated():
    """The last two of the four heads are NoPE heads (heads without positions)."""
    model = make_model("rotary", nope_heads=2)
    tokens = torch.randint(64, (1, 20))
    first_call = attention_calls(model, tokens)[0]
    fully_rotated_call = attention_calls(copy_with_settings(model, nope_heads=0), tokens)[0]
    not_rotated_call = attention_calls(copy_with_settings(model, position="none", nope_heads=0), tokens)[0]
    assert torch.equal(first_call.q[:, :2], fully_rotated_call.q[:, :2])
    assert not torch.equal(first_call.q[:, 2:], fully_rotated_call.q[:, 2:])
    assert torch.equal(first_call.q[:, 2:], not_rotated_call.q[:, 2:])
    assert not_rotated_call.bias is None


def test_alibi_slopes_are_computed_for_heads_with_positions():
    first_call = attention_calls(make_model("alibi", nope_heads=2), torch.randint(64, (1, 20)))[0]
    assert first_call.bias.slopes.tolist() == [*alibi.slopes(2).tolist(), 0, 0]


@pytest.mark.parametrize(("position", "head_dimension"), [("t5", 0), ("kerple", 0), ("fox", 1), ("fire", 0)])
def test_bias_of_nope_heads_is_zero(position, head_dimension):
    model = make_model(position, nope_heads=2)
    tokens = torch.randint(64, (1, 20))
    bias = attention_calls(model, tokens)[0].bias.values
    full_bias = attention_calls(copy_with_settings(model, nope_heads=0), tokens)[0].bias.values
    assert (bias.narrow(head_dimension, 2, 2) == 0).all()
    torch.testing.assert_close(bias.narrow(head_dimension, 0, 2), full_bias.narrow(head_dimension, 0, 2))


def test_learned_slopes_of_nope_heads_stay_zero():
    model = make_model(nope_heads=1, position_settings={"learned_slopes": True})
    tokens = torch.randint(64, (1, 40))
    model(tokens[:, :-1], tokens[:, 1:]).total.backward()
    assert model.position.slopes[3] == 0
    assert model.position.slopes.grad[3] == 0
    assert (model.position.slopes.grad[:3] != 0).all()


@pytest.mark.parametrize(
    ("bias_class", "shape", "head_dimension"),
    [(LinearBias, (4,), 0), (DistanceBias, (4, 5), 0), (DecayBias, (2, 4, 5), 1)],
)
def test_nope_heads_of_an_encoder_have_no_bias_on_either_side(bias_class, shape, head_dimension):
    """An infinite bias on the right side hides that side. The NoPE head must see the right side."""
    left = torch.rand(shape) + 1
    right = torch.full(shape, math.inf)
    config = ModelConfig(vocab_size=64, heads=4, width=32, nope_heads=1)
    bias = zero_bias_for_nope_heads(bias_class(left, right), config)
    for changed, original in ((bias.values, left), (bias.right, right)):
        assert torch.equal(changed.narrow(head_dimension, 0, 3), original.narrow(head_dimension, 0, 3))
        assert changed.narrow(head_dimension, 3, 1).eq(0).all()


def test_nope_heads_of_a_dense_bias_are_zero():
    config = ModelConfig(vocab_size=64, heads=4, width=32, nope_heads=1)
    bias = zero_bias_for_nope_heads(DenseBias(torch.ones(2, 4, 3, 3)), config)
    assert bias.values[:, :3].eq(1).all()
    assert bias.values[:, 3].eq(0).all()


# The Makefile deselects tests with this ending when it checks the shapes in all signatures.
def test_bias_type_mistakes_are_explained():
    config = ModelConfig(vocab_size=64, heads=4, width=32, nope_heads=1)
    with pytest.raises(
        InputError, match="bias must be LinearBias, DistanceBias, DecayBias, DenseBias or None, got str"
    ):
        zero_bias_for_nope_heads("falling", config)


# ---- NoPE layers


def test_every_nth_layer_has_no_positions_and_no_window():
    model = make_model(layers=6, nope_every=3, window=5, length_scaling="ssmax")
    calls = attention_calls(model, torch.randint(64, (1, 12)))
    assert [call.bias is None for call in calls] == [False, False, True] * 2
    assert [call.window for call in calls] == [5, 5, None] * 2
    assert [layer.attention.growth is None for layer in model.layers] == [True, True, False] * 2


# ---- scaling with the length


def compute_scale_factors(config: ModelConfig, position_ids: Tensor, s: Tensor | None = None) -> Tensor:
    """Return the factor of each head and position. `s` replaces the initial parameters of ssmax."""
    scaling = LengthScaling(config)
    if s is not None:
        scaling.s.data.copy_(s)
    queries = torch.ones(1, config.heads, position_ids.shape[1], 4)
    return scaling(queries, position_ids)[0, :, :, 0].detach()


def test_ssmax_equals_formula():
    config = ModelConfig(heads=2, length_scaling="ssmax")
    position_ids = torch.tensor([[0, 9, 16_384]])
    factors = compute_scale_factors(config, position_ids, s=torch.tensor([0.5, 2.0]))
    expected = [[s * math.log(num_visible) for num_visible in (1, 10, 16_385)] for s in (0.5, 2.0)]
    torch.testing.assert_close(factors, torch.tensor(expected))


def test_llama4_scaling_equals_formula():
    config = ModelConfig(heads=2, length_scaling="llama4")
    factors = compute_scale_factors(config, torch.tensor([[0, 9, 16_384]]))
    expected = [1.0, 1.0, 1 + 0.1 * math.log(1 + 2)]
    torch.testing.assert_close(factors[1], torch.tensor(expected))


def test_initial_scale_of_ssmax():
    mean_log = sum(math.log(num_visible) for num_visible in range(1, 1025)) / 1024
    assert pytest.approx(1 / mean_log, abs=1e-3) == 0.1686


def test_ssmax_multiplies_queries_and_keeps_the_bias():
    model = make_model(length_scaling="ssmax")
    tokens = torch.randint(64, (1, 30))
    scaled_call = attention_calls(model, tokens)[0]
    unscaled_call = attention_calls(copy_with_settings(model, length_scaling="none"), tokens)[0]
    factors = 0.1686 * torch.arange(1.0, 31).log()
    torch.testing.assert_close(scaled_call.q, unscaled_call.q * factors[:, None], rtol=1e-5, atol=1e-6)
    assert torch.equal(scaled_call.bias.slopes, unscaled_call.bias.slopes)


def test_parameters_of_ssmax_get_gradients():
    model = make_model(length_scaling="ssmax").train()
    tokens = torch.randint(64, (1, 30))
    model(tokens[:, :-1], tokens[:, 1:]).total.backward()
    for layer in model.layers:
        assert layer.attention.growth.s.grad.abs().sum() > 0


# ---- combinations


@pytest.mark.parametrize("position", LAYER_METHODS)
@pytest.mark.parametrize(
    "changes", [{"nope_heads": 2}, {"nope_every": 2, "window": 30}, {"length_scaling": "ssmax"}], ids=str
)
@torch.no_grad()
def test_reading_in_parts_and_packing_equal_one_pass(position, changes):
    model = make_model(position, **changes)
    tokens = torch.randint(64, (2, 90))
    cache = Cache()
    parts = (tokens[:, :50], tokens[:, 50:51], tokens[:, 51:])
    logits_of_parts = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    torch.testing.assert_close(logits_of_parts, model(tokens), rtol=0, atol=2e-5)

    segment_ids = torch.tensor([[1] * 40 + [2] * 50] * 2)
    packed_logits = model(tokens, segment_ids=segment_ids)
    torch.testing.assert_close(packed_logits[:, 40:], model(tokens[:, 40:]), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nope_heads": 4}, "nope_heads 4 leaves none of 4 heads with positions"),
        ({"nope_heads": 1, "kv_heads": 2}, "nope_heads 1 leaves 3 of 4 heads with positions; leave a multiple of 2"),
        ({"nope_every": 1}, "nope_every"),
        ({"nope_every": 5}, "nope_every 5 leaves all of 2 layers with positions"),
        ({"length_scaling_length": 0}, "length_scaling_length"),
        ({"position": "sinusoidal", "nope_every": 2}, "sinusoidal adds its positions to the embeddings"),
    ],
)
def test_invalid_combination_is_rejected(changes, message):
    with pytest.raises(InputError, match=message):
        make_model(**changes)
