"""The kernel's two calls, with tensors in and tensors filled. The structs mirror kernels/attention/call.h."""

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention.op import contiguous_rows, has_contiguous_rows, wide
from trainshort.kernels import build
from trainshort.kernels.build import KernelBuildError

DTYPES = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}
PANEL = 24
"""Query rows that decide together which keys they read; the same number as in tile.h."""
MARGIN = 96
"""Numbers that the kernel may touch before a table's distance 0; the same number as in call.h."""
SMALL = 1 << 22
"""Fewer multiplications than this are done by one thread; waking others takes longer."""


@dataclass(frozen=True)
class Problem:
    """What forward and backward both need to know."""

    q: Float[Tensor, "batch heads q_len dim"]
    k: Float[Tensor, "batch kv_heads k_len dim"]
    v: Float[Tensor, "batch kv_heads k_len dim"]
    slopes: Float[Tensor, " heads"]
    documents: Int[Tensor, "batch k_len"] | None
    window: int | None
    table: Float[Tensor, "heads k_len"] | None = None
    """A bias by distance in place of the slopes; then nothing is skipped."""


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]

    @classmethod
    def of(cls, x: Tensor) -> "_Tensor":
        assert has_contiguous_rows(x), "rows must be contiguous"
        return cls(x.data_ptr(), *x.stride()[:3])


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")),
        *((name, ctypes.c_void_p) for name in ("slopes", "table", "documents", "reach", "lse", "first", "dropped")),
        *((name, ctypes.c_void_p) for name in ("inner", "grad_table")),
        *((name, ctypes.c_int64) for name in ("batches", "heads", "kv_heads", "q_len", "k_len", "dim", "window")),
        ("tolerance", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("parallel", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@cache
def unavailable(double: bool = False) -> str | None:
    """Why the kernel cannot be had on this machine; None when it can (it is built now if it was not)."""
    try:
        _library(double)
    except KernelBuildError as error:
        return str(error)
    return None


def forward(problem: Problem, tolerance: float, out: Tensor, lse: Tensor, first: Tensor, dropped: Tensor) -> None:
    """Fill the output, the rows' log-sum-exp, each panel's first key, and the mass that may lie before it."""
    call, keep = _describe(problem)
    call.out, call.tolerance = _Tensor.of(out), tolerance
    call.lse, call.first, call.dropped = lse.data_ptr(), first.data_ptr(), dropped.data_ptr()
    _run("trainshort_forward", call, out.dtype)
    del keep


def backward(
    problem: Problem,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_table: Float[Tensor, "batch heads k_len"] | None = None,
) -> None:
    """Fill the gradients of k and v, and add to that of q (float32 or float64, zeros before) and of the table (float64,
    zeros before), where it is given."""
    call, keep = _describe(problem)
    inner = torch.empty_like(lse, dtype=grads[0].dtype)
    rows = contiguous_rows(grad_out)
    call.out, call.grad_out = _Tensor.of(out), _Tensor.of(rows)
    call.grad_q, call.grad_k, call.grad_v = (_Tensor.of(x) for x in grads)
    call.lse, call.first, call.inner = lse.data_ptr(), first.data_ptr(), inner.data_ptr()
    call.grad_table = None if grad_table is None else grad_table.data_ptr()
    _run("trainshort_backward", call, out.dtype)
    del keep


def _describe(problem: Problem) -> tuple[_Call, list[Tensor]]:
    """The struct, and the tensors that must live as long as it does: it holds bare addresses."""
    q, k, v = (contiguous_rows(x) for x in (problem.q, problem.k, problem.v))
    batch, heads, q_len, dim = q.shape
    slopes = problem.slopes.float().contiguous()
    keep = [q, k, v, slopes]
    call = _Call(q=_Tensor.of(q), k=_Tensor.of(k), v=_Tensor.of(v), slopes=slopes.data_ptr())
    call.batches, call.heads, call.kv_heads = batch, heads, k.shape[1]
    call.q_len, call.k_len, call.dim = q_len, k.shape[2], dim
    call.window = min(problem.window or k.shape[2], k.shape[2])
    call.scale, call.dtype = 1 / math.sqrt(dim), DTYPES[q.dtype]
    call.parallel = _torch_threads()
    call.threads = torch.get_num_threads() if batch * heads * q_len * k.shape[2] * dim > SMALL else 1
    if problem.table is not None:
        table = torch.nn.functional.pad(problem.table.detach().to(wide(q)), (MARGIN, PANEL)).contiguous()
        call.table = table.data_ptr()
        keep.append(table)
    if problem.documents is not None:
        documents, reach = document_reach(problem.documents)
        call.documents, call.reach = documents.data_ptr(), reach.data_ptr()
        keep += [documents, reach]
    return call, keep


def document_reach(
    documents: Int[Tensor, "batch k_len"],
) -> tuple[Int[Tensor, "batch k_len"], Int[Tensor, "batch k_len"]]:
    """Documents renumbered from 0, and for each position the first one of the same document, both int32.

    documents  7 7 7 3 3   ->   1 1 1 0 0   and   0 0 0 3 3
    """
    names, numbers = documents.unique(return_inverse=True)
    batch, length = documents.shape
    positions = torch.arange(length).expand(batch, length)
    first = torch.full((batch, len(names)), length).scatter_reduce(1, numbers, positions, "amin")
    return numbers.int().contiguous(), first.gather(1, numbers).int().contiguous()


def _run(name: str, call: _Call, dtype: torch.dtype) -> None:
    if getattr(_library(dtype == torch.float64), name)(ctypes.byref(call)):
        raise MemoryError("windowed attention ran out of memory for its scratch space")


@cache
def _library(double: bool) -> ctypes.CDLL:
    """The library for float32 (or, for gradient checks, float64) arithmetic."""
    library = build.load("attention64" if double else "attention", "attention", ("-DREAL_IS_DOUBLE",) if double else ())
    library.trainshort_call_size.restype = ctypes.c_size_t
    assert library.trainshort_call_size() == ctypes.sizeof(_Call), "call.h and kernel.py disagree"
    return library


@cache
def _torch_threads() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime this process already runs; None where it is not to be found."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "omp" in line and ".so" in line}
    own = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda path: (not path.startswith(own), path)):  # others may have brought theirs
        if any(name in Path(path).name for name in ("libgomp", "libiomp", "libomp")):
            entry = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if entry is not None:
                return ctypes.cast(entry, ctypes.c_void_p).value
    return None
