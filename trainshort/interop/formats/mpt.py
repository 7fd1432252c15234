"""MPT and replit-code: ALiBi. replit-code is an MPT with other tensor names and other setting names.

The import follows the config of the model. The MPT class of transformers ignores some settings of the config, for
example `alibi_bias_max`. The logits of the MPT class differ if a model uses such a setting.
"""

from typing import Any

from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    parse_length,
    read_float,
    read_int,
    read_section,
    require_value,
)

REPLIT_ATTENTION_SETTINGS = {
    "alibi": "alibi",
    "alibi_bias_max": "alibi_bias_max",
    "attn_clip_qkv": "clip_qkv",
    "attn_qk_ln": "qk_ln",
    "attn_pdrop": "attn_pdrop",
    "softmax_scale": "softmax_scale",
}
"""Attention settings that replit-code has at the top level of its config, and their names in MPT's `attn_config`."""

ATTENTION_TYPES = ("multihead_attention", "multiquery_attention", "grouped_query_attention")

# The beginning of the note about settings that the MPT class of transformers ignores.
IGNORED_SETTINGS_NOTE = "the MPT class of transformers ignores these settings of the model: "


def read_mpt_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of an MPT or replit-code model to trainshort.

    Args:
        source_config: The content of the model's `config.json`.
        weights: Not used. All formats have this parameter.

    Raises:
        InputError: If a setting is not supported.
    """
    attention_config = _read_attention_config(source_config)
    _check_mpt_supported(source_config, attention_config)

    width = read_int(source_config, "d_model")
    expansion_ratio = read_float(source_config, "expansion_ratio", "mlp_ratio", default=4)
    config = make_alibi_config(
        max_bias=read_float(attention_config, "alibi_bias_max", default=8),
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "n_layers"),
        width=width,
        heads=read_int(source_config, "n_heads"),
        kv_heads=_read_kv_heads(attention_config),
        feedforward_width=round(expansion_ratio * width),
        biases=not source_config.get("no_bias", True),
        tie_embeddings=bool(source_config.get("tie_word_embeddings", True)),
        norm_eps=read_float(source_config, "layer_norm_epsilon", "norm_eps", default=1e-5),
        clip_qkv=_read_optional_float(attention_config, "clip_qkv"),
        softmax_scale=_read_optional_float(attention_config, "softmax_scale"),
        logit_scale=_read_logit_scale(source_config, width),
        window=_read_window(attention_config),
        dropout=read_float(source_config, "resid_pdrop", default=0),
        attention_dropout=read_float(attention_config, "attn_pdrop", default=0),
    )

    notes: tuple[str, ...] = ()
    ignored_settings = _settings_ignored_by_transformers(source_config, attention_config, config)
    if ignored_settings:
        notes = (IGNORED_SETTINGS_NOTE + ", ".join(ignored_settings),)
    # An export of trainshort sets `max_seq_len` to a multiple of the training length, which is in `trained_at`.
    training_length = source_config.get("trained_at", source_config.get("max_seq_len"))
    return ImportedModel(config, parse_length(training_length), notes)


def _read_attention_config(source_config: dict[str, Any]) -> dict[str, Any]:
    """Return the attention settings of an MPT or replit-code model under the names that MPT uses.

    MPT has the attention settings in the section `attn_config` of its config. replit-code has the attention settings at
    the top level of its config, under other names.
    """
    attention_config = {}
    for replit_name, mpt_name in REPLIT_ATTENTION_SETTINGS.items():
        if replit_name in source_config:
            attention_config[mpt_name] = source_config[replit_name]
    return attention_config | read_section(source_config, "attn_config")


def _check_mpt_supported(source_config: dict[str, Any], attention_config: dict[str, Any]) -> None:
    """Raise `InputError` if an MPT model has a setting that trainshort does not support.

    Args:
        source_config: The content of the model's `config.json`.
        attention_config: The attention settings under the names that MPT uses.
    """
    require_value(attention_config, "alibi", allowed=(True,), default=False, reason="only ALiBi models can be imported")
    require_value(
        attention_config,
        "attn_type",
        allowed=ATTENTION_TYPES,
        default="multihead_attention",
        reason=f"supported values are {', '.join(ATTENTION_TYPES)}",
    )
    for name in ("qk_ln", "qk_gn", "prefix_lm", "rope"):
        require_value(
            attention_config,
            name,
            allowed=(False, None),
            default=False,
            reason="trainshort does not support this attention setting",
        )
    require_value(
        source_config,
        "norm_type",
        allowed=("low_precision_layernorm", "layernorm"),
        default="layernorm",
        reason="only LayerNorm is supported",
    )
    ffn_config = read_section(source_config, "ffn_config")
    require_value(ffn_config, "ffn_type", allowed=("mptmlp",), default="mptmlp", reason="only mptmlp is supported")


def _settings_ignored_by_transformers(
    source_config: dict[str, Any], attention_config: dict[str, Any], config: ModelConfig
) -> list[str]:
    """Return the names of the settings that a model uses and that the MPT class of transformers ignores.

    Args:
        source_config: The content of the model's `config.json`.
        attention_config: The attention settings under the names that MPT uses.
        config: The config of the imported model.
    """
    ignored_settings = []
    if source_config.get("logit_scale"):
        ignored_settings.append("logit_scale")
    if attention_config.get("alibi_bias_max", 8) != 8:  # The class always uses 8.
        ignored_settings.append("alibi_bias_max")
    if config.window is not None:
        ignored_settings.append("sliding_window_size")
    if config.ffn_width != 4 * config.width:  # The class always uses a ratio of 4.
        ignored_settings.append("expansion_ratio")
    if config.key_heads != config.heads:
        ignored_settings.append("kv_n_heads")
    if config.biases:
        ignored_settings.append("no_bias")
    return ignored_settings


def _read_kv_heads(attention_config: dict[str, Any]) -> int | None:
    """Return the number of key-value heads, or None if each query head has its own key-value head."""
    if attention_config.get("attn_type") == "multiquery_attention":
        return 1
    if attention_config.get("kv_n_heads"):
        return read_int(attention_config, "kv_n_heads")
    return None


def _read_optional_float(attention_config: dict[str, Any], name: str) -> float | None:
    """Return an attention setting, or None if the setting is missing, null or zero."""
    if not attention_config.get(name):
        return None
    return read_float(attention_config, name, default=0)


def _read_logit_scale(source_config: dict[str, Any], width: int) -> float:
    """Return the number by which a model multiplies its logits.

    Args:
        source_config: The content of the model's `config.json`. Its `logit_scale` is a number, or "inv_sqrt_d_model",
            which stands for 1 / sqrt(width). Without a value, the factor is 1.
        width: The width of the model.
    """
    logit_scale = source_config.get("logit_scale")
    if logit_scale == "inv_sqrt_d_model":
        return width**-0.5
    if isinstance(logit_scale, str):
        raise InputError(f"Invalid config: logit_scale must be a number or 'inv_sqrt_d_model', got {logit_scale!r}.")
    if not logit_scale:
        return 1.0
    return read_float(source_config, "logit_scale", default=1)


def _read_window(attention_config: dict[str, Any]) -> int | None:
    """Return the size of the sliding attention window, or None if the model has no window."""
    if attention_config.get("sliding_window_size") in (None, -1):
        return None
    return read_int(attention_config, "sliding_window_size")


_BLOCK = "transformer.blocks.{}."

MPT = Format(
    name="mpt",
    summary="MPT and replit-code, ALiBi",
    read_config=read_mpt_config,
    module_map={
        "vocabulary.embedding": map_weight("transformer.wte"),
        "vocabulary.output": map_weight("lm_head"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "norm_1"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "attn.Wqkv"),
        "layers.{}.attention.out": map_weight(_BLOCK + "attn.out_proj"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "norm_2"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "ffn.up_proj"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "ffn.down_proj"),
        "final_norm": map_weight("transformer.norm_f"),
    },
    ignored_tensors=("transformer.attn_bias", "transformer.alibi"),
    tied_tensors={"lm_head.weight": "transformer.wte.weight"},
    # The tensor names of replit-code.
    name_replacements=(
        (r"\.ln_(\d)\.", r".norm_\1."),
        (r"\.mlp\.mlp_(up|down)\.", r".ffn.\1_proj."),
        (r"\.ln_f\.", r".norm_f."),
    ),
)
