"""Refact-1.6B: ALiBi, one key head, gate and wide in one matrix, and norms without biases.

The norms subtract the mean: so does the code that came with the model, whatever others' ports of it do.
"""

from typing import Any

from trainshort.interop.formats.base import Format, Model, Weights, line
from trainshort.interop.formats.read_config import model_config, number, real, require

MULTIPLE = 256
"""The feed-forward width is two thirds of n_inner, rounded up to a multiple of this."""


def read(theirs: dict[str, Any], weights: Weights) -> Model:
    require(theirs, "multi_query", True, default=True, why="the released model has one key head")
    width = number(theirs, "n_embd", "hidden_size")
    inner = 2 * number(theirs, "n_inner", default=4 * width) // 3
    last = "transformer.ln_f.bias" in weights  # of some revisions
    config = model_config(
        vocabulary=number(theirs, "vocab_size"),
        layers=number(theirs, "n_layer", "num_hidden_layers"),
        width=width,
        heads=number(theirs, "n_head", "num_attention_heads"),
        kv_heads=1,
        ffn=-(-inner // MULTIPLE) * MULTIPLE,
        activation="silu",
        gated=True,
        biases=False,
        norm_biases=last,
        tie_embeddings="lm_head.weight" not in weights,
        norm_eps=real(theirs, "layer_norm_epsilon", default=1e-5),
        dropout=real(theirs, "resid_pdrop", default=0),
        attention_dropout=real(theirs, "attn_pdrop", default=0),
    )
    zeros = ("layers.{}.attention_norm", "layers.{}.ffn_norm") if last else ()
    return Model(config, number(theirs, "n_positions", "max_position_embeddings"), zeros=zeros)


_BLOCK = "transformer.h.{}."

REFACT = Format(
    name="refact",
    summary="Refact-1.6B, ALiBi with one key head",
    read=read,
    lines={
        "vocabulary.embedding": line("transformer.wte"),
        "vocabulary.output": line("lm_head"),
        "layers.{}.attention_norm": line(_BLOCK + "ln_1"),
        "layers.{}.attention.qkv": line(_BLOCK + "attn.q", _BLOCK + "attn.kv"),
        "layers.{}.attention.out": line(_BLOCK + "attn.c_proj"),
        "layers.{}.ffn_norm": line(_BLOCK + "ln_2"),
        "layers.{}.ffn.gate": line(_BLOCK + "mlp.gate_up_proj", turn="first half"),
        "layers.{}.ffn.wide": line(_BLOCK + "mlp.gate_up_proj", turn="second half"),
        "layers.{}.ffn.narrow": line(_BLOCK + "mlp.c_proj"),
        "final_norm": line("transformer.ln_f"),
    },
    superfluous=("*.attn.bias", "*.attn.masked_bias", "transformer.bias"),
    renamed=((r"^ln_f\.", "transformer.ln_f."),),
)
