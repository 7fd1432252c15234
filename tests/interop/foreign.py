"""Make small models in the formats of other programs, and compute their logits with an independent implementation.

The function of each format fills a state dict with the tensor names of the format. It also returns a `Decoder`, which
holds the same weights under common names. `compute` calculates the logits of a `Decoder` without code of trainshort.
The weights are random and large, so that an error in any part of the model changes the logits visibly.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

WIDTH = 48
HEADS = 6
LAYERS = 2
WORDS = 131
"""The vocabulary size. Tests replace this value to add a tokenizer."""
LENGTH = 32
"""The training length that the configs state."""

Affine = tuple[Tensor, Tensor | None]
"""The weight and the bias of a linear layer or a norm. Rows of a weight matrix are outputs, as in PyTorch."""


def slopes(heads: int = HEADS, max_bias: float = 8) -> Tensor:
    """Return the ALiBi slopes as the authors' code computes them.

    For a power of two, the slopes are a geometric sequence. Other numbers of heads use the sequence of the next smaller
    power of two, and then every second slope of the sequence of the next larger power of two.
    """
    smaller = 1 << (heads.bit_length() - 1)
    larger = 2 * smaller
    smaller_sequence = [2 ** (-max_bias * (i + 1) / smaller) for i in range(smaller)]
    larger_sequence = [2 ** (-max_bias * (i + 1) / larger) for i in range(larger)]
    return torch.tensor((smaller_sequence + larger_sequence[::2])[:heads])


@dataclass
class Block:
    """The weights of one Transformer block. `gate` is None for feed-forward layers without a gate."""

    norm_1: Affine
    q: Affine
    k: Affine
    v: Affine
    out: Affine
    norm_2: Affine
    wide: Affine
    narrow: Affine
    gate: Affine | None = None


@dataclass
class Decoder:
    """The weights and settings of a decoder with ALiBi.

    Attributes:
        embedding: The embedding matrix.
        blocks: The Transformer blocks.
        final: The final norm, or None.
        output: The output matrix.
        slopes: The ALiBi slope of each head.
        activation: The activation function of feed-forward layers without a gate.
        scale: The factor of the attention scores. None means 1 / sqrt(head width).
        clip: Queries, keys and values are clipped to this absolute value.
        factor: The factor of the embeddings.
        logit_scale: The factor of the logits.
        rms: Whether the norms are RMSNorms instead of LayerNorms.
        eps: The constant that norms add to the variance.
        embedding_norm: The norm after the embeddings, or None.
    """

    embedding: Tensor
    blocks: list[Block]
    final: Affine | None
    output: Tensor
    slopes: Tensor = field(default_factory=slopes)
    activation: Callable[[Tensor], Tensor] = F.gelu
    scale: float | None = None
    clip: float | None = None
    factor: float = 1
    logit_scale: float = 1
    rms: bool = False
    eps: float = 1e-5
    embedding_norm: Affine | None = None


def compute(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the logits of a decoder."""
    length = tokens.shape[1]
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    bias = (-model.slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)

    x = model.embedding[tokens] * model.factor
    if model.embedding_norm is not None:
        x = _apply_norm(model, x, model.embedding_norm)
    for block in model.blocks:
        x = x + _attention(model, block, _apply_norm(model, x, block.norm_1), bias)
        x = x + _feed_forward(model, block, _apply_norm(model, x, block.norm_2))
    if model.final is not None:
        x = _apply_norm(model, x, model.final)
    return F.linear(x, model.output) * model.logit_scale


def _apply_norm(model: Decoder, x: Tensor, norm: Affine) -> Tensor:
    weight, bias = norm
    if model.rms:
        return x * (x.pow(2).mean(-1, keepdim=True) + model.eps).rsqrt() * weight
    return F.layer_norm(x, weight.shape, weight, bias, model.eps)


def _attention(model: Decoder, block: Block, x: Tensor, bias: Tensor) -> Tensor:
    heads = len(model.slopes)
    q, k, v = (F.linear(x, *projection) for projection in (block.q, block.k, block.v))
    if model.clip is not None:
        q, k, v = (part.clamp(-model.clip, model.clip) for part in (q, k, v))
    head_width = q.shape[-1] // heads
    q, k, v = (part.unflatten(-1, (-1, head_width)).transpose(1, 2) for part in (q, k, v))
    k = k.repeat_interleave(heads // k.shape[1], 1)
    v = v.repeat_interleave(heads // v.shape[1], 1)
    scores = q @ k.mT * (model.scale or head_width**-0.5) + bias
    attended = scores.softmax(-1) @ v
    return F.linear(attended.transpose(1, 2).flatten(2), *block.out)


def _feed_forward(model: Decoder, block: Block, x: Tensor) -> Tensor:
    wide = F.linear(x, *block.wide)
    if block.gate is None:
        hidden = model.activation(wide)
    else:
        hidden = F.silu(F.linear(x, *block.gate)) * wide
    return F.linear(hidden, *block.narrow)


class Weights(dict[str, Tensor]):
    """A state dict. Each method adds tensors with random values and returns the values."""

    def matrix(self, name: str, rows: int, columns: int, *, bias: bool, transposed: bool = False) -> Affine:
        """Add a linear layer. `transposed` stores the transposed matrix, as GPT-2 does."""
        weight = torch.randn(rows, columns) * 1.2 / columns**0.5
        self[name + ".weight"] = weight.T.contiguous() if transposed else weight
        return weight, self.vector(name + ".bias", rows) if bias else None

    def norm(self, name: str, *, bias: bool) -> Affine:
        """Add a norm."""
        self[name + ".weight"] = 1 + 0.2 * torch.randn(WIDTH)
        return self[name + ".weight"], self.vector(name + ".bias", WIDTH) if bias else None

    def vector(self, name: str, size: int) -> Tensor:
        """Add a bias."""
        self[name] = 0.3 * torch.randn(size)
        return self[name]

    def table(self, name: str) -> Tensor:
        """Add an embedding matrix or an output matrix."""
        self[name + ".weight"] = torch.randn(WORDS, WIDTH) * 0.4
        return self[name + ".weight"]


ForeignModel = tuple[dict[str, Any], Weights, Decoder]
"""The config, the state dict, and the same model as a `Decoder`."""


def split_rows(linear: Affine, sizes: list[int]) -> list[Affine]:
    """Split the rows of a linear layer, for example into q, k and v."""
    weight, bias = linear
    weights = weight.split(sizes)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    return list(zip(weights, biases, strict=True))


def save(folder: Path, config: dict, weights: dict, shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model as the folder that the Hugging Face library writes.

    Args:
        folder: The folder, which must not exist.
        config: The content of `config.json`.
        weights: The state dict.
        shards: The number of safetensors files. More than one file gets an index.
        dtype: The dtype of the stored tensors.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: weight.to(dtype).contiguous().clone() for name, weight in weights.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    weight_map = {}
    names = list(stored)
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        shard_names = names[shard::shards]
        save_file({name: stored[name] for name in shard_names}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard_names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


MPT_NAMES = {"norm_1": "norm_1", "norm_2": "norm_2", "up": "ffn.up_proj", "down": "ffn.down_proj", "final": "norm_f"}
REPLIT_NAMES = {"norm_1": "ln_1", "norm_2": "ln_2", "up": "mlp.mlp_up", "down": "mlp.mlp_down", "final": "ln_f"}


def mpt(
    *,
    bias: bool = False,
    kv_heads: int = HEADS,
    clip: float | None = None,
    scale: float | None = None,
    logit_scale: str | None = None,
    max_bias: float = 8,
    tied: bool = True,
    ratio: int = 4,
    replit: bool = False,
) -> ForeignModel:
    """Make an MPT model, or a replit-code model, which is an MPT with other names.

    Args:
        bias: Whether linear layers and norms have biases.
        kv_heads: The number of key-value heads.
        clip: The absolute value to which queries, keys and values are clipped.
        scale: The factor of the attention scores.
        logit_scale: None, or "inv_sqrt_d_model".
        max_bias: The exponent of the smallest ALiBi slope.
        tied: Whether the output matrix is the embedding matrix.
        ratio: The width of the feed-forward layers, divided by the width of the model.
        replit: Whether to make a replit-code model.
    """
    weights = Weights()
    head_width = WIDTH // HEADS
    names = REPLIT_NAMES if replit else MPT_NAMES
    embedding = weights.table("transformer.wte")
    blocks = []
    for i in range(LAYERS):
        prefix = f"transformer.blocks.{i}."
        qkv = weights.matrix(prefix + "attn.Wqkv", (HEADS + 2 * kv_heads) * head_width, WIDTH, bias=bias)
        q, k, v = split_rows(qkv, [WIDTH, kv_heads * head_width, kv_heads * head_width])
        block = Block(
            norm_1=weights.norm(prefix + names["norm_1"], bias=bias),
            q=q,
            k=k,
            v=v,
            out=weights.matrix(prefix + "attn.out_proj", WIDTH, WIDTH, bias=bias),
            norm_2=weights.norm(prefix + names["norm_2"], bias=bias),
            wide=weights.matrix(prefix + names["up"], ratio * WIDTH, WIDTH, bias=bias),
            narrow=weights.matrix(prefix + names["down"], WIDTH, ratio * WIDTH, bias=bias),
        )
        blocks.append(block)
    model = Decoder(
        embedding,
        blocks,
        final=weights.norm("transformer." + names["final"], bias=bias),
        output=embedding if tied else weights.table("lm_head"),
        slopes=slopes(max_bias=max_bias),
        scale=scale,
        clip=clip,
        logit_scale=1 if logit_scale is None else WIDTH**-0.5,
    )
    config: dict[str, Any] = {
        "d_model": WIDTH,
        "n_heads": HEADS,
        "n_layers": LAYERS,
        "vocab_size": WORDS,
        "max_seq_len": LENGTH,
        "no_bias": not bias,
        "tie_word_embeddings": tied,
        "logit_scale": logit_scale,
    }
    if replit:
        config |= {
            "model_type": "replit_lm",
            "alibi": True,
            "alibi_bias_max": max_bias,
            "attn_clip_qkv": clip,
            "attn_qk_ln": False,
            "mlp_ratio": ratio,
        }
    else:
        attention = {"alibi": True, "alibi_bias_max": max_bias, "clip_qkv": clip, "softmax_scale": scale}
        if kv_heads != HEADS:
            attention["kv_n_heads"] = kv_heads
        config |= {"model_type": "mpt", "expansion_ratio": ratio, "attn_config": attention}
    return config, weights, model


def baichuan(*, version: int = 1) -> ForeignModel:
    """Make a Baichuan model. Version 2 normalizes the rows of the output matrix."""
    weights = Weights()
    ffn_width = 80
    embedding = weights.table("model.embed_tokens")
    blocks = []
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        q, k, v = split_rows(weights.matrix(prefix + "self_attn.W_pack", 3 * WIDTH, WIDTH, bias=False), [WIDTH] * 3)
        block = Block(
            norm_1=weights.norm(prefix + "input_layernorm", bias=False),
            q=q,
            k=k,
            v=v,
            out=weights.matrix(prefix + "self_attn.o_proj", WIDTH, WIDTH, bias=False),
            norm_2=weights.norm(prefix + "post_attention_layernorm", bias=False),
            wide=weights.matrix(prefix + "mlp.up_proj", ffn_width, WIDTH, bias=False),
            narrow=weights.matrix(prefix + "mlp.down_proj", WIDTH, ffn_width, bias=False),
            gate=weights.matrix(prefix + "mlp.gate_proj", ffn_width, WIDTH, bias=False),
        )
        blocks.append(block)
    output = weights.table("lm_head")
    if version == 2:
        output = output / output.norm(dim=1, keepdim=True)
    model = Decoder(embedding, blocks, weights.norm("model.norm", bias=False), output, rms=True, eps=1e-6)
    config = {
        "model_type": "baichuan",
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": ffn_width,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "model_max_length": LENGTH,
    }
    if version == 2:
        config["z_loss_weight"] = 0
    return config, weights, model


def btlm(*, model_type: str = "btlm") -> ForeignModel:
    """Make a BTLM or a Jais model. Both have the same weights, and other names for the scale factors."""
    weights = Weights()
    ffn_width = 72
    embedding = weights.table("transformer.wte")
    blocks = []
    for i in range(LAYERS):
        prefix = f"transformer.h.{i}."
        qkv = weights.matrix(prefix + "attn.c_attn", 3 * WIDTH, WIDTH, bias=True, transposed=True)
        q, k, v = split_rows(qkv, [WIDTH] * 3)
        block = Block(
            norm_1=weights.norm(prefix + "ln_1", bias=True),
            q=q,
            k=k,
            v=v,
            out=weights.matrix(prefix + "attn.c_proj", WIDTH, WIDTH, bias=True, transposed=True),
            norm_2=weights.norm(prefix + "ln_2", bias=True),
            wide=weights.matrix(prefix + "mlp.c_fc", ffn_width, WIDTH, bias=True, transposed=True),
            narrow=weights.matrix(prefix + "mlp.c_proj", WIDTH, ffn_width, bias=True, transposed=True),
            gate=weights.matrix(prefix + "mlp.c_fc2", ffn_width, WIDTH, bias=True, transposed=True),
        )
        blocks.append(block)
    stored_slopes = 0.7 * slopes()
    weights["transformer.relative_pe.slopes"] = stored_slopes[:, None]
    model = Decoder(
        embedding,
        blocks,
        final=weights.norm("transformer.ln_f", bias=True),
        output=embedding,
        slopes=stored_slopes,
        scale=HEADS / WIDTH,
        factor=3.5,
        logit_scale=2.2 * 0.25,
    )
    config = {
        "model_type": model_type,
        "vocab_size": WORDS,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_layer": LAYERS,
        "n_inner": ffn_width,
        "n_positions": LENGTH,
        "activation_function": "swiglu",
        "position_embedding_type": "alibi",
    }
    if model_type == "jais":
        config |= {"embeddings_scale": 3.5, "width_scale": 0.55, "scale_qk_dot_by_d": True}
    else:
        config |= {
            "mup_embeddings_scale": 3.5,
            "mup_output_alpha": 2.2,
            "mup_width_scale": 0.25,
            "mup_scale_qk_dot_by_d": True,
        }
    return config, weights, model


def refact() -> ForeignModel:
    """Make a Refact model."""
    weights = Weights()
    head_width = WIDTH // HEADS
    ffn_width = 256
    embedding = weights.table("transformer.wte")
    blocks = []
    for i in range(LAYERS):
        prefix = f"transformer.h.{i}."
        kv = weights.matrix(prefix + "attn.kv", 2 * head_width, WIDTH, bias=False)
        k, v = split_rows(kv, [head_width, head_width])
        gate_and_wide = weights.matrix(prefix + "mlp.gate_up_proj", 2 * ffn_width, WIDTH, bias=False)
        gate, wide = split_rows(gate_and_wide, [ffn_width, ffn_width])
        block = Block(
            norm_1=weights.norm(prefix + "ln_1", bias=False),
            q=weights.matrix(prefix + "attn.q", WIDTH, WIDTH, bias=False),
            k=k,
            v=v,
            out=weights.matrix(prefix + "attn.c_proj", WIDTH, WIDTH, bias=False),
            norm_2=weights.norm(prefix + "ln_2", bias=False),
            wide=wide,
            narrow=weights.matrix(prefix + "mlp.c_proj", WIDTH, ffn_width, bias=False),
            gate=gate,
        )
        blocks.append(block)
    model = Decoder(embedding, blocks, final=weights.norm("ln_f", bias=True), output=weights.table("lm_head"))
    config = {
        "model_type": "gpt_refact",
        "vocab_size": WORDS,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_layer": LAYERS,
        "n_positions": LENGTH,
        "multi_query": True,
        "layer_norm_epsilon": 1e-5,
    }
    return config, weights, model


def mpt_with_all_settings() -> ForeignModel:
    """Make an MPT model that uses the settings that the MPT class of transformers ignores."""
    return mpt(clip=0.8, scale=0.2, logit_scale="inv_sqrt_d_model", max_bias=16, tied=False, ratio=3)


FOREIGN_MODELS: dict[str, Callable[[], ForeignModel]] = {
    "mpt with biases": lambda: mpt(bias=True),
    "mpt with 2 key-value heads": lambda: mpt(kv_heads=2),
    "mpt with 1 key-value head": lambda: mpt(kv_heads=1, bias=True),
    "mpt with all settings": mpt_with_all_settings,
    "replit": lambda: mpt(replit=True, clip=1.0),
    "baichuan": baichuan,
    "baichuan 2": lambda: baichuan(version=2),
    "btlm": btlm,
    "jais": lambda: btlm(model_type="jais"),
    "refact": refact,
}
"""Models that transformers has no class for, or whose class in transformers ignores a part of the config."""
