"""Falcon with ALiBi (falcon-rw). Its bias is added before the division by the root of the heads' width, so that the
slopes that count are ALiBi's divided by that root."""

from typing import Any

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Weights
from trainshort.interop.formats.bloom import BLOCKS
from trainshort.interop.formats.read_config import length_of, model_config, number, read_float, require_value

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
NOTE = (
    "Hugging Face's Falcon rounds slope times position to bfloat16, whatever the model's dtype, so that it differs "
    "from about 260 tokens on; here nothing is rounded"
)


def read(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    require_value(theirs, "alibi", True, default=False, why="only ALiBi models can be imported")
    for name, default in (("parallel_attn", True), ("new_decoder_architecture", False)):
        require_value(
            theirs, name, False, default=default, why="ours runs attention and feed-forward one after the other"
        )
    name = "apply_residual_connection_post_layernorm"
    require_value(theirs, name, False, default=False, why="ours adds to what came before the norm")
    activation = theirs.get("activation", "gelu")
    if activation not in ACTIVATIONS:
        raise InputError(f"The model has activation {activation!r}; known here: {', '.join(ACTIVATIONS)}.")
    width, heads = number(theirs, "hidden_size"), number(theirs, "num_attention_heads", "n_head")
    config = model_config(
        slopes=tuple((alibi.slopes(heads) / (width / heads) ** 0.5).tolist()),
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "num_hidden_layers", "n_layer"),
        width=width,
        heads=heads,
        kv_heads=1 if theirs.get("multi_query", True) else None,
        feedforward_width=number(theirs, "ffn_hidden_size", default=4 * width),
        activation=ACTIVATIONS[activation],
        biases=bool(theirs.get("bias", False)),
        norm_biases=True,
        tie_embeddings=bool(theirs.get("tie_word_embeddings", True)),
        norm_eps=read_float(theirs, "layer_norm_epsilon", default=1e-5),
        dropout=read_float(theirs, "hidden_dropout", default=0),
        attention_dropout=read_float(theirs, "attention_dropout", default=0),
    )
    length = theirs.get("max_position_embeddings", 2048)
    packed = {} if config.key_heads == heads else {"layers.{}.attention.qkv": "same"}
    return ImportedModel(config, length_of(length), (NOTE,), packed)  # pyright: ignore[reportArgumentType]


FALCON = Format(
    name="falcon",
    summary="Falcon-RW, Falcon with ALiBi",
    read=read,
    lines=BLOCKS,
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)
