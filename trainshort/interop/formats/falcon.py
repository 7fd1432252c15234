"""Falcon with ALiBi (Falcon-RW).

Falcon adds the ALiBi bias to the attention scores before the scores are divided by the square root of the head width.
The slopes of the imported model are therefore the ALiBi slopes divided by this square root.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort import alibi
from trainshort.interop.formats.base import Format, ImportedModel, Transform, Weights
from trainshort.interop.formats.bloom import BLOOM_MODULE_MAP
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    parse_length,
    read_float,
    read_int,
    require_value,
    translate_activation,
)

FALCON_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
"""The activation functions of Falcon configs, and their names in trainshort."""

# With up to 8 heads, all ALiBi slopes are powers of two, which bfloat16 can represent.
EXACT_SLOPES_NOTE = (
    "the Falcon class of transformers rounds the ALiBi bias to bfloat16, so its logits differ for inputs of more than "
    "about 260 tokens; trainshort does not round the bias"
)

# The differences were measured with small random models of 12 to 71 heads.
ROUNDED_SLOPES_NOTE = (
    "the Falcon class of transformers rounds the ALiBi slopes and the ALiBi bias to bfloat16, so its logits differ for "
    "short inputs too (by about 0.001 standard deviations of the logits at 10 tokens, and 0.1 at 200 tokens); "
    "trainshort does not round the slopes and the bias"
)


def read_falcon_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a Falcon model to trainshort.

    Args:
        source_config: The content of the model's `config.json`.
        weights: Not used. All formats have this parameter.

    Raises:
        InputError: If a setting is not supported.
    """
    _check_falcon_supported(source_config)
    activation = translate_activation("activation", source_config.get("activation", "gelu"), FALCON_ACTIVATIONS)
    width = read_int(source_config, "hidden_size")
    heads = read_int(source_config, "num_attention_heads", "n_head")
    unscaled_slopes = alibi.slopes(heads)
    head_width = width / heads
    slopes = unscaled_slopes / head_width**0.5
    is_multi_query = source_config.get("multi_query", True)
    config = make_alibi_config(
        slopes=tuple(slopes.tolist()),
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "num_hidden_layers", "n_layer"),
        width=width,
        heads=heads,
        kv_heads=1 if is_multi_query else None,
        feedforward_width=read_int(source_config, "ffn_hidden_size", default=4 * width),
        activation=activation,
        biases=bool(source_config.get("bias", False)),
        norm_biases=True,
        tie_embeddings=bool(source_config.get("tie_word_embeddings", True)),
        norm_eps=read_float(source_config, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(source_config, "hidden_dropout", default=0),
        attention_dropout=read_float(source_config, "attention_dropout", default=0),
    )

    training_length = parse_length(source_config.get("max_position_embeddings", 2048))
    transforms: dict[str, Transform] = {}
    if config.key_heads != heads:
        # A multi-query model stores q of all heads, then k, then v. This is the order of trainshort.
        transforms["layers.{}.attention.qkv"] = "identity"
    return ImportedModel(config, training_length, (_make_rounding_note(unscaled_slopes),), transforms)


def _make_rounding_note(unscaled_slopes: Float[Tensor, " heads"]) -> str:
    """Return a note for users on how the rounding in transformers changes the logits of a Falcon model.

    Args:
        unscaled_slopes: The ALiBi slopes before they are divided by the square root of the head width. The Falcon class
            of transformers rounds these slopes.
    """
    rounded_slopes = unscaled_slopes.bfloat16().float()
    if torch.equal(rounded_slopes, unscaled_slopes):
        return EXACT_SLOPES_NOTE
    return ROUNDED_SLOPES_NOTE


def _check_falcon_supported(source_config: dict[str, Any]) -> None:
    """Raise `InputError` if a Falcon model has no ALiBi, or blocks of another structure than trainshort's blocks."""
    require_value(source_config, "alibi", allowed=(True,), default=False, reason="only ALiBi models can be imported")
    block_reason = "only blocks that run attention before the feed-forward layer are supported"
    require_value(source_config, "parallel_attn", allowed=(False,), default=True, reason=block_reason)
    require_value(source_config, "new_decoder_architecture", allowed=(False,), default=False, reason=block_reason)
    require_value(
        source_config,
        "apply_residual_connection_post_layernorm",
        allowed=(False,),
        default=False,
        reason="only residual connections from before the norm are supported",
    )


FALCON = Format(
    name="falcon",
    summary="Falcon-RW, Falcon with ALiBi",
    read_config=read_falcon_config,
    module_map=BLOOM_MODULE_MAP,
    tied_tensors={"lm_head.weight": "transformer.word_embeddings.weight"},
)
