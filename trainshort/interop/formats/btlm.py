"""BTLM-3B-8k and Jais: ALiBi, gated feed-forward layers, and the tensor names of GPT-2.

The weights contain the ALiBi slopes. Both models use the scales of maximal update parametrization (muP): attention
scores are divided by the head width, and the embeddings and logits are multiplied by constants.
"""

from typing import Any

from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    read_float,
    read_int,
    read_section,
    require_value,
)

SLOPES_TENSOR = "transformer.relative_pe.slopes"


def read_btlm_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a BTLM or Jais model to trainshort.

    Args:
        source_config: The content of the model's `config.json`.
        weights: The tensors of the model. They contain the ALiBi slopes.

    Raises:
        InputError: If a setting is not supported.
    """
    require_value(
        source_config,
        "position_embedding_type",
        allowed=("alibi",),
        default="learned",
        reason="only ALiBi models can be imported",
    )
    require_value(
        source_config, "activation_function", allowed=("swiglu",), default=None, reason="only swiglu is supported"
    )
    require_value(
        source_config,
        "scale_attn_by_inverse_layer_idx",
        allowed=(False,),
        default=False,
        reason="trainshort scales the attention scores of all layers equally",
    )
    width = read_int(source_config, "n_embd", "hidden_size")
    heads = read_int(source_config, "n_head", "num_attention_heads")

    # The factor of the attention scores. None means 1 / sqrt(head width).
    softmax_scale = None
    # BTLM and Jais use different names for this setting.
    divides_by_head_width = source_config.get("mup_scale_qk_dot_by_d", source_config.get("scale_qk_dot_by_d", False))
    if divides_by_head_width:
        softmax_scale = heads / width  # 1 / head width
    if not source_config.get("scale_attn_weights", True):
        softmax_scale = 1.0

    output_alpha = read_float(source_config, "mup_output_alpha", default=1)
    width_scale = read_float(source_config, "mup_width_scale", "width_scale", default=1)
    slopes, notes = _read_slopes(source_config, weights, heads)
    config = make_alibi_config(
        slopes=slopes,
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "n_layer", "num_hidden_layers"),
        width=width,
        heads=heads,
        feedforward_width=read_int(source_config, "n_inner", default=4 * width),
        activation="silu",
        gated_feedforward=True,
        tie_embeddings=bool(source_config.get("tie_word_embeddings", True)),
        embedding_factor=read_float(source_config, "mup_embeddings_scale", "embeddings_scale", default=1),
        softmax_scale=softmax_scale,
        logit_scale=output_alpha * width_scale,
        norm_eps=read_float(source_config, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(source_config, "resid_pdrop", default=0),
        attention_dropout=read_float(source_config, "attn_pdrop", default=0),
    )
    training_length = read_int(source_config, "n_positions", "max_position_embeddings")
    return ImportedModel(config, training_length, notes)


def _read_slopes(
    source_config: dict[str, Any], weights: Weights, heads: int
) -> tuple[tuple[float, ...] | None, tuple[str, ...]]:
    """Return the ALiBi slopes that a BTLM or Jais model stores, and notes for users.

    The setting `alibi_scaling` can scale the slopes for inputs that are longer than the training length. A constant
    factor is applied. A scaling that depends on the input length is not applied.

    Args:
        source_config: The content of the model's `config.json`.
        weights: The tensors of the model.
        heads: The number of attention heads.

    Returns:
        One slope for each head, or None if the model stores no slopes. The second value holds the notes.

    Raises:
        InputError: If the number of slopes is wrong, or if there is a scaling factor but no slopes.
    """
    scaling = read_section(source_config, "alibi_scaling")
    factor = read_float(scaling, "factor", default=1)
    if SLOPES_TENSOR not in weights:
        if factor != 1:
            raise InputError(
                f"The config has alibi_scaling.factor={factor}, but the model has no tensor {SLOPES_TENSOR} to scale."
            )
        return None, ()

    slopes = weights[SLOPES_TENSOR].flatten().float()
    if len(slopes) != heads:
        raise InputError(
            f"Shape mismatch in {SLOPES_TENSOR}: expected {heads} slopes, one per head, got {len(slopes)}."
        )
    if factor != 1:
        notes = [f"the stored ALiBi slopes were divided by alibi_scaling.factor, {factor}"]
    else:
        notes = ["the ALiBi slopes were read from the weights"]
    if scaling.get("train_seq_len"):
        notes.append(
            "alibi_scaling depends on the input length and is not applied; "
            "`trainshort evaluate --slopes interpolate` has the same effect"
        )
    return tuple((slopes / factor).tolist()), tuple(notes)


_BLOCK = "transformer.h.{}."

BTLM = Format(
    name="btlm",
    summary="BTLM-3B-8k and Jais, ALiBi with GPT-2 tensor names",
    read_config=read_btlm_config,
    module_map={
        "vocabulary.embedding": map_weight("transformer.wte"),
        "vocabulary.output": map_weight("lm_head"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "ln_1"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "attn.c_attn", transform="transpose"),
        "layers.{}.attention.out": map_weight(_BLOCK + "attn.c_proj", transform="transpose"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "ln_2"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.c_fc", transform="transpose"),
        "layers.{}.ffn.gate": map_weight(_BLOCK + "mlp.c_fc2", transform="transpose"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.c_proj", transform="transpose"),
        "final_norm": map_weight("transformer.ln_f"),
    },
    ignored_tensors=(SLOPES_TENSOR, "*.attn.bias", "*.attn.masked_bias"),
    tied_tensors={"lm_head.weight": "transformer.wte.weight"},
)
