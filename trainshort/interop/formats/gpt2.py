"""GPT-2: learned positions. GPT-2 models can be converted to ALiBi, but not imported."""

from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights
from trainshort.interop.formats.btlm import BTLM
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    read_activation,
    read_float,
    read_int,
    require_value,
)

POSITIONS_TENSOR = "transformer.wpe.weight"


def read_gpt2_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a GPT-2 model to a trainshort model with ALiBi.

    The learned positions are dropped. Their mean is added to the embeddings, because the layers were trained on
    embeddings plus positions.

    Args:
        source_config: The content of the model's `config.json`.
        weights: Not used. All formats have this parameter.

    Raises:
        InputError: If a setting is not supported.
    """
    require_value(
        source_config,
        "scale_attn_by_inverse_layer_idx",
        allowed=(False,),
        default=False,
        reason="trainshort scales the attention scores of all layers equally",
    )
    require_value(
        source_config,
        "add_cross_attention",
        allowed=(False,),
        default=False,
        reason="only decoders without cross-attention are supported",
    )
    width = read_int(source_config, "n_embd", "hidden_size")
    scales_scores = source_config.get("scale_attn_weights", True)
    config = make_alibi_config(
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "n_layer", "num_hidden_layers"),
        width=width,
        heads=read_int(source_config, "n_head", "num_attention_heads"),
        feedforward_width=read_int(source_config, "n_inner", default=4 * width),
        activation=read_activation(source_config, "activation_function", default="gelu_new"),
        softmax_scale=None if scales_scores else 1.0,
        tie_embeddings=bool(source_config.get("tie_word_embeddings", True)),
        norm_eps=read_float(source_config, "layer_norm_epsilon", default=1e-5),
    )
    return ImportedModel(
        config,
        training_length=read_int(source_config, "n_positions", "max_position_embeddings", default=1024),
        notes=("the learned positions were dropped, and their mean was added to the embeddings",),
        added_means={"vocabulary.embedding.weight": POSITIONS_TENSOR},
    )


# BTLM has the modules of GPT-2 and a gate in each feed-forward layer.
_GPT2_MODULE_MAP = dict(BTLM.module_map)
del _GPT2_MODULE_MAP["layers.{}.ffn.gate"]

GPT2 = Format(
    name="gpt2",
    summary="GPT-2, learned positions",
    read_config=read_gpt2_config,
    module_map=_GPT2_MODULE_MAP,
    ignored_tensors=(POSITIONS_TENSOR, "*.attn.bias", "*.attn.masked_bias"),
    tied_tensors={"lm_head.weight": "transformer.wte.weight"},
    # The released GPT-2 models were saved without the output head. Their tensor names lack the prefix "transformer.".
    name_replacements=((r"^(?=wte\.|wpe\.|h\.|ln_f\.)", "transformer."),),
    position="learned",
)
