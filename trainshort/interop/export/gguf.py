"""Export target `gguf`: the file format of llama.cpp.

A model is written with llama.cpp's architecture `mpt`, or `bloom` if it has a norm after the embeddings. llama.cpp
computes both kinds of GELU with a table of half-precision numbers. `verify` measures the resulting error.
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
from jaxtyping import Float, Int64
from torch import Tensor

from trainshort.data.tokenizers.base import Tokenizer, byte_alphabet
from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.errors import InputError
from trainshort.interop.export.base import MAX_LENGTH_MULTIPLE, ExportSource, ExportTarget, MaxError, Runtime
from trainshort.interop.export.transforms import (
    ALIBI_REQUIREMENTS,
    NO_SCALE_WITH_CLIPPING,
    ExportModel,
    Requirement,
    add_zero_biases,
    fold_embedding_norm,
    fold_scales,
)
from trainshort.utils.optional import require_package

GGUF_FILE = "model.gguf"

MAX_ERRORS = {
    "f32": MaxError(logits=1e-2, kl=1e-5),
    "f16": MaxError(logits=3e-2, kl=1e-4),
    "q8_0": MaxError(logits=3e-1, kl=1e-2),
}
"""llama.cpp computes GELU with a table of half-precision numbers, so even `f32` has a large error."""

NUM_COMPARED_POSITIONS = 64
"""The number of positions that `verify` compares, evenly spaced over an input. llama.cpp's server returns the
probabilities of the next token only, so each position needs one request."""

REQUIREMENTS = (
    *ALIBI_REQUIREMENTS,
    NO_SCALE_WITH_CLIPPING,
    Requirement(lambda c: c.activation != "relu", "activation relu", "Train with gelu or gelu_tanh."),
    Requirement(lambda c: c.activation != "silu", "activation silu", "Train with gelu or gelu_tanh."),
    Requirement(lambda c: c.final_norm, "final_norm=False", "Train with final_norm=True."),
)

MODULE_NAMES = {
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
"""The names of the modules in trainshort and in GGUF files. The prefix of a layer is left out."""

# Rows of a matrix can be quantized to 8 bits (q8_0) in blocks of this size only.
QUANTIZATION_BLOCK = 32

# The token types of a GGUF file.
NORMAL_TOKEN = 1
CONTROL_TOKEN = 3
UNUSED_TOKEN = 5

# llama.cpp needs a few more positions than the longest input, for the generated tokens.
EXTRA_CONTEXT = 64

SERVER_TIMEOUT = 60
"""Seconds to wait for a response of llama.cpp's server."""


def transform(model: ExportModel) -> ExportModel:
    """Change the weights, so that llama.cpp supports the model with one of its two architectures.

    The architecture `bloom` of llama.cpp has a norm after the embeddings, but no clipping of queries, keys and values,
    and its `max_bias` (a setting of the ALiBi slopes) is always 8. The architecture `mpt` has clipping and any
    `max_bias`, but no norm after the embeddings.
    """
    # Multiply the weights by the scale factors of the model, because the two architectures have no such factors.
    model = fold_scales(model)
    requires_mpt = model.max_bias != 8 or model.config.clip_qkv is not None
    if requires_mpt:
        return fold_embedding_norm(model)
    if model.config.embedding_norm:
        return add_zero_biases(model)  # llama.cpp's `bloom` requires all biases.
    return model


def write(folder: Path, run: ExportSource) -> None:
    """Write the model and its tokenizer to one GGUF file.

    Args:
        folder: The folder to write to.
        run: The model to export.

    Raises:
        InputError: If the package `gguf` is not installed.
    """
    require_package("gguf", "Writing a GGUF file", "trainshort[interop]")
    import gguf

    assert run.tokenizer is not None, "checked by tokenizer_unsupported_reason"
    config = run.model.config
    architecture = "bloom" if config.embedding_norm else "mpt"
    writer = gguf.GGUFWriter(folder / GGUF_FILE, architecture)
    writer.add_name(run.name)
    file_types = {
        "f32": gguf.LlamaFileType.ALL_F32,
        "f16": gguf.LlamaFileType.MOSTLY_F16,
        "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    }
    writer.add_file_type(file_types[run.dtype])
    writer.add_context_length(MAX_LENGTH_MULTIPLE * run.training_length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.key_heads)
    writer.add_layer_norm_eps(config.norm_eps)
    if architecture == "mpt":
        writer.add_max_alibi_bias(run.model.max_bias)
        if config.clip_qkv is not None:
            writer.add_clamp_kqv(config.clip_qkv)
    _add_tokenizer(writer, run.tokenizer, config.vocab_size)
    for name, weight in run.model.weights.items():
        float32_weight = weight.detach().float().contiguous()
        numbers, number_type = _encode_tensor(gguf, float32_weight, run.dtype)
        writer.add_tensor(_gguf_name(name), numbers, raw_dtype=number_type)
    with _close_writer(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


@contextmanager
def _close_writer(writer: Any) -> Iterator[None]:
    """Context manager: close a GGUF writer, and raise an `OSError` with an error number if the disk is full.

    NumPy writes the tensors. If the disk is full, NumPy raises an `OSError` without an error number.
    """
    try:
        yield
    except OSError as error:
        # An open file would keep its disk space after it is deleted.
        with suppress(OSError):
            writer.close()
        if error.errno:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    writer.close()


def _gguf_name(name: str) -> str:
    """Return the GGUF name of a trainshort tensor: `layers.3.ffn.wide.weight` becomes `blk.3.ffn_up.weight`."""
    module, _, parameter = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{MODULE_NAMES[module]}.{parameter}"
    _, layer_index, layer_module = module.split(".", 2)  # "layers", "3", "ffn.wide"
    return f"blk.{layer_index}.{MODULE_NAMES[layer_module]}.{parameter}"


def _encode_tensor(gguf: Any, weight: Tensor, dtype: str) -> tuple[np.ndarray, Any]:
    """Convert a tensor to the numbers that a GGUF file stores.

    q8_0 stores blocks of a row as 8-bit integers with one scale for each block. Vectors are always stored in float32.
    A matrix whose rows cannot be quantized in complete blocks is stored in
    float16 instead of q8_0.

    Args:
        gguf: The package `gguf`.
        weight: The tensor in float32.
        dtype: The dtype of the export: "f32", "f16" or "q8_0".

    Returns:
        The numbers, and their type as a `gguf.GGMLQuantizationType`.
    """
    values = weight.numpy()
    is_matrix = weight.dim() == 2
    if not is_matrix or dtype == "f32":
        return values, gguf.GGMLQuantizationType.F32
    if dtype == "q8_0" and weight.shape[1] % QUANTIZATION_BLOCK == 0:
        quantized_type = gguf.GGMLQuantizationType.Q8_0
        return gguf.quants.quantize(values, quantized_type), quantized_type
    return values.astype(np.float16), gguf.GGMLQuantizationType.F16


def tokenizer_unsupported_reason(tokenizer: Tokenizer | None) -> str | None:
    """Return why llama.cpp does not support a tokenizer and what to do, or None if it supports the tokenizer.

    Most programs that use llama.cpp pass text to it, and not token ids. An export therefore requires a tokenizer.

    Args:
        tokenizer: The tokenizer of the run, or None if the run has no tokenizer.

    Returns:
        A text that continues the sentence "Export to gguf does not support".
    """
    if tokenizer is None:
        return "a run without a tokenizer. Put its tokenizer.json into the run folder, or use --to hf."
    is_supported = False
    if not isinstance(tokenizer, WordTokenizer):
        layout = json.loads(tokenizer.to_json())  # the content of a tokenizer.json
        is_supported = _is_byte_level_bpe(layout)
    if not is_supported:
        return (
            f"the tokenizer '{tokenizer.name}'. Only byte-level BPE is supported. "
            "Train with --data.tokenizer bpe or bytes, or use --to hf or --to ctranslate2."
        )
    return None


def _is_byte_level_bpe(layout: dict[str, Any]) -> bool:
    """Return whether a tokenizer is a byte-level BPE like the tokenizer of GPT-2, without text normalization.

    Args:
        layout: The content of a `tokenizer.json`.
    """
    pre_tokenizer = layout.get("pre_tokenizer") or {}
    if pre_tokenizer.get("type") != "ByteLevel":
        return False
    # GPT-2 splits a text into words with a regular expression, and adds no space in front of the text.
    splits_like_gpt2 = pre_tokenizer.get("use_regex", True) and not pre_tokenizer["add_prefix_space"]
    is_bpe = layout["model"]["type"] == "BPE"
    has_normalizer = layout.get("normalizer") is not None
    return splits_like_gpt2 and is_bpe and not has_normalizer


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer to a GGUF file, as llama.cpp's tokenizer `gpt2`.

    Args:
        writer: The `gguf.GGUFWriter`.
        tokenizer: The tokenizer.
        vocab_size: The number of tokens of the model. It may be larger than the number of tokens of the tokenizer.
    """
    layout = json.loads(tokenizer.to_json())  # the content of a tokenizer.json
    token_ids = dict(layout["model"]["vocab"])
    special_tokens = set()
    for added_token in layout.get("added_tokens") or ():
        token_ids[added_token["content"]] = added_token["id"]
        if added_token.get("special"):
            special_tokens.add(added_token["content"])

    tokens = [f"<unused{token_id}>" for token_id in range(vocab_size)]
    for token, token_id in token_ids.items():
        tokens[token_id] = token
    token_types = []
    for token in tokens:
        if token in special_tokens:
            token_types.append(CONTROL_TOKEN)
        elif token in token_ids:
            token_types.append(NORMAL_TOKEN)
        else:
            token_types.append(UNUSED_TOKEN)

    # A merge is a pair of tokens, or a text with a space between the tokens.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in layout["model"]["merges"]]
    if not merges:
        # llama.cpp requires a list of merges, and an empty list is not written. Add a merge of two zero bytes.
        zero_byte = byte_alphabet()[0]
        merges = [f"{zero_byte} {zero_byte}"]

    # If the tokenizer has no end token, the first token takes its place.
    end_token = tokenizer.end if tokenizer.end is not None else 0
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end_token)
    writer.add_eos_token_id(end_token)
    writer.add_add_bos_token(False)


class LlamaCpp(Runtime):
    """An export that is loaded in llama.cpp, through the server of the package xllamacpp."""

    package = "xllamacpp"
    allows_end_token = True

    def __init__(self, folder: Path, max_length: int) -> None:
        """Start a llama.cpp server for an export. `max_length` is the length of the longest input that will be read."""
        llama: Any = importlib.import_module("xllamacpp")
        path = folder / GGUF_FILE
        self.vocab_size = _read_vocab_size(path)
        params = llama.CommonParams()
        params.model.path = str(path)
        params.n_ctx = max_length + EXTRA_CONTEXT
        params.n_parallel = 1
        params.verbosity = 0
        params.warmup = False
        params.n_batch = 512
        params.n_ubatch = 512
        params.cpuparams.n_threads = torch.get_num_threads()
        params.cpuparams_batch.n_threads = torch.get_num_threads()
        # Store keys and values in full precision.
        params.cache_type_k = llama.ggml_type.GGML_TYPE_F32
        params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        self.server = llama.Server(params)
        # A token whose text is a complete character. `_next_log_probabilities` needs such a token.
        tokens_of_a = self.encode("a")
        self._complete_token = tokens_of_a[0] if tokens_of_a else 0

    def log_probabilities(
        self, tokens: list[int]
    ) -> tuple[Int64[Tensor, " positions"], Float[Tensor, "positions vocab"]]:
        """Return the log-probabilities of the next token at evenly spaced positions, including the last position.

        Each request extends the previous request, so the server reads each token once.
        """
        count = min(NUM_COMPARED_POSITIONS, len(tokens))
        # The number of tokens that are read for each position, for example 2, 4, 6, 8 for 8 tokens and 4 positions.
        prefix_lengths = (torch.arange(1, count + 1) * len(tokens) / count).long()
        rows = [self._next_log_probabilities(tokens[:length]) for length in prefix_lengths.tolist()]
        positions = prefix_lengths - 1
        return positions, torch.stack(rows)

    def _next_log_probabilities(self, tokens: list[int]) -> Float[Tensor, " vocab"]:
        """Return the log-probability of each token of the vocabulary as the next token after an input."""
        request = {
            "prompt": tokens,
            "n_predict": 1,
            "temperature": 0.0,
            "n_probs": self.vocab_size,
            "cache_prompt": True,
            # The server returns probabilities only if the text of the generated token is a complete character. The bias
            # makes the server generate such a token, and does not change the returned probabilities.
            "logit_bias": [[self._complete_token, 1e4]],
        }
        response = self.server.handle_completions(request)
        # The response is a dictionary, or a text in JSON.
        if isinstance(response, str | bytes):
            response = json.loads(response)
        choices = response.get("choices") or [{}]
        log_probabilities = choices[0].get("logprobs")
        if not log_probabilities:
            raise InputError(f"llama.cpp did not return probabilities: {str(response)[:200]}")
        # The response lists tokens by probability. The result has the log-probabilities in the order of the token ids.
        row = torch.full((self.vocab_size,), -torch.inf)
        for entry in log_probabilities["content"][0]["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
        return row

    def generate_greedy(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens that the program generates after a prompt without sampling."""
        generated: list[int] = []
        for _ in range(count):
            log_probabilities = self._next_log_probabilities([*tokens, *generated])
            generated.append(int(log_probabilities.argmax()))
        return generated

    def encode(self, text: str) -> list[int] | None:
        """Return the token ids of a text."""
        # Send the text to the HTTP interface of the server, which returns the tokens as JSON.
        body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
        url = f"{self.server.listening_address}/tokenize"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT) as response:
            return json.load(response)["tokens"]


def _read_vocab_size(path: Path) -> int:
    """Return the number of tokens of the model in a GGUF file."""
    import gguf

    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[1])  # GGUF lists the dimensions in reverse order.
    raise InputError(f"Invalid file {path}: it has no embedding matrix.")


GGUF = ExportTarget(
    requirements=REQUIREMENTS,
    transform=transform,
    write=write,
    runtime=LlamaCpp,
    max_errors=MAX_ERRORS,
    loading="llama.cpp",
    tokenizer_unsupported_reason=tokenizer_unsupported_reason,
)
