"""A stream on disk: one safetensors file, whole or not there, which continues bit by bit where it was saved.

It holds every cache as it is (rings, counts, norms), the random generators, and what was read but not shown. The header
carries the rest as JSON, with a sha256 over all of it, and the identity of the model: a state means nothing to other
weights.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainshort.data.tokenizer import Tokenizer
from trainshort.errors import InputError
from trainshort.files import PARTIAL, sync_file, sync_folder
from trainshort.generate import memory
from trainshort.generate.sample import Sample, Token
from trainshort.generate.settings import GenerateConfig
from trainshort.generate.streaming import Stream
from trainshort.model import TransformerLM

FORMAT = 1
REMEMBERED = ("mode", "tolerance", "window", "sinks")
"""Settings that the cache was made by; they cannot change when a stream goes on."""


def save_state(stream: Stream, path: Path) -> None:
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
    partial = path.with_name(path.name + PARTIAL)
    try:
        save_file(tensors, partial, metadata={"state": text, "sha256": _digest(text, tensors)})
        sync_file(partial)
        partial.replace(path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise InputError(f"Cannot write {path}: {reason}. A state that was there before is intact.") from error


def load_state(path: Path, model: TransformerLM, tokenizer: Tokenizer | None = None, **changes: Any) -> Stream:
    """The stream that was saved, ready to go on. `changes` are settings to change; not those the cache was made by."""
    text, tensors = _read(path)
    state = json.loads(text)
    if state["format"] != FORMAT:
        raise InputError(f"{path} has format {state['format']}, and this version of trainshort reads format {FORMAT}.")
    if state["model"] != model_identity(model):
        raise InputError(f"{path} was saved with another model or other weights; resume it with the model it is of.")
    for name in REMEMBERED:
        if name in changes and changes[name] != state["settings"][name]:
            raise InputError(
                f"{path} was saved with {name} {state['settings'][name]}, and what it forgot cannot come back; "
                f"resume without another {name}."
            )
    stream = Stream(model.eval(), GenerateConfig.read(state["settings"] | changes), tokenizer)
    for number, facts in enumerate(state["samples"]):
        prefix = f"{number}."
        mine = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        stream.samples.append(_restored(stream, number, mine, facts))
    stream.waiting = [Token(*values) for values in state["waiting"]]
    return stream


def model_identity(model: TransformerLM) -> str:
    """sha256 of settings and weights. The attention engine may differ: it changes nothing but rounding."""
    digest = hashlib.sha256(to_json(model.config.replace(backend="auto").identity()))
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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


def _restored(stream: Stream, number: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Sample:
    model = stream.model
    device = next(model.parameters()).device
    cache = memory.new_cache(model, stream.config)
    sample = Sample(cache, model.config.vocabulary, stream.config, stream.tokenizer, number)
    for index, layer_facts in enumerate(facts["layers"]):
        prefix = f"layer{index}."
        stored = {name.removeprefix(prefix): x.to(device) for name, x in tensors.items() if name.startswith(prefix)}
        cache.layer(index).restore(stored, layer_facts)
    sample.generator.set_state(tensors["generator"])
    if sample.seen is not None and "seen" in tensors:
        sample.seen = tensors["seen"]
    sample.replay(facts["recent"])
    sample.unread, sample.made, sample.finished = facts["unread"], facts["made"], facts["finished"]
    sample.stops.held = facts["held"]
    return sample


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The JSON text and the tensors, every byte of them verified."""
    if not path.is_file():
        raise InputError(f"There is no saved state at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is no state file, or was cut short ({error}). Use an earlier one.") from None
    if "state" not in header:
        raise InputError(f"{path} is a safetensors file, but not a state that trainshort saved.")
    if _digest(header["state"], tensors) != header.get("sha256"):
        raise InputError(f"{path} is damaged: its sha256 is not the one written. Use an earlier one.")
    return header["state"], tensors


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
