"""Baichuan-13B, 1 and 2: a Llama with ALiBi. Nothing in its config says so; the 7B models, which are rotary, have
max_position_embeddings, and these do not."""

from typing import Any

from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Turn, Weights, map_weight
from trainshort.interop.formats.read_config import model_config, number, read_float, require_value

SECOND = 125_696
"""Vocabulary of Baichuan 2, which divides each row of its output matrix by its length whenever it is used."""


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    if "max_position_embeddings" in theirs or "model_max_length" not in theirs:
        raise InputError("The model is a Baichuan with rotary positions (7B), and only ALiBi models can be imported.")
    require_value(theirs, "hidden_act", "silu", default="silu", why="silu is known")
    config = model_config(
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "num_hidden_layers"),
        width=number(theirs, "hidden_size"),
        heads=number(theirs, "num_attention_heads"),
        feedforward_width=number(theirs, "intermediate_size"),
        activation="silu",
        gated_feedforward=True,
        norm="rms",
        biases=False,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", False)),
        norm_eps=read_float(theirs, "rms_norm_eps", default=1e-6),
    )
    turned: dict[str, Turn] = {}
    if config.vocab_size == SECOND or "z_loss_weight" in theirs:
        turned["vocabulary.output"] = "unit rows"
    notes = ("lm_head: rows divided by their length, once",) if turned else ()
    return ImportedModel(config, number(theirs, "model_max_length"), notes, turned)


_BLOCK = "model.layers.{}."

BAICHUAN = Format(
    name="baichuan",
    summary="Baichuan-13B and Baichuan2-13B, a Llama with ALiBi",
    read=read,
    lines={
        "vocabulary.embedding": map_weight("model.embed_tokens"),
        "vocabulary.output": map_weight("lm_head"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "input_layernorm"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "self_attn.W_pack"),
        "layers.{}.attention.out": map_weight(_BLOCK + "self_attn.o_proj"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "post_attention_layernorm"),
        "layers.{}.ffn.gate": map_weight(_BLOCK + "mlp.gate_proj"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.up_proj"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.down_proj"),
        "final_norm": map_weight("model.norm"),
    },
    superfluous=("model.alibi_mask", "model.future_mask"),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)
