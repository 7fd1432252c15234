"""MPT (MosaicML, and Hugging Face's class of that name), and replit-code, which is one with other names.

The import follows what the config says; Hugging Face's own class follows less of it (alibi_bias_max, logit_scale,
kv_n_heads and biases are ignored there), so that its logits differ where those are used.
"""

from typing import Any

from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import (
    length_of,
    model_config,
    number,
    read_float,
    read_section,
    require_value,
)

FLAT = {
    "alibi": "alibi",
    "alibi_bias_max": "alibi_bias_max",
    "attn_clip_qkv": "clip_qkv",
    "attn_qk_ln": "qk_ln",
    "attn_pdrop": "attn_pdrop",
    "softmax_scale": "softmax_scale",
}
"""replit-code says in one breath what MPT has under attn_config."""


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    attention = read_section(theirs, "attn_config")
    attention = {inner: theirs[name] for name, inner in FLAT.items() if name in theirs} | attention
    require_value(attention, "alibi", True, default=False, why="only ALiBi models can be imported")
    kinds = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    require_value(attention, "attn_type", *kinds, default=kinds[0], why=f"these are known: {', '.join(kinds)}")
    for name in ("qk_ln", "qk_gn", "prefix_lm", "rope"):
        require_value(attention, name, False, None, default=False, why="our attention has no such part")
    require_value(
        theirs, "norm_type", "low_precision_layernorm", "layernorm", default="layernorm", why="LayerNorm is known"
    )
    require_value(read_section(theirs, "ffn_config"), "ffn_type", "mptmlp", default="mptmlp", why="mptmlp is known")
    width, heads = number(theirs, "d_model"), number(theirs, "n_heads")
    ratio = read_float(theirs, "expansion_ratio", "mlp_ratio", default=4)
    tied = bool(theirs.get("tie_word_embeddings", True))
    grouped = 1 if attention.get("attn_type") == "multiquery_attention" else None
    clip, scale = attention.get("clip_qkv"), attention.get("softmax_scale")
    config = model_config(
        max_bias=read_float(attention, "alibi_bias_max", default=8),
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "n_layers"),
        width=width,
        heads=heads,
        kv_heads=grouped or (number(attention, "kv_n_heads") if attention.get("kv_n_heads") else None),
        feedforward_width=round(ratio * width),
        biases=not theirs.get("no_bias", True),
        tie_embeddings=tied,
        norm_eps=read_float(theirs, "layer_norm_epsilon", "norm_eps", default=1e-5),
        clip_qkv=read_float(attention, "clip_qkv", default=0) if clip else None,
        softmax_scale=read_float(attention, "softmax_scale", default=0) if scale else None,
        logit_scale=_logit_scale(theirs, width),
        window=_window(attention),
        dropout=read_float(theirs, "resid_pdrop", default=0),
        attention_dropout=read_float(attention, "attn_pdrop", default=0),
    )
    ignored = [name for name in ("logit_scale",) if theirs.get(name)]
    ignored += ["alibi_bias_max"] * (attention.get("alibi_bias_max", 8) != 8)
    ignored += ["sliding_window_size"] * (config.window is not None)
    ignored += ["expansion_ratio"] * (config.ffn_width != 4 * width)
    ignored += ["kv_n_heads"] * (config.key_heads != heads) + ["no_bias"] * config.biases
    notes = (f"followed here, ignored by Hugging Face's class: {', '.join(ignored)}",) if ignored else ()
    length = theirs.get("trained_at", theirs.get("max_seq_len"))  # our own exports leave room for longer inputs
    return ImportedModel(config, length_of(length), notes)


def _logit_scale(theirs: dict[str, Any], width: int) -> float:
    scale = theirs.get("logit_scale")
    if scale == "inv_sqrt_d_model":
        return width**-0.5
    if isinstance(scale, str):
        raise InputError(f"The model has logit_scale {scale!r}; a number or 'inv_sqrt_d_model' was expected.")
    return read_float(theirs, "logit_scale", default=1) if scale else 1.0


def _window(attention: dict[str, Any]) -> int | None:
    return None if attention.get("sliding_window_size") in (None, -1) else number(attention, "sliding_window_size")


_BLOCK = "transformer.blocks.{}."

MPT = Format(
    name="mpt",
    summary="MPT and replit-code, ALiBi",
    read=read,
    lines={
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
    superfluous=("transformer.attn_bias", "transformer.alibi"),
    copies={"lm_head.weight": "transformer.wte.weight"},
    renamed=(
        (r"\.ln_(\d)\.", r".norm_\1."),
        (r"\.mlp\.mlp_(up|down)\.", r".ffn.\1_proj."),
        (r"\.ln_f\.", r".norm_f."),
    ),
)
