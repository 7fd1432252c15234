"""The kernel as an operator that torch knows: its gradient, its shapes for torch.compile, and what runs where it cannot
be built. `windowed` and `compiled` are engines on it."""

import logging
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention import kernel, windowed_torch
from trainshort.attention.kernel import PANEL, Problem
from trainshort.attention.op import has_contiguous_rows, wide
from trainshort.errors import InputError

log = logging.getLogger("trainshort.attention")


@torch.compiler.assume_constant_result
def is_compiled(dtype: torch.dtype, implementation: str = "auto") -> bool:
    """Whether the compiled kernel serves; says once why not."""
    if implementation == "torch":
        return False
    reason = kernel_fault(dtype)
    if reason is None:
        return True
    if implementation == "compiled":
        raise InputError(f"The compiled kernel was asked for, but {reason}.")
    _announce(reason)
    return False


@torch.compiler.assume_constant_result
def kernel_fault(dtype: torch.dtype) -> str | None:
    """Why there is no kernel here, or None. Asked while torch.compile traces too, where it must be an answer and not a
    build to be traced."""
    return kernel.unavailable(dtype == torch.float64)


@cache
def _announce(reason: str) -> None:
    log.warning("windowed attention runs in plain PyTorch, which is slower: %s", reason)


@torch.library.custom_op("trainshort::windowed", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    table: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    tolerance: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp (float64: the backward pass makes weights of it), the first key each panel of query rows
    read, and the mass that may lie before it."""
    results = _empty_results(q)
    problem = Problem(q, k, v, slopes, documents, window, table)
    _implementing(problem, implementation).forward(problem, tolerance if table is None else 0.0, *results)
    return results


@_forward.register_fake
def _(q, k, v, slopes, table, documents, window, tolerance, implementation):
    return _empty_results(q)


@torch.library.custom_op("trainshort::windowed_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    table: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the table (float64, zeros where there is none)."""
    grad_q, grad_k, grad_v = (_like(x) for x in (q, k, v))
    # The gradient of q is added up over stretches of keys, so it needs full precision in between.
    summed = grad_q.zero_() if q.dtype == wide(q) else torch.zeros(q.shape, dtype=wide(q))
    problem = Problem(q, k, v, slopes, documents, window, table)
    grad_table = _empty_tables(q, k, table).zero_()
    grads = (summed, grad_k, grad_v)
    implementing = _implementing(problem, implementation)
    implementing.backward(problem, grad_out, out, lse, first, grads, None if table is None else grad_table)
    return (grad_q if summed is grad_q else grad_q.copy_(summed)), grad_k, grad_v, grad_table.sum(0)


@_backward.register_fake
def _(grad_out, q, k, v, slopes, table, documents, window, out, lse, first, implementation):
    return _like(q), _like(k), _like(v), _empty_tables(q, k, table).sum(0)


def _setup(ctx, inputs, output) -> None:
    q, k, v, slopes, table, documents, ctx.window, _, ctx.implementation = inputs
    out, lse, first, dropped = output
    ctx.save_for_backward(q, k, v, slopes, table, documents, out, lse, first)
    ctx.mark_non_differentiable(lse, first, dropped)


def _differentiate(ctx, grad_out, *_):
    q, k, v, slopes, table, documents, out, lse, first = ctx.saved_tensors
    *grads, grad_table = torch.ops.trainshort.windowed_backward(
        grad_out, q, k, v, slopes, table, documents, ctx.window, out, lse, first, ctx.implementation
    )
    return *grads, None, None if table is None else grad_table.to(table.dtype), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, q_len, dim = q.shape
    # Tokens before heads in memory, as torch's own attention returns it: joining the heads afterwards is then free.
    out = q.new_empty(batch, q_len, heads, dim).transpose(1, 2)
    panels = (batch, heads, -(-q_len // PANEL))
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float64)
    return out, lse, q.new_empty(panels, dtype=torch.int32), q.new_empty(panels, dtype=torch.float32)


def _empty_tables(q: Tensor, k: Tensor, table: Tensor | None) -> Float[Tensor, "batch heads k_len"]:
    """One gradient of the table for each batch entry, since entries are worked on at the same time."""
    entries = 0 if table is None else q.shape[0]
    return q.new_empty(entries, q.shape[1], k.shape[2], dtype=torch.float64)


def _implementing(problem: Problem, implementation: str):
    """The module whose `forward` and `backward` do the work. Plain PyTorch knows no tables."""
    return kernel if is_compiled(problem.q.dtype, implementation) else windowed_torch


def _like(x: Tensor) -> Tensor:
    """An empty tensor laid out like `x` where its rows are contiguous, so that adding gradients up is quick."""
    dense = torch.empty_like(x)
    return dense if has_contiguous_rows(dense) else torch.empty_like(x, memory_format=torch.contiguous_format)
