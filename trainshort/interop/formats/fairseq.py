"""Checkpoints of the authors' own code (fairseq with ALiBi), as released for WikiText-103 and as others trained them.

ALiBi is in fairseq's code and nowhere in the file, so that every model of the fork has it and no other says so.
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
from trainshort.interop.formats.read_config import length_of, model_config, number, read_float, require_value
from trainshort.utils.io import read_text

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""What fairseq calls accurate is the approximation by tanh."""
OLDEST_VERSION = 3
"""Of the decoder's layout; before it there was no final norm and other names."""


def read_checkpoint(path: Path) -> tuple[dict[str, Any], Weights]:
    """A checkpoint's settings, flat, and its tensors."""
    saved = safe_unpickle.read(path)
    weights = saved.get("model")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise InputError(f"{path} holds no model: a fairseq checkpoint has its tensors under 'model'.")
    weights = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
    for name, weight in weights.items():
        if not safe_unpickle.is_stored(weight):
            raise InputError(f"{path} does not hold the numbers of {name!r}, only what they would look like.")
    settings = _settings(saved, path)
    if wrong := next((name for name, value in settings.items() if isinstance(value, Tensor)), None):
        raise InputError(f"{path} has a tensor for the setting {wrong!r}, and no fairseq checkpoint does.")
    version = weights.get("decoder.version")
    if version is not None and (version.numel() != 1 or not version.is_floating_point()):
        raise InputError(f"{path} has a decoder.version of shape {tuple(version.shape)}, and it should be one number.")
    if version is not None and float(version) < OLDEST_VERSION:
        raise InputError(f"{path} has the decoder layout of before 2019, which nobody's ALiBi model has.")
    settings["vocab_size"] = _vocabulary(weights, path)
    return settings, weights


def _settings(saved: dict[str, Any], path: Path) -> dict[str, Any]:
    """`args` of older versions, flat; `cfg` of later ones, in sections."""
    args, cfg = safe_unpickle.plain(saved.get("args")), safe_unpickle.plain(saved.get("cfg"))
    if isinstance(cfg, dict) and cfg.get("model") is not None:
        model, task = safe_unpickle.plain(cfg["model"]), safe_unpickle.plain(cfg.get("task"))
        if isinstance(model, dict):
            return {**model, **({} if not isinstance(task, dict) else {"task": task})}
    if isinstance(args, dict):
        return dict(args)
    raise InputError(f"{path} has neither args nor cfg, which say how many heads the model has.")


def _vocabulary(weights: Weights, path: Path) -> int:
    """Token types, over all bands of words."""
    plain, bands = "decoder.embed_tokens.weight", re.compile(r"decoder\.embed_tokens\.embeddings\.\d+\.0\.weight")
    tables = [weights[name] for name in weights if name == plain or bands.fullmatch(name)]
    if not tables or any(table.dim() != 2 for table in tables):
        raise InputError(f"{path} has no embeddings under decoder.embed_tokens, so it is no language model of fairseq.")
    return sum(map(len, tables))


def read_settings(theirs: dict[str, Any], weights: Weights) -> ImportedModel:
    for name, allowed, default, why in (
        ("decoder_normalize_before", (True,), True, "ours normalises before each layer"),
        ("cross_self_attention", (False, None), False, "ours is a decoder alone"),
        ("base_layers", (0, None), 0, "ours has no expert layers"),
        ("character_embeddings", (False, None), False, "ours reads whole tokens"),
        ("quant_noise_pq", (0, 0.0, None), 0, "ours is not quantised"),
    ):
        require_value(theirs, name, *allowed, default=default, why=why)
    width = number(theirs, "decoder_embed_dim")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        require_value(
            theirs, name, width, None, default=width, why=f"ours has embeddings as wide as the model, {width}"
        )
    activation = theirs.get("activation_fn", "relu")
    if activation not in ACTIVATIONS:
        raise InputError(f"The model has activation_fn {activation!r}; known here: {', '.join(ACTIVATIONS)}.")
    tied = bool(theirs.get("share_decoder_input_output_embed"))
    adaptive = _adaptive(theirs)
    config = model_config(
        vocab_size=number(theirs, "vocab_size"),
        layers=number(theirs, "decoder_layers"),
        width=width,
        heads=number(theirs, "decoder_attention_heads"),
        feedforward_width=number(theirs, "decoder_ffn_embed_dim"),
        activation=ACTIVATIONS[activation],
        final_norm=not theirs.get("no_decoder_final_norm"),
        tie_embeddings=tied or adaptive is not None,
        embedding_scale=not theirs.get("no_scale_embedding"),
        embedding_norm=bool(theirs.get("layernorm_embedding")),
        init="fairseq",
        adaptive=adaptive,
        dropout=read_float(theirs, "dropout", default=0),
        attention_dropout=read_float(theirs, "attention_dropout", default=0),
        activation_dropout=read_float(theirs, "activation_dropout", default=0)
        or read_float(theirs, "relu_dropout", default=0),
        head_dropout=0 if adaptive is None else read_float(theirs, "adaptive_softmax_dropout", default=0),
    )
    task = theirs.get("task")
    length = (task if isinstance(task, dict) else theirs).get("tokens_per_sample", theirs.get("tokens_per_sample"))
    return ImportedModel(config, length_of(length))


def _adaptive(theirs: dict[str, Any]) -> AdaptiveConfig | None:
    inputs, outputs = bool(theirs.get("adaptive_input")), theirs.get("adaptive_softmax_cutoff")
    if not inputs and not outputs:
        return None
    why = "ours has the same bands on both sides"
    require_value({"adaptive_input": inputs}, "adaptive_input", bool(outputs), default=inputs, why=why)
    require_value(theirs, "adaptive_softmax_cutoff", theirs.get("adaptive_input_cutoff"), default=None, why=why)
    require_value(theirs, "adaptive_softmax_factor", theirs.get("adaptive_input_factor"), default=4, why=why)
    for name in ("tie_adaptive_weights", "tie_adaptive_proj"):
        require_value(theirs, name, True, default=False, why=why)
    try:
        cutoffs = tuple(int(rank) for rank in str(outputs).strip("[]()").split(","))
    except ValueError:
        raise InputError(f"The model has adaptive_softmax_cutoff {outputs!r}, and word ranks were expected.") from None
    return AdaptiveConfig.parse({"cutoffs": cutoffs, "factor": theirs.get("adaptive_softmax_factor", 4)})


def read_dictionary(path: Path, vocab_size: int) -> WordTokenizer:
    """fairseq's dict.txt, one `word count` a line after four words of its own, as a tokenizer."""
    words: list[str] = list(WordTokenizer.SPECIAL)
    known = {*words, "</s>"}
    for place, row in enumerate(read_text(path, hint="Give the dict.txt of the model's data.").split("\n"), start=1):
        row = row.removesuffix("\r")
        overwrites = row.endswith(" #fairseq:overwrite")
        word, space, count = row.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not row:
            continue
        if not space or not count.isascii() or not count.isdigit():
            raise InputError(f"{path}, line {place}, should be a word and its count; it is {row[:60]!r}.")
        if word in known and not overwrites:
            raise InputError(f"{path}, line {place}: the word {word!r} is there twice.")
        known.add(word)
        words.append(word)
    if len(words) != vocab_size:
        raise InputError(
            f"{path} does not match the model: it makes {len(words):,} tokens, four of them fairseq's own, and the "
            f"model has {vocab_size:,}. Give the dict.txt of the model's data."
        )
    return WordTokenizer(words)


_LAYER = "decoder.layers.{}."
_TAIL = "decoder.adaptive_softmax.tail."
_BAND = "decoder.embed_tokens.embeddings."
MOST_BANDS = 16

FAIRSEQ = Format(
    name="fairseq",
    summary="ALiBi checkpoints of the paper's authors (fairseq)",
    read=read_settings,
    lines={
        "vocabulary.embedding": map_weight("decoder.embed_tokens"),
        "vocabulary.output": map_weight("decoder.output_projection"),
        "vocabulary.embeddings.{}": map_weight(_BAND + "{}.0"),
        "vocabulary.projections.{}": map_weight(_BAND + "{}.1"),
        "vocabulary.clusters": map_weight("decoder.adaptive_softmax.head.class_proj"),
        "embedding_norm": map_weight("decoder.layernorm_embedding"),
        "layers.{}.attention_norm": map_weight(_LAYER + "self_attn_layer_norm"),
        "layers.{}.attention.qkv": map_weight(*(f"{_LAYER}self_attn.{part}_proj" for part in "qkv")),
        "layers.{}.attention.out": map_weight(_LAYER + "self_attn.out_proj"),
        "layers.{}.ffn_norm": map_weight(_LAYER + "final_layer_norm"),
        "layers.{}.ffn.wide": map_weight(_LAYER + "fc1"),
        "layers.{}.ffn.narrow": map_weight(_LAYER + "fc2"),
        "final_norm": map_weight("decoder.layer_norm"),
    },
    superfluous=("decoder.version", "*._float_tensor", "decoder.adaptive_softmax.version"),
    copies={
        "decoder.output_projection.weight": "decoder.embed_tokens.weight",
        "decoder.adaptive_softmax.head.word_proj.weight": _BAND + "0.0.weight",
        **{f"{_TAIL}{i}.0.weight": f"{_BAND}{i + 1}.1.weight" for i in range(MOST_BANDS)},
        **{f"{_TAIL}{i}.2.weight": f"{_BAND}{i + 1}.0.weight" for i in range(MOST_BANDS)},
    },
)
