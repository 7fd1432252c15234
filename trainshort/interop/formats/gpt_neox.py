"""GPT-NeoX and Pythia: rotary positions, and blocks that run attention and feed-forward layers in parallel.

GPT-NeoX models can be converted to ALiBi, but not imported. `load_in_memory` loads them with their rotary positions.
"""

from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    read_activation,
    read_float,
    read_int,
    rope_scaling_notes,
)


def read_gpt_neox_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a GPT-NeoX model to a trainshort model with ALiBi. The rotary positions are dropped.

    Args:
        source_config: The content of the model's `config.json`.
        weights: Not used. All formats have this parameter.

    Raises:
        InputError: If a setting is not supported.
    """
    has_attention_biases = bool(source_config.get("attention_bias", True))
    config = make_alibi_config(
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "num_hidden_layers"),
        width=read_int(source_config, "hidden_size"),
        heads=read_int(source_config, "num_attention_heads"),
        feedforward_width=read_int(source_config, "intermediate_size"),
        activation=read_activation(source_config, "hidden_act", default="gelu"),
        attention_biases=None if has_attention_biases else False,
        parallel_blocks=bool(source_config.get("use_parallel_residual", True)),
        tie_embeddings=bool(source_config.get("tie_word_embeddings", False)),
        norm_eps=read_float(source_config, "layer_norm_eps", default=1e-5),
    )
    training_length = read_int(source_config, "max_position_embeddings")
    return ImportedModel(config, training_length, rope_scaling_notes(source_config))


_BLOCK = "gpt_neox.layers.{}."

GPT_NEOX = Format(
    name="gpt_neox",
    summary="GPT-NeoX and Pythia, rotary positions",
    read_config=read_gpt_neox_config,
    module_map={
        "vocabulary.embedding": map_weight("gpt_neox.embed_in"),
        "vocabulary.output": map_weight("embed_out"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "input_layernorm"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "attention.query_key_value", transform="deinterleave_qkv"),
        "layers.{}.attention.out": map_weight(_BLOCK + "attention.dense"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "post_attention_layernorm"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.dense_h_to_4h"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.dense_4h_to_h"),
        "final_norm": map_weight("gpt_neox.final_layer_norm"),
    },
    ignored_tensors=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
    tied_tensors={"embed_out.weight": "gpt_neox.embed_in.weight"},
    position="rotary",
    rotary_halves=True,
)
