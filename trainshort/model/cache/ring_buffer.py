"""The compiled decode step of the KV caches: ctypes structs, and the library that is built from kernels/decode.

A decode step is the attention of one new token to all cached keys. The structs mirror those of
kernels/decode/ring_buffer.h. The C code reads and updates them in place, so no state is copied between C and Python.
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
from trainshort.model.positions.base import CUMULATIVE_DECAY_KEY

UNBOUNDED = 2**62
"""The window size of a model without a sliding window. No text is that long."""

MIN_PARALLEL_MULTIPLICATIONS = 1 << 18
"""The decode step uses a single thread up to this number of multiplications, because threads would not save time."""

INITIAL_DECAY_CAPACITY = 64
"""The number of free columns in a new `DecayBuffer`."""

LANES = 8
"""The number of floats in a vector register. The rows of a ring buffer are padded to a multiple of this number."""


class RingBuffer(ctypes.Structure):
    """The ring buffer of one key-value head. Mirrors `RingBuffer` in kernels/decode/ring_buffer.h.

    A ring buffer holds the most recent keys and values. When the buffer is full, a new key replaces the oldest key.

    Attributes:
        keys: Address of the keys, an array of shape (capacity, padded_dim).
        values: Address of the values, an array of the same shape.
        capacity: The number of keys that fit into the buffer.
        count: The number of keys in the buffer. Their distances to the next token are 1 to `count`.
        next: The slot of the next key. If the buffer is full, this slot holds the oldest key.
        requested_capacity: Set by the C code if the buffer must grow before the newest key can be stored. Otherwise 0.
        max_evicted_norm: The largest norm of all evicted keys.
        max_norm: The largest finite norm of all keys, evicted or not.
    """

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("requested_capacity", ctypes.c_int64),
        ("max_evicted_norm", ctypes.c_double),
        ("max_norm", ctypes.c_double),
    ]


class HeadState(ctypes.Structure):
    """The statistics of one query head. Mirrors `HeadState` in kernels/decode/ring_buffer.h.

    Attributes:
        slope: The ALiBi slope.
        max_excess: The largest value of |q| * K / sqrt(dim) - lse of all queries so far. K is the largest key norm, and
            lse is the log-sum-exp of the scores. The ring buffer must be longer for a larger value.
        certificate: An upper bound on the softmax mass of evicted keys, the largest one of all queries so far.
        rows_above_tolerance: The number of queries whose upper bound was above the tolerance.
        log_evicted_weight: With a `DecayBias` c, the logarithm of the sum of exp(-c[j]) over all evicted keys j.
        initial_decay: With a `DecayBias`, the cumulative log decay of the first token.
    """

    _fields_ = [
        ("slope", ctypes.c_double),
        ("max_excess", ctypes.c_double),
        ("certificate", ctypes.c_double),
        ("rows_above_tolerance", ctypes.c_int64),
        ("log_evicted_weight", ctypes.c_double),
        ("initial_decay", ctypes.c_double),
    ]


class DecodeArgs(ctypes.Structure):
    """The arguments of the decode step of one layer. Mirrors `DecodeArgs` in kernels/decode/ring_buffer.h.

    The struct contains plain addresses. Use `create`, which keeps the ring buffers, the head states and the scratch
    memory alive as long as the struct.

    Attributes:
        q, k, v: Addresses of the query, key and value of the new token, one row per head.
        query_scales: Address of one factor per query head that its query is multiplied by, or None.
        out: Address of the output, shape (num_heads, dim).
        q_stride, k_stride, v_stride: The distances between the rows of two heads, in floats.
        ring_buffers: Address of one `RingBuffer` per key-value head.
        heads: Address of one `HeadState` per query head.
        length: The number of tokens before the new token.
        window: The size of the sliding window, or `UNBOUNDED`.
        tolerance: The softmax mass that may be dropped from each query by evicting keys.
        capacity_margin, min_bias_drop: `CAPACITY_MARGIN` and `MIN_BIAS_DROP` of bounded.py.
        softmax_scale: The factor of the product of query and key.
        scratch: Address of the scratch memory.
        cumulative_decay: Address of the cumulative log decays, shape (num_heads, decay_stride), or None for ALiBi.
        decay_stride: The distance between the rows of `cumulative_decay`.
        decay_length: The number of columns of `cumulative_decay` that are filled. The step fills one more column.
        gates: Address of the forget gates of the new token before the sigmoid, one per query head.
        gate_sign: 1, or -1 if the gates are negated.
        num_threads: The largest number of threads that the step may use.
    """

    query_scales: int | None
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("query_scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("ring_buffers", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("tolerance", ctypes.c_double),
        ("capacity_margin", ctypes.c_double),
        ("min_bias_drop", ctypes.c_double),
        ("softmax_scale", ctypes.c_double),
        ("scratch", ctypes.c_void_p),
        ("cumulative_decay", ctypes.c_void_p),
        ("decay_stride", ctypes.c_int64),
        ("decay_length", ctypes.c_int64),
        ("gates", ctypes.c_void_p),
        ("gate_sign", ctypes.c_double),
        ("num_threads", ctypes.c_int32),
    ]

    @classmethod
    def create(cls, ring_buffers: Any, heads: Any, dim: int) -> "DecodeArgs":
        """Create the arguments of the decode step of one layer.

        The fields that describe the new token, such as `q` and `length`, are not set yet.

        Args:
            ring_buffers: A ctypes array with one `RingBuffer` per key-value head.
            heads: A ctypes array with one `HeadState` per query head.
            dim: The size of each head.
        """
        args = cls(
            num_heads=len(heads),
            num_kv_heads=len(ring_buffers),
            dim=dim,
            softmax_scale=1 / math.sqrt(dim),
            window=UNBOUNDED,
        )
        args.ring_buffers = ctypes.addressof(ring_buffers)
        args.heads = ctypes.addressof(heads)
        scratch_length = load_library().trainshort_decode_scratch_length(ctypes.byref(args))
        scratch = (ctypes.c_float * scratch_length)()
        args.scratch = ctypes.addressof(scratch)
        # The fields of the struct are plain addresses. These references keep the memory alive.
        args.ring_buffer_array = ring_buffers
        args.referenced_memory = (heads, scratch)
        return args

    def bind_full_cache(self, storage: Float[Tensor, "2 1 kv_heads capacity dim"], length: int) -> None:
        """Let the ring buffers use the storage of a full cache, which never evicts keys.

        Args:
            storage: The stored keys (index 0) and values (index 1), with room for at least one more token.
            length: The number of tokens in `storage`.
        """
        ring_buffers = self.ring_buffer_array
        # `count` is the number of keys, and `next` is the slot of the next key. The compiled code updates both fields
        # itself. After a compiled step, they are already correct.
        is_same_storage = ring_buffers[0].keys == storage.data_ptr()
        if is_same_storage and ring_buffers[0].count == length:
            return
        for kv_head, ring_buffer in enumerate(ring_buffers):
            ring_buffer.keys = storage[0, 0, kv_head].data_ptr()
            ring_buffer.values = storage[1, 0, kv_head].data_ptr()
            ring_buffer.capacity = storage.shape[3]
            ring_buffer.count = length
            ring_buffer.next = length  # the slot of the next key

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "1 heads 1 dim"]:
        """Run the decode step (the attention of one new token to all cached keys).

        The step also stores the new key and the new value in the ring buffer of each key-value head. If a ring buffer
        is too small, the key and the value are not stored in this ring buffer. Instead, the step writes the needed
        capacity into the field `requested_capacity` of the ring buffer.

        Args:
            q: The query, shape (1, heads, 1, dim).
            k: The key, shape (1, kv_heads, 1, dim).
            v: The value, with the same shape as `k`.

        Returns:
            The attention output.
        """
        q = contiguous_rows(q)
        k = contiguous_rows(k)
        v = contiguous_rows(v)
        out = q.new_empty(1, 1, q.shape[1], q.shape[3])
        self.set_pointers(q, k, v, out)
        self.query_scales = None  # The caller has scaled the query already.
        load_library().trainshort_decode_attention(ctypes.byref(self))
        return out.transpose(1, 2)

    def set_pointers(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Set the addresses of the tensors of one new token.

        Args:
            q: The query, shape (1, heads, 1, dim).
            k: The key, shape (1, kv_heads, 1, dim).
            v: The value, with the same shape as `k`.
            out: The tensor that the attention output is written to. It has heads * dim contiguous elements.
        """
        self.q = q.data_ptr()
        self.k = k.data_ptr()
        self.v = v.data_ptr()
        self.out = out.data_ptr()
        self.q_stride = q.stride(1)
        self.k_stride = k.stride(1)
        self.v_stride = v.stride(1)

    def set_step(self, length: int, window: int | None) -> None:
        """Set the fields that change with every token: the length, the window and the number of threads.

        Args:
            length: The number of tokens before the new token.
            window: The size of the sliding window, or None if there is no sliding window.
        """
        self.length = length
        self.window = UNBOUNDED if window is None else window
        num_keys = sum(ring_buffer.count for ring_buffer in self.ring_buffer_array)
        num_multiplications = num_keys * self.dim
        if num_multiplications > MIN_PARALLEL_MULTIPLICATIONS:
            self.num_threads = torch.get_num_threads()
        else:
            self.num_threads = 1


class DecayBuffer:
    """The cumulative log decays of one layer: the running sum of the log forget gates (FoX), for each head and token.

    The buffer has one column per token, in the order of the text, and free columns for further tokens. The compiled
    decode step fills one column per token. The position method reads the filled columns from `method_cache`. If the
    position method processes tokens without the compiled step, the method puts a new tensor into `method_cache`.
    """

    def __init__(self) -> None:
        self._storage = torch.empty(0, 0, dtype=torch.float64)  # (heads, capacity)
        self._length = 0  # the number of columns that are filled
        self._cached_view: Tensor | None = None  # the view of `_storage` that was put into `method_cache`

    def bind(self, args: DecodeArgs, method_cache: dict[str, Tensor]) -> None:
        """Set the fields `cumulative_decay`, `decay_stride` and `decay_length` of a decode step.

        The buffer holds the cumulative log decay (the sum of the log forget gates so far) of each head and token. The
        buffer is first enlarged if it is full, and refilled if other code has changed the decays.

        Args:
            args: The arguments of the decode step.
            method_cache: The tensors that the position method stores in the cache of the layer.
        """
        decays = method_cache.get(CUMULATIVE_DECAY_KEY)
        # The position method puts a new tensor into `method_cache` if it processes tokens without the compiled step.
        was_replaced = decays is None or decays is not self._cached_view
        is_full = self._length == self._storage.shape[1]
        if was_replaced or is_full:
            self._reallocate(args.num_heads, decays)
        args.cumulative_decay = self._storage.data_ptr()
        args.decay_stride = self._storage.shape[1]
        args.decay_length = self._length

    def _reallocate(self, num_heads: int, decays: Float[Tensor, "1 heads length"] | None) -> None:
        """Create new storage with free columns, and copy the decays of the previous tokens.

        Args:
            num_heads: The number of query heads.
            decays: The cumulative log decays of the previous tokens, or None if there are no previous tokens.
        """
        self._length = 0 if decays is None else decays.shape[2]
        capacity = 2 * self._length + INITIAL_DECAY_CAPACITY
        self._storage = torch.empty(num_heads, capacity, dtype=torch.float64)
        if decays is not None:
            self._storage[:, : self._length] = decays[0]

    def commit_token(self, method_cache: dict[str, Tensor], num_needed: int) -> None:
        """Count the column that the decode step has filled, and put the newest columns into `method_cache`.

        A column holds the cumulative log decays (sums of log forget gates) of one token, with one row per head.

        Args:
            method_cache: The tensors that the position method stores in the cache of the layer.
            num_needed: The number of newest columns (tokens) that the position method still needs.
        """
        self._length += 1
        start = self._length - num_needed
        self._cached_view = self._storage[None, :, start : self._length]
        method_cache[CUMULATIVE_DECAY_KEY] = self._cached_view


def make_head_structs(slopes: list[float], max_excess: float) -> Any:
    """Return a ctypes array with the state of each query head before the first token.

    Args:
        slopes: The ALiBi slopes, one per query head.
        max_excess: The initial value of the field `max_excess`: the largest score so far minus the log-sum-exp.
    """
    # No key is evicted yet. The total weight of the evicted keys is 0, so the logarithm of the weight is -inf.
    states = [HeadState(slope=slope, max_excess=max_excess, log_evicted_weight=-math.inf) for slope in slopes]
    return (HeadState * len(slopes))(*states)


@cache
def kernel_unavailable_reason() -> str | None:
    """Return why the compiled decode step cannot be used on this machine, or None if it can be used.

    The library is built if it does not exist yet.
    """
    try:
        load_library()
    except KernelBuildError as error:
        return str(error)
    return None


@cache
def load_library() -> ctypes.CDLL:
    """Load the library of the C files in kernels/decode, and build it if it does not exist yet.

    Raises:
        KernelBuildError: If the library cannot be built or loaded. `kernel_unavailable_reason` returns the reason.
    """
    library = build.load("decode", "decode")
    library.trainshort_decode_args_size.restype = ctypes.c_size_t
    library.trainshort_linear_args_size.restype = ctypes.c_size_t
    library.trainshort_layer_args_size.restype = ctypes.c_size_t
    library.trainshort_decode_scratch_length.restype = ctypes.c_int64
    library.trainshort_decode_attention.restype = None
    library.trainshort_linear.restype = None
    library.trainshort_decode_layers.restype = ctypes.c_int64
    library.trainshort_decode_layers.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    has_same_size = library.trainshort_decode_args_size() == ctypes.sizeof(DecodeArgs)
    assert has_same_size, "DecodeArgs differs between ring_buffer.py and ring_buffer.h"
    return library
