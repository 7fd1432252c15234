"""GPT-2: learned positions, matrices kept the other way round. Converted, not imported."""

from typing import Any

from trainshort.interop.formats.base import Format, ImportedModel, Weights
from trainshort.interop.formats.btlm import BTLM
from trainshort.interop.formats.read_config import activation as known
from trainshort.interop.formats.read_config import model_config, number, read_float, require_value

POSITIONS = "transformer.wpe.weight"


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    require_value(theirs, "scale_attn_by_inverse_layer_idx", False, default=False, why="ours scales all layers alike")
    require_value(theirs, "add_cross_attention", False, default=False, why="our model is a decoder alone")
    width = number(theirs, "n_embd", "hidden_size")
    config = model_config(
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "n_layer", "num_hidden_layers"),
        width=width,
        heads=number(theirs, "n_head", "num_attention_heads"),
        feedforward_width=number(theirs, "n_inner", default=4 * width),
        activation=known(theirs, "activation_function", default="gelu_new"),
        softmax_scale=None if theirs.get("scale_attn_weights", True) else 1.0,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", True)),
        norm_eps=read_float(theirs, "layer_norm_epsilon", default=1e-5),
    )
    notes = ("its learned positions are dropped; their mean goes into the embeddings",)
    means = {"vocabulary.embedding.weight": POSITIONS}
    return ImportedModel(
        config, number(theirs, "n_positions", "max_position_embeddings", default=1024), notes, means=means
    )


GPT2 = Format(
    name="gpt2",
    summary="GPT-2, learned positions",
    read=read,
    lines={name: one for name, one in BTLM.lines.items() if name != "layers.{}.ffn.gate"},  # BTLM took over GPT-2's
    superfluous=(POSITIONS, "*.attn.bias", "*.attn.masked_bias"),
    copies={"lm_head.weight": "transformer.wte.weight"},
    renamed=((r"^(?=wte\.|wpe\.|h\.|ln_f\.)", "transformer."),),  # of the body alone, as GPT-2 itself was saved
    position="learned",
)
