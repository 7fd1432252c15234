"""Llama and its relatives (Mistral, Qwen2): rotary positions, RMSNorm, SwiGLU, grouped heads. Converted, not imported.

Its q and k rows lie in the order that rotation in halves wants; without rotation any order common to both will do, and
`generate`, which takes it with its rotation, lays them in pairs (import_model.py).
"""

from typing import Any

from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import activation, model_config, number, read_float, scaled_rotation

OUT = "model.layers.0.self_attn.o_proj.bias"


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    width, heads = number(theirs, "hidden_size"), number(theirs, "num_attention_heads")
    if number(theirs, "head_dim", default=max(1, width // heads)) * heads != width:
        raise InputError(
            f"The model has heads of width {theirs['head_dim']}, and ours are hidden_size over heads wide."
        )
    qwen = theirs.get("model_type") == "qwen2"  # biases of q, k and v without a setting that says so
    biases = qwen or bool(theirs.get("attention_bias", False))
    window = theirs.get("sliding_window") if theirs.get("use_sliding_window", not qwen) else None
    config = model_config(
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=number(theirs, "num_key_value_heads", default=heads),
        feedforward_width=number(theirs, "intermediate_size"),
        activation=activation(theirs, "hidden_act", default="silu"),
        gated_feedforward=True,
        norm="rms",
        biases=False,
        attention_biases=biases,
        feedforward_biases=bool(theirs.get("mlp_bias", False)),
        window=number(theirs, "sliding_window") if window else None,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", False)),
        norm_eps=read_float(theirs, "rms_norm_eps", default=1e-6),
    )
    zeros = ("layers.{}.attention.out",) if biases and OUT not in weights else ()
    return ImportedModel(config, number(theirs, "max_position_embeddings"), scaled_rotation(theirs), zeros=zeros)


_BLOCK = "model.layers.{}."
_ATTENTION = _BLOCK + "self_attn."

LLAMA = Format(
    name="llama",
    summary="Llama, Mistral and Qwen2, rotary positions",
    read=read,
    lines={
        "vocabulary.embedding": map_weight("model.embed_tokens"),
        "vocabulary.output": map_weight("lm_head"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "input_layernorm"),
        "layers.{}.attention.qkv": map_weight(_ATTENTION + "q_proj", _ATTENTION + "k_proj", _ATTENTION + "v_proj"),
        "layers.{}.attention.out": map_weight(_ATTENTION + "o_proj"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "post_attention_layernorm"),
        "layers.{}.ffn.gate": map_weight(_BLOCK + "mlp.gate_proj"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.up_proj"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.down_proj"),
        "final_norm": map_weight("model.norm"),
    },
    superfluous=("*.rotary_emb.inv_freq",),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    position="rotary",
    rotary_halves=True,
)
