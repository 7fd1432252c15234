"""Fairseq checkpoints of language models with ALiBi, as the authors of the ALiBi paper released them.

A fairseq checkpoint does not say whether a model uses ALiBi, because ALiBi is in the authors' copy of fairseq. Every
checkpoint is therefore read as a model with ALiBi.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from trainshort.config.run_config import AdaptiveConfig
from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.errors import InputError
from trainshort.interop import safe_unpickle
from trainshort.interop.formats.base import Format, ImportedModel, Weights, map_weight
from trainshort.interop.formats.read_config import (
    make_alibi_config,
    parse_length,
    read_float,
    read_int,
    require_value,
    translate_activation,
)
from trainshort.utils.io import read_text

FAIRSEQ_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""The activation functions of fairseq, and their names in trainshort. `gelu_accurate` is the tanh approximation."""

# The decoder layout since 2019. Older decoders have other tensor names and no final norm.
MIN_DECODER_VERSION = 3

DICTIONARY_HINT = "Give the dict.txt of the model's data."

# The largest number of tails of an adaptive softmax. Released models have two.
MAX_TAILS = 16

# fairseq appends this mark to a word that is intentionally listed a second time.
OVERWRITE_MARK = " #fairseq:overwrite"


def read_checkpoint(path: Path) -> tuple[dict[str, Any], Weights]:
    """Read the settings and the tensors of a fairseq checkpoint. No code in the file is executed.

    Args:
        path: The checkpoint file.

    Returns:
        The settings, including `vocab_size`, which is taken from the embeddings. The second value holds the tensors.

    Raises:
        InputError: If the file is not a fairseq checkpoint of a language model.
    """
    checkpoint = safe_unpickle.read(path)
    saved_model = checkpoint.get("model")
    if not isinstance(saved_model, dict) or not all(isinstance(name, str) for name in saved_model):
        raise InputError(f"{path} contains no model: a fairseq checkpoint has its tensors under the key 'model'.")

    weights = {name: value for name, value in saved_model.items() if isinstance(value, Tensor)}
    for name, weight in weights.items():
        if not safe_unpickle.is_stored(weight):
            raise InputError(f"{path} does not contain all numbers of the tensor {name!r}.")

    settings = _read_settings(checkpoint, path)
    for name, value in settings.items():
        if isinstance(value, Tensor):
            raise InputError(f"{path} has a tensor for the setting {name!r}. Expected a number, a string or a boolean.")
    _check_decoder_version(weights, path)
    settings["vocab_size"] = _read_vocab_size(weights, path)
    return settings, weights


def _check_decoder_version(weights: Weights, path: Path) -> None:
    """Raise `InputError` if a checkpoint has a decoder layout that is too old. A missing version is accepted."""
    version = weights.get("decoder.version")
    if version is None:
        return
    if version.numel() != 1 or not version.is_floating_point():
        raise InputError(f"{path}: decoder.version must be one number, got a tensor of shape {tuple(version.shape)}.")
    if float(version) < MIN_DECODER_VERSION:
        raise InputError(
            f"{path} has decoder version {float(version):g}. "
            f"Only version {MIN_DECODER_VERSION} and later are supported, which fairseq has written since 2019."
        )


def _read_settings(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the model settings of a checkpoint.

    Newer versions of fairseq store the settings under `cfg`, in sections. The model section is returned, and the task
    section is added under the key `task`. Older versions store all settings under `args`.
    """
    cfg = safe_unpickle.unwrap_stub(checkpoint.get("cfg"))
    if isinstance(cfg, dict) and cfg.get("model") is not None:
        model_section = safe_unpickle.unwrap_stub(cfg["model"])
        task_section = safe_unpickle.unwrap_stub(cfg.get("task"))
        if isinstance(model_section, dict):
            settings = dict(model_section)
            if isinstance(task_section, dict):
                settings["task"] = task_section
            return settings

    args = safe_unpickle.unwrap_stub(checkpoint.get("args"))
    if isinstance(args, dict):
        return dict(args)
    raise InputError(f"{path} has no settings: a fairseq checkpoint has them under the key 'cfg' or 'args'.")


def _read_vocab_size(weights: Weights, path: Path) -> int:
    """Return the vocabulary size of a fairseq model, which is the number of rows of its embedding matrix.

    Adaptive embeddings split the words into bands by frequency, and each band has an embedding matrix of its own.

    Args:
        weights: The tensors of the checkpoint.
        path: The checkpoint file, for the error message.
    """
    band_pattern = re.compile(r"decoder\.embed_tokens\.embeddings\.\d+\.0\.weight")
    matrices = []
    for name, weight in weights.items():
        if name == "decoder.embed_tokens.weight" or band_pattern.fullmatch(name):
            matrices.append(weight)
    if not matrices or any(matrix.dim() != 2 for matrix in matrices):
        raise InputError(f"{path} is not a fairseq language model: it has no embedding matrix decoder.embed_tokens.")
    return sum(len(matrix) for matrix in matrices)


def read_fairseq_config(source_config: dict[str, Any], weights: Weights) -> ImportedModel:
    """Translate the settings of a fairseq checkpoint to trainshort.

    Args:
        source_config: The settings that `read_checkpoint` returned.
        weights: Not used. All formats have this parameter.

    Raises:
        InputError: If a setting is not supported.
    """
    _check_fairseq_supported(source_config)
    width = read_int(source_config, "decoder_embed_dim")
    width_reason = f"only decoder_embed_dim, {width}, is supported"
    for name in ("decoder_input_dim", "decoder_output_dim"):
        require_value(source_config, name, allowed=(width, None), default=width, reason=width_reason)
    activation = translate_activation("activation_fn", source_config.get("activation_fn", "relu"), FAIRSEQ_ACTIVATIONS)

    adaptive = _read_adaptive_config(source_config)
    has_tied_embeddings = bool(source_config.get("share_decoder_input_output_embed"))
    head_dropout = 0.0
    if adaptive is not None:
        head_dropout = read_float(source_config, "adaptive_softmax_dropout", default=0)
    activation_dropout = read_float(source_config, "activation_dropout", default=0)
    if activation_dropout == 0:
        activation_dropout = read_float(source_config, "relu_dropout", default=0)  # the name in older versions

    config = make_alibi_config(
        vocab_size=read_int(source_config, "vocab_size"),
        layers=read_int(source_config, "decoder_layers"),
        width=width,
        heads=read_int(source_config, "decoder_attention_heads"),
        feedforward_width=read_int(source_config, "decoder_ffn_embed_dim"),
        activation=activation,
        final_norm=not source_config.get("no_decoder_final_norm"),
        tie_embeddings=has_tied_embeddings or adaptive is not None,
        embedding_scale=not source_config.get("no_scale_embedding"),
        embedding_norm=bool(source_config.get("layernorm_embedding")),
        init="fairseq",
        adaptive=adaptive,
        dropout=read_float(source_config, "dropout", default=0),
        attention_dropout=read_float(source_config, "attention_dropout", default=0),
        activation_dropout=activation_dropout,
        head_dropout=head_dropout,
    )
    return ImportedModel(config, _read_training_length(source_config))


def _check_fairseq_supported(source_config: dict[str, Any]) -> None:
    """Raise `InputError` if a fairseq model has parts that a trainshort model cannot have."""
    require_value(
        source_config,
        "decoder_normalize_before",
        allowed=(True,),
        default=True,
        reason="only models that normalize before each layer are supported",
    )
    decoder_reason = "only decoders that read tokens are supported"
    for name in ("cross_self_attention", "character_embeddings"):
        require_value(source_config, name, allowed=(False, None), default=False, reason=decoder_reason)
    require_value(source_config, "base_layers", allowed=(0, None), default=0, reason="expert layers are not supported")
    require_value(source_config, "quant_noise_pq", allowed=(0, None), default=0, reason="quantization is not supported")


def _read_training_length(source_config: dict[str, Any]) -> int | None:
    """Return the training length of a fairseq model, or None if the settings do not state a valid length."""
    length = source_config.get("tokens_per_sample")
    # Newer versions of fairseq store the length in the task section.
    task_section = source_config.get("task")
    if isinstance(task_section, dict):
        length = task_section.get("tokens_per_sample", length)
    return parse_length(length)


def _read_adaptive_config(source_config: dict[str, Any]) -> AdaptiveConfig | None:
    """Return the settings of adaptive embeddings and adaptive softmax, or None if a model has plain embeddings.

    Adaptive embeddings are narrower for rare words. The words are split into frequency bands at the cutoffs.
    trainshort requires that embeddings and softmax have the same bands and share their weights.

    Raises:
        InputError: If the embeddings and the softmax have different settings, or if the cutoffs are invalid.
    """
    has_adaptive_input = bool(source_config.get("adaptive_input"))
    softmax_cutoffs = source_config.get("adaptive_softmax_cutoff")
    if not has_adaptive_input and not softmax_cutoffs:
        return None

    reason = "the embeddings and the softmax must have the same frequency bands and share their weights"
    if has_adaptive_input != bool(softmax_cutoffs):
        raise InputError(f"Unsupported setting adaptive_input={has_adaptive_input}: {reason}.")
    input_cutoffs = source_config.get("adaptive_input_cutoff")
    require_value(source_config, "adaptive_softmax_cutoff", allowed=(input_cutoffs,), default=None, reason=reason)
    input_factor = source_config.get("adaptive_input_factor")
    require_value(source_config, "adaptive_softmax_factor", allowed=(input_factor,), default=4, reason=reason)
    for name in ("tie_adaptive_weights", "tie_adaptive_proj"):
        require_value(source_config, name, allowed=(True,), default=False, reason=reason)

    # The cutoffs are stored as text, such as "20000,60000" or "[20000, 60000]".
    cutoff_texts = str(softmax_cutoffs).strip("[]()").split(",")
    try:
        cutoffs = tuple(int(text) for text in cutoff_texts)
    except ValueError:
        raise InputError(
            f"Invalid config: adaptive_softmax_cutoff must be a list of word ranks, got {softmax_cutoffs!r}."
        ) from None
    return AdaptiveConfig.parse({"cutoffs": cutoffs, "factor": source_config.get("adaptive_softmax_factor", 4)})


def read_dictionary(path: Path, vocab_size: int) -> WordTokenizer:
    """Read the `dict.txt` of a fairseq model as a tokenizer.

    Each line has a word and its count. fairseq puts four special words before the words of the file.

    Args:
        path: The file.
        vocab_size: The vocabulary size of the model.

    Raises:
        InputError: If a line is invalid, if a word is listed twice, or if the number of words does not fit the model.
    """
    words: list[str] = list(WordTokenizer.SPECIAL)
    known_words = {*words, "</s>"}
    lines = read_text(path, hint=DICTIONARY_HINT).split("\n")
    for line_number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line:
            continue
        may_repeat = line.endswith(OVERWRITE_MARK)
        # A word may contain spaces. The last space is before the count.
        word, space, count = line.removesuffix(OVERWRITE_MARK).rpartition(" ")
        is_count = count.isascii() and count.isdigit()
        if not space or not is_count:
            raise InputError(f"{path}, line {line_number}: expected a word and its count, got {line[:60]!r}.")
        if word in known_words and not may_repeat:
            raise InputError(f"{path}, line {line_number}: the word {word!r} is listed twice.")
        known_words.add(word)
        words.append(word)

    if len(words) != vocab_size:
        raise InputError(
            f"{path} does not match the model: the file and fairseq's four special words make {len(words):,} tokens, "
            f"but the model has {vocab_size:,}. {DICTIONARY_HINT}"
        )
    return WordTokenizer(words)


def _list_tied_tensors() -> dict[str, str]:
    """Return the tensors that fairseq stores twice, and their counterparts in the embeddings.

    The adaptive softmax shares its weights with the adaptive embeddings. The first frequency band is in the head of
    the softmax, and each later band has a tail of its own.
    """
    tied_tensors = {
        "decoder.output_projection.weight": "decoder.embed_tokens.weight",
        "decoder.adaptive_softmax.head.word_proj.weight": "decoder.embed_tokens.embeddings.0.0.weight",
    }
    for tail_index in range(MAX_TAILS):
        tail = f"decoder.adaptive_softmax.tail.{tail_index}"
        band = f"decoder.embed_tokens.embeddings.{tail_index + 1}"
        tied_tensors[f"{tail}.0.weight"] = f"{band}.1.weight"  # the projection
        tied_tensors[f"{tail}.2.weight"] = f"{band}.0.weight"  # the embeddings
    return tied_tensors


_LAYER = "decoder.layers.{}."
_BAND = "decoder.embed_tokens.embeddings.{}."

FAIRSEQ = Format(
    name="fairseq",
    summary="ALiBi checkpoints of the paper's authors (fairseq)",
    read_config=read_fairseq_config,
    module_map={
        "vocabulary.embedding": map_weight("decoder.embed_tokens"),
        "vocabulary.output": map_weight("decoder.output_projection"),
        "vocabulary.embeddings.{}": map_weight(_BAND + "0"),
        "vocabulary.projections.{}": map_weight(_BAND + "1"),
        "vocabulary.clusters": map_weight("decoder.adaptive_softmax.head.class_proj"),
        "embedding_norm": map_weight("decoder.layernorm_embedding"),
        "layers.{}.attention_norm": map_weight(_LAYER + "self_attn_layer_norm"),
        "layers.{}.attention.qkv": map_weight(
            _LAYER + "self_attn.q_proj", _LAYER + "self_attn.k_proj", _LAYER + "self_attn.v_proj"
        ),
        "layers.{}.attention.out": map_weight(_LAYER + "self_attn.out_proj"),
        "layers.{}.ffn_norm": map_weight(_LAYER + "final_layer_norm"),
        "layers.{}.ffn.wide": map_weight(_LAYER + "fc1"),
        "layers.{}.ffn.narrow": map_weight(_LAYER + "fc2"),
        "final_norm": map_weight("decoder.layer_norm"),
    },
    ignored_tensors=("decoder.version", "*._float_tensor", "decoder.adaptive_softmax.version"),
    tied_tensors=_list_tied_tensors(),
)
