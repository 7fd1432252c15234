"""GGUF, the file of llama.cpp, written directly: its own converter takes no tokenizer that was trained here.

Architecture `mpt`, or `bloom` for models with a norm after the embeddings. Its layers take q, k and v in our order, and
its slopes come from the number of heads inside its kernels. GELU is computed there by tanh from a table of
half-precision numbers, whichever GELU a model has; verify measures what that costs.
"""

import errno
import importlib
import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainshort.data.tokenizers.base import Tokenizer, byte_alphabet
from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.errors import InputError
from trainshort.interop.export.base import MAX_LENGTH_MULTIPLE, ExportSource, ExportTarget, MaxError, Runtime
from trainshort.interop.export.transforms import (
    NO_CLIPPED_SCALE,
    PLAIN_ALIBI,
    ExportModel,
    Requirement,
    add_zero_biases,
    fold_embedding_norm,
    fold_scales,
)
from trainshort.utils.optional import require_package

FILE = "model.gguf"
MAX_ERRORS = {
    "f32": MaxError(logits=1e-2, kl=1e-5),
    "f16": MaxError(logits=3e-2, kl=1e-4),
    "q8_0": MaxError(logits=3e-1, kl=1e-2),
}
"""llama.cpp computes GELU with a table of half-precision numbers, so even `f32` has a large error."""
ASKED = 64
"""The number of positions that `verify` compares, evenly spaced over an input. llama.cpp's server returns the
probabilities of the next token only, so each position needs one request."""
NEEDS = (
    *PLAIN_ALIBI,
    NO_CLIPPED_SCALE,
    Requirement(lambda c: c.activation != "relu", "activation relu", "train with gelu or gelu_tanh"),
    Requirement(lambda c: c.activation != "silu", "activation silu", "train with gelu or gelu_tanh"),
    Requirement(lambda c: c.final_norm, "final_norm=False", "train with final_norm=True"),
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


def rewritten(model: ExportModel) -> ExportModel:
    """llama.cpp's bloom has a norm after the embeddings, but the usual slopes alone and no clipping; its mpt has those,
    and no such norm."""
    model = fold_scales(model)
    if model.max_bias != 8 or model.config.clip_qkv is not None:
        return fold_embedding_norm(model)
    return add_zero_biases(model) if model.config.embedding_norm else model


def write(folder: Path, run: ExportSource) -> None:
    """Write the model and its tokenizer to one file."""
    require_package("gguf", "Writing a GGUF file", "trainshort[interop]")
    import gguf

    assert run.tokenizer is not None, "checked by tokenizer_misfit"
    model, kind = run.model, run.dtype
    config = model.config
    arch = "bloom" if config.embedding_norm else "mpt"
    writer = gguf.GGUFWriter(folder / FILE, arch)
    writer.add_name(run.name)
    types = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16}
    writer.add_file_type(types.get(kind, gguf.LlamaFileType.MOSTLY_Q8_0))
    writer.add_context_length(MAX_LENGTH_MULTIPLE * run.length)
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
    _add_tokenizer(writer, run.tokenizer, config.vocab_size)
    for ours, weight in model.weights.items():
        data, stored = _stored(gguf, weight.detach().float().contiguous(), kind)
        writer.add_tensor(_name(ours), data, raw_dtype=stored)
    with _raise_on_write_error(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


@contextmanager
def _raise_on_write_error(writer: Any) -> Iterator[None]:
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


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Byte-level BPE as llama.cpp's `gpt2`."""
    layout = json.loads(tokenizer.to_json())
    ids = dict(layout["model"]["vocab"]) | {one["content"]: one["id"] for one in layout.get("added_tokens") or ()}
    special = {one["content"] for one in layout.get("added_tokens") or () if one.get("special")}
    words = [f"<unused{number}>" for number in range(vocab_size)]
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


class LlamaCpp(Runtime):
    """llama.cpp by the wheel xllamacpp, asked as a server is: all log-probabilities of the token after a prompt."""

    package = "xllamacpp"
    ends = True

    def __init__(self, folder: Path, longest: int) -> None:
        llama: Any = importlib.import_module("xllamacpp")  # which tells a type checker nothing of itself
        self.vocabulary = _read_vocabulary_size(folder / FILE)
        asked = llama.CommonParams()
        asked.model.path = str(folder / FILE)
        asked.n_ctx, asked.n_parallel, asked.verbosity, asked.warmup = longest + 64, 1, 0, False
        asked.n_batch = asked.n_ubatch = 512
        asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = torch.get_num_threads()
        asked.cache_type_k = asked.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        self.server = llama.Server(asked)
        self._whole = (self.encode("a") or [0])[0]

    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Each prompt is the one before and some tokens more, so that the server reads every token once."""
        count = min(ASKED, len(tokens))
        where = (torch.arange(1, count + 1) * len(tokens) / count).long() - 1  # the last one always
        return where, torch.stack([self._next(tokens[: at + 1]) for at in where.tolist()])

    def _next(self, tokens: list[int]) -> Tensor:
        """The server shows probabilities only beside a token whose text is whole, so that it is made to choose one; the
        probabilities are the model's all the same."""
        asked = {"prompt": tokens, "n_predict": 1, "temperature": 0.0, "n_probs": self.vocabulary}
        answer = self.server.handle_completions({**asked, "cache_prompt": True, "logit_bias": [[self._whole, 1e4]]})
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        shown = (answer.get("choices") or [{}])[0].get("logprobs")
        if not shown:
            raise InputError(f"llama.cpp did not answer with probabilities: {str(answer)[:200]}")
        row = torch.full((self.vocabulary,), -torch.inf)
        for one in shown["content"][0]["top_logprobs"]:
            row[one["id"]] = one["logprob"]
        return row

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Token by token, each after what the server remembers of those before."""
        made: list[int] = []
        for _ in range(count):
            made.append(int(self._next([*tokens, *made]).argmax()))
        return made

    def encode(self, text: str) -> list[int] | None:
        body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
        address = f"{self.server.listening_address}/tokenize"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]


def _read_vocabulary_size(path: Path) -> int:
    """Return the number of token types in a GGUF file."""
    import gguf

    return next(int(tensor.shape[1]) for tensor in gguf.GGUFReader(path).tensors if tensor.name == "token_embd.weight")


GGUF = ExportTarget(
    summary="llama.cpp, as an MPT or a BLOOM (GGUF)",
    requirements=NEEDS,
    transform=rewritten,
    write=write,
    runtime=LlamaCpp,
    max_errors=MAX_ERRORS,
    loading="llama.cpp",
    tokenizer_unsupported_reason=tokenizer_misfit,
)
