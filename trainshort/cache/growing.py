"""Keys and values of past tokens, so that the next token costs one pass over them and not over the text again.

    cache = Cache()
    model(prompt, cache=cache)          # prefill, in one or several chunks
    model(next_token, cache=cache)      # decode

Room grows by doubling, so appending n tokens copies O(n) in all; what `attend` gets are views.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import Bias, attend, attend_in_blocks
from trainshort.cache.facts import Facts, check, saved_tensor, under
from trainshort.cache.ring import LANES, Readings, Ring, RingCall, heads_of
from trainshort.errors import InputError

SMALLEST = 64
"""Tokens that a cache has room for at first."""
Ask = Callable[[slice, int, dict[str, Tensor]], Bias | None]
"""What a position method says to some rows of the batch, the number of keys before them, and its place in the cache."""
PLACE = "place_"
"""Before the names of a position method's own tensors, where a layer is saved."""


class _GrowingFacts(Facts):
    capacity: int
    """Tokens that there is room for."""
    left_out: float = 0.0


class LayerCache:
    """One layer's keys and values, (batch, kv_heads, length, dim) each."""

    def __init__(self) -> None:
        self._room = torch.empty(2, 0, 0, 0, 0)  # (2, batch, kv_heads, capacity, dim), once there is a key to keep
        self.length = 0
        self.place: dict[str, Tensor] = {}
        """What a position method that looks at the text wants back next time (positions.LayerInput)."""
        self.left_out: Float[Tensor, ""] | None = None
        """The largest share of any softmax that an engine proved it could leave out (the model's tolerance)."""
        self._call: RingCall | None = None
        self._readings: Readings | None = None  # of a clock, once a token was read by compiled code

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
            return attend_in_blocks(q, *self.append(*detached(k, v)), blocks=blocks, **options)
        out, left_out = attend(q, *self.append(*detached(k, v)), **options, return_certificate=True)
        self.left_out = left_out.max() if self.left_out is None else torch.maximum(self.left_out, left_out.max())
        return out

    def text_bias(self, ask: Ask, rows: slice = slice(None)) -> Any:
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
            room = self._make_room(end, k)
        room[0, :, :, self.length : end] = k
        room[1, :, :, self.length : end] = v
        self.length = end
        return room[0, :, :, :end], room[1, :, :, :end]

    def next_call(self, slopes: Float[Tensor, " heads"], shape: tuple[int, int], window: int | None) -> RingCall | None:
        """For step.c: a call that reads one more token, of `shape` (key heads, dim); None if only `attend` can.

        Once the compiled layers ran, `took_token`.
        """
        kv_heads, dim = shape
        like = torch.empty(1, kv_heads, 0, dim, dtype=torch.float32)
        room = self._room if self._room.shape[1] else like[None]
        if dim % LANES or room.shape[1] != 1 or room.dtype != like.dtype or room.device != like.device:
            return None
        if self.length == room.shape[3]:
            room = self._make_room(self.length + 1, like)
        if self._call is None:
            self._call = RingCall.of((Ring * kv_heads)(), heads_of(slopes.tolist(), 0.0), dim)
        self._call.lay_over(room, self.length)
        self._call.comes_after(self.length, window)
        return self._call

    def took_token(self, k: Float[Tensor, "1 kv_heads 1 dim"], v: Float[Tensor, "1 kv_heads 1 dim"]) -> None:
        """The token of `next_call` was read, with this key and value."""
        self.length += 1
        if self._readings is not None:
            self._readings.took_token(self.place, self._clocked)

    def under_clock(self, call: RingCall, gates: Float[Tensor, " heads"], sign: float) -> None:
        """The call's bias is a clock, moved on by these gates: log σ(sign · gate)."""
        self._readings = self._readings or Readings()
        self._readings.lay_under(call, self.place)
        call.gates, call.sign = gates.data_ptr(), sign

    @property
    def _clocked(self) -> int:
        """Newest keys whose readings of a clock are needed."""
        return self.length

    def _make_room(self, length: int, like: Tensor) -> Tensor:
        """Room for `length` tokens and as many more."""
        batch, heads, _, dim = like.shape
        grown = like.new_empty(2, batch, heads, max(length, 2 * self._room.shape[3], SMALLEST), dim)
        if self.length:
            grown[:, :, :, : self.length] = self._room[:, :, :, : self.length]
        self._room = grown
        return grown

    @property
    def bytes(self) -> int:
        return self._room.nbytes

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything remembered, as tensors and plain data; `restore` of it continues bit by bit."""
        if not self.length:
            return {}, {"length": 0}
        kept = {PLACE + name: tensor.contiguous() for name, tensor in self.place.items()}
        kept["kv"] = self._room[:, :, :, : self.length].contiguous()
        left_out = 0.0 if self.left_out is None else float(self.left_out)
        return kept, {"length": self.length, "capacity": self._room.shape[3], "left_out": left_out}

    def restore(self, tensors: Mapping[str, Tensor], facts: dict[str, Any], like: Tensor, bias: Bias | None) -> None:
        """Take up what `save` gave. `like` is empty keys of the model's own, (1, kv_heads, 0, dim); a file says no more
        than fits them. The room is as large as it was: torch's products may round by where a row lies in memory."""
        saved = _GrowingFacts.read(facts)
        if not saved.length:
            return
        _, heads, _, dim = like.shape
        kept = saved_tensor(tensors, "kv", (2, 1, heads, saved.length, dim), like)
        capacity = saved.capacity
        check(saved.length <= capacity <= max(2 * saved.length, SMALLEST), "the capacity")
        self._room, self.length = like.new_empty(2, 1, heads, capacity, dim), saved.length
        self._room[:, :, :, : self.length] = kept
        self.place = under(tensors, PLACE)
        self.left_out = torch.tensor(saved.left_out)


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


def detached(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A cache remembers values, not how they were computed; it is not for training."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise InputError("a cache cannot be trained through; wrap the call in torch.no_grad().")
    return k, v
