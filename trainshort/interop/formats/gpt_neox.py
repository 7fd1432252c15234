"""GPT-NeoX and Pythia: rotary positions, attention and feed-forward layers side by side. Converted, not imported;
`generate` takes it with its rotation, of the first part of each head (import_model.py)."""

from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import activation, model_config, number, read_float, scaled_rotation


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    biases = bool(theirs.get("attention_bias", True))
    config = model_config(
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "num_hidden_layers"),
        width=number(theirs, "hidden_size"),
        heads=number(theirs, "num_attention_heads"),
        feedforward_width=number(theirs, "intermediate_size"),
        activation=activation(theirs, "hidden_act", default="gelu"),
        attention_biases=None if biases else False,
        parallel_blocks=bool(theirs.get("use_parallel_residual", True)),
        tie_embeddings=bool(theirs.get("tie_word_embeddings", False)),
        norm_eps=read_float(theirs, "layer_norm_eps", default=1e-5),
    )
    return ImportedModel(config, number(theirs, "max_position_embeddings"), scaled_rotation(theirs))


_BLOCK = "gpt_neox.layers.{}."

GPT_NEOX = Format(
    name="gpt_neox",
    summary="GPT-NeoX and Pythia, rotary positions",
    read=read,
    lines={
        "vocabulary.embedding": map_weight("gpt_neox.embed_in"),
        "vocabulary.output": map_weight("embed_out"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "input_layernorm"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "attention.query_key_value", turn="by head"),
        "layers.{}.attention.out": map_weight(_BLOCK + "attention.dense"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "post_attention_layernorm"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.dense_h_to_4h"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.dense_4h_to_h"),
        "final_norm": map_weight("gpt_neox.final_layer_norm"),
    },
    superfluous=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
    copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
    position="rotary",
    rotary_halves=True,
)
