"""Queries, keys and values to measure attention on: made up, from a file, or recorded from a trained model.

How much proven windows skip depends on the sizes of queries and keys, so a trained model's own are the honest input.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainshort import alibi
from trainshort.attention import DecayBias, LinearBias, decay
from trainshort.errors import InputError
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.evaluate.targets import RunTarget
from trainshort.evaluate.text import open_text
from trainshort.train.checkpoint import fingerprint

SYNTHETIC = ("normal", "scaled")
HEADS, DIM = 8, 64
RECORD_CHUNK = 4096
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
        return replace(self, bias=DecayBias(decay.decay_from_slopes(self.bias.slopes, self.q.shape[2])))


def make_inputs(source: str, length: int) -> Inputs:
    """Random normal, random normal with sharper heads ("scaled"), or the first tokens of a recorded file."""
    generator = torch.Generator().manual_seed(0)
    if source not in SYNTHETIC:
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


def require_error_bound(run: Path, what: str) -> RunTarget:
    """A causal run whose positions bound what far tokens weigh, which measuring `what` needs."""
    target = RunTarget(run)
    if not target.model.position.has_error_bound():
        position = target.model.config.position
        raise InputError(f"{run} has {position} positions; {what} is measured with ALiBi or FoX. Give such a run.")
    return target


def recordable(run: Path, layer: int | None) -> tuple[RunTarget, int]:
    """The run's model, and which layer of it is recorded (default: the middle one)."""
    target = require_error_bound(run, "attention")
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
    call = attention_calls(model, tokens[None], RECORD_CHUNK)[index]
    # Shared key heads are written out, since not every contestant can share them.
    found = {"q": call.q} | {
        name: getattr(call, name).repeat_interleave(call.heads_per_kv_head, dim=1) for name in "kv"
    }
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
