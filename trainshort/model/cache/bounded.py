"""The bounded KV cache: it evicts keys with provably little softmax mass, and reports an upper bound on the error.

ALiBi subtracts slope * distance from every score, and a score before the bias is at most the product of two norms. Let
all evicted keys of a head have a distance of at least w and a norm of at most K. With slope m and the log-sum-exp (lse)
of the scores of the remaining keys, the evicted keys have at most this softmax mass (sum of attention weights):

    mass <= exp(|q| * K / sqrt(d) - m * w - lse) / (1 - exp(-m))

Each key-value head stores its recent keys in a ring buffer. The length of the ring buffer follows from this bound and
the queries so far. The bound is then computed for every query, and the certificate is the largest value. See
docs/generation.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainshort import alibi
from trainshort.attention import AttentionCall, Bias, LinearBias, attend
from trainshort.errors import InputError
from trainshort.model.cache.full import INITIAL_CAPACITY, Cache, LayerCache, detach_kv
from trainshort.model.cache.ring_buffer import (
    LANES,
    UNBOUNDED,
    DecodeArgs,
    HeadState,
    RingBuffer,
    kernel_unavailable_reason,
    make_head_structs,
)

CAPACITY_MARGIN = 1.0
"""The length of a ring buffer suffices for queries whose scores exceed those of all earlier queries by this number."""

MIN_BIAS_DROP = 4.0
"""Queries with fewer than MIN_BIAS_DROP / slope past tokens do not determine the length of the ring buffers.

The log-sum-exp of these queries still grows with every key, so the queries do not represent later queries.
"""

BACKEND_TOLERANCE_SHARE = 0.1
"""The share of the tolerance that the attention backend may use up itself while a prompt is processed."""


@dataclass(frozen=True)
class Certificate:
    """An upper bound on the error that a bounded cache caused by evicting keys.

    A row is one query of one head in one layer.

    Attributes:
        mass: The largest softmax mass (sum of attention weights) that can have been evicted from any row. NaN or
            infinity if a query or a key was not finite.
        tolerance: The softmax mass that the cache was allowed to evict from each row.
        rows_above_tolerance: The number of rows whose upper bound was above the tolerance.
        rows: The number of all rows.
        grow_count: How often a ring buffer was enlarged after it had evicted keys.
    """

    mass: float
    tolerance: float
    rows_above_tolerance: int
    rows: int
    grow_count: int

    def __add__(self, other: "Certificate") -> "Certificate":
        """Return the certificate of two caches together.

        A certificate is an upper bound on the softmax mass (`mass`) that was evicted from any row. A row is one query
        of one head in one layer. The upper bounds of some rows may exceed the tolerance.
        """
        return Certificate(
            mass=_nan_propagating_max(self.mass, other.mass),
            tolerance=max(self.tolerance, other.tolerance),
            rows_above_tolerance=self.rows_above_tolerance + other.rows_above_tolerance,
            rows=self.rows + other.rows,
            grow_count=self.grow_count + other.grow_count,
        )

    def __str__(self) -> str:
        """Return one line such as "error certificate: 5.0e-07 (tolerance 1e-06, no row above it)".

        The first number is the upper bound on the softmax mass that was evicted from any row. A row is one query of one
        head in one layer.
        """
        if self.rows_above_tolerance:
            rows_text = f"{self.rows_above_tolerance:,} of {self.rows:,} rows above it"
        else:
            rows_text = "no row above it"
        grow_text = ""
        if self.grow_count:
            grow_text = f", windows grew {self.grow_count:,} times"
        return f"error certificate: {self.mass:.1e} (tolerance {self.tolerance:.0e}, {rows_text}{grow_text})"


@dataclass
class BoundedCache(Cache):
    """A KV cache that evicts keys with provably little softmax mass. The cache stores a single sequence.

    Args:
        tolerance: The softmax mass (sum of attention weights) that may be dropped from each query by evicting keys.
        compiled: Whether single tokens are processed by compiled code if possible. False is used by tests.
        has_decay_bias: Whether the model uses a `DecayBias` (FoX). With False, it must use a `LinearBias` (ALiBi).

    Raises:
        InputError: If `tolerance` is out of range.
    """

    tolerance: float = 1e-6
    compiled: bool = True
    has_decay_bias: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise InputError(f"tolerance must be at least 0 and less than 1, got {self.tolerance}.")

    def new_layer(self) -> "BoundedLayer":
        """Create the empty cache of one layer. Models with a decay bias (FoX) need another class than ALiBi models."""
        if self.has_decay_bias:
            from trainshort.model.cache.bounded_decay import BoundedDecayLayer

            return BoundedDecayLayer(self.tolerance, self.compiled)
        return BoundedLayer(self.tolerance, self.compiled)

    @property
    def certificate(self) -> Certificate:
        """Return an upper bound on the softmax mass that was evicted so far, over all queries, heads and layers."""
        head_states: list[HeadState] = []
        grow_count = 0
        for layer in self.layers:
            assert isinstance(layer, BoundedLayer)
            head_states.extend(layer.head_states)
            grow_count += layer.grow_count

        mass = 0.0
        for state in head_states:
            mass = _nan_propagating_max(mass, state.certificate)
        return Certificate(
            mass=mass,
            tolerance=self.tolerance,
            rows_above_tolerance=sum(state.rows_above_tolerance for state in head_states),
            # A row is one query of one head in one layer.
            rows=self.length * len(head_states),
            grow_count=grow_count,
        )

    @property
    def windows(self) -> list[list[int]]:
        """Return the number of keys in each ring buffer, as one list per layer.

        Each key-value head of a layer has a ring buffer with its newest keys.
        """
        counts = []
        for layer in self.layers:
            assert isinstance(layer, BoundedLayer)
            counts.append([ring_buffer.count for ring_buffer in layer.ring_buffers])
        return counts


class BoundedLayer(LayerCache):
    """One layer of a `BoundedCache` for a model with ALiBi.

    Single tokens are processed by compiled code where possible. Prompts are processed by PyTorch.

    Attributes:
        tolerance: The softmax mass that may be dropped from each query by evicting keys.
        use_compiled: Whether single tokens may be processed by compiled code.
        grow_count: How often a ring buffer was enlarged after it had evicted keys.
        ring_buffers: A ctypes array with one `RingBuffer` per key-value head. Empty before the first token.
        head_states: A ctypes array with one `HeadState` per query head. Empty before the first token.
    """

    def __init__(self, tolerance: float, use_compiled: bool = True) -> None:
        super().__init__()
        self.tolerance = tolerance
        self.use_compiled = use_compiled
        self.grow_count = 0
        # Both become ctypes arrays with the first token: one `RingBuffer` per key-value head, one `HeadState` per query
        # head.
        self.ring_buffers: Any = []
        self.head_states: Any = []
        # The keys and values that the ring buffers point to, one tensor (2, capacity, padded_dim) per key-value head.
        self._ring_storage: list[Tensor] = []
        self._dim = 0

    def attend(
        self,
        q: Float[Tensor, "batch heads new dim"],
        k: Float[Tensor, "batch kv_heads new dim"],
        v: Float[Tensor, "batch kv_heads new dim"],
        **options: Any,
    ) -> Float[Tensor, "batch heads new dim"]:
        """Compute the attention of new tokens to the cached tokens and to themselves, and store their keys and values.

        The arguments are those of `LayerCache.attend`.

        Raises:
            InputError: If the batch contains several sequences, or if the bias gives no bound on the evicted mass.
        """
        q = q.detach()
        k, v = detach_kv(k, v)
        bias = options["bias"]
        if q.shape[0] != 1:
            raise InputError(
                f"A bounded cache stores one sequence, got a batch of {q.shape[0]}. "
                "Use BatchedCache for several sequences."
            )
        slopes = self._slopes(bias, q.shape[1])
        if not self.ring_buffers:
            self._initialize(slopes.tolist(), k)

        is_single_token = q.shape[2] == 1
        if is_single_token and isinstance(bias, LinearBias) and q.device.type == "cpu" and q.dtype == torch.float32:
            kv_shape = (k.shape[1], k.shape[3])
            args = self.decode_args(slopes, kv_shape, options.get("window"))
            if args is not None:
                out = args.attend(q, k, v)
                self.commit_token(k, v)
                return out

        out = self._prefill(q, k, v, options)
        self.length += q.shape[2]
        return out

    def _slopes(self, bias: Bias | None, heads: int) -> Float[Tensor, " heads"]:
        """Return the ALiBi slopes of the query heads.

        Raises:
            InputError: If the bias is not linear.
        """
        if not isinstance(bias, LinearBias):
            raise InputError(
                f"A bounded cache requires ALiBi (LinearBias), got {type(bias).__name__}. Use another KV cache."
            )
        return bias.slopes

    def _initialize(self, slopes: list[float], k: Float[Tensor, "1 kv_heads new dim"]) -> None:
        """Create an empty ring buffer for each key-value head, and the state (statistics) of each query head.

        Args:
            slopes: The ALiBi slopes of the query heads.
            k: Keys with the shape, dtype and device of the keys that will be stored.
        """
        num_kv_heads = k.shape[1]
        self._dim = k.shape[3]
        # The compiled code reads complete vector registers, so rows are padded to a multiple of LANES.
        padded_dim = math.ceil(self._dim / LANES) * LANES
        self.ring_buffers = (RingBuffer * num_kv_heads)()
        self.head_states = make_head_structs(slopes, max_excess=-math.inf)
        self._ring_storage = [k.new_zeros(2, 0, padded_dim) for _ in range(num_kv_heads)]
        for kv_head in range(num_kv_heads):
            self._resize(kv_head, INITIAL_CAPACITY)

    # ---- single tokens, processed by compiled code

    def decode_args(
        self, slopes: Float[Tensor, " heads"], kv_shape: tuple[int, int], window: int | None
    ) -> DecodeArgs | None:
        """Return the arguments with which the compiled decoder processes one more token.

        Args:
            slopes: The ALiBi slopes of the query heads.
            kv_shape: The number of key-value heads and the size of each head.
            window: The size of the sliding window of the model, or None.

        Returns:
            The arguments, or None if the compiled decoder cannot be used with this cache.
        """
        if not self.use_compiled or kernel_unavailable_reason() is not None:
            return None
        if not self.ring_buffers:
            kv_heads, dim = kv_shape
            empty_k = torch.empty(1, kv_heads, 0, dim, dtype=torch.float32)
            self._initialize(slopes.tolist(), empty_k)
        storage = self._ring_storage[0]
        if storage.dtype != torch.float32 or storage.device.type != "cpu":
            return None
        if self._decode_args is None:
            self._decode_args = DecodeArgs.create(self.ring_buffers, self.head_states, self._dim)
            self._decode_args.tolerance = self.tolerance
            self._decode_args.capacity_margin = CAPACITY_MARGIN
            self._decode_args.min_bias_drop = MIN_BIAS_DROP
        self._decode_args.set_step(self.length, window)
        return self._decode_args

    def commit_token(self, k: Float[Tensor, "1 kv_heads 1 dim"], v: Float[Tensor, "1 kv_heads 1 dim"]) -> None:
        """Count a token that the compiled decoder has processed, and enlarge ring buffers that were too small.

        If a ring buffer must grow, the compiled decoder sets `requested_capacity` and does not store the key and the
        value of the token. In this case, they are stored here.

        Args:
            k: The key of the token.
            v: The value of the token.
        """
        for kv_head, ring_buffer in enumerate(self.ring_buffers):
            if ring_buffer.requested_capacity:
                self._grow(kv_head, ring_buffer.requested_capacity, needed_now=ring_buffer.count + 1)
                self._insert(kv_head, k[0, kv_head], v[0, kv_head])
                ring_buffer.requested_capacity = 0
        super().commit_token(k, v)

    # ---- any number of tokens, processed by PyTorch

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the attention of new tokens with the attention backend of training.

        The key-value heads are processed one by one, because their ring buffers have different lengths.

        Args:
            q: The queries, shape (1, heads, new, dim).
            k: The keys, shape (1, kv_heads, new, dim).
            v: The values, with the same shape as `k`.
            options: The arguments `bias`, `window` and `backend` of `attend`.

        Returns:
            The attention output with the shape of `q`.
        """
        heads_per_kv_head = q.shape[1] // len(self.ring_buffers)
        outputs = []
        for kv_head, ring_buffer in enumerate(self.ring_buffers):
            heads = slice(kv_head * heads_per_kv_head, (kv_head + 1) * heads_per_kv_head)
            past_k, past_v = self.ordered_kv(kv_head)[..., : self._dim]
            all_k = torch.cat([past_k, k[0, kv_head]])
            all_v = torch.cat([past_v, v[0, kv_head]])
            bias = self._bias_for_heads(options["bias"], heads, len(all_k))
            call = AttentionCall(q[:, heads], all_k[None, None], all_v[None, None], bias, options.get("window"))
            out, lse, certificate = attend(
                call.q,
                call.k,
                call.v,
                bias=bias,
                window=call.window,
                backend=options.get("backend", "auto"),
                tolerance=self.tolerance * BACKEND_TOLERANCE_SHARE,
                return_stats=True,
            )
            assert lse is not None
            assert certificate is not None
            new_key_norms = _norms(k[0, kv_head])
            ring_buffer.max_norm = _finite_max(ring_buffer.max_norm, new_key_norms)
            self._update_error_bound(kv_head, call, lse[0].double(), certificate[0].tolist())
            self._store(kv_head, call)
            outputs.append(out)
        return torch.cat(outputs, dim=1)

    def _update_error_bound(
        self, kv_head: int, call: AttentionCall, lse: Float[Tensor, "group new"], backend_certificates: list[float]
    ) -> None:
        """Update the certificates and `max_excess` of the query heads that share one key-value head.

        The certificate of a head is the largest softmax mass that can have been dropped from any query so far. The
        excess of a query is an upper bound on its scores before the bias, minus the log-sum-exp of its scores.

        Args:
            kv_head: The index of the key-value head.
            call: The attention call of these query heads. Its keys are the cached keys and the new keys.
            lse: The log-sum-exp of the scores of each query.
            backend_certificates: For each query head, an upper bound on the softmax mass that the backend skipped.
        """
        ring_buffer = self.ring_buffers[kv_head]
        has_evicted_keys = self.length > ring_buffer.count
        # A score before the bias is at most the scaled norm of the query times the norm of the key.
        scaled_norms = _norms(call.q[0]) / math.sqrt(self._dim)
        group_size, num_new = lse.shape
        nearest_evicted_distance = ring_buffer.count + 1 + torch.arange(num_new, device=lse.device)
        is_outside_window = nearest_evicted_distance >= (call.window or UNBOUNDED)

        for index in range(group_size):
            head = kv_head * group_size + index
            state = self.head_states[head]
            dropped_mass = torch.full_like(scaled_norms[index], backend_certificates[index])
            if has_evicted_keys:
                excess = scaled_norms[index] * ring_buffer.max_evicted_norm - lse[index]
                evicted_mass = self._evicted_mass(head, call, excess, nearest_evicted_distance)
                dropped_mass += evicted_mass.masked_fill(is_outside_window, 0)
            state.certificate = _nan_propagating_max(state.certificate, float(dropped_mass.max()))
            is_within_tolerance = dropped_mass <= self.tolerance  # False for NaN
            state.rows_above_tolerance += int((~is_within_tolerance).sum())

            is_representative = self._is_representative(head, call)
            excess = scaled_norms[index] * ring_buffer.max_norm - lse[index]
            state.max_excess = _finite_max(state.max_excess, excess[is_representative])

    def _is_representative(self, head: int, call: AttentionCall) -> Bool[Tensor, " new"]:
        """Return for each new query whether it may determine the capacity of the ring buffer.

        The capacity is computed from the largest difference between a score and the log-sum-exp of its query. The
        log-sum-exp of a query with few past tokens is smaller than that of later queries, so such a query does not
        represent the later queries.

        Args:
            head: The index of the query head.
            call: The attention call of the new tokens.
        """
        return self._bias_drop(head, call) >= MIN_BIAS_DROP

    # ---- parts that depend on the kind of bias. BoundedDecayLayer overrides them.

    def _bias_for_heads(self, bias: Bias, heads: slice, num_keys: int) -> Bias:
        """Return the bias of some query heads for the newest `num_keys` keys."""
        assert isinstance(bias, LinearBias)
        return LinearBias(bias.slopes[heads])

    def _evicted_mass(
        self, head: int, call: AttentionCall, excess: Float[Tensor, " new"], distance: Int[Tensor, " new"]
    ) -> Float[Tensor, " new"]:
        """Return an upper bound on the softmax mass of the evicted keys, for each new query.

        Args:
            head: The index of the query head.
            call: The attention call of the new tokens.
            excess: For each new query, an upper bound on its scores before the bias, minus its log-sum-exp.
            distance: For each new query, the distance to the nearest evicted key.
        """
        slope = torch.tensor(self.head_states[head].slope, dtype=torch.float64)
        return alibi.mass_beyond(excess, slope, distance)

    def _bias_drop(self, head: int, call: AttentionCall) -> Float[Tensor, " new"]:
        """Return for each new token the difference between its own bias and the bias of the first token of the text.

        Example:
            With the slope 0.5, the difference is 0.5 * 100 = 50 for the token at position 100.

        Args:
            head: The index of the query head.
            call: The attention call of the new tokens.
        """
        # ALiBi's bias of the first token is -slope * position. The bias of the new token itself is 0.
        new_positions = torch.arange(call.q.shape[2], device=call.q.device, dtype=torch.float64)
        return (self.length + new_positions) * self.head_states[head].slope

    def _required_capacity(self, kv_head: int, call: AttentionCall) -> int:
        """Return the capacity (number of keys) that the error bound requires of the ring buffer of a key-value head.

        Args:
            kv_head: The index of the key-value head.
            call: The attention call of the query heads that share this key-value head.
        """
        group_size = call.q.shape[1]  # the number of query heads that share the key-value head
        states = self.head_states[kv_head * group_size : (kv_head + 1) * group_size]  # the states of these query heads
        return required_capacity(states, self.tolerance, call.window or UNBOUNDED)

    def _evict(self, kv_head: int, call: AttentionCall, num_evicted: int) -> None:
        """Update the largest norm of all evicted keys, on which the error bound depends.

        Args:
            kv_head: The index of the key-value head.
            call: The attention call of the new tokens. Its keys are the cached keys, followed by the new keys.
            num_evicted: How many of the oldest keys of the call are evicted.
        """
        ring_buffer = self.ring_buffers[kv_head]
        # The call has a batch of one sequence and a single key-value head, so the keys are call.k[0, 0].
        max_norm = float(_norms(call.k[0, 0, :num_evicted]).max())
        ring_buffer.max_evicted_norm = _nan_propagating_max(ring_buffer.max_evicted_norm, max_norm)

    def _store(self, kv_head: int, call: AttentionCall) -> None:
        """Store new keys and values in a ring buffer. Enlarge the ring buffer first if the error bound requires it.

        Args:
            kv_head: The index of the key-value head.
            call: The attention call of the new tokens. Its keys are the cached keys, followed by the new keys.
        """
        ring_buffer = self.ring_buffers[kv_head]
        keys = call.k[0, 0]  # (cached + new, dim), because the batch and the number of key-value heads are 1
        values = call.v[0, 0]
        if len(keys) > ring_buffer.capacity:
            required = self._required_capacity(kv_head, call)
            if required > ring_buffer.capacity:
                self._grow(kv_head, required, needed_now=len(keys))

        num_evicted = len(keys) - ring_buffer.capacity
        if num_evicted > 0:
            self._evict(kv_head, call, num_evicted)
        # If the prompt is longer than the ring buffer, only its last keys are stored.
        num_stored = min(call.q.shape[2], ring_buffer.capacity)
        self._insert(kv_head, keys[-num_stored:], values[-num_stored:])

    # ---- ring buffers

    def ordered_kv(self, kv_head: int) -> Float[Tensor, "2 count padded_dim"]:
        """Return the keys (index 0) and values (index 1) in the ring buffer of a key-value head, oldest first."""
        ring_buffer = self.ring_buffers[kv_head]
        storage = self._ring_storage[kv_head]
        is_full = ring_buffer.count == ring_buffer.capacity
        if not is_full:
            return storage[:, : ring_buffer.count]
        oldest = ring_buffer.next  # In a full ring buffer, the next slot holds the oldest key.
        return torch.cat([storage[:, oldest:], storage[:, :oldest]], dim=1)

    def _grow(self, kv_head: int, required: int, needed_now: int) -> None:
        """Enlarge a ring buffer (the storage of the newest keys and values of one key-value head).

        The new capacity is at most the larger of twice the old capacity and `needed_now`. A short text therefore needs
        little memory, even if the required capacity is large.

        Args:
            kv_head: The index of the key-value head.
            required: The capacity that the error bound requires.
            needed_now: The number of keys that will be in the buffer after the current step.
        """
        ring_buffer = self.ring_buffers[kv_head]
        # The statistics count only cases in which the buffer was too small, not the growth of a young buffer.
        has_evicted_keys = self.length > ring_buffer.count
        if has_evicted_keys:
            self.grow_count += 1
        max_capacity = max(2 * ring_buffer.capacity, needed_now)
        self._resize(kv_head, min(required, max_capacity))

    def _resize(self, kv_head: int, capacity: int) -> None:
        """Move the keys and values of a key-value head to a new, larger ring buffer."""
        ring_buffer = self.ring_buffers[kv_head]
        old_kv = self.ordered_kv(kv_head)
        storage = old_kv.new_zeros(2, capacity, old_kv.shape[2])
        storage[:, : ring_buffer.count] = old_kv
        ring_buffer.capacity = capacity
        ring_buffer.next = ring_buffer.count % capacity  # the slot of the next key
        ring_buffer.keys = storage[0].data_ptr()
        ring_buffer.values = storage[1].data_ptr()
        self._ring_storage[kv_head] = storage

    def _insert(self, kv_head: int, k: Float[Tensor, "new dim"], v: Float[Tensor, "new dim"]) -> None:
        """Write new keys and values into the next slots of a ring buffer. In a full buffer, they replace the oldest."""
        ring_buffer = self.ring_buffers[kv_head]
        storage = self._ring_storage[kv_head]
        # After the last slot of the ring buffer, the first slot follows.
        slots = (torch.arange(len(k), device=k.device) + ring_buffer.next) % ring_buffer.capacity
        storage[0, slots, : self._dim] = k
        storage[1, slots, : self._dim] = v
        ring_buffer.next = (ring_buffer.next + len(k)) % ring_buffer.capacity
        ring_buffer.count = min(ring_buffer.count + len(k), ring_buffer.capacity)

    @property
    def bytes(self) -> int:
        """Return the size of all ring buffers in bytes."""
        return sum(storage.nbytes for storage in self._ring_storage)


def required_capacity(states: Sequence[HeadState], tolerance: float, window: int = UNBOUNDED) -> int:
    """Return the number of keys that a ring buffer must hold, so that the evicted softmax mass stays in the tolerance.

    The excess of a query is an upper bound on its scores before the bias, minus the log-sum-exp of its scores. The
    capacity suffices for queries whose excess is at most `max_excess` (the largest excess so far) + `CAPACITY_MARGIN`.
    The function returns `window - 1`, which keeps all keys, in these cases:

    - No query with enough past tokens was processed yet (see `MIN_BIAS_DROP`).
    - A slope is not positive.
    - The tolerance is 0.

    Args:
        states: The states of the query heads that share the ring buffer.
        tolerance: The softmax mass that may be evicted from each query.
        window: The size of the sliding window of the model.
    """
    excess = torch.tensor([state.max_excess for state in states], dtype=torch.float64) + CAPACITY_MARGIN
    slopes = torch.tensor([state.slope for state in states], dtype=torch.float64)
    max_distance = float(alibi.window_for(excess, slopes, tolerance).max())
    return max(1, int(min(max_distance, window - 1)))


def _norms(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows"]:
    """Return the Euclidean norm of each row in float64."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _nan_propagating_max(old: float, new: float) -> float:
    """Return the larger number. NaN counts as larger than all numbers, so that a certificate never hides a NaN."""
    if math.isnan(old) or new <= old:
        return old
    return new


def _finite_max(old: float, new: Float[Tensor, " n"]) -> float:
    """Return the largest of `old` and the finite numbers in `new`.

    Infinite numbers and NaN are ignored. The largest number determines the size of a ring buffer, and a single invalid
    query or key must not enlarge a ring buffer forever.
    """
    if len(new) == 0:
        return old
    finite = new.where(new.isfinite(), -math.inf)
    return max(old, float(finite.amax()))
