"""Small models of other people's kinds with random, loud weights, and what they should compute.

`compute` is a decoder in the fewest words, written from the formats' own tables: no code of ours is in it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

WIDTH, HEADS, LAYERS, WORDS, LENGTH = 48, 6, 2, 131, 32


def slopes(heads: int = HEADS, most: float = 8) -> torch.Tensor:
    """The released rule: a power of two's sequence, filled up with every second of twice as many."""
    below = 1 << (heads.bit_length() - 1)
    first = [2 ** (-most * (i + 1) / below) for i in range(below)]
    second = [2 ** (-most * (i + 1) / (2 * below)) for i in range(2 * below)]
    return torch.tensor((first + second[::2])[:heads])


@dataclass
class Block:
    norm_1: tuple
    q: tuple
    k: tuple
    v: tuple
    out: tuple
    norm_2: tuple
    wide: tuple
    narrow: tuple
    gate: tuple | None = None


@dataclass
class Decoder:
    """Everything is (weight, bias or None); matrices have outputs as rows."""

    embedding: torch.Tensor
    blocks: list[Block]
    final: tuple | None
    output: torch.Tensor
    slopes: torch.Tensor = field(default_factory=slopes)
    activation: object = F.gelu
    scale: float | None = None
    clip: float | None = None
    factor: float = 1
    logit_scale: float = 1
    rms: bool = False
    eps: float = 1e-5
    embedding_norm: tuple | None = None


def compute(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    def norm(x, weight_and_bias):
        weight, bias = weight_and_bias
        if model.rms:
            return x * (x.pow(2).mean(-1, keepdim=True) + model.eps).rsqrt() * weight
        return F.layer_norm(x, weight.shape, weight, bias, model.eps)

    heads, length = len(model.slopes), tokens.shape[1]
    where = torch.arange(length)
    distance = where[:, None] - where
    bias = (-model.slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    x = model.embedding[tokens] * model.factor
    x = x if model.embedding_norm is None else norm(x, model.embedding_norm)
    for block in model.blocks:
        y = norm(x, block.norm_1)
        parts = [F.linear(y, *part) for part in (block.q, block.k, block.v)]
        parts = parts if model.clip is None else [part.clamp(-model.clip, model.clip) for part in parts]
        dim = parts[0].shape[-1] // heads
        q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
        weight = (q @ k.mT * (model.scale or dim**-0.5) + bias).softmax(-1)
        x = x + F.linear((weight @ v).transpose(1, 2).flatten(2), *block.out)
        y = norm(x, block.norm_2)
        wide = F.linear(y, *block.wide)
        inside = model.activation(wide) if block.gate is None else F.silu(F.linear(y, *block.gate)) * wide
        x = x + F.linear(inside, *block.narrow)
    x = x if model.final is None else norm(x, model.final)
    return F.linear(x, model.output) * model.logit_scale


class Weights(dict):
    """A foreign state dict that is filled as it is asked for."""

    def matrix(self, name: str, rows: int, columns: int, *, bias: bool, transposed: bool = False) -> tuple:
        weight = torch.randn(rows, columns) * 1.2 / columns**0.5
        self[name + ".weight"] = weight.T.contiguous() if transposed else weight
        return weight, self.vector(name + ".bias", rows) if bias else None

    def norm(self, name: str, *, bias: bool) -> tuple:
        self[name + ".weight"] = 1 + 0.2 * torch.randn(WIDTH)
        return self[name + ".weight"], self.vector(name + ".bias", WIDTH) if bias else None

    def vector(self, name: str, size: int) -> torch.Tensor:
        self[name] = 0.3 * torch.randn(size)
        return self[name]

    def table(self, name: str) -> torch.Tensor:
        self[name + ".weight"] = torch.randn(WORDS, WIDTH) * 0.4
        return self[name + ".weight"]


def split(qkv: tuple, sizes: list[int]) -> list[tuple]:
    weights = qkv[0].split(sizes)
    biases = [None] * len(sizes) if qkv[1] is None else qkv[1].split(sizes)
    return list(zip(weights, biases, strict=True))


def save(folder: Path, config: dict, weights: dict, shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """A model's folder as Hugging Face's library saves one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: weight.to(dtype).contiguous().clone() for name, weight in weights.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    table, names = {}, list(stored)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def mpt(*, bias=False, kv=HEADS, clip=None, scale=None, logits=None, most=8, tied=True, ratio=4, replit=False):
    w, dim = Weights(), WIDTH // HEADS
    one, two, up, down, last = ("ln_1", "ln_2", "mlp.mlp_up", "mlp.mlp_down", "ln_f") if replit else (
        "norm_1", "norm_2", "ffn.up_proj", "ffn.down_proj", "norm_f")  # fmt: skip
    embedding, blocks = w.table("transformer.wte"), []
    for i in range(LAYERS):
        at = f"transformer.blocks.{i}."
        qkv = w.matrix(at + "attn.Wqkv", (HEADS + 2 * kv) * dim, WIDTH, bias=bias)
        blocks.append(Block(
            w.norm(at + one, bias=bias), *split(qkv, [WIDTH, kv * dim, kv * dim]),
            w.matrix(at + "attn.out_proj", WIDTH, WIDTH, bias=bias), w.norm(at + two, bias=bias),
            w.matrix(at + up, ratio * WIDTH, WIDTH, bias=bias), w.matrix(at + down, WIDTH, ratio * WIDTH, bias=bias),
        ))  # fmt: skip
    model = Decoder(
        embedding, blocks, w.norm("transformer." + last, bias=bias), embedding if tied else w.table("lm_head"),
        slopes(most=most), scale=scale, clip=clip, logit_scale=1 if logits is None else WIDTH**-0.5,
    )  # fmt: skip
    common = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "vocab_size": WORDS, "max_seq_len": LENGTH,
              "no_bias": not bias, "tie_word_embeddings": tied, "logit_scale": logits}  # fmt: skip
    if replit:
        flat = {"alibi": True, "alibi_bias_max": most, "attn_clip_qkv": clip, "attn_qk_ln": False, "mlp_ratio": ratio}
        return {"model_type": "replit_lm", **common, **flat}, w, model
    attention = {"alibi": True, "alibi_bias_max": most, "clip_qkv": clip, "softmax_scale": scale}
    attention |= {"kv_n_heads": kv} if kv != HEADS else {}
    return {"model_type": "mpt", "expansion_ratio": ratio, "attn_config": attention, **common}, w, model


def baichuan(*, second=False):
    w, inner = Weights(), 80
    embedding, blocks = w.table("model.embed_tokens"), []
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        qkv = w.matrix(at + "self_attn.W_pack", 3 * WIDTH, WIDTH, bias=False)
        blocks.append(Block(
            w.norm(at + "input_layernorm", bias=False), *split(qkv, [WIDTH] * 3),
            w.matrix(at + "self_attn.o_proj", WIDTH, WIDTH, bias=False),
            w.norm(at + "post_attention_layernorm", bias=False), w.matrix(at + "mlp.up_proj", inner, WIDTH, bias=False),
            w.matrix(at + "mlp.down_proj", WIDTH, inner, bias=False),
            w.matrix(at + "mlp.gate_proj", inner, WIDTH, bias=False),
        ))  # fmt: skip
    output = w.table("lm_head")
    output = output / output.norm(dim=1, keepdim=True) if second else output
    model = Decoder(embedding, blocks, w.norm("model.norm", bias=False), output, rms=True, eps=1e-6)
    config = {"model_type": "baichuan", "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
              "num_attention_heads": HEADS, "intermediate_size": inner, "rms_norm_eps": 1e-6, "hidden_act": "silu",
              "model_max_length": LENGTH, **({"z_loss_weight": 0} if second else {})}  # fmt: skip
    return config, w, model


def btlm(*, kind="btlm"):
    w, inner = Weights(), 72
    embedding, blocks = w.table("transformer.wte"), []
    for i in range(LAYERS):
        at = f"transformer.h.{i}."
        qkv = w.matrix(at + "attn.c_attn", 3 * WIDTH, WIDTH, bias=True, transposed=True)
        blocks.append(Block(
            w.norm(at + "ln_1", bias=True), *split(qkv, [WIDTH] * 3),
            w.matrix(at + "attn.c_proj", WIDTH, WIDTH, bias=True, transposed=True), w.norm(at + "ln_2", bias=True),
            w.matrix(at + "mlp.c_fc", inner, WIDTH, bias=True, transposed=True),
            w.matrix(at + "mlp.c_proj", WIDTH, inner, bias=True, transposed=True),
            w.matrix(at + "mlp.c_fc2", inner, WIDTH, bias=True, transposed=True),
        ))  # fmt: skip
    stored = 0.7 * slopes()
    w["transformer.relative_pe.slopes"] = stored[:, None]
    model = Decoder(
        embedding, blocks, w.norm("transformer.ln_f", bias=True), embedding, stored, scale=HEADS / WIDTH, factor=3.5,
        logit_scale=2.2 * 0.25,
    )  # fmt: skip
    scales = {"mup_embeddings_scale": 3.5, "mup_output_alpha": 2.2, "mup_width_scale": 0.25,
              "mup_scale_qk_dot_by_d": True}  # fmt: skip
    if kind == "jais":
        scales = {"embeddings_scale": 3.5, "width_scale": 0.55, "scale_qk_dot_by_d": True}
    config = {"model_type": kind, "vocab_size": WORDS, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
              "n_inner": inner, "n_positions": LENGTH, "activation_function": "swiglu",
              "position_embedding_type": "alibi", **scales}  # fmt: skip
    return config, w, model


def refact():
    w, dim, inner = Weights(), WIDTH // HEADS, 256
    embedding, blocks = w.table("transformer.wte"), []
    for i in range(LAYERS):
        at = f"transformer.h.{i}."
        k, v = split(w.matrix(at + "attn.kv", 2 * dim, WIDTH, bias=False), [dim, dim])
        gate, wide = split(w.matrix(at + "mlp.gate_up_proj", 2 * inner, WIDTH, bias=False), [inner, inner])
        blocks.append(Block(
            w.norm(at + "ln_1", bias=False), w.matrix(at + "attn.q", WIDTH, WIDTH, bias=False), k, v,
            w.matrix(at + "attn.c_proj", WIDTH, WIDTH, bias=False), w.norm(at + "ln_2", bias=False), wide,
            w.matrix(at + "mlp.c_proj", WIDTH, inner, bias=False), gate,
        ))  # fmt: skip
    model = Decoder(embedding, blocks, w.norm("ln_f", bias=True), w.table("lm_head"))
    config = {"model_type": "gpt_refact", "vocab_size": WORDS, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
              "n_positions": LENGTH, "multi_query": True, "layer_norm_epsilon": 1e-5}  # fmt: skip
    return config, w, model


BY_HAND = {
    "mpt with biases": lambda: mpt(bias=True),
    "mpt with key heads": lambda: mpt(kv=2),
    "mpt with one key head": lambda: mpt(kv=1, bias=True),
    "mpt with all settings": lambda: mpt(clip=0.8, scale=0.2, logits="inv_sqrt_d_model", most=16, tied=False, ratio=3),
    "replit": lambda: mpt(replit=True, clip=1.0),
    "baichuan": baichuan,
    "baichuan 2": lambda: baichuan(second=True),
    "btlm": btlm,
    "jais": lambda: btlm(kind="jais"),
    "refact": refact,
}
"""Models that transformers cannot run, or not as their config says."""
