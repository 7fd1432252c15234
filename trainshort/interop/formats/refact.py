"""Refact-1.6B: ALiBi, multi-query attention, and one matrix for both inputs of the gated feed-forward layer.

The norms are LayerNorms without biases, as in the code that was published with the model.
"""

import math
from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import make_alibi_config, read_float, read_int, require_value

# The feed-forward width is two thirds of `n_inner`, rounded up to a multiple of this number.
FFN_WIDTH_MULTIPLE = 256


def read_refact_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a Refact model to trainshort.

    Args:
        source_config: The content of the model's `config.json`.
        weights: The tensors of the model. They show whether the embeddings are tied, and whether the final norm has a
            bias.

    Raises:
        InputError: If a setting is not supported.
    """
    require_value(
        source_config,
        "multi_query",
        allowed=(True,),
        default=True,
        reason="only models with multi-query attention are supported",
    )
    width = read_int(source_config, "n_embd", "hidden_size")
    n_inner = read_int(source_config, "n_inner", default=4 * width)
    feedforward_width = math.ceil((2 * n_inner // 3) / FFN_WIDTH_MULTIPLE) * FFN_WIDTH_MULTIPLE
    # Some revisions of the released model have a bias in the final norm only.
    has_final_norm_bias = "transformer.ln_f.bias" in weights
    config = make_alibi_config(
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "n_layer", "num_hidden_layers"),
        width=width,
        heads=read_int(source_config, "n_head", "num_attention_heads"),
        kv_heads=1,
        feedforward_width=feedforward_width,
        activation="silu",
        gated_feedforward=True,
        biases=False,
        norm_biases=has_final_norm_bias,
        tie_embeddings="lm_head.weight" not in weights,
        norm_eps=read_float(source_config, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(source_config, "resid_pdrop", default=0),
        attention_dropout=read_float(source_config, "attn_pdrop", default=0),
    )
    zero_biases: tuple[str, ...] = ()
    if has_final_norm_bias:
        # In trainshort, either all norms have a bias or none.
        zero_biases = ("layers.{}.attention_norm", "layers.{}.ffn_norm")
    training_length = read_int(source_config, "n_positions", "max_position_embeddings")
    return ImportedModel(config, training_length, zero_biases=zero_biases)


_BLOCK = "transformer.h.{}."

REFACT = Format(
    name="refact",
    summary="Refact-1.6B, ALiBi with one key head",
    read_config=read_refact_config,
    module_map={
        "vocabulary.embedding": map_weight("transformer.wte"),
        "vocabulary.output": map_weight("lm_head"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "ln_1"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "attn.q", _BLOCK + "attn.kv"),
        "layers.{}.attention.out": map_weight(_BLOCK + "attn.c_proj"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "ln_2"),
        "layers.{}.ffn.gate": map_weight(_BLOCK + "mlp.gate_up_proj", transform="first_half"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.gate_up_proj", transform="second_half"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.c_proj"),
        "final_norm": map_weight("transformer.ln_f"),
    },
    ignored_tensors=("*.attn.bias", "*.attn.masked_bias", "transformer.bias"),
    name_replacements=((r"^ln_f\.", "transformer.ln_f."),),
)
