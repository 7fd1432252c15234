"""The Forgetting Transformer's gates against their formula."""

import pytest
import torch

from trainshort import alibi
from trainshort.attention import DecayBias, attend
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.model.cache import BatchedCache, Cache
from trainshort.model.positions import LayerInput, build_position
from trainshort.model.transformer import TransformerLM

GATES = [{}, {"negate_gate": True}, {"gate": "bias_only"}, {"gate": "fixed", "init": "alibi"}, {"init": "alibi"}]


def make(**settings):
    torch.manual_seed(0)
    return build_position(
        ModelConfig.parse({"width": 16, "heads": 4, "layers": 2, "position": "fox", "position_settings": settings})
    )


def tiny(**settings):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=64, layers=2, width=32, heads=4, position="fox", position_settings=settings)
    model = TransformerLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return model


@pytest.mark.parametrize("settings", GATES, ids=str)
def test_the_bias_is_the_sum_of_log_gates_between(settings):
    method, x = make(**settings), torch.randn(2, 9, 16)
    bias = method.content_bias(LayerInput(1, x, 9, torch.arange(9).expand(2, 9), {}))
    assert isinstance(bias, DecayBias)
    logits = method.shift.double().view(2, 4)[1].expand(2, 9, 4)
    if method.weight is not None:
        logits = logits + x.double() @ method.weight[1].double().T
    log_gate = torch.log(torch.sigmoid(-logits if settings.get("negate_gate") else logits))
    for i in range(9):
        for j in range(i + 1):
            expected = log_gate[:, j + 1 : i + 1].sum(1)
            torch.testing.assert_close(bias.cumulative[:, :, i] - bias.cumulative[:, :, j], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_bias_is_x_transformers_data_dependent_alibi():
    theirs = pytest.importorskip("x_transformers.x_transformers").DataDependentAlibi(16, 4)
    method, x = make(), torch.randn(2, 30, 16)
    method.weight[1].copy_(theirs.to_forget_gates[0].weight)
    method.shift.view(2, 4)[1].copy_(theirs.to_forget_gates[0].bias)
    q, k, v = torch.randn(3, 2, 4, 30, 8)
    bias = method.content_bias(LayerInput(1, x, 30, torch.arange(30).expand(2, 30), {}))
    future = torch.ones(30, 30).triu(1).bool()
    mask = theirs(x).masked_fill(future, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attend(q, k, v, bias=bias), expected, rtol=1e-5, atol=1e-5)


def test_first_gates_are_halves_slopes_or_times():
    tick = torch.nn.functional.logsigmoid
    assert make().shift.tolist() == [0] * 8
    torch.testing.assert_close(tick(make(init="alibi").shift[:4]), -alibi.slopes(4))
    torch.testing.assert_close(tick(-make(init="alibi", negate_gate=True).shift[4:]), -alibi.slopes(4))
    times = make(gate="bias_only", min_decay_time=2, max_decay_time=16).shift[:4]
    torch.testing.assert_close(tick(times), -1 / torch.tensor([2.0, 4, 8, 16]))


def test_what_is_trained_and_what_is_kept():
    assert {name for name, _ in make().named_parameters()} == {"shift", "weight"}
    assert {name for name, _ in make(gate="bias_only").named_parameters()} == {"shift"}
    fixed = make(gate="fixed")
    assert not list(fixed.parameters())
    assert not fixed.state_dict()
    assert fixed.to(torch.bfloat16).shift.dtype == torch.float32
    with torch.device("meta"):
        sleeping = make(gate="fixed")
    assert torch.equal(sleeping.to_empty(device="cpu").shift, fixed.shift)


def test_fixed_gates_of_alibis_slopes_are_alibi():
    fox = tiny(gate="fixed", init="alibi")
    plain = TransformerLM(fox.config.replace(position="alibi", position_settings=None)).eval()
    plain.load_state_dict(fox.state_dict())
    tokens = torch.randint(64, (2, 200))
    torch.testing.assert_close(fox(tokens), plain(tokens), rtol=0, atol=2e-5)


@torch.no_grad()
def test_rows_of_different_texts_go_on_with_their_own_clocks():
    model, tokens = tiny(), torch.randint(64, (2, 60))
    whole = model(tokens)
    short, long = Cache(), Cache()
    model(tokens[:1, :20], cache=short)
    model(tokens[1:, :40], cache=long)
    next_ones = torch.stack([tokens[0, 20:25], tokens[1, 40:45]])
    found = model(next_ones, cache=BatchedCache([short, long]))
    torch.testing.assert_close(found, torch.stack([whole[0, 20:25], whole[1, 40:45]]), rtol=0, atol=1e-5)


def test_recorded_calls_do_not_move_the_clock():
    model, tokens = tiny(), torch.randint(64, (1, 50))
    for at_once, chunked in zip(attention_calls(model, tokens), attention_calls(model, tokens, 20), strict=True):
        torch.testing.assert_close(chunked.bias.cumulative, at_once.bias.cumulative, rtol=0, atol=1e-4)
        torch.testing.assert_close(chunked.q, at_once.q, rtol=0, atol=1e-4)


def test_wrong_settings_are_told():
    with pytest.raises(InputError, match="gate"):
        make(gate="half")
    with pytest.raises(InputError, match=r"shortest.*greater than 0"):
        make(min_decay_time=0)
