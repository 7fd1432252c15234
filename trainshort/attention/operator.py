"""The kernel as an operator that torch knows: the call into C, its gradient, its shapes for torch.compile, and plain
PyTorch in its place where it cannot be built. `windowed` and `compiled` are engines on it.

Torch's operators take tensors and numbers only, so a `Call` is laid out in nine arguments, which go into C as they are;
the structs mirror kernels/attention/call.h.
"""

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention import windowed_torch
from trainshort.attention.call import Call, ClockBias, DistanceBias, LinearBias, contiguous_rows
from trainshort.attention.formula import document_reach, formula, wide
from trainshort.attention.windowed_torch import PANEL
from trainshort.kernels import build
from trainshort.kernels.build import KernelBuildError

log = logging.getLogger("trainshort.attention")
DTYPES = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}
MARGIN = 96
"""Numbers that the kernel may touch before a table's distance 0; the same number as in call.h."""
SMALL = 1 << 22
"""Fewer multiplications than this are done by one thread; waking others takes longer."""
WIDEST = 1024
"""Largest head dimension that the kernel's scratch space is laid out for."""
MOST_KEYS = 2**31 - 1
"""The kernel notes in 32 bits which key each row read first."""


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")),
        *(
            (name, ctypes.c_void_p)
            for name in ("slopes", "table", "ceiling", "clock", "documents", "reach", "lse", "first", "dropped")
        ),
        *((name, ctypes.c_void_p) for name in ("inner", "grad_table", "grad_rows", "grad_keys")),
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
    library = build.load("attention64" if double else "attention", "attention", ("-DREAL_IS_DOUBLE",) if double else ())
    library.trainshort_call_size.restype = ctypes.c_size_t
    assert library.trainshort_call_size() == ctypes.sizeof(_Call), "call.h and operator.py disagree"
    return library


@cache
def unavailable(double: bool = False) -> str | None:
    """Why the kernel cannot be had on this machine; None when it can (it is built now if it was not)."""
    try:
        _library(double)
    except KernelBuildError as error:
        return str(error)
    return None


@torch.compiler.assume_constant_result
def kernel_fault(dtype: torch.dtype) -> str | None:
    """`unavailable`, also asked while torch.compile traces, where it must be an answer and not a build to be traced."""
    return unavailable(dtype == torch.float64)


def beyond(call: Call) -> str | None:
    """What the operator cannot do, whatever the bias."""
    if call.q.device.type != "cpu":
        return "it runs on the CPU; use 'flex' or 'sdpa'"
    if call.dropout:
        return "it has no dropout; use 'sdpa'"
    if call.q.dtype not in DTYPES:
        return f"it does not compute in {call.q.dtype}; use float32, bfloat16, float16 or float64"
    if call.k.shape[2] > MOST_KEYS:
        return f"it counts at most {MOST_KEYS:,} keys, these are {call.k.shape[2]:,}; use 'sdpa'"
    if call.is_transformed:
        return "torch.func and forward-mode derivatives do not reach into its kernel; use 'reference'"
    return None


@cache
def has_kernel(width: int, dtype: torch.dtype) -> bool:
    """Whether heads this wide are computed in C; those wider than its scratch space, and machines without a kernel, get
    plain PyTorch."""
    return width <= WIDEST and unavailable(dtype == torch.float64) is None


def _run(
    entry: str,
    bias: Tensor,
    documents: Tensor | None,
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
    given.parallel = build.torch_threads()
    given.threads = torch.get_num_threads() if batch * heads * q_len * k_len * dim > SMALL else 1
    if bias.dim() == 1:
        tensors["slopes"] = bias.float().contiguous()
    else:
        tensors["slopes"] = torch.zeros(heads)
    if bias.dim() == 2:
        table = bias.detach().to(wide(q))
        tensors["table"] = torch.nn.functional.pad(table, (MARGIN, PANEL)).contiguous()
        if tolerance > 0:
            tensors["ceiling"] = table.flip(-1).cummax(-1).values.flip(-1).contiguous()
    if bias.dim() == 3:
        tensors["clock"] = bias.detach().double().contiguous()
    if documents is not None:
        tensors["documents"], tensors["reach"] = document_reach(documents)
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
    documents: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp (float64: the backward pass makes weights of it), the first key each panel of query rows
    read, and the mass that may lie before it. The bias is slopes, or (heads, k_len) by distance, or (batch, heads,
    k_len), a clock."""
    results = out, lse, first, dropped = _empty_results(q)
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    if compiled and has_kernel(q.shape[3], q.dtype):
        written = {"out": out, "lse": lse, "first": first, "dropped": dropped}
        _run("trainshort_forward", bias, documents, window, scale, tolerance, q=q, k=k, v=v, **written)
    else:
        windowed_torch.forward(_call(q, k, v, bias, documents, window, scale, tolerance), *results)
    return results


@torch.library.custom_op("trainshort::attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias (float64; slopes get none here: an empty tensor)."""
    grad_q, grad_k, grad_v = (_like(x) for x in (q, k, v))
    # The gradient of q is added up over stretches of keys, so it needs full precision in between.
    summed = grad_q.zero_() if q.dtype == wide(q) else torch.zeros(q.shape, dtype=wide(q))
    grad_bias = _empty_grad_bias(q, k, bias).zero_()
    q, k, v, grad_out = (contiguous_rows(x) for x in (q, k, v, grad_out))
    if compiled and has_kernel(q.shape[3], q.dtype):
        written = {"grad_q": summed, "grad_k": grad_k, "grad_v": grad_v}
        written["inner"] = torch.empty_like(lse, dtype=summed.dtype)
        match bias.dim():
            case 2:
                written["grad_table"] = grad_bias
            case 3:
                written["grad_rows"] = q.new_zeros(q.shape[:3], dtype=torch.float64)
                written["grad_keys"] = grad_bias
        given = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out, "lse": lse, "first": first}
        _run("trainshort_backward", bias, documents, window, scale, 0.0, **given, **written)
        if bias.dim() == 3:
            grad_bias[..., k.shape[2] - q.shape[2] :] += written["grad_rows"]
    else:
        call, grads = _call(q, k, v, bias, documents, window, scale, 0.0), (summed, grad_k, grad_v)
        if bias.dim() == 3:
            grad_bias = windowed_torch.backward_of_clock(call, grad_out, out, lse, first, grads)
        else:
            windowed_torch.backward(call, grad_out, out, lse, first, grads)
    grad_q = grad_q if summed is grad_q else grad_q.copy_(summed)
    return grad_q, grad_k, grad_v, grad_bias if bias.dim() == 3 else grad_bias.sum(0)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    documents: Tensor | None,
    window: int | None,
    scale: float,
    tolerance: float,
) -> Call:
    """The call again, for what is written in PyTorch."""
    kind = (LinearBias, DistanceBias, ClockBias)[bias.dim() - 1](bias)
    return Call(q, k, v, kind, window, documents, tolerance=tolerance, scale=scale)


_forward.register_fake(lambda q, *_: _empty_results(q))
_backward.register_fake(
    lambda grad_out, q, k, v, bias, *_: (
        *(_like(x) for x in (q, k, v)),
        _empty_grad_bias(q, k, bias) if bias.dim() == 3 else _empty_grad_bias(q, k, bias).sum(0),
    )
)


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, documents, ctx.window, ctx.scale, _, ctx.compiled = inputs
    out, lse, first, dropped = output
    ctx.save_for_backward(q, k, v, bias, documents, out, lse, first)
    ctx.mark_non_differentiable(lse, first, dropped)


def _differentiate(ctx: Any, grad_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bias, documents, *results = ctx.saved_tensors
    *grads, grad_bias = torch.ops.trainshort.attention_backward(
        grad_out, q, k, v, bias, documents, ctx.window, ctx.scale, *results, ctx.compiled
    )
    return *grads, grad_bias.to(bias.dtype) if bias.dim() > 1 else None, None, None, None, None, None


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, q, k, v, bias, documents, ctx.window, ctx.scale, *_ = inputs
    ctx.save_for_backward(grad_out, q, k, v, bias, documents)


def _differentiate_again(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Second derivatives come from the formula, whose every step torch can differentiate as often as one likes."""
    _announce_formula()
    *given, documents = ctx.saved_tensors
    with_bias = given[4].dim() > 1
    goes_on = torch.is_grad_enabled()
    with torch.enable_grad():
        # Each under a name of its own, since the incoming gradient may itself have come from the queries.
        leaves = [x.view_as(x) if goes_on and x.requires_grad else x.detach().requires_grad_() for x in given]
        q, k, v, bias = leaves[1:]
        out, _ = formula(_call(q, k, v, bias, documents, ctx.window, ctx.scale, 0.0))
        inputs = leaves[1:] if with_bias else leaves[1:4]
        first = torch.autograd.grad(out, inputs, leaves[0], create_graph=True)
        asked = [(x, g.to(x.dtype)) for x, g in zip(first, grads, strict=False) if g is not None]
        second = torch.autograd.grad(
            [x for x, _ in asked], leaves, [g for _, g in asked], create_graph=goes_on, allow_unused=True
        )
    grad_bias = second[4] if with_bias else None
    return *second[:4], grad_bias, None, None, None, None, None, None, None


@cache
def _announce_formula() -> None:
    log.warning("second derivatives of attention are computed by the formula of 'reference', which holds all scores")


_forward.register_autograd(_differentiate, setup_context=_keep_forward)
_backward.register_autograd(_differentiate_again, setup_context=_keep_backward)


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, q_len, dim = q.shape
    # Tokens before heads in memory, as torch's own attention returns it: joining the heads afterwards is then free.
    out = q.new_empty(batch, q_len, heads, dim).transpose(1, 2)
    panels = (batch, heads, -(-q_len // PANEL))
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float64)
    return out, lse, q.new_empty(panels, dtype=torch.int32), q.new_empty(panels, dtype=torch.float32)


def _empty_grad_bias(q: Tensor, k: Tensor, bias: Tensor) -> Float[Tensor, "batch heads k_len"]:
    """Of a clock, or one of the table for each batch entry, since entries are worked on at the same time."""
    entries = q.shape[0] if bias.dim() > 1 else 0
    return q.new_empty(entries, q.shape[1], k.shape[2], dtype=torch.float64)


def _like(x: Tensor) -> Tensor:
    """An empty tensor laid out like `x` where its rows are contiguous, so that adding gradients up is quick."""
    dense = torch.empty_like(x)
    return dense if contiguous_rows(dense) is dense else torch.empty_like(x, memory_format=torch.contiguous_format)
