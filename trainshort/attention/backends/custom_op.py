"""The kernel as an operator that torch knows: the call into C, its gradient, its shapes for torch.compile, and plain
PyTorch in its place where it cannot be built. `windowed` and `compiled` are backends on it.

PyTorch operators take tensors and numbers only, so an `AttentionCall` is passed as separate arguments. The structs
mirror kernels/attention/call.h.
"""

import ctypes
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention.backends import bidirectional, windowed_torch
from trainshort.attention.backends.reference import segment_starts
from trainshort.attention.backends.windowed_torch import QUERY_TILE
from trainshort.attention.call import (
    BIAS_TYPES,
    AttentionCall,
    BiasKind,
    accumulation_dtype,
    bias_kind_of,
    contiguous_rows,
    reduce_bias_grad,
)
from trainshort.attention.kernels import build
from trainshort.attention.kernels.build import KernelBuildError

DTYPES = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}
TABLE_PADDING = 96
"""Numbers that the kernel may touch before a table's distance 0; the same number as in call.h."""
MIN_PARALLEL_MULTIPLICATIONS = 1 << 22
"""Fewer multiplications than this are done by one thread; waking others takes longer."""
MAX_HEAD_DIM = 1024
"""Largest head dimension that the kernel's scratch space is laid out for."""
MAX_KEYS = 2**31 - 1
"""The kernel notes in 32 bits which key each row read first."""


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")),
        *((name, ctypes.c_void_p) for name in ("slopes", "table", "ceiling", "clock", "segment_ids", "reach", "lse")),
        *((name, ctypes.c_void_p) for name in ("first", "dropped", "inner", "grad_table", "grad_rows", "grad_keys")),
        *((name, ctypes.c_int64) for name in ("batches", "heads", "kv_heads", "q_len", "k_len", "dim", "window")),
        ("tolerance", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("parallel", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@cache
def _library(double: bool) -> ctypes.CDLL:
    """The library for float32 (or, for gradient checks, float64) arithmetic."""
    library = build.load("attention64" if double else "attention", "windowed", ("-DREAL_IS_DOUBLE",) if double else ())
    library.trainshort_call_size.restype = ctypes.c_size_t
    assert library.trainshort_call_size() == ctypes.sizeof(_Call), "call.h and operator.py disagree"
    return library


@cache
def kernel_unavailable_reason(double: bool = False) -> str | None:
    """Why the kernel cannot be had on this machine; None when it can (it is built now if it was not)."""
    try:
        _library(double)
    except KernelBuildError as error:
        return str(error)
    return None


@torch.compiler.assume_constant_result
def traceable_kernel_unavailable_reason(dtype: torch.dtype) -> str | None:
    """`unavailable`, also asked while torch.compile traces, where it must be an answer and not a build to be traced."""
    return kernel_unavailable_reason(dtype == torch.float64)


def unsupported_reason(call: AttentionCall) -> str | None:
    """What the operator cannot do, whatever the bias."""
    if call.q.device.type != "cpu":
        return "it runs on the CPU; use 'flex' or 'sdpa'"
    if call.dropout_p:
        return "it has no dropout; use 'sdpa'"
    if call.q.dtype not in DTYPES:
        return f"it does not compute in {call.q.dtype}; use float32, bfloat16, float16 or float64"
    if call.k.shape[2] > MAX_KEYS:
        return f"it counts at most {MAX_KEYS:,} keys, these are {call.k.shape[2]:,}; use 'sdpa'"
    if call.has_split_segments:
        return bidirectional.SPLIT_SEGMENTS_MESSAGE
    if call.is_transformed:
        return "torch.func and forward-mode derivatives do not reach into its kernel; use 'reference'"
    return None


@cache
def has_kernel(width: int, dtype: torch.dtype) -> bool:
    """Whether heads this wide are computed in C; those wider than its scratch space, and machines without a kernel, get
    plain PyTorch."""
    return width <= MAX_HEAD_DIM and kernel_unavailable_reason(dtype == torch.float64) is None


def _run(
    entry: str,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    **tensors: Tensor,
) -> None:
    """Call into C, with q, k, v and whatever else is read or written under the struct's names. What the struct points
    to lives until this returns: it holds bare addresses."""
    q, k = tensors["q"], tensors["k"]
    (batch, heads, q_len, dim), k_len = q.shape, k.shape[2]
    given = _Call(batches=batch, heads=heads, kv_heads=k.shape[1], q_len=q_len, k_len=k_len, dim=dim)
    given.window, given.scale, given.dtype = min(window or k_len, k_len), scale, DTYPES[q.dtype]
    given.tolerance = tolerance
    given.parallel = build.find_gomp_parallel()
    given.threads = torch.get_num_threads() if batch * heads * q_len * k_len * dim > MIN_PARALLEL_MULTIPLICATIONS else 1
    if bias_kind == BiasKind.SLOPES:
        tensors["slopes"] = bias.float().contiguous()
    else:
        tensors["slopes"] = torch.zeros(heads, dtype=torch.float32)
    if bias_kind == BiasKind.TABLE:
        table = bias.detach().to(accumulation_dtype(q))
        tensors["table"] = torch.nn.functional.pad(table, (TABLE_PADDING, QUERY_TILE)).contiguous()
        if tolerance > 0:
            tensors["ceiling"] = table.flip(-1).cummax(-1).values.flip(-1).contiguous()
    if bias_kind == BiasKind.DECAY:
        tensors["clock"] = bias.detach().double().contiguous()
    if segment_ids is not None:
        tensors["segment_ids"], tensors["reach"] = segment_starts(segment_ids)
    for name, x in tensors.items():
        setattr(given, name, (x.data_ptr(), *x.stride()[:3]) if x.dim() == 4 else x.data_ptr())
    if getattr(_library(q.dtype == torch.float64), entry)(ctypes.byref(given)):
        raise MemoryError("attention ran out of memory for its scratch space")


@torch.library.custom_op("trainshort::attention", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    compiled: bool,
    right: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute attention on the CPU, with the compiled kernel or in PyTorch.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        bias: The bias of the keys to the left of the query. `bias_kind` says what the tensor contains.
        bias_kind: A value of `BiasKind`.
        segment_ids: The segment that each key belongs to, or None.
        window: The size of a sliding window, or None.
        scale: The factor applied to the product of query and key.
        tolerance: The softmax mass that may be dropped from each query.
        compiled: Whether to use the compiled kernel if it is available.
        right: The bias of the keys to the right of the query. None means causal attention.

    Returns:
        The output, the log-sum-exp (in float64, because the backward pass computes the attention weights from it), the
        first key that each panel of query rows reads, and an upper bound on the softmax mass that each panel dropped.
        Without a causal mask, the panels of the right side follow the panels of the left side.
    """
    given: dict[str, Any] = {"segment_ids": segment_ids, "window": window, "scale": scale, "tolerance": tolerance}
    if right is not None:
        return bidirectional.forward(_rebuild_call(q, k, v, bias, bias_kind, right, **given), compiled)
    results = out, lse, first, dropped = _allocate_outputs(q)
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    if compiled and has_kernel(q.shape[3], q.dtype):
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "first": first, "dropped": dropped}
        _run("trainshort_forward", bias, bias_kind, **given, **tensors)
    else:
        windowed_torch.forward(_rebuild_call(q, k, v, bias, bias_kind, **given), *results)
    return results


@torch.library.custom_op("trainshort::attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    compiled: bool,
    right: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the bias and that of the right side (float64; slopes get none here: an empty tensor)."""
    call = _rebuild_call(
        q, k, v, bias, bias_kind, right, segment_ids=segment_ids, window=window, scale=scale, tolerance=0.0
    )
    gradients = partial(_causal_gradients, compiled=compiled)
    if right is not None:
        return bidirectional.backward(call, grad_out, out, lse, first, gradients)
    grad_q, grad_k, grad_v, keys, rows = gradients(call, grad_out, out, lse, first)
    return grad_q, grad_k, grad_v, reduce_bias_grad(call, keys, rows), lse.new_empty(0)


def _causal_gradients(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, first: Tensor, compiled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of q, k and v of one causal call; of a table, for each batch entry, or of a clock where it stands for keys; and
    of a clock where it stands for rows."""
    bias, bias_kind = call.bias_tensors[0], bias_kind_of(call.bias)
    grad_q, grad_k, grad_v = (_empty_like_contiguous(x) for x in (call.q, call.k, call.v))
    q, k, v, grad_out = (contiguous_rows(x) for x in (call.q, call.k, call.v, grad_out))
    # The gradient of q is added up over stretches of keys, so it needs full precision in between.
    summed = grad_q.zero_() if q.dtype == accumulation_dtype(q) else torch.zeros(q.shape, dtype=accumulation_dtype(q))
    keys = _allocate_bias_grad(q, k, bias_kind).zero_()
    rows = q.new_zeros(q.shape[:3] if bias_kind == BiasKind.DECAY else (0,), dtype=torch.float64)
    if compiled and has_kernel(q.shape[3], q.dtype):
        written = {"grad_q": summed, "grad_k": grad_k, "grad_v": grad_v}
        written["inner"] = torch.empty_like(lse, dtype=summed.dtype)
        if bias_kind == BiasKind.TABLE:
            written["grad_table"] = keys
        if bias_kind == BiasKind.DECAY:
            written["grad_rows"] = rows
            written["grad_keys"] = keys
        given = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out, "lse": lse, "first": first}
        options = (call.segment_ids, call.window, call.softmax_scale, 0.0)
        _run("trainshort_backward", bias, bias_kind, *options, **given, **written)
    else:
        given = (replace(call, q=q, k=k, v=v), grad_out, out, lse, first, (summed, grad_k, grad_v))
        if bias_kind == BiasKind.DECAY:
            keys, rows = windowed_torch.backward_decay(*given)
        else:
            windowed_torch.backward(*given)
    return grad_q if summed is grad_q else grad_q.copy_(summed), grad_k, grad_v, keys, rows


def _rebuild_call(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, bias_kind: int, right: Tensor | None = None, **given: Any
) -> AttentionCall:
    """Build an `AttentionCall` from the arguments of the operator."""
    bias_type = BIAS_TYPES[BiasKind(bias_kind)]
    return AttentionCall(q, k, v, bias_type(bias, right), causal=right is None, **given)


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    compiled: bool,
    right: Tensor | None = None,
) -> Any:
    out, lse, *panels = _allocate_outputs(q)
    if right is not None and window != 1:
        more = -(-(q.shape[2] - 1) // QUERY_TILE)
        panels = [torch.cat([x, x.new_empty(*x.shape[:2], more)], dim=2) for x in panels]
    return out, lse, *panels


@_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bias_kind: int,
    segment_ids: Tensor | None,
    window: int | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    compiled: bool,
    right: Tensor | None = None,
) -> Any:
    of_bias = _allocate_bias_grad(q, k, bias_kind)
    if bias_kind != BiasKind.DECAY:
        of_bias = of_bias.sum(0)
    has_right_gradient = right is not None and bias_kind != BiasKind.SLOPES
    of_right = torch.empty_like(of_bias) if has_right_gradient else of_bias.new_empty(0)
    return *(_empty_like_contiguous(x) for x in (q, k, v)), of_bias, of_right


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, ctx.bias_kind, segment_ids, ctx.window, ctx.scale, _, ctx.compiled, right = inputs
    out, lse, first, dropped = output
    ctx.save_for_backward(q, k, v, bias, segment_ids, out, lse, first, right)
    ctx.mark_non_differentiable(lse, first, dropped)


def _autograd_backward(ctx: Any, grad_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bias, segment_ids, *results, right = ctx.saved_tensors
    *grads, of_bias, of_right = torch.ops.trainshort.attention_backward(
        grad_out, q, k, v, bias, ctx.bias_kind, segment_ids, ctx.window, ctx.scale, *results, ctx.compiled, right
    )
    # The operator computes no gradient of slopes.
    trained = ctx.bias_kind != BiasKind.SLOPES
    of_bias = of_bias.to(bias.dtype) if trained else None
    of_right = of_right.to(bias.dtype) if trained and right is not None else None
    without_gradient = (None,) * 6  # bias_kind, segment_ids, window, scale, tolerance, compiled
    return *grads, of_bias, *without_gradient, of_right


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def _allocate_outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, q_len, dim = q.shape
    # Tokens before heads in memory, as torch's own attention returns it: joining the heads afterwards is then free.
    out = q.new_empty(batch, q_len, heads, dim).transpose(1, 2)
    panels = (batch, heads, -(-q_len // QUERY_TILE))
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float64)
    return out, lse, q.new_empty(panels, dtype=torch.int32), q.new_empty(panels, dtype=torch.float32)


def _allocate_bias_grad(q: Tensor, k: Tensor, bias_kind: int) -> Float[Tensor, "batch heads k_len"]:
    """Of a clock, or one of the table for each batch entry, since entries are worked on at the same time."""
    entries = 0 if bias_kind == BiasKind.SLOPES else q.shape[0]
    return q.new_empty(entries, q.shape[1], k.shape[2], dtype=torch.float64)


def _empty_like_contiguous(x: Tensor) -> Tensor:
    """An empty tensor laid out like `x` where its rows are contiguous, so that adding gradients up is quick."""
    dense = torch.empty_like(x)
    return dense if contiguous_rows(dense) is dense else torch.empty_like(x, memory_format=torch.contiguous_format)
