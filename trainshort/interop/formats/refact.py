"""Refact-1.6B: ALiBi, one key head, gate and wide in one matrix, and norms without biases.

The norms subtract the mean: so does the code that came with the model, whatever others' ports of it do.
"""

from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import model_config, number, read_float, require_value

MULTIPLE = 256
"""The feed-forward width is two thirds of n_inner, rounded up to a multiple of this."""


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    require_value(theirs, "multi_query", True, default=True, why="the released model has one key head")
    width = number(theirs, "n_embd", "hidden_size")
    inner = 2 * number(theirs, "n_inner", default=4 * width) // 3
    last = "transformer.ln_f.bias" in weights  # of some revisions
    config = model_config(
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "n_layer", "num_hidden_layers"),
        width=width,
        heads=number(theirs, "n_head", "num_attention_heads"),
        kv_heads=1,
        feedforward_width=-(-inner // MULTIPLE) * MULTIPLE,
        activation="silu",
        gated_feedforward=True,
        biases=False,
        norm_biases=last,
        tie_embeddings="lm_head.weight" not in weights,
        norm_eps=read_float(theirs, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(theirs, "resid_pdrop", default=0),
        attention_dropout=read_float(theirs, "attn_pdrop", default=0),
    )
    zeros = ("layers.{}.attention_norm", "layers.{}.ffn_norm") if last else ()
    return ImportedModel(config, number(theirs, "n_positions", "max_position_embeddings"), zeros=zeros)


_BLOCK = "transformer.h.{}."

REFACT = Format(
    name="refact",
    summary="Refact-1.6B, ALiBi with one key head",
    read=read,
    lines={
        "vocabulary.embedding": map_weight("transformer.wte"),
        "vocabulary.output": map_weight("lm_head"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "ln_1"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "attn.q", _BLOCK + "attn.kv"),
        "layers.{}.attention.out": map_weight(_BLOCK + "attn.c_proj"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "ln_2"),
        "layers.{}.ffn.gate": map_weight(_BLOCK + "mlp.gate_up_proj", turn="first half"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.gate_up_proj", turn="second half"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.c_proj"),
        "final_norm": map_weight("transformer.ln_f"),
    },
    superfluous=("*.attn.bias", "*.attn.masked_bias", "transformer.bias"),
    renamed=((r"^ln_f\.", "transformer.ln_f."),),
)
