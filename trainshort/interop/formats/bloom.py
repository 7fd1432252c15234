"""BLOOM: ALiBi, a norm after the embeddings, and each head's query, key and value side by side."""

from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import length_of, model_config, number, read_float, require_value


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    name = "apply_residual_connection_post_layernorm"
    require_value(theirs, name, False, default=False, why="ours adds to what came before the norm")
    config = model_config(
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "n_layer", "num_hidden_layers"),
        width=number(theirs, "hidden_size", "n_embed"),
        heads=number(theirs, "n_head", "num_attention_heads"),
        activation="gelu_tanh",
        embedding_norm=True,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", True)),
        norm_eps=read_float(theirs, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(theirs, "hidden_dropout", default=0),
        attention_dropout=read_float(theirs, "attention_dropout", default=0),
    )
    length = theirs.get("seq_length", 2048)
    return ImportedModel(config, length_of(length))


_BLOCK = "transformer.h.{}."

BLOCKS = {
    "vocabulary.embedding": map_weight("transformer.word_embeddings"),
    "vocabulary.output": map_weight("lm_head"),
    "layers.{}.attention_norm": map_weight(_BLOCK + "input_layernorm"),
    "layers.{}.attention.qkv": map_weight(_BLOCK + "self_attention.query_key_value", turn="by head"),
    "layers.{}.attention.out": map_weight(_BLOCK + "self_attention.dense"),
    "layers.{}.ffn_norm": map_weight(_BLOCK + "post_attention_layernorm"),
    "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.dense_h_to_4h"),
    "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.dense_4h_to_h"),
    "final_norm": map_weight("transformer.ln_f"),
}
"""Falcon has the same names."""

BLOOM = Format(
    name="bloom",
    summary="BLOOM, ALiBi with a norm after the embeddings",
    read=read,
    lines=BLOCKS | {"embedding_norm": map_weight("transformer.word_embeddings_layernorm")},
    superfluous=("*.self_attention.masked_bias", "*.self_attention.bias"),
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
    renamed=((r"^(?=word_embeddings|h\.|ln_f\.)", "transformer."),),  # of the body alone, as BLOOM itself was saved
)
