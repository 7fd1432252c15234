"""The compiled step of the bounded cache: structs that mirror those of kernels/decode, which is built on first use.

The structs are the cache's own memory of counts and norms, so that a step moves nothing between C and Python.
"""

import ctypes
import math
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention.call import contiguous_rows
from trainshort.attention.kernels import build
from trainshort.attention.kernels.build import KernelBuildError

UNBOUNDED = 2**62
"""A reach that no text has: the window of a model without one."""
MIN_PARALLEL_MULTIPLICATIONS = 1 << 18
"""Products below which one thread is quicker than two."""
CLOCK = "clock"
"""Where in its place in the cache a position method keeps the readings of its clock."""
INITIAL_DECAY_CAPACITY = 64
"""Readings that there is room for at first."""
LANES = 8
"""Floats in a vector of the processor; rings hold keys and values in rows of whole vectors."""


class Ring(ctypes.Structure):
    """One key head's past: `count` keys at distances 1 to count, the oldest at `next` once the ring is full."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("capacity", "count", "next", "wanted")),
        *((name, ctypes.c_double) for name in ("far", "peak")),
    ]


class Head(ctypes.Structure):
    """One query head's slope, the reach of its queries so far, and the mass that it can have left out; of a clock also
    the log of what its forgotten keys can weigh, and its first reading."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("slope", "excess", "mass")),
        ("above", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("weight", "began")),
    ]


class DecodeArgs(ctypes.Structure):
    """One call: a token's queries, key and value, and the rings they meet.

    It points into `rings`, `heads` and a scratch space, and keeps them alive."""

    factors: int | None
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "factors", "out")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("rings", "heads")),
        *((name, ctypes.c_int64) for name in ("head_count", "ring_count", "dim", "length", "limit")),
        *((name, ctypes.c_double) for name in ("tolerance", "margin", "settled", "scale")),
        *((name, ctypes.c_void_p) for name in ("scratch", "clock")),
        *((name, ctypes.c_int64) for name in ("clock_stride", "held")),
        ("gates", ctypes.c_void_p),
        ("sign", ctypes.c_double),
        ("threads", ctypes.c_int32),
    ]

    @classmethod
    def create(cls, rings: Any, heads: Any, dim: int) -> "DecodeArgs":
        """A call on these ctypes arrays of Ring and Head, without the token itself."""
        call = cls(head_count=len(heads), ring_count=len(rings), dim=dim, scale=1 / math.sqrt(dim), limit=UNBOUNDED)
        call.rings, call.heads = ctypes.addressof(rings), ctypes.addressof(heads)
        scratch = (ctypes.c_float * library().trainshort_token_scratch(ctypes.byref(call)))()
        call.scratch, call.kept = ctypes.addressof(scratch), (rings, heads, scratch)
        return call

    def bind_full_cache(self, room: Float[Tensor, "2 1 kv_heads capacity dim"], length: int) -> None:
        """Lay the rings over a growing cache's room, where they never come round: `length` keys, and room for more."""
        rings = self.kept[0]
        if rings[0].keys == room.data_ptr() and rings[0].count == length:
            return  # as the last call left them
        for index, ring in enumerate(rings):
            ring.keys, ring.values = (x[0, index].data_ptr() for x in room)
            ring.capacity, ring.count, ring.next = room.shape[3], length, length

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "1 heads 1 dim"]:
        """The token's output; its key and value are in the rings then, but for those that must grow first."""
        q, k, v = (contiguous_rows(x) for x in (q, k, v))
        out = q.new_empty(1, 1, q.shape[1], q.shape[3])
        self.set_pointers(q, k, v, out)
        self.factors = None  # these queries have theirs
        library().trainshort_token(ctypes.byref(self))
        return out.transpose(1, 2)

    def set_pointers(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Where queries, key and value lie, each (1, heads, 1, dim), and where the output goes."""
        self.q, self.k, self.v, self.out = (x.data_ptr() for x in (q, k, v, out))
        self.q_stride, self.k_stride, self.v_stride = (x.stride(1) for x in (q, k, v))

    def set_step(self, length: int, window: int | None) -> None:
        """Set what changes with every token: how many came before, how far it may look, and with how many threads."""
        self.length, self.limit = length, window or UNBOUNDED
        keys = sum(ring.count for ring in self.kept[0])
        self.threads = torch.get_num_threads() if keys * self.dim > MIN_PARALLEL_MULTIPLICATIONS else 1


class DecayBuffer:
    """The readings of a layer's clock in the order of the text, with room for one more, which compiled code adds to.

    A position method finds them in its place in the cache, and leaves others there when it has read by itself.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, 0, dtype=torch.float64)  # (heads, capacity)
        self._held = 0
        self._shown: Tensor | None = None

    def bind(self, call: DecodeArgs, place: dict[str, Tensor]) -> None:
        """Give a call its clock, in new room where what is shown is not ours, or fills ours to the end."""
        clock = place.get(CLOCK)
        if clock is None or clock is not self._shown or self._held == self._room.shape[1]:
            self._held = 0 if clock is None else clock.shape[2]
            self._room = torch.empty(call.head_count, 2 * self._held + INITIAL_DECAY_CAPACITY, dtype=torch.float64)
            if clock is not None:
                self._room[:, : self._held] = clock[0]
        call.clock, call.clock_stride, call.held = self._room.data_ptr(), self._room.shape[1], self._held

    def commit_token(self, place: dict[str, Tensor], keep: int) -> None:
        """Compiled code added a reading: show the newest `keep`."""
        self._held += 1
        place[CLOCK] = self._shown = self._room[None, :, self._held - keep : self._held]


def make_head_structs(slopes: list[float], excess: float) -> Any:
    """A ctypes array of heads that have read nothing."""
    return (Head * len(slopes))(*(Head(slope, excess, weight=-math.inf) for slope in slopes))


@cache
def kernel_unavailable_reason() -> str | None:
    """Why the compiled step cannot be had on this machine; None when it can (it is built now if it was not)."""
    try:
        library()
    except KernelBuildError as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """The C files in kernels/decode, built once per user; see `unavailable` before."""
    loaded = build.load("decode", "decode")
    for name in ("token", "linear", "layer"):
        getattr(loaded, f"trainshort_{name}_size").restype = ctypes.c_size_t
    loaded.trainshort_token_scratch.restype = loaded.trainshort_layers.restype = ctypes.c_int64
    loaded.trainshort_layers.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    loaded.trainshort_token.restype = loaded.trainshort_linear.restype = None
    assert loaded.trainshort_token_size() == ctypes.sizeof(DecodeArgs), "ring.c and ring.py disagree"
    return loaded
