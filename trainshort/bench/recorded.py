"""Queries, keys and values to measure attention on: made up, from a file, or recorded from a trained model.

How much proven windows skip depends on the sizes of queries and keys, so a trained model's own are the honest input.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainshort import alibi, clocks
from trainshort.attention import AttentionCall, DecayBias, LinearBias
from trainshort.cache import Cache
from trainshort.checkpoint import fingerprint
from trainshort.errors import InputError
from trainshort.evaluate.target import RunTarget, open_text
from trainshort.model import Attention, TransformerLM

MADE_UP = ("normal", "scaled")
HEADS, DIM = 8, 64
CHUNK = 4096
"""Tokens that a recorded model reads at once."""


@dataclass(frozen=True)
class Inputs:
    q: Float[Tensor, "1 heads length dim"]
    k: Float[Tensor, "1 heads length dim"]
    v: Float[Tensor, "1 heads length dim"]
    bias: LinearBias | DecayBias
    grad_out: Float[Tensor, "1 heads length dim"]

    def with_clock(self) -> "Inputs":
        """The same, with slopes told as a clock."""
        if isinstance(self.bias, DecayBias):
            return self
        return replace(self, bias=DecayBias(clocks.of_slopes(self.bias.slopes, self.q.shape[2])))


def make_inputs(source: str, length: int) -> Inputs:
    """Random normal, random normal with sharper heads ("scaled"), or the first tokens of a recorded file."""
    generator = torch.Generator().manual_seed(0)
    if source not in MADE_UP:
        return _read(Path(source), length, generator)
    q, k, v, grad_out = (torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(4))
    if source == "scaled":
        q *= torch.linspace(0.5, 3, HEADS)[:, None, None]
    return Inputs(q, k, v, LinearBias(alibi.slopes(HEADS)), grad_out)


def _read(path: Path, length: int, generator: torch.Generator) -> Inputs:
    if not path.is_file():
        raise InputError(f"--inputs is normal, scaled, a .safetensors file or a run folder; there is no {path}.")
    try:
        recorded = load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}).") from None
    shapes = {recorded[name].shape for name in "qkv" if name in recorded}
    if not {"q", "k", "v"} <= recorded.keys() or len(shapes) != 1 or recorded["q"].dim() != 4:
        raise InputError(f"{path} must hold q, k and v of one shape (batch, heads, length, dim).")
    if recorded["q"].shape[2] < length:
        raise InputError(f"{path} holds {recorded['q'].shape[2]} tokens; asked for {length}. Give shorter --lengths.")
    q, k, v = (recorded[name][:1, :, :length].float().contiguous() for name in "qkv")
    bias: LinearBias | DecayBias = LinearBias(recorded.get("slopes", alibi.slopes(q.shape[1])))
    if "clock" in recorded:
        if recorded["clock"].shape != recorded["q"].shape[:3]:
            raise InputError(f"{path}: its clock must have a reading for each head and token, as q, k and v do.")
        if not recorded["clock"].isfinite().all():
            raise InputError(f"{path}: its clock must be finite everywhere; this one has readings that are not.")
        bias = DecayBias(recorded["clock"][:1, :, :length].double().contiguous())
    return Inputs(q, k, v, bias, torch.randn(q.shape, generator=generator))


def bounding(run: Path, what: str) -> RunTarget:
    """A causal run whose positions bound what far tokens weigh, which measuring `what` needs."""
    target = RunTarget(run)
    if not target.model.position.bounds_the_past():
        position = target.model.config.position
        raise InputError(f"{run} has {position} positions; {what} is measured with ALiBi or FoX. Give such a run.")
    return target


def recordable(run: Path, layer: int | None) -> tuple[RunTarget, int]:
    """The run's model, and which layer of it is recorded (default: the middle one)."""
    target = bounding(run, "attention")
    layers = target.model.config.layers
    index = layers // 2 if layer is None else layer
    if index >= layers:
        raise InputError(f"--layer {index} is not in {run}, whose layers are 0 to {layers - 1}.")
    return target, index


def record(target: RunTarget, index: int, length: int, path: Path) -> dict[str, object]:
    """Read the run's validation text through its model, repeated until it is `length` tokens, as one sequence; write
    one layer's q, k, v and slopes or clock. Returns what was recorded."""
    model = target.model
    text = open_text(target, ())
    tokens = torch.from_numpy(np.resize(text.tokens, length).astype(np.int64))
    call = attention_calls(model, tokens[None], CHUNK)[index]
    # Shared key heads are written out, since not every contestant can share them.
    found = {"q": call.q} | {name: getattr(call, name).repeat_interleave(call.group, dim=1) for name in "kv"}
    tensors = {name: x.float().contiguous() for name, x in found.items()}
    match call.bias:
        case LinearBias(slopes):
            tensors["slopes"] = slopes.detach().clone()
        case DecayBias(clock):
            tensors["clock"] = clock.contiguous()
        case _:
            raise InputError(f"layer {index} of {target.name} knows no positions; choose another --layer.")
    save_file(tensors, path)
    return {
        "run": target.name,
        "weights": fingerprint(model),
        "layer": index,
        "text": text.name,
        "text_sha256": text.sha256,
        "heads": model.config.heads,
        "dim": model.config.head_width,
    }


def attention_calls(
    model: TransformerLM, tokens: Int[Tensor, "batch length"], chunk: int | None = None
) -> tuple[AttentionCall, ...]:
    """One call per layer, from the first to the last. `chunk` tokens are read at a time where a long text would take
    too much memory at once; the calls are those of the whole text all the same (their bias is the last chunk's)."""
    parts: dict[Attention, list[AttentionCall]] = {
        layer: [] for layer in model.modules() if isinstance(layer, Attention)
    }

    def record(layer: Attention, arguments: tuple[Any, ...]) -> None:
        x, position, step, cache = arguments[:4]
        q, k, v = layer.project(x, position, step.where)
        remembered = {} if cache is None else dict(cache.place)
        bias = layer.bias(x, position, step, cache)
        if cache is not None:  # the layer itself asks again, and must find its place as it was
            cache.place = remembered
        parts[layer].append(AttentionCall(q, k, v, bias, layer.window, step.segment_ids))

    with ExitStack() as held, torch.no_grad():
        for layer in parts:
            held.callback(layer.register_forward_pre_hook(record).remove)
        cache = None if chunk is None else Cache()
        for part in tokens.split(chunk or tokens.shape[1], dim=1):
            model.hidden(part, cache=cache)
    return tuple(_joined(calls) for calls in parts.values())


def _joined(calls: list[AttentionCall]) -> AttentionCall:
    if len(calls) == 1:
        return calls[0]
    return replace(calls[-1], **{name: torch.cat([getattr(call, name) for call in calls], dim=2) for name in "qkv"})
