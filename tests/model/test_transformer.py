"""Tests of the Transformer: sizes, properties that hold for every position method, and error messages."""

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

# FlexAttention compiles each call, which takes too long here.
QUICK_BACKENDS = [name for name in backends.names() if name != "flex"]


def make_tiny_model(**settings) -> TransformerLM:
    """Create the preset "tiny" with some settings changed, in evaluation mode."""
    torch.manual_seed(0)
    return TransformerLM(presets.get("tiny")().replace(**settings)).eval()


# ---- sizes


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        model = TransformerLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [("wikitext103", 246_933_504), ("books", 231_292_928), ("cc100", 1_363_818_496), ("small", 23_109_632)],
)
@pytest.mark.parametrize("position", ["alibi", "sinusoidal", "rotary"])
def test_number_of_parameters_of_presets(preset, num_parameters, position):
    """The number for WikiText-103 is given in the paper. The three position methods have no parameters."""
    config = presets.get(preset)().replace(position=position)
    assert count_parameters(config) == num_parameters


def test_shape_of_cc100_preset():
    config = presets.get("cc100")()
    assert config.layers == 25
    assert config.width == 2048
    assert config.heads == 16
    assert config.ffn_width == 8192


def test_t5_adds_one_table_for_all_layers():
    config = presets.get("wikitext103")().replace(position="t5")
    num_heads = 8
    num_buckets = 32
    assert count_parameters(config) == 246_933_504 + num_heads * num_buckets


# ---- properties of all position methods


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize("backend", ["auto", *QUICK_BACKENDS])
def test_reading_in_parts_with_cache_equals_one_pass(position, backend):
    """A text is read as prompt, single token, second prompt and single tokens."""
    if position not in ("alibi", "fox") and backend.startswith("windowed"):
        pytest.skip(f"{backend} supports linear biases and decay biases only")
    if position == "fire" and backend == "compiled":
        pytest.skip("compiled does not support biases that depend on more than the distance")
    if backend == "compiled" and (reason := kernel_unavailable_reason()):
        pytest.skip(reason)
    model = make_tiny_model(position=position, backend=backend)
    tokens = torch.randint(256, (2, 400))
    cache = Cache()
    parts = [tokens[:, :130], tokens[:, 130:131], tokens[:, 131:380], *tokens[:, 380:].split(1, dim=1)]
    with torch.no_grad():
        expected_logits = model(tokens)
        logits = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    assert cache.length == 400
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", METHODS)
def test_later_tokens_do_not_change_earlier_logits(position):
    model = make_tiny_model(position=position)
    tokens = torch.randint(256, (1, 30))
    changed_tokens = tokens.clone()
    changed_tokens[:, 20:] = (changed_tokens[:, 20:] + 1) % 256
    logits = model(tokens)
    changed_logits = model(changed_tokens)
    torch.testing.assert_close(changed_logits[:, :20], logits[:, :20], rtol=0, atol=1e-6)
    assert (changed_logits[:, 20:] - logits[:, 20:]).abs().max() > 1e-3


@pytest.mark.parametrize("position", METHODS)
def test_packed_documents_equal_separate_documents(position):
    model = make_tiny_model(position=position)
    tokens = torch.randint(256, (1, 30))
    segment_ids = torch.tensor([[4] * 11 + [9] * 19])
    packed_logits = model(tokens, segment_ids=segment_ids)
    torch.testing.assert_close(packed_logits[:, :11], model(tokens[:, :11]), rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_logits[:, 11:], model(tokens[:, 11:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", METHODS)
def test_order_of_earlier_tokens_matters_except_without_positions(position):
    """With one layer and no positions, a token sees its past as a set without order."""
    model = make_tiny_model(position=position, layers=1)
    with torch.no_grad():
        # The initial scores are too small for a visible difference. The initial parameters of KERPLE are random, and
        # larger query and key weights would saturate its softmax.
        model.layers[0].attention.qkv.weight.mul_(3 if position == "kerple" else 20)
        if position == "t5":
            model.position.table.mul_(50)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    swapped_tokens = torch.tensor([[2, 1, 3, 4, 5]])
    difference = (model(tokens) - model(swapped_tokens))[:, -1].abs().max()
    if position == "none":
        assert difference < 1e-5
    else:
        assert difference > 1e-4


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize("adaptive", [None, {"cutoffs": (20, 100)}])
def test_loss_is_the_sum_over_scored_targets(position, adaptive):
    model = make_tiny_model(position=position, adaptive=adaptive)
    tokens, targets = torch.randint(256, (2, 2, 20))
    targets[0, :5] = IGNORED
    total, count = model(tokens, targets)
    assert count == 35
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)

    nll_from_start = model.token_nll(tokens, targets, start=3)
    nll_before_start = model.token_nll(tokens, targets)[:, :3]
    assert nll_from_start.shape == (2, 17)
    torch.testing.assert_close(nll_from_start.sum() + nll_before_start.sum(), total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("position", METHODS)
def test_every_parameter_gets_a_gradient(position):
    position_settings = {"learned_slopes": True} if position == "alibi" else {}
    model = make_tiny_model(
        position=position, position_settings=position_settings, embedding_norm=True, tie_embeddings=False
    )
    total, _ = model(*torch.randint(256, (2, 2, 64)))
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


# ---- options


def test_activation_checkpointing_does_not_change_gradients():
    model = make_tiny_model().train()
    tokens, targets = torch.randint(256, (2, 2, 40))

    def compute_gradients(checkpoint_activations: bool) -> tuple[torch.Tensor, ...]:
        model.checkpoint_activations = checkpoint_activations
        total, _ = model(tokens, targets)
        return torch.autograd.grad(total, list(model.parameters()))

    for grad, expected in zip(compute_gradients(True), compute_gradients(False), strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [6, 12, 20, 40])
def test_numbers_of_heads_that_are_not_powers_of_two(heads):
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
def test_every_option_changes_the_logits(settings):
    tokens = torch.randint(256, (1, 40))
    assert not torch.equal(make_tiny_model(**settings)(tokens), make_tiny_model()(tokens))


@pytest.mark.parametrize("option", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_is_used_in_training_only(option):
    model = make_tiny_model(**{option: 0.5})
    tokens = torch.randint(256, (1, 40))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_bfloat16_model_is_close_to_float32_model():
    tokens = torch.randint(256, (1, 500))
    float32_log_probs = make_tiny_model()(tokens).log_softmax(-1)
    bfloat16_log_probs = make_tiny_model().to(torch.bfloat16)(tokens).float().log_softmax(-1)
    assert bfloat16_log_probs.isfinite().all()
    assert (bfloat16_log_probs - float32_log_probs).abs().max() < 0.05


# ---- error messages
#
# The Makefile deselects tests whose names end in "mistakes_are_explained" when it checks the shapes in all signatures.
# The shape checks would raise their own errors.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position": "alibbi"}, "Unknown position method 'alibbi'. Did you mean 'alibi'"),
        ({"backend": "sdpaa"}, "Unknown attention backend 'sdpaa'. Did you mean 'sdpa'"),
        ({"width": 100, "heads": 8}, "width 100 is not a multiple of heads 8; choose width 96"),
        ({"width": 12, "heads": 4, "position": "rotary"}, "width / heads must be even; got 12 / 4"),
        (
            {"width": 16, "heads": 4, "position": "rotary", "position_settings": {"rotary_fraction": 0.25}},
            "rotary_fraction",
        ),
        ({"kv_heads": 3}, "kv_heads 3 must divide heads 4"),
        ({"widht": 3}, "Unknown setting 'widht'. Did you mean 'width'"),
        ({"vocab_size": 0}, "model.vocab_size"),
        ({"adaptive": {"cutoffs": (5, 3)}}, "cutoffs must be ascending"),
        ({"position_settings": {"slopes": (0.5, 0.25)}}, "slopes must contain one number per head, 4 in total; got 2"),
    ],
)
def test_settings_mistakes_are_explained(settings, message):
    with pytest.raises(InputError, match=message):
        make_tiny_model(**settings)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 2]), r"tokens must have shape \(batch, length\).*got \(2,\)"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
        (torch.tensor([[256]]), "token id 256 is outside the model's vocabulary of 256"),
        (torch.tensor([[-1]]), "token id -1 is outside"),
    ],
)
def test_token_mistakes_are_explained(tokens, message):
    with pytest.raises(InputError, match=message):
        make_tiny_model()(tokens)


def test_segment_id_mistakes_are_explained():
    tokens = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(InputError, match="segment_ids must have the shape of tokens"):
        make_tiny_model()(tokens, segment_ids=torch.ones(1, 3))


def test_unknown_preset_gets_a_suggestion():
    with pytest.raises(InputError, match=r"Unknown preset 'wikitext-103'\. Did you mean 'wikitext103'"):
        presets.get("wikitext-103")


def test_learned_positions_reject_longer_inputs():
    model = make_tiny_model(position="learned", position_settings={"max_length": 8})
    with pytest.raises(InputError, match="stop at 8, but this input reaches 9"):
        model(torch.ones(1, 9, dtype=torch.long))

    cache = Cache()
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.long), cache=cache)
        with pytest.raises(InputError, match="stop at 8, but this input reaches 9"):
            model(torch.ones(1, 1, dtype=torch.long), cache=cache)


def test_adaptive_cutoffs_beyond_the_vocabulary_are_ignored():
    model = make_tiny_model(adaptive=AdaptiveConfig(cutoffs=(100, 300)).model_dump())
    assert model.vocabulary.bands == [(0, 100), (100, 256)]


# ---- settings of imported models


# Settings that only models of other libraries need.
IMPORTED_MODEL_SETTINGS = {
    "RMSNorm": {"norm": "rms"},
    "SwiGLU": {"gated_feedforward": True, "activation": "silu", "biases": False},
    "clipped queries, keys and values": {"clip_qkv": 0.3},
    "softmax scale": {"softmax_scale": 1 / 16},
    "logit scale": {"logit_scale": 0.25},
    "embedding factor": {"embedding_factor": 3.0, "embedding_norm": False},
    "own slopes": {"position_settings": {"slopes": (0.5, 0.2, 0.03, 0.001)}},
    "biases in norms only": {"biases": False, "norm_biases": True},
    "parallel blocks": {"parallel_blocks": True},
}


def compute_reference_logits(model: TransformerLM, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the preset "tiny" with the weights of a model, in plain PyTorch operations."""
    config = model.config
    weights = dict(model.named_parameters())
    slopes = torch.tensor(config.position_settings.slopes or (2**-2, 2**-4, 2**-6, 2**-8))
    activation = F.silu if config.activation == "silu" else F.gelu

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centered = x if config.norm == "rms" else x - x.mean(-1, keepdim=True)
        normalized = centered / (centered.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return normalized * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        qkv = linear(x, f"{name}.qkv")
        if config.clip_qkv is not None:
            qkv = qkv.clamp(-config.clip_qkv, config.clip_qkv)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in qkv.chunk(3, -1))
        scores = q @ k.mT * (config.softmax_scale or 16**-0.5) + bias
        return linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{name}.out")

    def feed_forward(x: torch.Tensor, name: str) -> torch.Tensor:
        hidden = linear(x, f"{name}.wide")
        if config.gated_feedforward:
            hidden = activation(linear(x, f"{name}.gate")) * hidden
        else:
            hidden = activation(hidden)
        return linear(hidden, f"{name}.narrow")

    positions_of_tokens = torch.arange(tokens.shape[1])
    distances = positions_of_tokens[:, None] - positions_of_tokens
    bias = (-slopes[:, None, None] * distances).masked_fill(distances < 0, -torch.inf)

    embedding = weights["vocabulary.embedding.weight"]
    x = embedding[tokens] * config.embedding_factor
    for layer in range(config.layers):
        after_attention = x + attention(norm(x, f"layers.{layer}.attention_norm"), f"layers.{layer}.attention")
        ffn_input = x if config.parallel_blocks else after_attention
        x = after_attention + feed_forward(norm(ffn_input, f"layers.{layer}.ffn_norm"), f"layers.{layer}.ffn")
    return norm(x, "final_norm") @ embedding.T * config.logit_scale


@pytest.mark.parametrize("settings", IMPORTED_MODEL_SETTINGS.values(), ids=IMPORTED_MODEL_SETTINGS)
@torch.no_grad()
def test_settings_of_imported_models_equal_reference(settings):
    model = make_tiny_model(**settings)
    for parameter in model.parameters():
        # Random changes make the effect of every weight visible. Biases are 0 and gains are 1 at first.
        parameter += 0.1 * torch.randn_like(parameter)
    tokens = torch.randint(256, (2, 90))
    logits = model(tokens)
    std = float(logits.std())
    torch.testing.assert_close(logits, compute_reference_logits(model, tokens), rtol=0, atol=2e-5 * std + 2e-5)
    assert not torch.allclose(logits, make_tiny_model()(tokens), atol=0.1 * std)

    expected_loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss = model.loss(tokens[:, :-1], tokens[:, 1:]).total
    torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-4)


def test_slopes_of_the_settings_are_set_when_a_meta_model_gets_memory():
    with torch.device("meta"):
        model = make_tiny_model(position_settings={"slopes": (0.5, 0.2, 0.03, 0.001)})
    assert model.to_empty(device="cpu").position.slopes.tolist() == pytest.approx([0.5, 0.2, 0.03, 0.001])
