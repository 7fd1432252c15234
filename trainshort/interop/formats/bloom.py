"""BLOOM: ALiBi, a norm after the embeddings, and each head's query, key and value side by side."""

from typing import Any

from trainshort.interop.formats.base import Format, Model, Weights, line
from trainshort.interop.formats.read_config import length_of, model_config, number, real, require


def read(theirs: dict[str, Any], weights: Weights) -> Model:
    name = "apply_residual_connection_post_layernorm"
    require(theirs, name, False, default=False, why="ours adds to what came before the norm")
    config = model_config(
        vocabulary=number(theirs, "vocab_size"),
        layers=number(theirs, "n_layer", "num_hidden_layers"),
        width=number(theirs, "hidden_size", "n_embed"),
        heads=number(theirs, "n_head", "num_attention_heads"),
        activation="gelu_tanh",
        embedding_norm=True,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", True)),
        norm_eps=real(theirs, "layer_norm_epsilon", default=1e-5),
        dropout=real(theirs, "hidden_dropout", default=0),
        attention_dropout=real(theirs, "attention_dropout", default=0),
    )
    length = theirs.get("seq_length", 2048)
    return Model(config, length_of(length))


_BLOCK = "transformer.h.{}."

BLOCKS = {
    "vocabulary.embedding": line("transformer.word_embeddings"),
    "vocabulary.output": line("lm_head"),
    "layers.{}.attention_norm": line(_BLOCK + "input_layernorm"),
    "layers.{}.attention.qkv": line(_BLOCK + "self_attention.query_key_value", turn="by head"),
    "layers.{}.attention.out": line(_BLOCK + "self_attention.dense"),
    "layers.{}.ffn_norm": line(_BLOCK + "post_attention_layernorm"),
    "layers.{}.ffn.wide": line(_BLOCK + "mlp.dense_h_to_4h"),
    "layers.{}.ffn.narrow": line(_BLOCK + "mlp.dense_4h_to_h"),
    "final_norm": line("transformer.ln_f"),
}
"""Falcon has the same names."""

BLOOM = Format(
    name="bloom",
    summary="BLOOM, ALiBi with a norm after the embeddings",
    read=read,
    lines=BLOCKS | {"embedding_norm": line("transformer.word_embeddings_layernorm")},
    superfluous=("*.self_attention.masked_bias", "*.self_attention.bias"),
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
    renamed=((r"^(?=word_embeddings|h\.|ln_f\.)", "transformer."),),  # of the body alone, as BLOOM itself was saved
)
