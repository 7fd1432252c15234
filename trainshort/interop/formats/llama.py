"""Llama, Mistral and Qwen2: rotary positions, RMSNorm, SwiGLU and grouped-query attention.

These models can be converted to ALiBi, but not imported. `load_in_memory` loads them with their rotary positions.
"""

from typing import Any

from trainshort.errors import InputError
from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    read_activation,
    read_float,
    read_int,
    rope_scaling_notes,
)

OUTPUT_BIAS_TENSOR = "model.layers.0.self_attn.o_proj.bias"


def read_llama_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the config of a Llama, Mistral or Qwen2 model to a trainshort model with ALiBi.

    The rotary positions are dropped.

    Args:
        source_config: The content of the model's `config.json`.
        weights: The tensors of the model. They show whether the output projection of attention has biases.

    Raises:
        InputError: If a setting is not supported.
    """
    width = read_int(source_config, "hidden_size")
    heads = read_int(source_config, "num_attention_heads")
    head_width = read_int(source_config, "head_dim", default=max(1, width // heads))
    if head_width * heads != width:
        raise InputError(
            f"Unsupported setting head_dim={head_width}: "
            f"only hidden_size / num_attention_heads ({width} / {heads}) is supported."
        )

    is_qwen2 = source_config.get("model_type") == "qwen2"
    # Qwen2 always has biases for q, k and v. Its config has no setting for these biases.
    has_attention_biases = is_qwen2 or bool(source_config.get("attention_bias", False))

    window = None
    # Qwen2 ignores the window unless use_sliding_window is set.
    uses_window = source_config.get("use_sliding_window", not is_qwen2)
    if uses_window and source_config.get("sliding_window"):
        window = read_int(source_config, "sliding_window")

    config = make_alibi_config(
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=read_int(source_config, "num_key_value_heads", default=heads),
        feedforward_width=read_int(source_config, "intermediate_size"),
        activation=read_activation(source_config, "hidden_act", default="silu"),
        gated_feedforward=True,
        norm="rms",
        biases=False,
        attention_biases=has_attention_biases,
        feedforward_biases=bool(source_config.get("mlp_bias", False)),
        window=window,
        tie_embeddings=bool(source_config.get("tie_word_embeddings", False)),
        norm_eps=read_float(source_config, "rms_norm_eps", default=1e-6),
    )
    zero_biases: tuple[str, ...] = ()
    if has_attention_biases and OUTPUT_BIAS_TENSOR not in weights:
        zero_biases = ("layers.{}.attention.out",)
    return ImportedModel(
        config,
        training_length=read_int(source_config, "max_position_embeddings"),
        notes=rope_scaling_notes(source_config),
        zero_biases=zero_biases,
    )


_BLOCK = "model.layers.{}."
_ATTENTION = _BLOCK + "self_attn."

LLAMA = Format(
    name="llama",
    summary="Llama, Mistral and Qwen2, rotary positions",
    read_config=read_llama_config,
    module_map={
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
    ignored_tensors=("*.rotary_emb.inv_freq",),
    tied_tensors={"lm_head.weight": "model.embed_tokens.weight"},
    position="rotary",
    rotary_halves=True,
)
