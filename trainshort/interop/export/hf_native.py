"""Export targets `hf-mpt` and `hf-bloom`: Hugging Face folders for the MPT and BLOOM classes of transformers.

The folders need no code of trainshort. These classes ignore some settings that their configs can hold, so a model that
needs such a setting is not exported.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from trainshort.config.run_config import ModelConfig
from trainshort.interop.export.base import MAX_LENGTH_MULTIPLE, ExportSource, ExportTarget
from trainshort.interop.export.hf import MAX_ERRORS, Transformers, write_hugging_face_folder
from trainshort.interop.export.transforms import (
    ALIBI_REQUIREMENTS,
    ExportModel,
    Requirement,
    add_zero_biases,
    fold_embedding_norm,
    fold_scales,
    pad_ffn,
    repeat_kv_heads,
)
from trainshort.interop.formats.base import Format, from_trainshort
from trainshort.interop.formats.bloom import BLOOM
from trainshort.interop.formats.mpt import MPT


def _has_no_biases(config: ModelConfig) -> bool:
    """Return whether no linear layer and no norm of a model has a bias."""
    has_any_bias = config.has_biases("attention") or config.has_biases("feedforward") or config.has_biases("norm")
    return not has_any_bias


_COMMON_REQUIREMENTS = (
    Requirement(lambda c: c.final_norm, "final_norm=False", "Train with final_norm=True."),
    Requirement(
        lambda c: c.ffn_width <= 4 * c.width,
        "feedforward_width {config.ffn_width}",
        "Train with a feedforward_width of at most four times the width.",
    ),
    Requirement(
        lambda c: c.position_settings.max_bias == 8,
        "max_bias {config.position_settings.max_bias}",
        "Only 8 is supported.",
    ),
)
MPT_REQUIREMENTS = (
    *ALIBI_REQUIREMENTS,
    Requirement(_has_no_biases, "biases", "Train with biases=False, for example with the recipe portable-128."),
    Requirement(lambda c: c.activation == "gelu", "activation {config.activation}", "Train with gelu."),
    *_COMMON_REQUIREMENTS,
)
BLOOM_REQUIREMENTS = (
    *ALIBI_REQUIREMENTS,
    Requirement(lambda c: c.embedding_norm, "embedding_norm=False", "Train with embedding_norm=True."),
    Requirement(lambda c: c.activation == "gelu_tanh", "activation {config.activation}", "Train with gelu_tanh."),
    Requirement(lambda c: c.clip_qkv is None, "clip_qkv {config.clip_qkv}", "Train without clip_qkv."),
    *_COMMON_REQUIREMENTS,
)


def transform_for_mpt(model: ExportModel) -> ExportModel:
    """Change the weights of a model, so that the MPT class of transformers supports the model."""
    model = repeat_kv_heads(model)  # The class has no grouped-query attention.
    model = pad_ffn(model, width=4 * model.config.width)  # The class has feed-forward layers of this width only.
    model = fold_scales(model, fold_softmax_scale=False)  # MPT has the setting softmax_scale.
    return fold_embedding_norm(model)  # The class has no norm after the embeddings.


def transform_for_bloom(model: ExportModel) -> ExportModel:
    """Change the weights of a model, so that the BLOOM class of transformers supports the model."""
    model = repeat_kv_heads(model)  # The class has no grouped-query attention.
    model = pad_ffn(model, width=4 * model.config.width)  # The class has feed-forward layers of this width only.
    model = fold_scales(model)  # Multiply the weights by the scale factors, which the class does not have.
    return add_zero_biases(model)  # All linear layers and norms of the class have biases.


def make_mpt_config(config: ModelConfig, training_length: int) -> dict[str, Any]:
    """Return the `config.json` of an MPT model.

    transformers checks the types of the values: the integer 8 must not be the float 8.0.

    Args:
        config: The config of the trainshort model.
        training_length: The training length.
    """
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": config.width,
        "n_heads": config.heads,
        "n_layers": config.layers,
        "expansion_ratio": 4,
        "vocab_size": config.vocab_size,
        "max_seq_len": MAX_LENGTH_MULTIPLE * training_length,
        "trained_at": training_length,
        "no_bias": True,
        "learned_pos_emb": False,
        "norm_type": "low_precision_layernorm",
        "embedding_fraction": 1.0,
        "layer_norm_epsilon": config.norm_eps,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "dtype": "float32",
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "clip_qkv": config.clip_qkv,
            "softmax_scale": config.softmax_scale,
            "attn_type": "multihead_attention",
            "attn_pdrop": 0,
            "prefix_lm": False,
            "qk_ln": False,
        },
    }


def make_bloom_config(config: ModelConfig, training_length: int) -> dict[str, Any]:
    """Return the `config.json` of a BLOOM model.

    Args:
        config: The config of the trainshort model.
        training_length: The training length.
    """
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": config.width,
        "n_head": config.heads,
        "n_layer": config.layers,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.norm_eps,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "seq_length": training_length,
        "use_cache": True,
        "dtype": "float32",
    }


def to_source_tensors(model_format: Format, model: ExportModel) -> dict[str, Tensor]:
    """Return the weights of a model under the names and in the layout of another program.

    For example, "layers.3.ffn.wide.weight" becomes "transformer.blocks.3.ffn.up_proj.weight" for MPT. This is
    the inverse of the import of a model (`map_weights`).

    Args:
        model_format: The format of the other program. Each trainshort module must have exactly one source module.
        model: The model to export.
    """
    tensors = {}
    for name, weight in model.weights.items():
        module, _, parameter = name.rpartition(".")  # for example "layers.3.ffn.wide" and "weight"
        layer_index = ""
        pattern = module  # for example "layers.{}.ffn.wide", which stands for all layers
        if module.startswith("layers."):
            _, layer_index, layer_module = module.split(".", 2)
            pattern = "layers.{}." + layer_module
        source = model_format.module_map[pattern]
        source_module = source.names[0].format(layer_index)
        tensors[f"{source_module}.{parameter}"] = from_trainshort(weight, source.transform, model.config)
    return tensors


def write_mpt(folder: Path, run: ExportSource) -> None:
    """Write a Hugging Face folder for the MPT class of transformers."""
    config = make_mpt_config(run.model.config, run.training_length)
    write_hugging_face_folder(folder, run, config, to_source_tensors(MPT, run.model))


def write_bloom(folder: Path, run: ExportSource) -> None:
    """Write a Hugging Face folder for the BLOOM class of transformers."""
    config = make_bloom_config(run.model.config, run.training_length)
    write_hugging_face_folder(folder, run, config, to_source_tensors(BLOOM, run.model))


_LOADING = "AutoModelForCausalLM.from_pretrained, in float32"

HF_MPT = ExportTarget(
    requirements=MPT_REQUIREMENTS,
    transform=transform_for_mpt,
    write=write_mpt,
    runtime=Transformers,
    max_errors=MAX_ERRORS,
    loading=_LOADING,
)
HF_BLOOM = ExportTarget(
    requirements=BLOOM_REQUIREMENTS,
    transform=transform_for_bloom,
    write=write_bloom,
    runtime=Transformers,
    max_errors=MAX_ERRORS,
    loading=_LOADING,
)
