"""Proven windows: ALiBi attention that skips every key which provably cannot matter, forward and backward.

Far keys lose slope · distance from their scores, and no score can exceed the product of two norms. So for every head
and every few query rows there is a first key such that all keys before it together carry less than `tolerance` of the
softmax mass; only the rest is computed. docs/windows.md has the proof and what was measured.

A compiled kernel does the work where a C compiler is at hand (kernel/), plain PyTorch elsewhere (windowed_torch.py);
both are one registered operator, so that torch.compile keeps the graph whole.
"""

import logging
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import kernel, windowed_torch
from trainshort.attention.kernel.library import DTYPES, PANEL, Problem
from trainshort.attention.op import TOLERANCE, Call, LinearBias, check, engines
from trainshort.attention.reference import formula, is_short
from trainshort.attention.squares import row_mask_fault
from trainshort.errors import InputError
from trainshort.registry import did_you_mean

log = logging.getLogger("trainshort.attention")

WIDEST = 1024
"""Largest head dimension that the kernel's scratch space is laid out for."""
IMPLEMENTATIONS = ("auto", "compiled", "torch")


class Windowed:
    """ALiBi on the CPU, skipping keys that provably cannot matter; cheaper than attention without positions."""

    def unsupported(self, call: Call) -> str | None:
        if not isinstance(call.bias, LinearBias):
            return "it computes linear biases (ALiBi) only; use 'sdpa'"
        if call.q.device.type != "cpu":
            return "it runs on the CPU; use 'flex' or 'sdpa'"
        if call.bias_needs_grad:
            return "it does not train slopes; use 'sdpa' or 'reference'"
        if call.dropout:
            return "it has no dropout; use 'sdpa'"
        if call.q.dtype not in DTYPES:
            return f"it does not compute in {call.q.dtype}; use float32, bfloat16, float16 or float64"
        if call.q.shape[3] > WIDEST:
            return f"its heads are at most {WIDEST} wide, these are {call.q.shape[3]}; use 'sdpa'"
        return None if _compiled(call.q.dtype) else row_mask_fault()

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, _ = self.run_certified(call)
        return out, lse

    def run_certified(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(call.bias, LinearBias)
        if is_short(call):
            return *formula(call), call.q.new_zeros(call.q.shape[:2], dtype=torch.float32)
        problem = Problem(call.q, call.k, call.v, call.bias.slopes, call.documents, call.window)
        return attend_windowed(problem, call.tolerance)


def windowed_attention(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    slopes: Float[Tensor, " heads"],
    *,
    tolerance: float = TOLERANCE,
    window: int | None = None,
    documents: Int[Tensor, "batch k_len"] | None = None,
) -> tuple[Tensor, Float[Tensor, "batch heads q_len"], Float[Tensor, "batch heads"]]:
    """Causal ALiBi attention, the rows' log-sum-exp, and a certificate: the largest softmax mass that any row of a head
    can have left out, never more than `tolerance`. Tolerance 0 leaves out nothing.

        out, lse, left_out = windowed_attention(q, k, v, alibi.slopes(8), tolerance=1e-4)
        left_out.max() <= 1e-4
    """
    call = Call(q, k, v, LinearBias(slopes), window, documents, tolerance=tolerance)
    check(call)
    if reason := Windowed().unsupported(call):
        raise InputError(f"Attention engine 'windowed' cannot do this: {reason}.")
    return attend_windowed(Problem(q, k, v, slopes, documents, window), tolerance)


def attend_windowed(problem: Problem, tolerance: float, implementation: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """`windowed_attention` on checked inputs. The implementation is chosen by tests and benchmarks only."""
    if implementation not in IMPLEMENTATIONS:
        close = did_you_mean(implementation, IMPLEMENTATIONS)
        raise InputError(f"Unknown implementation '{implementation}'.{close} Known: {', '.join(IMPLEMENTATIONS)}.")
    out, lse, _, dropped = torch.ops.trainshort.windowed(
        problem.q,
        problem.k,
        problem.v,
        problem.slopes.detach(),
        problem.documents,
        problem.window,
        tolerance,
        implementation,
    )
    return out, lse.to(_wide(problem.q)), dropped.amax(-1)


def _compiled(dtype: torch.dtype, implementation: str = "auto") -> bool:
    """Whether the compiled kernel serves; says once why not."""
    if implementation == "torch":
        return False
    reason = _kernel_fault(dtype == torch.float64)
    if reason is None:
        return True
    if implementation == "compiled":
        raise InputError(f"The compiled kernel was asked for, but {reason}.")
    _announce(reason)
    return False


@torch.compiler.assume_constant_result
def _kernel_fault(double: bool) -> str | None:
    """Asked while torch.compile traces too, where it must be an answer and not a build to be traced."""
    return kernel.unavailable(double)


@cache
def _announce(reason: str) -> None:
    log.warning("windowed attention runs in plain PyTorch, which is slower: %s", reason)


@torch.library.custom_op("trainshort::windowed", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    documents: Tensor | None,
    window: int | None,
    tolerance: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp (float64: the backward pass makes weights of it), the first key each panel of query rows
    read, and the mass that may lie before it."""
    results = _empty_results(q)
    implementing = kernel if _compiled(q.dtype, implementation) else windowed_torch
    implementing.forward(Problem(q, k, v, slopes, documents, window), tolerance, *results)
    return results


@_forward.register_fake
def _(q, k, v, slopes, documents, window, tolerance, implementation):
    return _empty_results(q)


@torch.library.custom_op("trainshort::windowed_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    documents: Tensor | None,
    window: int | None,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (_like(x) for x in (q, k, v))
    # The gradient of q is added up over stretches of keys, so it needs full precision in between.
    wide = grad_q.zero_() if q.dtype == _wide(q) else torch.zeros(q.shape, dtype=_wide(q))
    implementing = kernel if _compiled(q.dtype, implementation) else windowed_torch
    problem = Problem(q, k, v, slopes, documents, window)
    implementing.backward(problem, grad_out, out, lse, first, (wide, grad_k, grad_v))
    return (grad_q if wide is grad_q else grad_q.copy_(wide)), grad_k, grad_v


@_backward.register_fake
def _(grad_out, q, k, v, slopes, documents, window, out, lse, first, implementation):
    return _like(q), _like(k), _like(v)


def _setup(ctx, inputs, output) -> None:
    q, k, v, slopes, documents, ctx.window, _, ctx.implementation = inputs
    out, lse, first, dropped = output
    ctx.save_for_backward(q, k, v, slopes, documents, out, lse, first)
    ctx.mark_non_differentiable(lse, first, dropped)


def _differentiate(ctx, grad_out, *_):
    q, k, v, slopes, documents, out, lse, first = ctx.saved_tensors
    grads = torch.ops.trainshort.windowed_backward(
        grad_out, q, k, v, slopes, documents, ctx.window, out, lse, first, ctx.implementation
    )
    return *grads, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, q_len, dim = q.shape
    # Tokens before heads in memory, as torch's own attention returns it: joining the heads afterwards is then free.
    out = q.new_empty(batch, q_len, heads, dim).transpose(1, 2)
    panels = (batch, heads, -(-q_len // PANEL))
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float64)
    return out, lse, q.new_empty(panels, dtype=torch.int32), q.new_empty(panels, dtype=torch.float32)


def _wide(q: Tensor) -> torch.dtype:
    """What sums are made in."""
    return torch.promote_types(q.dtype, torch.float32)


def _like(x: Tensor) -> Tensor:
    """An empty tensor laid out like `x` where its rows are contiguous, so that adding gradients up is quick."""
    dense = torch.empty_like(x)
    return dense if dense.stride(3) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


engines.register("windowed")(Windowed())
