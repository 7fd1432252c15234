"""BTLM-3B-8k and Jais: GPT-2's names with ALiBi, gated layers, stored slopes and the scales of maximal update
parametrisation (query · key divided by the heads' width, embeddings and logits multiplied)."""

from typing import Any

from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import model_config, number, read_float, read_section, require_value

SLOPES = "transformer.relative_pe.slopes"


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    require_value(
        theirs, "position_embedding_type", "alibi", default="learned", why="only ALiBi models can be imported"
    )
    require_value(theirs, "activation_function", "swiglu", default=None, why="swiglu is known")
    require_value(theirs, "scale_attn_by_inverse_layer_idx", False, default=False, why="ours scales all layers alike")
    width, heads = number(theirs, "n_embd", "hidden_size"), number(theirs, "n_head", "num_attention_heads")
    by_width = theirs.get("mup_scale_qk_dot_by_d", theirs.get("scale_qk_dot_by_d", False))
    scale = heads / width if by_width else None
    if not theirs.get("scale_attn_weights", True):
        scale = 1.0
    slopes, notes = _slopes(theirs, weights, heads)
    config = model_config(
        slopes=slopes,
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "n_layer", "num_hidden_layers"),
        width=width,
        heads=heads,
        feedforward_width=number(theirs, "n_inner", default=4 * width),
        activation="silu",
        gated_feedforward=True,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", True)),
        embedding_factor=read_float(theirs, "mup_embeddings_scale", "embeddings_scale", default=1),
        softmax_scale=scale,
        logit_scale=read_float(theirs, "mup_output_alpha", default=1)
        * read_float(theirs, "mup_width_scale", "width_scale", default=1),
        norm_eps=read_float(theirs, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(theirs, "resid_pdrop", default=0),
        attention_dropout=read_float(theirs, "attn_pdrop", default=0),
    )
    return ImportedModel(config, number(theirs, "n_positions", "max_position_embeddings"), notes)


def _slopes(theirs: dict[str, Any], weights: Weights, heads: int) -> tuple[tuple[float, ...] | None, tuple[str, ...]]:
    """The stored slopes, if there are any, and what their scaling means."""
    scaling = read_section(theirs, "alibi_scaling")
    factor = read_float(scaling, "factor", default=1)
    if SLOPES not in weights:
        if factor != 1:
            raise InputError(f"The model has alibi_scaling.factor {factor} but no tensor {SLOPES} to divide by it.")
        return None, ()
    stored = weights[SLOPES].flatten().float()
    if len(stored) != heads:
        raise InputError(f"{SLOPES} should be one slope per head, {heads}; it holds {len(stored)} numbers.")
    notes = ["slopes: as stored" + (f", divided by alibi_scaling.factor {factor}" if factor != 1 else "")]
    if scaling.get("train_seq_len"):
        notes.append("alibi_scaling by length is not applied; evaluate --slopes interpolate does the same")
    return tuple((stored / factor).tolist()), tuple(notes)


_BLOCK = "transformer.h.{}."

BTLM = Format(
    name="btlm",
    summary="BTLM-3B-8k and Jais, ALiBi with GPT-2 tensor names",
    read=read,
    lines={
        "vocabulary.embedding": map_weight("transformer.wte"),
        "vocabulary.output": map_weight("lm_head"),
        "layers.{}.attention_norm": map_weight(_BLOCK + "ln_1"),
        "layers.{}.attention.qkv": map_weight(_BLOCK + "attn.c_attn", turn="transposed"),
        "layers.{}.attention.out": map_weight(_BLOCK + "attn.c_proj", turn="transposed"),
        "layers.{}.ffn_norm": map_weight(_BLOCK + "ln_2"),
        "layers.{}.ffn.wide": map_weight(_BLOCK + "mlp.c_fc", turn="transposed"),
        "layers.{}.ffn.gate": map_weight(_BLOCK + "mlp.c_fc2", turn="transposed"),
        "layers.{}.ffn.narrow": map_weight(_BLOCK + "mlp.c_proj", turn="transposed"),
        "final_norm": map_weight("transformer.ln_f"),
    },
    superfluous=(SLOPES, "*.attn.bias", "*.attn.masked_bias"),
    copies={"lm_head.weight": "transformer.wte.weight"},
)
