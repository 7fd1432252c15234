"""The last n tokens, and if wanted the first few: forgetting without a proof, for comparison and for methods that have
none.

Without sinks this is the model with a sliding window, distances true. With sinks it is StreamingLLM (Xiao et al.):
the first m tokens stay, and distances are counted inside the cache, as if what was forgotten had never been:

    10 tokens read, window 3, sinks 2:   keys 0 1 . . . . . 7 8 9
                          distance to 9       4 3           2 1 0

Methods that add or turn positions before the cache (sinusoidal, learned, rotary) have them in the keys already; with
them only the mask changes. The generator refuses sinks for rotary, whose keys would have to be turned anew.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention import Bias, DistanceBias, LinearBias, attend, merge_by_lse
from trainshort.errors import InputError
from trainshort.model.cache.full import INITIAL_CAPACITY, Cache, LayerCache, detach_kv


@dataclass
class WindowCache(Cache):
    """A token sees itself, the `window` − 1 before it, and the first `sinks` tokens of the text."""

    window: int = 1024
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            raise InputError(f"a window is at least 1 and sinks at least 0; got {self.window} and {self.sinks}.")

    def new_layer(self) -> LayerCache:
        return WindowLayer(self.window, self.sinks)


class WindowLayer(LayerCache):
    """A buffer that is filled from the left; when it is full, the last window − 1 keys move to its beginning."""

    def __init__(self, window: int, sinks: int) -> None:
        super().__init__()
        self.window, self.sinks = window, sinks
        self._begin = self._end = 0  # of what is remembered, in the buffer
        self._first: Tensor | None = None  # (2, batch, kv_heads, up to sinks, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        k, v = detach_kv(k, v)
        window = min(options.pop("window", None) or self.window, self.window)
        start = self.length
        recent_k, recent_v = self.append(k, v)
        if not self.sinks:
            return attend(q, recent_k, recent_v, window=window, **options)
        self._keep_first(k, v, start)
        result = attend(q, recent_k, recent_v, window=window, return_stats=True, **options)
        assert result.lse is not None
        return self._with_sinks(q, result.out, result.lse, start, options.get("bias"))

    def decode_args(self, slopes: Tensor, shape: tuple[int, int], window: int | None) -> None:
        return None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest; returns them and the window − 1 before them."""
        new, kept = k.shape[2], min(self.window - 1, self._end - self._begin)
        if not self.length:
            self._room = k.new_empty(2, *k.shape[:2], 0, k.shape[3])
        room = self._room
        if self._end + new > room.shape[3]:
            past = room[:, :, :, self._end - kept : self._end].clone()
            if kept + new > self._largest:
                return self._append_many(past, torch.stack([k, v]))
            room = self._shift(past, new)
        self._begin = self._end - kept
        room[0, :, :, self._end : self._end + new] = k
        room[1, :, :, self._end : self._end + new] = v
        self._end += new
        self.length += new
        recent = room[:, :, :, self._begin : self._end]
        return recent[0], recent[1]

    @property
    def _largest(self) -> int:
        """Capacity of the buffer: half a window more than is kept, so that moving is rare."""
        return self.window - 1 + max(INITIAL_CAPACITY, self.window // 2)

    def _shift(self, past: Tensor, new: int) -> Tensor:
        """Bring what is kept to the beginning, in a larger buffer while it has not its full size."""
        kept, capacity = past.shape[3], self._room.shape[3]
        if capacity < self._largest:
            capacity = min(self._largest, max(2 * capacity, kept + new, INITIAL_CAPACITY))
            self._room = past.new_empty(*past.shape[:3], capacity, past.shape[4])
        self._room[:, :, :, :kept] = past
        self._begin, self._end = 0, kept
        return self._room

    def _append_many(self, past: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """More than the buffer ever holds, such as a prompt: what will be seen of them goes in, all are returned."""
        recent = torch.cat([past, new], dim=3)
        last = recent[:, :, :, max(0, recent.shape[3] - self.window + 1) :]
        self._shift(last, 0)
        self.length += new.shape[3]
        return recent[0], recent[1]

    def _keep_first(self, k: Tensor, v: Tensor, start: int) -> None:
        wanted = self.sinks - start
        if wanted > 0:
            fresh = torch.stack([k, v])[:, :, :, :wanted].clone()
            self._first = fresh if self._first is None else torch.cat([self._first, fresh], dim=3)

    def _with_sinks(self, q: Tensor, out: Tensor, lse: Tensor, start: int, bias: Bias | None) -> Tensor:
        """Put attention to those first tokens that have left the window together with that inside it."""
        assert self._first is not None
        group, sinks, device = q.shape[1] // self._first.shape[2], self._first.shape[3], q.device
        if start + q.shape[2] <= self.window:
            return out  # the window still holds them all
        k, v = (x.repeat_interleave(group, dim=1) for x in self._first)
        at = torch.arange(sinks, device=device)
        rows = torch.arange(start, start + q.shape[2], device=device)[:, None]
        distance = (rows - at).minimum(self.window + sinks - 1 - at)
        scores = (q @ k.transpose(-1, -2)).float() / q.shape[3] ** 0.5 + _bias_at(bias, distance)
        scores = scores.masked_fill(rows - at < self.window, -torch.inf)  # those in the window were counted there
        sink_lse = scores.logsumexp(-1)
        weights = (scores - sink_lse[..., None]).exp().nan_to_num(0)  # rows that see no sink outside have lse −inf
        merged, _ = merge_by_lse(out, lse, weights.to(v.dtype) @ v, sink_lse)
        return merged

    @property
    def bytes(self) -> int:
        return super().bytes + (0 if self._first is None else self._first.nbytes)


def _bias_at(bias: Bias | None, distance: Tensor) -> Float[Tensor, "heads rows keys"] | float:
    match bias:
        case None:
            return 0.0
        case LinearBias(slopes):
            return -slopes.float()[:, None, None] * distance
        case DistanceBias(table):
            return table[:, distance.clamp(0, table.shape[1] - 1)].float()
    raise InputError("sinks need a bias by distance, or none; a dense one does not say what a cached distance means.")
