"""Make small models of the three ALiBi classes of Hugging Face transformers, and copies without their known bugs."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

WORDS = 131
"""The vocabulary size."""
WIDTH = 48
HEADS = 6
LAYERS = 2
LENGTH = 32

# Longer than all inputs of the tests.
MAX_LENGTH = 4096


def make_model(kind: str, implementation: str | None = None, **settings: Any) -> Any:
    """Make a model with large random weights, so that an error in any part changes the logits visibly.

    Args:
        kind: "mpt", "bloom" or "falcon".
        implementation: The attention implementation of transformers. None means the default.
        settings: Settings of the config that differ from the defaults of this function.
    """
    torch.manual_seed(1)
    match kind:
        case "mpt":
            config = _make_mpt_config(settings)
        case "bloom":
            config = transformers.BloomConfig(
                hidden_size=WIDTH, n_head=HEADS, n_layer=LAYERS, vocab_size=WORDS, **settings
            )
        case "falcon":
            config = _make_falcon_config(settings)
        case _:
            raise ValueError(kind)
    options = {} if implementation is None else {"attn_implementation": implementation}
    model = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    # `generate` must not stop at a token.
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, weight.shape[1] ** -0.5)
    return model


def _make_mpt_config(settings: dict[str, Any]) -> transformers.MptConfig:
    """Make the config of an MPT model. `alibi_bias_max` may be given at the top level of the settings."""
    settings = dict(settings)
    attention = {"alibi": True, "alibi_bias_max": settings.pop("alibi_bias_max", 8)}
    attention |= settings.pop("attn_config", {})
    return transformers.MptConfig(
        d_model=WIDTH,
        n_heads=HEADS,
        n_layers=LAYERS,
        max_seq_len=LENGTH,
        use_cache=True,
        vocab_size=WORDS,
        attn_config=attention,
        **settings,
    )


def _make_falcon_config(settings: dict[str, Any]) -> transformers.FalconConfig:
    """Make the config of a Falcon model with ALiBi, as Falcon-RW."""
    defaults = {
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "new_decoder_architecture": False,
    }
    return transformers.FalconConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        vocab_size=WORDS,
        **(defaults | settings),
    )


def make_reference_model(model: Any) -> Any:
    """Return a copy of a model in float64, without the known bugs of its class.

    - MPT: the copy accepts long inputs and uses the setting `alibi_bias_max`.
    - Falcon: the copy uses the attention implementation that does not add the bias twice.
    """
    model = copy.deepcopy(model).double()
    body = model.transformer
    if hasattr(body, "build_mpt_alibi_tensor"):
        model.config.max_seq_len = MAX_LENGTH
        build_original = type(body).build_mpt_alibi_tensor
        max_bias = model.config.attn_config.alibi_bias_max

        def build_with_max_bias(heads: int, length: int, device: Any = None) -> Tensor:
            return build_original(body, heads, length, max_bias, device)

        body.build_mpt_alibi_tensor = build_with_max_bias
    if hasattr(body, "use_alibi"):
        model.config._attn_implementation = "sdpa"
    return model


def disable_bias_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Falcon compute its ALiBi bias as BLOOM does, without rounding to bfloat16."""
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)


def max_logit_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two logits, in standard deviations of the expected logits."""
    logits = logits.detach().double()
    expected = expected.detach().double()
    return float((logits - expected).abs().max() / expected.std())
