"""A cache that forgets what provably cannot matter: endless text in constant memory, with the error known.

ALiBi takes slope · distance off every score, and no score exceeds the product of two norms. So the keys that a head
has forgotten, all at distance ≥ w and of norm ≤ K, can have had at most

    mass  ≤  exp(‖q‖·K/√d − m·w − lse) / (1 − e^(−m))          lse: log-sum-exp of the row's scores on what is kept

of a query's softmax. How long a ring must be follows from the queries seen so far, with a margin; whether it was long
enough is computed for every query from its own norm, and the largest value is the certificate. A key that is gone
cannot come back: when a query reaches farther than all before, its ring grows from there on, and if that query's bound
passed the tolerance, it is counted. docs/generation.md has the proof.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort import alibi
from trainshort.attention import AttentionCall, Bias, LinearBias, attend
from trainshort.errors import InputError
from trainshort.model.cache import ring_buffer as compiled
from trainshort.model.cache.full import INITIAL_CAPACITY, Cache, LayerCache, detach_kv
from trainshort.model.cache.ring_buffer import LANES, UNBOUNDED, DecodeArgs, Head, Ring, make_head_structs

CAPACITY_MARGIN = 1.0
"""Natural log: room for queries that reach e times farther than any before, for 1/slope more keys."""
MIN_BIAS_DROP = 4.0
"""Queries with fewer than this / slope tokens behind them say nothing about later ones: their log-sum-exp still grows
with every key. A ring starts to forget much later than that."""
BACKEND_TOLERANCE_SHARE = 0.1
"""Share of the tolerance that the backend may leave out while it reads a chunk."""


@dataclass(frozen=True)
class Certificate:
    """What a bounded cache can say at the end."""

    mass: float
    """The largest share of any softmax that can have been forgotten, over all queries, heads and layers."""
    tolerance: float
    rows_above_tolerance: int
    """Rows (query, head, layer) whose bound was above the tolerance."""
    rows: int
    grow_count: int
    """Rings that grew after they had begun to forget."""

    def __add__(self, other: "Certificate") -> "Certificate":
        """Of two caches together."""
        return Certificate(
            mass=_nan_propagating_max(self.mass, other.mass),
            tolerance=max(self.tolerance, other.tolerance),
            rows_above_tolerance=self.rows_above_tolerance + other.rows_above_tolerance,
            rows=self.rows + other.rows,
            grow_count=self.grow_count + other.grow_count,
        )

    def __str__(self) -> str:
        kept = (
            "no row above it"
            if not self.rows_above_tolerance
            else f"{self.rows_above_tolerance:,} of {self.rows:,} rows above it"
        )
        grown = f", windows grew {self.grow_count:,} times" if self.grow_count else ""
        return f"error certificate: {self.mass:.1e} (tolerance {self.tolerance:.0e}, {kept}{grown})"


@dataclass
class BoundedCache(Cache):
    """One sequence; each head keeps what can matter. `compiled=False` takes plain PyTorch, for tests."""

    tolerance: float = 1e-6
    compiled: bool = True
    clocked: bool = False
    """Whether the model's bias is a clock (FoX), and not ALiBi's."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise InputError(f"tolerance is a share of softmax mass, at least 0 and less than 1; got {self.tolerance}.")

    def new_layer(self) -> "BoundedLayer":
        if self.clocked:
            from trainshort.model.cache.bounded_decay import BoundedDecayLayer

            return BoundedDecayLayer(self.tolerance, self.compiled)
        return BoundedLayer(self.tolerance, self.compiled)

    @property
    def certificate(self) -> Certificate:
        layers = [layer for layer in self.layers if isinstance(layer, BoundedLayer)]
        heads = [head for layer in layers for head in layer.heads]
        return Certificate(
            mass=reduce(_nan_propagating_max, (head.mass for head in heads), 0.0),
            tolerance=self.tolerance,
            rows_above_tolerance=sum(head.above for head in heads),
            rows=self.length * len(heads),
            grow_count=sum(layer.grown for layer in layers),
        )

    @property
    def windows(self) -> list[list[int]]:
        """Keys that each layer's heads keep."""
        return [[ring.count for ring in layer.rings] for layer in self.layers if isinstance(layer, BoundedLayer)]


class BoundedLayer(LayerCache):
    """Rings of one layer. A single token goes through ring.c where it can, everything else through `attend`."""

    def __init__(self, tolerance: float, use_compiled: bool = True) -> None:
        super().__init__()
        self.tolerance, self.use_compiled = tolerance, use_compiled
        self.grown = 0
        self.rings: Any = []  # a ctypes array once the number of heads is known
        self.heads: Any = []
        self._stored: list[Tensor] = []  # per ring (2, capacity, padded)
        self._dim = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, (k, v), bias = q.detach(), detach_kv(k, v), options["bias"]
        if q.shape[0] != 1:
            raise InputError(f"a bounded cache holds one sequence, but the input has {q.shape[0]}; use Rows.")
        slopes = self._slopes(bias, q.shape[1])
        if not self.rings:
            self._initialize(slopes.tolist(), k)
        single = q.shape[2] == 1 and isinstance(bias, LinearBias)
        if single and q.device.type == "cpu" and q.dtype == torch.float32:
            call = self.decode_args(slopes, (k.shape[1], k.shape[3]), options.get("window"))
            if call is not None:
                out = call.attend(q, k, v)
                self.commit_token(k, v)
                return out
        out = self._prefill(q, k, v, options)
        self.length += q.shape[2]
        return out

    def _slopes(self, bias: Bias | None, heads: int) -> Float[Tensor, " heads"]:
        if not isinstance(bias, LinearBias):
            raise InputError("a bounded cache needs ALiBi: only a linear bias bounds what far keys can weigh.")
        return bias.slopes

    def _initialize(self, slopes: list[float], k: Tensor) -> None:
        self._dim = k.shape[3]
        self.rings = (Ring * k.shape[1])()
        self.heads = make_head_structs(slopes, -math.inf)
        padded = -(-k.shape[3] // LANES) * LANES
        self._stored = [k.new_zeros(2, 0, padded) for _ in self.rings]
        for index in range(len(self.rings)):
            self._resize(index, INITIAL_CAPACITY)

    # One token, compiled

    def decode_args(
        self, slopes: Float[Tensor, " heads"], shape: tuple[int, int], window: int | None
    ) -> DecodeArgs | None:
        if not self.use_compiled or compiled.kernel_unavailable_reason() is not None:
            return None
        if not self.rings:
            self._initialize(slopes.tolist(), torch.empty(1, shape[0], 0, shape[1], dtype=torch.float32))
        if self._stored[0].dtype != torch.float32 or self._stored[0].device.type != "cpu":
            return None
        if self._call is None:
            self._call = DecodeArgs.create(self.rings, self.heads, self._dim)
            self._call.tolerance, self._call.margin, self._call.settled = self.tolerance, CAPACITY_MARGIN, MIN_BIAS_DROP
        self._call.set_step(self.length, window)
        return self._call

    def commit_token(self, k: Float[Tensor, "1 kv_heads 1 dim"], v: Float[Tensor, "1 kv_heads 1 dim"]) -> None:
        for index, ring in enumerate(self.rings):
            if ring.wanted:
                self._grow(index, ring.wanted, ring.count + 1)
                self._insert(index, k[0, index], v[0, index])
                ring.wanted = 0
        super().commit_token(k, v)

    # Any number of tokens, in PyTorch

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Each ring's past and the new keys, in order, through the training operator."""
        group, parts = q.shape[1] // len(self.rings), []
        for index, ring in enumerate(self.rings):
            heads = slice(index * group, (index + 1) * group)
            past = self.ordered_kv(index)[..., : self._dim]
            keys, values = (torch.cat([past[i], x[0, index]]) for i, x in enumerate((k, v)))
            bias = self._bias_of(options["bias"], heads, len(keys))
            call = AttentionCall(q[:, heads], keys[None, None], values[None, None], bias, options.get("window"))
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
            ring.peak = _finite_max(ring.peak, _norms(k[0, index]))
            self._update_error_bound(index, call, lse[0].double(), certificate[0].tolist())
            self._store(index, call)
            parts.append(out)
        return torch.cat(parts, dim=1)

    def _update_error_bound(
        self, index: int, call: AttentionCall, lse: Float[Tensor, "group new"], left: list[float]
    ) -> None:
        """What the forgotten keys can have weighed in each new row, and how far each query reaches."""
        ring, reach = self.rings[index], _norms(call.q[0]) / math.sqrt(self._dim)
        distance = ring.count + 1 + torch.arange(lse.shape[1], device=lse.device)  # of the nearest forgotten key
        first = index * len(lse)
        for i, head in enumerate(self.heads[first : first + len(lse)]):
            mass = torch.full_like(reach[i], left[i])
            if self.length > ring.count:
                bound = self._evicted_mass(first + i, call, reach[i] * ring.far - lse[i], distance)
                mass += bound.masked_fill(distance >= (call.window or UNBOUNDED), 0)
            head.mass = _nan_propagating_max(head.mass, float(mass.max()))
            head.above += int((~(mass <= self.tolerance)).sum())
            settled = self._bias_drop(first + i, call) >= MIN_BIAS_DROP
            head.excess = _finite_max(head.excess, (reach[i] * ring.peak - lse[i])[settled])

    # What is particular to a bias that falls evenly; clocked.py has its own

    def _bias_of(self, bias: Bias, heads: slice, keys: int) -> Bias:
        """For some heads over the newest keys."""
        assert isinstance(bias, LinearBias)
        return LinearBias(bias.slopes[heads])

    def _evicted_mass(
        self, number: int, call: AttentionCall, excess: Float[Tensor, " new"], distance: Int[Tensor, " new"]
    ) -> Float[Tensor, " new"]:
        """The most that a head's forgotten keys can have weighed in each row."""
        return alibi.mass_beyond(excess, torch.tensor(self.heads[number].slope, dtype=torch.float64), distance)

    def _bias_drop(self, number: int, call: AttentionCall) -> Float[Tensor, " new"]:
        """How far the bias has fallen since the text began, at each new row."""
        rows = torch.arange(call.q.shape[2], device=call.q.device, dtype=torch.float64)
        return (self.length + rows) * self.heads[number].slope

    def _required_capacity(self, index: int, call: AttentionCall) -> int:
        group = call.q.shape[1]
        return required_capacity(
            self.heads[index * group : (index + 1) * group], self.tolerance, call.window or UNBOUNDED
        )

    def _evict(self, index: int, call: AttentionCall, gone: int) -> None:
        """The oldest of the call's keys are forgotten."""
        ring = self.rings[index]
        ring.far = _nan_propagating_max(ring.far, float(_norms(call.k[0, 0, :gone]).max()))

    def _store(self, index: int, call: AttentionCall) -> None:
        """Put the newest keys into the ring; grow it first where the promise asks for it."""
        ring = self.rings[index]
        keys, values, new = call.k[0, 0], call.v[0, 0], call.q.shape[2]
        if len(keys) > ring.capacity and (most := self._required_capacity(index, call)) > ring.capacity:
            self._grow(index, most, len(keys))
        gone = len(keys) - ring.capacity
        if gone > 0:
            self._evict(index, call, gone)
        new = min(new, ring.capacity)
        self._insert(index, keys[-new:], values[-new:])

    # Rings

    def ordered_kv(self, index: int) -> Float[Tensor, "2 count padded"]:
        """A ring's keys and values, oldest first."""
        ring, stored = self.rings[index], self._stored[index]
        if ring.count < ring.capacity:
            return stored[:, : ring.count]
        return torch.cat([stored[:, ring.next :], stored[:, : ring.next]], dim=1)

    def _grow(self, index: int, wanted: int, needed: int) -> None:
        """Towards `wanted`, but no more than twice what is needed now: a short text does not pay for a long one."""
        ring = self.rings[index]
        self.grown += self.length > ring.count
        self._resize(index, min(wanted, max(2 * ring.capacity, needed)))

    def _resize(self, index: int, capacity: int) -> None:
        old, ring = self.ordered_kv(index), self.rings[index]
        fresh = old.new_zeros(2, capacity, old.shape[2])
        fresh[:, : ring.count] = old
        ring.next, ring.capacity = ring.count % capacity, capacity
        ring.keys, ring.values = fresh[0].data_ptr(), fresh[1].data_ptr()
        self._stored[index] = fresh

    def _insert(self, index: int, k: Float[Tensor, "new dim"], v: Float[Tensor, "new dim"]) -> None:
        ring, stored = self.rings[index], self._stored[index]
        slots = (torch.arange(len(k), device=k.device) + ring.next) % ring.capacity
        stored[0, slots, : self._dim], stored[1, slots, : self._dim] = k, v
        ring.next = (ring.next + len(k)) % ring.capacity
        ring.count = min(ring.count + len(k), ring.capacity)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self._stored)


def required_capacity(heads: Sequence[Head], tolerance: float, limit: int = UNBOUNDED) -> int:
    """Keys that a ring must hold for its heads' promise: w of the bound above with the farthest-reaching query so far,
    and a margin. All of them while no query has been settled, or a slope is not positive, or nothing may be lost."""
    excess = torch.tensor([head.excess for head in heads], dtype=torch.float64) + CAPACITY_MARGIN
    slopes = torch.tensor([head.slope for head in heads], dtype=torch.float64)
    most = float(alibi.window_for(excess, slopes, tolerance).max())
    return max(1, int(min(most, limit - 1)))


def _norms(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows"]:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _nan_propagating_max(old: float, new: float) -> float:
    """The larger, for a promise: what is not a number counts as larger than anything and stays, so that it shows."""
    return old if new <= old or math.isnan(old) else new


def _finite_max(old: float, new: Float[Tensor, " n"]) -> float:
    """The largest, for the length of rings: what is not finite says nothing about the queries to come."""
    return max(old, float(new.where(new.isfinite(), -math.inf).amax())) if len(new) else old
