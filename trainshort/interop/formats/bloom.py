"""BLOOM: ALiBi, a LayerNorm after the embeddings, and a QKV projection that is ordered by head."""

from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    parse_length,
    read_float,
    read_int,
    require_value,
)


def read_bloom_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a BLOOM model to trainshort.

    Args:
        source_config: The content of the model's `config.json`.
        weights: Not used. All formats have this parameter.

    Raises:
        InputError: If a setting is not supported.
    """
    require_value(
        source_config,
        "apply_residual_connection_post_layernorm",
        allowed=(False,),
        default=False,
        reason="only residual connections from before the norm are supported",
    )
    config = make_alibi_config(
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "n_layer", "num_hidden_layers"),
        width=read_int(source_config, "hidden_size", "n_embed"),
        heads=read_int(source_config, "n_head", "num_attention_heads"),
        activation="gelu_tanh",
        embedding_norm=True,
        tie_embeddings=bool(source_config.get("tie_word_embeddings", True)),
        norm_eps=read_float(source_config, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(source_config, "hidden_dropout", default=0),
        attention_dropout=read_float(source_config, "attention_dropout", default=0),
    )
    training_length = parse_length(source_config.get("seq_length", 2048))
    return ImportedModel(config, training_length)


_BLOCK = "transformer.h.{}."

BLOOM_MODULE_MAP = {
    "vocabulary.embedding": map_weight("transformer.word_embeddings"),
    "vocabulary.output": map_weight("lm_head"),
    "layers.{}.attention_norm": map_weight(_BLOCK + "input_layernorm"),
    "layers.{}.attention.qkv": map_weight(_BLOCK + "self_attention.query_key_value", transform="deinterleave_qkv"),
    "layers.{}.attention.out": map_weight(_BLOCK + "self_attention.dense"),
    "layers.{}.ffn_norm": map_weight(_BLOCK + "post_attention_layernorm"),
    "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.dense_h_to_4h"),
    "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.dense_4h_to_h"),
    "final_norm": map_weight("transformer.ln_f"),
}
"""The modules that BLOOM and Falcon have in common."""

BLOOM = Format(
    name="bloom",
    summary="BLOOM, ALiBi with a norm after the embeddings",
    read_config=read_bloom_config,
    module_map=BLOOM_MODULE_MAP | {"embedding_norm": map_weight("transformer.word_embeddings_layernorm")},
    ignored_tensors=("*.self_attention.masked_bias", "*.self_attention.bias"),
    tied_tensors={"lm_head.weight": "transformer.word_embeddings.weight"},
    # The released BLOOM models were saved without the output head. Their tensor names lack the prefix "transformer.".
    name_replacements=((r"^(?=word_embeddings|h\.|ln_f\.)", "transformer."),),
)
