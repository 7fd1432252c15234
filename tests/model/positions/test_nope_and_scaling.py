"""Heads and layers without positions, and scores that grow with what a query sees: settings of every method."""

import math

import pytest
import torch

from trainshort import alibi
from trainshort.attention import DecayBias, DenseBias, DistanceBias, LinearBias
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.cache import Cache
from trainshort.model.positions import LengthScaling, zero_bias_for_nope_heads
from trainshort.model.transformer import TransformerLM

INSIDE = ["alibi", "rotary", "t5", "kerple", "fox", "fire"]


def tiny(position="alibi", **changes):
    torch.manual_seed(0)
    config = {"vocab_size": 64, "layers": 2, "width": 32, "heads": 4, "position": position, **changes}
    model = TransformerLM(ModelConfig.parse(config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return model


def queries_and_biases(model, tokens):
    from trainshort.evaluate.attention_inputs import attention_calls

    return attention_calls(model, tokens)


@pytest.mark.parametrize("position", INSIDE)
def test_nope_heads_are_those_of_a_model_without_positions(position):
    """And the others are as they were."""
    mixed, tokens = tiny(position, nope_heads=2), torch.randint(64, (1, 20))
    (first, *_), (plain, *_) = (queries_and_biases(m, tokens) for m in (mixed, tiny("none")))
    weights = TransformerLM(mixed.config.replace(nope_heads=0)).eval()
    weights.load_state_dict(mixed.state_dict())
    (whole, *_) = queries_and_biases(weights, tokens)
    if position == "rotary":
        assert (first.q[:, :2] == whole.q[:, :2]).all()
        assert (first.q[:, 2:] != whole.q[:, 2:]).any()
        assert plain.bias is None
        return
    if isinstance(first.bias, LinearBias):
        assert first.bias.slopes.tolist() == [*alibi.slopes(2).tolist(), 0, 0]
        return
    mixed_values, values = first.bias.values, whole.bias.values
    heads = mixed_values.dim() - (2 if position in ("t5", "kerple", "fox") else 3)
    assert (mixed_values.narrow(heads, 2, 2) == 0).all()
    torch.testing.assert_close(mixed_values.narrow(heads, 0, 2), values.narrow(heads, 0, 2))


@pytest.mark.parametrize("position", INSIDE)
@pytest.mark.parametrize(
    "changes", [{"nope_heads": 2}, {"nope_every": 2, "window": 30}, {"length_scaling": "ssmax"}], ids=str
)
@torch.no_grad()
def test_token_by_token_equals_one_pass(position, changes):
    model, tokens = tiny(position, **changes), torch.randint(64, (2, 90))
    whole, cache = model(tokens), Cache()
    pieces = [model(part, cache=cache) for part in (tokens[:, :50], tokens[:, 50:51], tokens[:, 51:])]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=2e-5)
    segment_ids = torch.tensor([[1] * 40 + [2] * 50] * 2)
    torch.testing.assert_close(model(tokens, segment_ids=segment_ids)[:, 40:], model(tokens[:, 40:]), rtol=0, atol=2e-5)


def test_every_nth_layer_knows_no_positions_and_sees_all():
    model = tiny(layers=6, nope_every=3, window=5, length_scaling="ssmax")
    calls = queries_and_biases(model, torch.randint(64, (1, 12)))
    assert [call.bias is None for call in calls] == [False, False, True] * 2
    assert [call.window for call in calls] == [5, 5, None] * 2
    assert [layer.attention.growth is None for layer in model.layers] == [True, True, False] * 2


def test_growth_against_its_formulas():
    q, where = torch.ones(1, 2, 3, 4), torch.tensor([[0, 9, 16_384]])
    ssmax = LengthScaling(ModelConfig(heads=2, length_scaling="ssmax"))
    with torch.no_grad():
        ssmax.s.copy_(torch.tensor([0.5, 2.0]))
    expected = [[s * math.log(n) for n in (1, 10, 16_385)] for s in (0.5, 2.0)]
    torch.testing.assert_close(ssmax(q, where)[0, :, :, 0], torch.tensor(expected))
    llama = LengthScaling(ModelConfig(heads=2, length_scaling="llama4"))
    expected = [1.0, 1.0, 1 + 0.1 * math.log(1 + 2)]
    torch.testing.assert_close(llama(q, where)[0, 1, :, 0], torch.tensor(expected))
    mean = sum(math.log(n) for n in range(1, 1025)) / 1024
    assert pytest.approx(1 / mean, abs=1e-3) == 0.1686


def test_growth_multiplies_products_and_leaves_the_bias():
    model, tokens = tiny(length_scaling="ssmax"), torch.randint(64, (1, 30))
    plain = TransformerLM(model.config.replace(length_scaling="none")).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.endswith("growth.s")})
    (grown, *_), (first, *_) = (queries_and_biases(m, tokens) for m in (model, plain))
    factor = 0.1686 * torch.arange(1.0, 31).log()
    torch.testing.assert_close(grown.q, first.q * factor[:, None], rtol=1e-5, atol=1e-6)
    assert torch.equal(grown.bias.slopes, first.bias.slopes)
    model.train()
    model(tokens[:, :-1], tokens[:, 1:])[0].backward()
    assert all(layer.attention.growth.s.grad.abs().sum() > 0 for layer in model.layers)


def test_learned_slopes_of_nope_heads_stay_zero():
    model = tiny(nope_heads=1, position_settings={"learned_slopes": True})
    tokens = torch.randint(64, (1, 40))
    model(tokens[:, :-1], tokens[:, 1:])[0].backward()
    assert model.position.slopes[3] == 0
    assert model.position.slopes.grad[3] == 0
    assert (model.position.slopes.grad[:3] != 0).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nope_heads": 4}, "nope_heads 4 leaves none of 4 heads with positions"),
        ({"nope_heads": 1, "kv_heads": 2}, "nope_heads 1 leaves 3 of 4 heads with positions; leave a multiple of 2"),
        ({"nope_every": 1}, "nope_every"),
        ({"nope_every": 5}, "nope_every 5 leaves all of 2 layers with positions"),
        (
            {"position": "fox", "position_settings": {"min_decay_time": 300}},
            "decay times go from shortest to longest; got 300 and 256",
        ),
        ({"length_scaling_length": 0}, "length_scaling_length"),
        ({"position": "sinusoidal", "nope_every": 2}, "sinusoidal adds its positions to the embeddings, before any"),
    ],
)
def test_mixtures_that_do_not_add_up(changes, said):
    with pytest.raises(InputError) as told:
        tiny(**changes)
    assert said in str(told.value)


@pytest.mark.parametrize(
    ("kind", "shape", "heads_at"), [(LinearBias, (4,), 0), (DistanceBias, (4, 5), 0), (DecayBias, (2, 4, 5), 1)]
)
def test_nope_heads_have_nothing_on_either_side(kind, shape, heads_at):
    """The right side of an encoder's bias is kept, and a head that would be blind there sees it."""
    left, right = torch.rand(shape) + 1, torch.full(shape, math.inf)
    both = zero_bias_for_nope_heads(kind(left, right), ModelConfig(vocab_size=64, heads=4, width=32, nope_heads=1))
    for found, given in ((both.values, left), (both.right, right)):
        assert torch.equal(found.narrow(heads_at, 0, 3), given.narrow(heads_at, 0, 3))
        assert found.narrow(heads_at, 3, 1).eq(0).all()


def test_nope_heads_of_a_written_bias_and_of_one_that_nobody_knows():
    config = ModelConfig(vocab_size=64, heads=4, width=32, nope_heads=1)
    written = zero_bias_for_nope_heads(DenseBias(torch.ones(2, 4, 3, 3)), config)
    assert written.values[:, :3].eq(1).all()
    assert written.values[:, 3].eq(0).all()
    with pytest.raises(
        InputError, match="bias must be LinearBias, DistanceBias, DecayBias, DenseBias or None, got str"
    ):
        zero_bias_for_nope_heads("falling", config)
