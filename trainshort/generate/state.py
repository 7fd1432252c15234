"""A stream on disk: one safetensors file, whole or not there, which continues bit by bit where it was saved.

It holds every cache as it is (rings, counts, norms), the random generators, and what was read but not shown. The header
carries the rest as JSON, with a sha256 over all of it, and the identity of the model: a state means nothing to other
weights.
"""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from pydantic_core import to_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainshort import files
from trainshort.cache import BoundedCache, Cache
from trainshort.cache.facts import Strict, check, saved_tensor, under
from trainshort.checkpoint import fingerprint, sha256_of
from trainshort.config import Settings
from trainshort.data.tokenizer import Tokenizer
from trainshort.errors import InputError
from trainshort.generate.sample import REPLAYED, Sample, Token
from trainshort.generate.settings import GenerateConfig
from trainshort.generate.streaming import TokenStream
from trainshort.model import Attention, TransformerLM
from trainshort.positions import LayerInput

FORMAT = 1
REMEMBERED = ("mode", "tolerance", "window", "sinks")
"""Settings that the cache was made by; they cannot change when a stream goes on."""


def save_state(stream: TokenStream, path: Path) -> None:
    """Write the stream beside `path`, then rename: whatever stops this, the state before it is intact."""
    if stream.torn:
        raise InputError(f"the stream was stopped in the middle of a token; {path} is left as it was.")
    tensors, samples = {}, []
    for number, sample in enumerate(stream.samples):
        mine, facts = _sample_state(sample)
        tensors |= {f"{number}.{name}": tensor.detach().cpu().contiguous() for name, tensor in mine.items()}
        samples.append(facts)
    text = json.dumps(
        {
            "format": FORMAT,
            "model": model_identity(stream.model),
            "settings": stream.config.model_dump(mode="json"),
            "samples": samples,
            "waiting": stream.waiting,
        }
    )
    kept = "A state that was there before is intact."
    with files.replacing(path, mend=kept) as partial:
        try:
            save_file(tensors, partial, metadata={"state": text, "sha256": sha256_of(tensors, text.encode())})
        except SafetensorError as error:
            raise files.refused(error) from error


def load_state(path: Path, model: TransformerLM, tokenizer: Tokenizer | None = None, **changes: Any) -> TokenStream:
    """The stream that was saved, ready to go on. `changes` are settings to change; not those the cache was made by."""
    text, tensors = _read(path)
    values = files.parse_json(text, str(path))
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise InputError(f"{path} has format {found}, and this version of trainshort reads format {FORMAT}.")
    try:
        state = _SavedState.read(values)
        if state.model != model_identity(model):
            raise InputError("it was saved with another model or other weights; resume it with the model it is of.")
        for name in REMEMBERED:
            if name in changes and changes[name] != getattr(state.settings, name):
                raise InputError(
                    f"it was saved with {name} {getattr(state.settings, name)}, and what it forgot cannot come back; "
                    f"resume without another {name}."
                )
        stream = TokenStream(model.eval(), state.settings.replace(**changes), tokenizer)
        for number, facts in enumerate(state.samples):
            _restore(stream.begin(), model, under(tensors, f"{number}."), facts)
        stream.waiting = [Token(*values) for values in state.waiting]
        check(all(0 <= token.sample < len(stream.samples) for token in stream.waiting), "a waiting token")
    except InputError as error:
        raise InputError(f"{path} cannot be resumed: {error}") from None
    return stream


def model_identity(model: TransformerLM) -> str:
    """sha256 of settings and weights. The attention engine may differ: it changes nothing but rounding."""
    return fingerprint(model, to_json(model.config.replace(backend="auto").model_dump(mode="json")))


class _SavedSample(Strict):
    """One sample beside its tensors."""

    unread: list[int]
    made: int = Field(ge=0)
    finished: str | None
    recent: list[int] = Field(max_length=REPLAYED)
    held: str
    layers: list[dict[str, Any]]


class _SavedState(Settings):
    """The header's JSON."""

    format: int
    model: str
    settings: GenerateConfig
    samples: list[_SavedSample]
    waiting: list[tuple[int, str, float, int]]


def _sample_state(sample: Sample) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {"generator": sample.generator.get_state()}
    if sample.seen is not None:
        tensors["seen"] = sample.seen
    layers = []
    for index, layer in enumerate(sample.cache.layers):
        stored, facts = layer.save()
        tensors |= {f"layer{index}.{name}": tensor for name, tensor in stored.items()}
        layers.append(facts)
    facts = {name: getattr(sample, name) for name in ("unread", "made", "finished")}
    return tensors, {**facts, "recent": list(sample.recent), "held": sample.stops.held, "layers": layers}


def _restore(sample: Sample, model: TransformerLM, tensors: dict[str, Tensor], facts: _SavedSample) -> None:
    _restore_cache(sample.cache, model, tensors, facts)
    ids = [*facts.unread, *facts.recent]
    check(all(0 <= token < sample.vocabulary for token in ids), "a token that is not in the model's vocabulary")
    check(bool(facts.unread) or not facts.layers, "a sample without its newest token")
    state = sample.generator.get_state()
    sample.generator.set_state(saved_tensor(tensors, "generator", tuple(state.shape), state))
    if sample.seen is not None and "seen" in tensors:
        sample.seen = saved_tensor(tensors, "seen", tuple(sample.seen.shape), sample.seen).clone()
    sample.replay(facts.recent)
    sample.unread, sample.made, sample.finished = list(facts.unread), facts.made, facts.finished
    sample.stops.held = facts.held


def _restore_cache(cache: Cache, model: TransformerLM, tensors: dict[str, Tensor], facts: _SavedSample) -> None:
    config, weight = model.config, next(model.parameters())
    check(len(facts.layers) in (0, config.layers), "the number of layers")
    like = weight.new_empty(1, config.key_heads, 0, config.head_width)
    bias = model.position.score_bias(1)
    for index, layer_facts in enumerate(facts.layers):
        # Copied, because torch's products may round by where a row lies in memory, and in a file it lies anywhere.
        stored = {name: x.to(like.device, copy=True) for name, x in under(tensors, f"layer{index}.").items()}
        cache.layer(index).restore(stored, layer_facts, like, bias)
    check(len({layer.length for layer in cache.layers}) <= 1, "the length of a layer")
    if model.position.reads_text() and cache.length and not isinstance(cache, BoundedCache):
        _check_places(cache, model)  # a bounded cache keeps less of it, and has looked itself


def _check_places(cache: Cache, model: TransformerLM) -> None:
    """What a method that looks at the text left in the cache must have the shapes that it leaves there after as many
    tokens: it is asked on the meta device, where shapes cost nothing."""
    position = deepcopy(model.position).to("meta")
    weight = next(model.parameters())
    x = torch.empty(1, cache.length, model.config.width, dtype=weight.dtype, device="meta")
    where = torch.arange(cache.length, device="meta")[None]
    for index, layer in enumerate(cache.layers):
        wanted: dict[str, Tensor] = {}
        attention = model.layers[index].get_submodule("attention")
        if not (isinstance(attention, Attention) and attention.plain):  # a plain layer asks for no bias
            position.text_bias(LayerInput(index, x, cache.length, where, wanted))
        for name in wanted.keys() | layer.place.keys():
            check(name in wanted, f"'{name}', which the position method does not keep,")
            saved_tensor(layer.place, name, tuple(wanted[name].shape), wanted[name])


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The JSON text and the tensors, every byte of them verified."""
    if not os.path.lexists(path):
        raise InputError(f"There is no saved state at {path}.")
    files.open_file(path, mend="Use an earlier one.").close()
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"{path} is no state file, or was cut short ({error}). Use an earlier one.") from None
    if "state" not in header:
        raise InputError(f"{path} is a safetensors file, but not a state that trainshort saved.")
    if sha256_of(tensors, header["state"].encode()) != header.get("sha256"):
        raise InputError(f"{path} is damaged: its sha256 is not the one written. Use an earlier one.")
    return header["state"], tensors
