"""A KV cache that keeps only the most recent tokens and, on request, the first tokens (attention sinks).

Unlike the bounded cache, this cache evicts keys without a bound on the error. Without sinks, the cache computes
sliding-window attention with the true distances.

With sinks, the cache follows StreamingLLM (Xiao et al., 2024): the first tokens stay, and distances are counted among
the cached tokens. An example with window 3 and 2 sinks, after 10 tokens:

    cached tokens        0 1 7 8 9
    distance to token 9  4 3 2 1 0

Position methods that change embeddings or keys (sinusoidal, learned, rotary) use the true positions nevertheless.
`trainshort.generate` therefore rejects sinks for rotary embeddings.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import Bias, DistanceBias, LinearBias, attend, merge_by_lse
from trainshort.errors import InputError
from trainshort.model.cache.full import INITIAL_CAPACITY, Cache, LayerCache, detach_kv


@dataclass
class WindowCache(Cache):
    """A KV cache of limited size. A token attends to the tokens in its window and to the sinks.

    Args:
        window: The size of the window. A token attends to itself and the `window - 1` tokens before it.
        sinks: The number of tokens at the beginning of the text that all later tokens attend to.

    Raises:
        InputError: If `window` is below 1 or `sinks` is negative.
    """

    window: int = 1024
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InputError(f"window must be at least 1, got {self.window}.")
        if self.sinks < 0:
            raise InputError(f"sinks must be at least 0, got {self.sinks}.")

    def new_layer(self) -> LayerCache:
        """Create the empty cache of one layer."""
        return WindowLayer(self.window, self.sinks)


class WindowLayer(LayerCache):
    """One layer of a `WindowCache`.

    The keys are stored in a buffer that is filled from left to right. When the buffer is full, the last `window - 1`
    keys are moved to the beginning of the buffer.
    """

    def __init__(self, window: int, sinks: int) -> None:
        super().__init__()
        self.window = window
        self.sinks = sinks
        # The cached tokens are in the columns `_start` to `_end` of the buffer.
        self._start = 0
        self._end = 0
        # Keys and values of the first tokens: (2, batch, kv_heads, up to `sinks`, dim).
        self._sink_kv: Tensor | None = None

    def attend(
        self,
        q: Float[Tensor, "batch heads new dim"],
        k: Float[Tensor, "batch kv_heads new dim"],
        v: Float[Tensor, "batch kv_heads new dim"],
        **options: Any,
    ) -> Float[Tensor, "batch heads new dim"]:
        """Compute the attention of new tokens to the tokens in the window and to the sinks (first tokens of the text).

        The arguments are those of `LayerCache.attend`. If the model has a sliding window itself, the smaller window is
        used.
        """
        k, v = detach_kv(k, v)
        window = self.window
        model_window = options.pop("window", None)
        if model_window is not None:
            window = min(model_window, self.window)
        start = self.length  # the position of the first new token
        recent_k, recent_v = self.append(k, v)
        if not self.sinks:
            return attend(q, recent_k, recent_v, window=window, **options)

        self._store_sinks(k, v, start)
        # The log-sum-exp is needed to combine this attention with the attention to the sinks.
        result = attend(q, recent_k, recent_v, window=window, return_stats=True, **options)
        assert result.lse is not None
        return self._add_sink_attention(q, result.out, result.lse, start, options.get("bias"))

    def decode_args(self, slopes: Tensor, kv_shape: tuple[int, int], window: int | None) -> None:
        """Return None, because the compiled decoder does not support this cache."""

    def append(
        self, k: Float[Tensor, "batch kv_heads new dim"], v: Float[Tensor, "batch kv_heads new dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads recent dim"], Float[Tensor, "batch kv_heads recent dim"]]:
        """Store the keys and values of new tokens.

        Returns:
            The keys and the values of the new tokens and of the `window - 1` tokens before them.
        """
        new = k.shape[2]  # the number of new tokens
        cached = self._end - self._start  # the number of cached tokens
        past = min(self.window - 1, cached)  # the number of cached tokens that the first new token attends to
        if not self.length:
            batch, kv_heads, _, dim = k.shape
            self._storage = k.new_empty(2, batch, kv_heads, 0, dim)

        # The stored tokens are in the columns `_start` to `_end`. If no column is left, they move to the beginning.
        has_room = self._end + new <= self._storage.shape[3]
        if not has_room:
            past_kv = self._storage[:, :, :, self._end - past : self._end].clone()
            if past + new > self._max_capacity:
                return self._append_many(past_kv, torch.stack([k, v]))
            self._move_to_start(past_kv, new)

        storage = self._storage
        self._start = self._end - past
        storage[0, :, :, self._end : self._end + new] = k
        storage[1, :, :, self._end : self._end + new] = v
        self._end += new
        self.length += new
        recent = storage[:, :, :, self._start : self._end]
        return recent[0], recent[1]

    @property
    def _max_capacity(self) -> int:
        """Return the largest capacity of the buffer.

        The capacity exceeds the `window - 1` tokens that are needed, so that these tokens are rarely moved.
        """
        return self.window - 1 + max(INITIAL_CAPACITY, self.window // 2)

    def _move_to_start(self, past_kv: Float[Tensor, "2 batch kv_heads past dim"], new: int) -> None:
        """Store past tokens at the beginning of the buffer. Enlarge the buffer first if it may still grow.

        Args:
            past_kv: The keys and values of the past tokens.
            new: The number of new tokens that are stored afterwards.
        """
        _, batch, kv_heads, past, dim = past_kv.shape
        capacity = self._storage.shape[3]
        if capacity < self._max_capacity:
            doubled_capacity = max(2 * capacity, past + new, INITIAL_CAPACITY)
            capacity = min(self._max_capacity, doubled_capacity)
            self._storage = past_kv.new_empty(2, batch, kv_heads, capacity, dim)
        self._storage[:, :, :, :past] = past_kv
        self._start = 0
        self._end = past

    def _append_many(
        self, past_kv: Float[Tensor, "2 batch kv_heads past dim"], new_kv: Float[Tensor, "2 batch kv_heads new dim"]
    ) -> tuple[Tensor, Tensor]:
        """Store more tokens than the buffer can hold, such as a long prompt.

        Returns:
            The keys and the values of the past and the new tokens. Only the last `window - 1` tokens are stored.
        """
        recent = torch.cat([past_kv, new_kv], dim=3)
        # The next token attends to the last `window - 1` tokens only.
        stored_start = max(0, recent.shape[3] - (self.window - 1))
        self._move_to_start(recent[:, :, :, stored_start:], new=0)
        self.length += new_kv.shape[3]
        return recent[0], recent[1]

    def _store_sinks(self, k: Tensor, v: Tensor, start: int) -> None:
        """Store the keys and values of those new tokens that are sinks: the first `sinks` tokens of the text.

        Args:
            k: The keys of the new tokens.
            v: The values of the new tokens.
            start: The position of the first new token.
        """
        num_missing = self.sinks - start  # the number of sinks that are not stored yet
        if num_missing <= 0:
            return
        new_sink_kv = torch.stack([k, v])[:, :, :, :num_missing].clone()
        if self._sink_kv is None:
            self._sink_kv = new_sink_kv
        else:
            self._sink_kv = torch.cat([self._sink_kv, new_sink_kv], dim=3)

    def _add_sink_attention(
        self,
        q: Float[Tensor, "batch heads new dim"],
        out: Float[Tensor, "batch heads new dim"],
        lse: Float[Tensor, "batch heads new"],
        start: int,
        bias: Bias | None,
    ) -> Float[Tensor, "batch heads new dim"]:
        """Combine the attention inside the window with the attention to the sinks that are outside of the window.

        The sinks are the first tokens of the text. All later tokens attend to the sinks.

        Args:
            q: The queries of the new tokens.
            out: The attention output inside the window.
            lse: The log-sum-exp of the scores inside the window.
            start: The position of the first new token.
            bias: The bias of the attention scores.

        Returns:
            The attention output over the keys in the window and the sinks together.
        """
        assert self._sink_kv is not None
        all_in_window = start + q.shape[2] <= self.window
        if all_in_window:
            return out

        heads_per_kv_head = q.shape[1] // self._sink_kv.shape[2]
        k, v = self._sink_kv.repeat_interleave(heads_per_kv_head, dim=2)
        sinks = k.shape[2]
        sink_positions = torch.arange(sinks, device=q.device)
        positions = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
        true_distance = positions - sink_positions
        # The bias uses distances that are counted among the cached tokens (the sinks and the window) only.
        max_cached_distance = self.window + sinks - 1 - sink_positions
        cached_distance = true_distance.minimum(max_cached_distance)

        scores = (q @ k.transpose(-1, -2)).float() / q.shape[3] ** 0.5 + _bias_at(bias, cached_distance)
        # A sink inside the window is already part of `out`.
        scores = scores.masked_fill(true_distance < self.window, -torch.inf)
        sink_lse = scores.logsumexp(-1)
        # If all sinks are inside the window of a query, its `sink_lse` is -inf, and its weights are NaN.
        weights = (scores - sink_lse[..., None]).exp().nan_to_num(0)
        sink_out = weights.to(v.dtype) @ v
        merged_out, _ = merge_by_lse(out, lse, sink_out, sink_lse)
        return merged_out

    @property
    def bytes(self) -> int:
        """Return the size of the stored tensors in bytes."""
        sink_bytes = 0 if self._sink_kv is None else self._sink_kv.nbytes
        return super().bytes + sink_bytes


def _bias_at(bias: Bias | None, distance: Int[Tensor, "new keys"]) -> Float[Tensor, "heads new keys"] | float:
    """Return the values of a bias at the given distances between queries and keys, or 0 if there is no bias.

    Raises:
        InputError: If the bias does not depend on the distance alone.
    """
    match bias:
        case None:
            return 0.0
        case LinearBias(slopes):
            return -slopes.float()[:, None, None] * distance
        case DistanceBias(table):
            last_column = table.shape[1] - 1
            return table[:, distance.clamp(0, last_column)].float()
    raise InputError(
        f"Attention sinks require a bias that depends on the distance alone, or no bias, got {type(bias).__name__}."
    )
