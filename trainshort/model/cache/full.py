"""Keys and values of past tokens, so that the next token costs one pass over them and not over the text again.

    cache = Cache()
    model(prompt, cache=cache)          # prefill, in one or several chunks
    model(next_token, cache=cache)      # decode

Room grows by doubling, so appending n tokens copies O(n) in all; what `attend` gets are views.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import AttentionCall, Bias, attend_in_blocks, run_attention
from trainshort.errors import InputError
from trainshort.model.cache.ring_buffer import LANES, DecayBuffer, DecodeArgs, Ring, make_head_structs

INITIAL_CAPACITY = 64
"""Tokens that a cache has room for at first."""
Ask = Callable[[slice, int, dict[str, Tensor]], Bias | None]
"""What a position method says to some rows of the batch, the number of keys before them, and its place in the cache."""


class LayerCache:
    """One layer's keys and values, (batch, kv_heads, length, dim) each."""

    def __init__(self) -> None:
        self._room = torch.empty(2, 0, 0, 0, 0)  # (2, batch, kv_heads, capacity, dim), once there is a key to keep
        self.length = 0
        self.place: dict[str, Tensor] = {}
        """What a position method that looks at the text wants back next time (positions.LayerInput)."""
        self.left_out: Float[Tensor, ""] | None = None
        """The largest share of any softmax that a backend proved it could leave out (the model's tolerance)."""
        self._call: DecodeArgs | None = None
        self._readings: DecayBuffer | None = None  # of a clock, once a token was read by compiled code

    def attend(
        self,
        q: Float[Tensor, "batch heads new dim"],
        k: Float[Tensor, "batch kv_heads new dim"],
        v: Float[Tensor, "batch kv_heads new dim"],
        *,
        blocks: int | None = None,
        **options: Any,
    ) -> Float[Tensor, "batch heads new dim"]:
        """Attention of the newest tokens over all that came before and themselves; `options` are `attend`'s."""
        if blocks is not None:
            return attend_in_blocks(q, *self.append(*detach_kv(k, v)), blocks=blocks, **options)
        backend = options.pop("backend", "auto")
        all_k, all_v = self.append(*detach_kv(k, v))
        result = run_attention(AttentionCall(q, all_k, all_v, **options), backend)
        if result.certificate is not None:
            largest = result.certificate.max()
            self.left_out = largest if self.left_out is None else torch.maximum(self.left_out, largest)
        return result.out

    def content_bias(self, ask: Ask, rows: slice = slice(None)) -> Any:
        """The bias of a method that looks at the text, for what `attend` is given next, of these rows of the batch."""
        return ask(rows, self.length, self.place)

    def append(
        self, k: Float[Tensor, "batch kv_heads new dim"], v: Float[Tensor, "batch kv_heads new dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads length dim"], Float[Tensor, "batch kv_heads length dim"]]:
        """Add the newest keys and values; returns all of them."""
        if self._room.shape[1] not in (0, k.shape[0]):
            raise InputError(
                f"this cache holds {self._room.shape[1]} sequences, but the input has {k.shape[0]}; "
                "use a new Cache for another batch."
            )
        end, room = self.length + k.shape[2], self._room
        if end > room.shape[3]:
            room = self._reserve(end, k)
        room[0, :, :, self.length : end] = k
        room[1, :, :, self.length : end] = v
        self.length = end
        return room[0, :, :, :end], room[1, :, :, :end]

    def decode_args(
        self, slopes: Float[Tensor, " heads"], shape: tuple[int, int], window: int | None
    ) -> DecodeArgs | None:
        """For step.c: a call that reads one more token, of `shape` (key heads, dim); None if only `attend` can.

        Once the compiled layers ran, `took_token`.
        """
        kv_heads, dim = shape
        like = torch.empty(1, kv_heads, 0, dim, dtype=torch.float32)
        room = self._room if self._room.shape[1] else like[None]
        if dim % LANES or room.shape[1] != 1 or room.dtype != like.dtype or room.device != like.device:
            return None
        if self.length == room.shape[3]:
            room = self._reserve(self.length + 1, like)
        if self._call is None:
            self._call = DecodeArgs.create((Ring * kv_heads)(), make_head_structs(slopes.tolist(), 0.0), dim)
        self._call.bind_full_cache(room, self.length)
        self._call.set_step(self.length, window)
        return self._call

    def commit_token(self, k: Float[Tensor, "1 kv_heads 1 dim"], v: Float[Tensor, "1 kv_heads 1 dim"]) -> None:
        """The token of `decode_args` was read, with this key and value."""
        self.length += 1
        if self._readings is not None:
            self._readings.commit_token(self.place, self._decay_span)

    def set_decay(self, call: DecodeArgs, gates: Float[Tensor, " heads"], sign: float) -> None:
        """The call's bias is a clock, moved on by these gates: log σ(sign · gate)."""
        self._readings = self._readings or DecayBuffer()
        self._readings.bind(call, self.place)
        call.gates, call.sign = gates.data_ptr(), sign

    @property
    def _decay_span(self) -> int:
        """Newest keys whose readings of a clock are needed."""
        return self.length

    def _reserve(self, length: int, like: Tensor) -> Tensor:
        """Room for `length` tokens and as many more."""
        batch, heads, _, dim = like.shape
        grown = like.new_empty(2, batch, heads, max(length, 2 * self._room.shape[3], INITIAL_CAPACITY), dim)
        if self.length:
            grown[:, :, :, : self.length] = self._room[:, :, :, : self.length]
        self._room = grown
        return grown

    @property
    def bytes(self) -> int:
        return self._room.nbytes


@dataclass
class Cache:
    """What a model remembers of the tokens it has read: here everything. Made empty; the model fills it."""

    layers: list[LayerCache] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0].length if self.layers else 0

    def offset(self, batch: int) -> int | Int[Tensor, "batch 1"]:
        """Position of the next token of `batch` sequences; a tensor where they differ."""
        return self.length

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    def layer(self, index: int) -> LayerCache:
        while len(self.layers) <= index:
            self.layers.append(self.new_layer())
        return self.layers[index]

    def new_layer(self) -> LayerCache:
        """What one layer remembers by; other caches have other layers."""
        return LayerCache()


def detach_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A cache remembers values, not how they were computed; it is not for training."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise InputError("a cache cannot be trained through; wrap the call in torch.no_grad().")
    return k, v
