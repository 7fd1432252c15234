"""Baichuan-13B and Baichuan2-13B: a Llama architecture with ALiBi.

The config does not say whether a model uses ALiBi. The 7B models use rotary embeddings. Their config has the setting
`max_position_embeddings`, and the config of the 13B models does not have this setting.
"""

from typing import Any

from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Transform, Weights, map_weight
from trainshort.interop.formats.read_config import make_alibi_config, read_float, read_int, require_value

# The vocabulary size of Baichuan 2. Baichuan 2 normalizes the rows of the output matrix in each forward pass.
BAICHUAN2_VOCAB_SIZE = 125_696


def read_baichuan_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a Baichuan model to trainshort.

    Args:
        source_config: The content of the model's `config.json`.
        weights: The tensors of the model.

    Raises:
        InputError: If the model has rotary embeddings, or another setting that is not supported.
    """
    has_rotary_embeddings = "max_position_embeddings" in source_config or "model_max_length" not in source_config
    if has_rotary_embeddings:
        raise InputError(
            "This Baichuan model has rotary positions, as the 7B models have. Only ALiBi models can be imported."
        )
    require_value(source_config, "hidden_act", allowed=("silu",), default="silu", reason="only silu is supported")
    config = make_alibi_config(
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "num_hidden_layers"),
        width=read_int(source_config, "hidden_size"),
        heads=read_int(source_config, "num_attention_heads"),
        feedforward_width=read_int(source_config, "intermediate_size"),
        activation="silu",
        gated_feedforward=True,
        norm="rms",
        biases=False,
        tie_embeddings=bool(source_config.get("tie_word_embeddings", False)),
        norm_eps=read_float(source_config, "rms_norm_eps", default=1e-6),
    )

    transforms: dict[str, Transform] = {}
    notes: tuple[str, ...] = ()
    is_baichuan2 = config.vocab_size == BAICHUAN2_VOCAB_SIZE or "z_loss_weight" in source_config
    if is_baichuan2:
        transforms["vocabulary.output"] = "normalize_rows"
        notes = ("the rows of lm_head were normalized once, instead of in each forward pass",)
    return ImportedModel(config, read_int(source_config, "model_max_length"), notes, transforms)


_BLOCK = "model.layers.{}."

BAICHUAN = Format(
    name="baichuan",
    summary="Baichuan-13B and Baichuan2-13B, a Llama with ALiBi",
    read_config=read_baichuan_config,
    module_map={
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
    ignored_tensors=("model.alibi_mask", "model.future_mask"),
    tied_tensors={"lm_head.weight": "model.embed_tokens.weight"},
)
