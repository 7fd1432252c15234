"""Calls the compiled attention kernel through ctypes.

The structs in this module mirror the structs in kernels/windowed/args.h. custom_op.py makes a PyTorch operator of these
calls.
"""

import ctypes
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.attention.backends.reference import segment_starts
from trainshort.attention.backends.windowed_torch import QUERY_TILE
from trainshort.attention.call import BiasKind, accumulation_dtype
from trainshort.attention.kernels import build
from trainshort.attention.kernels.build import KernelBuildError

# The dtypes that the kernel supports, with the values of the enum in args.h. 0 is the native dtype of the library.
DTYPE_CODES = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}

# The number of values that the kernel may read before distance 0 of a table. The value is the same as in args.h.
TABLE_PADDING = 96

# Calls with fewer multiplications use one thread, because starting other threads would take longer than the call.
MIN_PARALLEL_MULTIPLICATIONS = 1 << 22

# The largest head dimension for which the kernel's scratch memory is designed.
MAX_HEAD_DIM = 1024

# The kernel stores key positions in 32 bits.
MAX_KEYS = 2**31 - 1


class TensorStruct(ctypes.Structure):
    """Mirrors the struct `Tensor` in args.h: the data pointer and the strides of the first three dimensions."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
    ]


class CallStruct(ctypes.Structure):
    """Mirrors the struct `Call` in args.h, which describes all fields. Pointers that are not set are NULL."""

    _fields_ = [
        ("q", TensorStruct),
        ("k", TensorStruct),
        ("v", TensorStruct),
        ("out", TensorStruct),
        ("grad_out", TensorStruct),
        ("grad_q", TensorStruct),
        ("grad_k", TensorStruct),
        ("grad_v", TensorStruct),
        ("slopes", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_suffix_max", ctypes.c_void_p),
        ("cumulative_decay", ctypes.c_void_p),
        ("segment_ids", ctypes.c_void_p),
        ("segment_starts", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("first_keys", ctypes.c_void_p),
        ("dropped_mass", ctypes.c_void_p),
        ("grad_out_dot_out", ctypes.c_void_p),
        ("grad_table", ctypes.c_void_p),
        ("grad_decay_queries", ctypes.c_void_p),
        ("grad_decay_keys", ctypes.c_void_p),
        ("batches", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("q_len", ctypes.c_int64),
        ("k_len", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("tolerance", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("openmp_parallel", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@cache
def load_library(use_float64: bool) -> ctypes.CDLL:
    """Load the compiled kernel, and build the kernel first if necessary.

    Args:
        use_float64: Whether to load the library that computes in float64. The other library computes in float32.

    Raises:
        KernelBuildError: If the library cannot be built.
    """
    if use_float64:
        library = build.load("attention64", "windowed", ("-DREAL_IS_DOUBLE",))
    else:
        library = build.load("attention", "windowed")
    library.trainshort_call_size.restype = ctypes.c_size_t
    assert library.trainshort_call_size() == ctypes.sizeof(CallStruct), "args.h and ctypes_call.py disagree"
    return library


@cache
def kernel_unavailable_reason(use_float64: bool = False) -> str | None:
    """Return why the compiled kernel cannot be used on this machine, or None. The kernel is built if necessary."""
    try:
        load_library(use_float64)
    except KernelBuildError as error:
        return str(error)
    return None


# torch.compile must not trace the build, so the decorator runs the function while the graph is compiled.
@torch.compiler.assume_constant_result
def traceable_kernel_unavailable_reason(dtype: torch.dtype) -> str | None:
    """Return why the compiled kernel cannot be used for a dtype, or None. torch.compile can trace calls of it."""
    return kernel_unavailable_reason(use_float64=dtype == torch.float64)


@cache
def has_kernel(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the compiled kernel can be used for heads of a dimension and dtype."""
    return head_dim <= MAX_HEAD_DIM and kernel_unavailable_reason(use_float64=dtype == torch.float64) is None


def run_kernel(
    function_name: str,
    *,
    bias: Tensor,
    bias_kind: BiasKind,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    tensors: dict[str, Tensor],
) -> None:
    """Call a function of the compiled kernel.

    Args:
        function_name: "trainshort_forward" or "trainshort_backward".
        bias: The bias tensor of a causal call.
        bias_kind: The meaning of the bias tensor.
        segment_ids: The segment that each key belongs to, or None.
        window: The size of the sliding window, or None.
        scale: The factor applied to the product of query and key.
        tolerance: The softmax mass that may be dropped from each query.
        tensors: All other tensors that the function reads or writes, by their field names in `CallStruct`. `q` and `k`
            are required.

    Raises:
        MemoryError: If the scratch memory cannot be allocated.
    """
    q = tensors["q"]
    k = tensors["k"]
    batch, heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    multiplications = batch * heads * q_len * k_len * dim

    struct = CallStruct()
    struct.batches = batch
    struct.heads = heads
    struct.kv_heads = kv_heads
    struct.q_len = q_len
    struct.k_len = k_len
    struct.dim = dim
    struct.window = k_len if window is None else min(window, k_len)
    struct.tolerance = tolerance
    struct.scale = scale
    struct.openmp_parallel = build.find_gomp_parallel()
    struct.threads = torch.get_num_threads() if multiplications > MIN_PARALLEL_MULTIPLICATIONS else 1
    struct.dtype = DTYPE_CODES[q.dtype]

    # The struct holds only addresses. The dictionary keeps the tensors alive until the function returns.
    tensors = tensors | _prepare_bias(q, k, bias, bias_kind, tolerance)
    if segment_ids is not None:
        segment_numbers, starts = segment_starts(segment_ids)
        tensors["segment_ids"] = segment_numbers
        tensors["segment_starts"] = starts
    for name, tensor in tensors.items():
        if tensor.dim() == 4:
            setattr(struct, name, TensorStruct(tensor.data_ptr(), *tensor.stride()[:3]))
        else:
            setattr(struct, name, tensor.data_ptr())

    library = load_library(use_float64=q.dtype == torch.float64)
    kernel_function = getattr(library, function_name)
    is_out_of_memory = kernel_function(ctypes.byref(struct))
    if is_out_of_memory:
        raise MemoryError("The attention kernel could not allocate its scratch memory.")


def _prepare_bias(q: Tensor, k: Tensor, bias: Tensor, bias_kind: BiasKind, tolerance: float) -> dict[str, Tensor]:
    """Return the tensors of the bias by their field names in `CallStruct`, the argument of the C kernel.

    Args:
        q: The queries.
        k: The keys.
        bias: The slopes, the bias at every distance, or the cumulative log decay (sums of log forget gates).
        bias_kind: Which of the three tensors `bias` is.
        tolerance: The softmax mass that may be skipped for each query.
    """
    batch, heads = q.shape[:2]
    k_len = k.shape[2]
    if bias_kind == BiasKind.SLOPES:
        assert bias.shape == (heads,)
        return {"slopes": bias.float().contiguous()}

    # The kernel always reads the slopes.
    tensors = {"slopes": torch.zeros(heads, dtype=torch.float32)}
    if bias_kind == BiasKind.TABLE:
        assert bias.shape == (heads, k_len)
        table = bias.detach().to(accumulation_dtype(q))
        # The kernel reads the table in blocks, so it may read values before the first and after the last distance.
        tensors["table"] = F.pad(table, (TABLE_PADDING, QUERY_TILE)).contiguous()
        if tolerance > 0:
            # The largest bias at each distance and all larger distances.
            tensors["table_suffix_max"] = table.flip(-1).cummax(-1).values.flip(-1).contiguous()
    if bias_kind == BiasKind.DECAY:
        assert bias.shape == (batch, heads, k_len)
        tensors["cumulative_decay"] = bias.detach().double().contiguous()
    return tensors
