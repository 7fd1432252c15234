"""GGUF, the file of llama.cpp, written directly: its own converter takes no tokenizer that was trained here.

Architecture `mpt`, or `bloom` for models with a norm after the embeddings. Its layers take q, k and v in our order, and
its slopes come from the number of heads inside its kernels. GELU is computed there by tanh from a table of
half-precision numbers, whichever GELU a model has; verify measures what that costs.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainshort.data.tokenizer import Tokenizer, byte_alphabet
from trainshort.data.tokenizer.built import ByteTokenizer, WordTokenizer
from trainshort.interop.rewriting import NO_CLIPPED_SCALE, PLAIN_ALIBI, Need, Plain, normed_table, unscaled, with_biases
from trainshort.optional import require_package

FILE = "model.gguf"
TYPES = ("f32", "f16", "q8_0")
NEEDS = (
    *PLAIN_ALIBI,
    NO_CLIPPED_SCALE,
    Need(lambda c: c.activation != "relu", "activation relu", "train with gelu or gelu_tanh"),
    Need(lambda c: c.activation != "silu", "activation silu", "train with gelu or gelu_tanh"),
    Need(lambda c: c.final_norm, "final_norm=False", "train with final_norm=True"),
)
NAMES = {
    "vocabulary.embedding": "token_embd",
    "vocabulary.output": "output",
    "embedding_norm": "token_embd_norm",
    "final_norm": "output_norm",
    "attention_norm": "attn_norm",
    "attention.qkv": "attn_qkv",
    "attention.out": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.wide": "ffn_up",
    "ffn.narrow": "ffn_down",
}


def rewritten(model: Plain) -> Plain:
    """llama.cpp's bloom has a norm after the embeddings, but the usual slopes alone and no clipping; its mpt has those,
    and no such norm."""
    model = unscaled(model)
    if model.max_bias != 8 or model.config.clip_qkv is not None:
        return normed_table(model)
    return with_biases(model) if model.config.embedding_norm else model


def write(folder: Path, model: Plain, *, name: str, length: int, tokenizer: Tokenizer, kind: str) -> None:
    """The model and its tokenizer as one file."""
    require_package("gguf", "Writing a GGUF file", "trainshort[interop]")
    import gguf

    config = model.config
    arch = "bloom" if config.embedding_norm else "mpt"
    writer = gguf.GGUFWriter(folder / FILE, arch)
    writer.add_name(name)
    types = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16}
    writer.add_file_type(types.get(kind, gguf.LlamaFileType.MOSTLY_Q8_0))
    writer.add_context_length(length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.key_heads)
    writer.add_layer_norm_eps(config.norm_eps)
    if arch == "mpt":
        writer.add_max_alibi_bias(model.max_bias)
        if config.clip_qkv is not None:
            writer.add_clamp_kqv(config.clip_qkv)
    _add_tokenizer(writer, tokenizer, config.vocabulary)
    for ours, weight in model.weights.items():
        data, stored = _stored(gguf, weight.detach().float().contiguous(), kind)
        writer.add_tensor(_name(ours), data, raw_dtype=stored)
    with _closed(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


@contextmanager
def _closed(writer: Any) -> Iterator[None]:
    """Numpy, by which it writes, tells a full disk by two numbers and no errno; and a file that is left open keeps its
    disk busy."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            writer.close()
        raise error if error.errno else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    writer.close()


def _name(ours: str) -> str:
    module, _, ending = ours.rpartition(".")
    parts = module.split(".", 2)
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{NAMES[parts[2]]}.{ending}"
    return f"{NAMES[module]}.{ending}"


def _stored(gguf: Any, weight: torch.Tensor, kind: str) -> tuple[np.ndarray, Any]:
    """Matrices in the type that was asked for, where their rows allow it; vectors stay as they are."""
    numbers = weight.numpy()
    if weight.dim() == 2 and kind == "q8_0" and weight.shape[1] % 32 == 0:
        quantized = gguf.GGMLQuantizationType.Q8_0
        return gguf.quants.quantize(numbers, quantized), quantized
    if weight.dim() == 2 and kind != "f32":
        return numbers.astype(np.float16), gguf.GGMLQuantizationType.F16
    return numbers, gguf.GGMLQuantizationType.F32


def tokenizer_misfit(tokenizer: Tokenizer | None) -> str | None:
    """llama.cpp's server, and most that is built on it, wants text and not token numbers."""
    if tokenizer is None:
        return "a run without a tokenizer; put its tokenizer.json into the run folder, or export --to hf."
    if isinstance(tokenizer, WordTokenizer) or not _byte_level(json.loads(tokenizer.to_json())):
        return (
            f"the tokenizer '{tokenizer.name}', which is no byte-level BPE; train with --data.tokenizer bpe or bytes, "
            "or export --to hf or ctranslate2."
        )
    return None


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Byte-level BPE as llama.cpp's `gpt2`."""
    layout = json.loads(tokenizer.to_json())
    ids = dict(layout["model"]["vocab"]) | {one["content"]: one["id"] for one in layout.get("added_tokens") or ()}
    special = {one["content"] for one in layout.get("added_tokens") or () if one.get("special")}
    words = [f"<unused{number}>" for number in range(vocabulary)]
    for word, number in ids.items():
        words[number] = word
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in layout["model"]["merges"]]
    if not merges:
        # An empty list is not written at all, and llama.cpp refuses a file without: one pair that no text has.
        merges = [f"{byte_alphabet()[0]} {byte_alphabet()[0]}"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    normal, control, unused = 1, 3, 5
    known = ids.keys()
    writer.add_token_types([control if w in special else normal if w in known else unused for w in words])
    writer.add_token_merges(merges)
    end = tokenizer.end if tokenizer.end is not None else 0
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _byte_level(layout: dict[str, Any]) -> bool:
    before = layout.get("pre_tokenizer") or {}
    plain = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before["add_prefix_space"]
    return bool(plain) and layout["model"]["type"] == "BPE" and layout.get("normalizer") is None


def is_bytes(tokenizer: Tokenizer | None) -> bool:
    return isinstance(tokenizer, ByteTokenizer)
