"""Export targets `hf-mpt` and `hf-bloom`: Hugging Face folders for the MPT and BLOOM classes of transformers.

The folders need no code of trainshort. These classes ignore some settings that their configs can hold, so a model that
needs such a setting is not exported.
"""

from pathlib import Path
from typing import Any

from trainshort.config.run_config import ModelConfig
from trainshort.interop.export.base import MAX_LENGTH_MULTIPLE, ExportSource, ExportTarget
from trainshort.interop.export.hf import MAX_ERRORS, Transformers, write_hugging_face_folder
from trainshort.interop.export.transforms import (
    PLAIN_ALIBI,
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


def _no_biases(config: ModelConfig) -> bool:
    return not any(config.has_biases(place) for place in ("attention", "feedforward", "norm"))


_COMMON = (
    Requirement(lambda c: c.final_norm, "final_norm=False", "train with final_norm=True"),
    Requirement(
        lambda c: c.ffn_width <= 4 * c.width, "ffn {config.ffn_width}", "train with ffn at most four times width"
    ),
    Requirement(
        lambda c: c.position_settings.max_bias == 8,
        "max_bias {config.position_settings.max_bias}",
        "that class follows 8 alone",
    ),
)
MPT_NEEDS = (
    *PLAIN_ALIBI,
    Requirement(_no_biases, "biases", "train with biases=False, as the recipe portable-128 does"),
    Requirement(lambda c: c.activation == "gelu", "activation {config.activation}", "train with gelu"),
    *_COMMON,
)
BLOOM_NEEDS = (
    *PLAIN_ALIBI,
    Requirement(lambda c: c.embedding_norm, "embedding_norm=False", "train with embedding_norm=True"),
    Requirement(lambda c: c.activation == "gelu_tanh", "activation {config.activation}", "train with gelu_tanh"),
    Requirement(lambda c: c.clip_qkv is None, "clip_qkv {config.clip_qkv}", "train without clip_qkv"),
    *_COMMON,
)


def as_mpt(model: ExportModel) -> ExportModel:
    return fold_embedding_norm(fold_scales(pad_ffn(repeat_kv_heads(model), 4 * model.config.width), scores=False))


def as_bloom(model: ExportModel) -> ExportModel:
    return add_zero_biases(fold_scales(pad_ffn(repeat_kv_heads(model), 4 * model.config.width)))


def mpt_config(config: ModelConfig, length: int) -> dict[str, Any]:
    """Types matter: the class refuses 8.0 where it wants 8."""
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": config.width,
        "n_heads": config.heads,
        "n_layers": config.layers,
        "expansion_ratio": 4,
        "vocab_size": config.vocab_size,
        "max_seq_len": MAX_LENGTH_MULTIPLE * length,
        "trained_at": length,
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


def bloom_config(config: ModelConfig, length: int) -> dict[str, Any]:
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
        "seq_length": length,
        "use_cache": True,
        "dtype": "float32",
    }


def renamed(kind: Format, model: ExportModel) -> dict[str, Any]:
    """The tensors under their names, turned their way."""
    made = {}
    for name, weight in model.weights.items():
        module, _, ending = name.rpartition(".")
        parts = module.split(".")
        index = parts[1] if parts[0] == "layers" else ""
        line = kind.lines[module.replace(f"layers.{index}.", "layers.{}.", 1) if index else module]
        made[f"{line.names[0].format(index)}.{ending}"] = from_trainshort(weight, line.transform, model.config)
    return made


def mpt_tensors(model: ExportModel) -> dict[str, Any]:
    return renamed(MPT, model)


def bloom_tensors(model: ExportModel) -> dict[str, Any]:
    return renamed(BLOOM, model)


def write_mpt(folder: Path, run: ExportSource) -> None:
    config = mpt_config(run.model.config, run.length)
    write_hugging_face_folder(folder, run, config, mpt_tensors(run.model))


def write_bloom(folder: Path, run: ExportSource) -> None:
    config = bloom_config(run.model.config, run.length)
    write_hugging_face_folder(folder, run, config, bloom_tensors(run.model))


_LOADING = "AutoModelForCausalLM.from_pretrained, in float32"

HF_MPT = ExportTarget(
    summary="transformers, as an MPT",
    requirements=MPT_NEEDS,
    transform=as_mpt,
    write=write_mpt,
    runtime=Transformers,
    max_errors=MAX_ERRORS,
    loading=_LOADING,
)
HF_BLOOM = ExportTarget(
    summary="transformers, as a BLOOM",
    requirements=BLOOM_NEEDS,
    transform=as_bloom,
    write=write_bloom,
    runtime=Transformers,
    max_errors=MAX_ERRORS,
    loading=_LOADING,
)
