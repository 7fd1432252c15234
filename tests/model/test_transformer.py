"""The transformer: sizes, equalities that must hold for every position method, and refusals."""

import pytest
import torch
import torch.nn.functional as F

from trainshort import Cache, InputError, ModelConfig, TransformerLM
from trainshort.attention.backends.ctypes_call import kernel_unavailable_reason
from trainshort.config.presets import presets
from trainshort.config.registries import backends
from trainshort.config.run_config import IGNORED, AdaptiveConfig
from trainshort.model.positions import positions

METHODS = positions.names()
QUICK_BACKENDS = [name for name in backends.names() if name != "flex"]


def tiny(**settings):
    torch.manual_seed(0)
    return TransformerLM(presets.get("tiny")().replace(**settings)).eval()


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("wikitext103", 246_933_504), ("books", 231_292_928), ("cc100", 1_363_818_496), ("small", 23_109_632)],
)
@pytest.mark.parametrize("position", ["alibi", "sinusoidal", "rotary"])
def test_presets_have_their_size(preset, parameters, position):
    """WikiText-103's is the paper's number to the last parameter; none of these methods adds any."""
    with torch.device("meta"):
        model = TransformerLM(presets.get(preset)().replace(position=position))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_cc100_is_the_papers_shape():
    config = presets.get("cc100")()
    assert (config.layers, config.width, config.heads, config.ffn_width) == (25, 2048, 16, 8192)


def test_t5_adds_one_table_for_all_layers():
    with torch.device("meta"):
        model = TransformerLM(presets.get("wikitext103")().replace(position="t5"))
    assert sum(p.numel() for p in model.parameters()) == 246_933_504 + 8 * 32


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize("backend", ["auto", *QUICK_BACKENDS])
def test_token_by_token_equals_one_pass(position, backend):
    """Prefill, chunked prefill and decoding, to four times the length a model of this kind is usually trained at."""
    if position not in ("alibi", "fox") and backend.startswith("windowed"):
        pytest.skip(f"{backend} computes linear biases and clocks only")
    if position == "fire" and backend == "compiled":
        pytest.skip("compiled computes no bias that depends on more than the distance")
    if backend == "compiled" and (reason := kernel_unavailable_reason()):
        pytest.skip(reason)
    model = tiny(position=position, backend=backend)
    tokens = torch.randint(256, (2, 400))
    cache, pieces = Cache(), []
    with torch.no_grad():
        whole = model(tokens)
        for piece in (tokens[:, :130], tokens[:, 130:131], tokens[:, 131:380], *tokens[:, 380:].split(1, dim=1)):
            pieces.append(model(piece, cache=cache))
    assert cache.length == 400
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", METHODS)
def test_the_future_is_invisible(position):
    model = tiny(position=position)
    tokens = torch.randint(256, (1, 30))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-6)
    assert (after[:, 20:] - before[:, 20:]).abs().max() > 1e-3


@pytest.mark.parametrize("position", METHODS)
def test_a_document_packed_second_equals_itself_alone(position):
    model = tiny(position=position)
    tokens = torch.randint(256, (1, 30))
    segment_ids = torch.tensor([[4] * 11 + [9] * 19])
    packed = model(tokens, segment_ids=segment_ids)
    torch.testing.assert_close(packed[:, 11:], model(tokens[:, 11:]), rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[:, :11], model(tokens[:, :11]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", METHODS)
def test_order_matters_except_without_positions_to_a_bag(position):
    """One layer without positions sees its past as a bag; every method but none tells two orders of it apart."""
    model = tiny(position=position, layers=1)
    with torch.no_grad():  # first weights are small: make scores large enough to see
        # KERPLE's first values are drawn, and with the weights that come after them larger ones saturate the softmax.
        model.layers[0].attention.qkv.weight.mul_(3 if position == "kerple" else 20)
        if position == "t5":
            model.position.table.mul_(50)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    swapped = torch.tensor([[2, 1, 3, 4, 5]])
    difference = (model(tokens) - model(swapped))[:, -1].abs().max()
    assert difference < 1e-5 if position == "none" else difference > 1e-4


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize("adaptive", [None, {"cutoffs": (20, 100)}])
def test_loss_is_the_sum_over_scored_targets(position, adaptive):
    model = tiny(position=position, adaptive=adaptive)
    tokens, targets = torch.randint(256, (2, 2, 20))
    targets[0, :5] = IGNORED
    total, count = model(tokens, targets)
    assert count == 35
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    nll = model.token_nll(tokens, targets, first=3)
    assert nll.shape == (2, 17)
    torch.testing.assert_close(nll.sum() + model.token_nll(tokens, targets)[:, :3].sum(), total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("position", METHODS)
def test_every_parameter_is_trained(position):
    trained = {"position_settings": {"learned_slopes": True}} if position == "alibi" else {}
    model = tiny(position=position, **trained, embedding_norm=True, tie_embeddings=False)
    total, _ = model(*torch.randint(256, (2, 2, 64)))
    total.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_recomputed_activations_give_the_same_gradients():
    model = tiny().train()
    tokens, targets = torch.randint(256, (2, 2, 40))
    grads = []
    for model.checkpoint_activations in (False, True):
        total, _ = model(tokens, targets)
        grads.append(torch.autograd.grad(total, list(model.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [6, 12, 20, 40])
def test_head_counts_of_released_models(heads):
    model = TransformerLM(ModelConfig(vocab_size=64, width=heads * 4, heads=heads, kv_heads=heads // 2, layers=1))
    assert model(torch.randint(64, (1, 50))).isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "relu"},
        {"activation": "gelu_tanh"},
        {"biases": False},
        {"final_norm": False},
        {"tie_embeddings": False},
        {"embedding_scale": True},
        {"embedding_norm": True},
        {"init": "fairseq"},
        {"window": 5},
        {"position_settings": {"max_bias": 4.0}},
        {"norm_eps": 0.1},
        {"feedforward_width": 100},
        {"kv_heads": 2},
    ],
    ids=str,
)
def test_every_option_changes_the_model(settings):
    tokens = torch.randint(256, (1, 40))
    assert not torch.equal(tiny(**settings)(tokens), tiny()(tokens))


@pytest.mark.parametrize("where", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_acts_in_training_only(where):
    model = tiny(**{where: 0.5})
    tokens = torch.randint(256, (1, 40))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_bfloat16_model_stays_close_to_float32():
    tokens = torch.randint(256, (1, 500))
    exact = tiny()(tokens).log_softmax(-1)
    half = tiny().to(torch.bfloat16)(tokens).float().log_softmax(-1)
    assert half.isfinite().all()
    assert (half - exact).abs().max() < 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tiny()(torch.tensor([1, 2])), r"tokens must have shape \(batch, length\).*got \(2,\)"),
        (lambda: tiny()(torch.zeros(1, 0, dtype=torch.long)), "at least one token"),
        (lambda: tiny()(torch.tensor([[256]])), "token id 256 is outside the model's vocabulary of 256"),
        (lambda: tiny()(torch.tensor([[-1]])), "token id -1 is outside"),
        (lambda: tiny(position="alibbi"), "Unknown position method 'alibbi'. Did you mean 'alibi'"),
        (lambda: tiny(backend="sdpaa"), "Unknown attention backend 'sdpaa'. Did you mean 'sdpa'"),
        (lambda: tiny(width=100, heads=8), "width 100 is not a multiple of heads 8; choose width 96"),
        (lambda: tiny(width=12, heads=4, position="rotary"), "rotary turns pairs"),
        (lambda: tiny(kv_heads=3), "kv_heads 3 must divide heads 4"),
        (lambda: tiny(widht=3), "Unknown setting 'widht'. Did you mean 'width'"),
        (lambda: presets.get("wikitext-103"), "Unknown preset 'wikitext-103'. Did you mean 'wikitext103'"),
        (lambda: TransformerLM(ModelConfig()), "a model needs a vocabulary"),
        (
            lambda: tiny(position="learned", position_settings={"max_length": 8})(torch.ones(1, 9, dtype=torch.long)),
            "stop at 8",
        ),
        (lambda: tiny(adaptive={"cutoffs": (5, 3)}), "cutoffs must be ascending"),
        (
            lambda: tiny()(torch.ones(1, 4, dtype=torch.long), segment_ids=torch.ones(1, 3)),
            "segment_ids must have the shape of tokens",
        ),
    ],
)
def test_mistakes_are_explained(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_learned_positions_past_the_table_through_a_cache():
    model, cache = tiny(position="learned", position_settings={"max_length": 8}), Cache()
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.long), cache=cache)
        with pytest.raises(InputError, match="stop at 8, but this input reaches 9"):
            model(torch.ones(1, 1, dtype=torch.long), cache=cache)


def test_adaptive_cutoffs_past_the_vocabulary_are_left_out():
    model = tiny(adaptive=AdaptiveConfig(cutoffs=(100, 300)).model_dump())
    assert model.vocabulary.bands == [(0, 100), (100, 256)]


FOREIGN = {
    "rms": {"norm": "rms"},
    "swiglu": {"gated_feedforward": True, "activation": "silu", "biases": False},
    "clipped": {"clip_qkv": 0.3},
    "scale 1/d": {"softmax_scale": 1 / 16},
    "logits": {"logit_scale": 0.25},
    "factor": {"embedding_factor": 3.0, "embedding_norm": False},
    "slopes": {"position_settings": {"slopes": (0.5, 0.2, 0.03, 0.001)}},
    "biases of norms alone": {"biases": False, "norm_biases": True},
    "parallel": {"parallel_blocks": True},
}
"""Settings that models from elsewhere need."""


def by_hand(model, tokens):
    """The model once more, in the fewest words."""
    c, weights = model.config, dict(model.named_parameters())
    slopes = torch.tensor(c.position_settings.slopes or (2**-2, 2**-4, 2**-6, 2**-8))

    def linear(x, name):
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(x, name):
        centred = x if c.norm == "rms" else x - x.mean(-1, keepdim=True)
        x = centred / (centred.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
        return x * weights[name + ".weight"] + weights.get(name + ".bias", 0)

    x = weights["vocabulary.embedding.weight"][tokens] * c.embedding_factor
    where = torch.arange(tokens.shape[1])
    bias = -slopes[:, None, None] * (where[:, None] - where)
    bias = bias.masked_fill(where[:, None] < where, -torch.inf)
    for i in range(c.layers):
        qkv = linear(norm(x, f"layers.{i}.attention_norm"), f"layers.{i}.attention.qkv")
        qkv = qkv if c.clip_qkv is None else qkv.clamp(-c.clip_qkv, c.clip_qkv)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in qkv.chunk(3, -1))
        weight = (q @ k.mT * (c.softmax_scale or 16**-0.5) + bias).softmax(-1)
        before, x = x, x + linear((weight @ v).transpose(1, 2).flatten(2), f"layers.{i}.attention.out")
        inside = norm(before if c.parallel_blocks else x, f"layers.{i}.ffn_norm")
        wide, activate = linear(inside, f"layers.{i}.ffn.wide"), F.silu if c.activation == "silu" else F.gelu
        wide = activate(linear(inside, f"layers.{i}.ffn.gate")) * wide if c.gated_feedforward else activate(wide)
        x = x + linear(wide, f"layers.{i}.ffn.narrow")
    return norm(x, "final_norm") @ weights["vocabulary.embedding.weight"].T * c.logit_scale


@pytest.mark.parametrize("settings", FOREIGN.values(), ids=FOREIGN)
def test_settings_of_models_from_elsewhere(settings):
    model = tiny(**settings)
    with torch.no_grad():
        for parameter in model.parameters():  # loud, and no bias or gain where it would not show
            parameter += 0.1 * torch.randn_like(parameter)
        tokens = torch.randint(256, (2, 90))
        logits = model(tokens)
        torch.testing.assert_close(logits, by_hand(model, tokens), rtol=0, atol=2e-5 * float(logits.std()) + 2e-5)
        assert not torch.allclose(logits, tiny()(tokens), atol=0.1 * float(logits.std()))
        nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        torch.testing.assert_close(model.loss(tokens[:, :-1], tokens[:, 1:]).total, nll, rtol=1e-4, atol=1e-4)


def test_given_slopes_are_one_per_head_and_come_to_life_from_meta():
    with pytest.raises(InputError, match="slopes must be one per head, 4; got 2"):
        tiny(position_settings={"slopes": (0.5, 0.25)})
    with torch.device("meta"):
        model = tiny(position_settings={"slopes": (0.5, 0.2, 0.03, 0.001)})
    assert model.to_empty(device="cpu").position.slopes.tolist() == pytest.approx([0.5, 0.2, 0.03, 0.001])
