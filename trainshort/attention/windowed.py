"""Proven windows: ALiBi attention that skips every key which provably cannot matter, forward and backward.

Far keys lose slope · distance from their scores, and no score can exceed the product of two norms. So for every head
and every few query rows there is a first key such that all keys before it together carry less than `tolerance` of the
softmax mass; only the rest is computed. docs/windows.md has the proof and what was measured.

A compiled kernel does the work where a C compiler is at hand (kernel/), plain PyTorch elsewhere (windowed_torch.py);
both are one registered operator, so that torch.compile keeps the graph whole.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import windowed_torch
from trainshort.attention.kernel import DTYPES, Problem
from trainshort.attention.op import TOLERANCE, Call, LinearBias, check, engines, wide
from trainshort.attention.reference import formula, is_short
from trainshort.attention.registered import is_compiled
from trainshort.errors import InputError
from trainshort.registry import did_you_mean

WIDEST = 1024
"""Largest head dimension that the kernel's scratch space is laid out for."""
MOST_KEYS = 2**31 - 1
"""The kernel notes in 32 bits which key each row read first."""
IMPLEMENTATIONS = ("auto", "compiled", "torch")


class Windowed:
    """ALiBi on the CPU, skipping keys that provably cannot matter; cheaper than attention without positions."""

    def unsupported(self, call: Call) -> str | None:
        if not isinstance(call.bias, LinearBias):
            return "it computes linear biases (ALiBi) only; use 'sdpa'"
        if call.bias_needs_grad:
            return "it does not train slopes; use 'compiled', 'sdpa' or 'reference'"
        return beyond_kernel(call) or (None if is_compiled(call.q.dtype) else windowed_torch.fault())

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, _ = self.run_certified(call)
        return out, lse

    def run_certified(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(call.bias, LinearBias)
        if is_short(call):
            return *formula(call), call.q.new_zeros(call.q.shape[:2], dtype=torch.float32)
        problem = Problem(call.q, call.k, call.v, call.bias.slopes, call.documents, call.window)
        return attend_windowed(problem, call.tolerance)


def beyond_kernel(call: Call) -> str | None:
    """What the kernel cannot do, whatever the bias."""
    if call.q.device.type != "cpu":
        return "it runs on the CPU; use 'flex' or 'sdpa'"
    if call.dropout:
        return "it has no dropout; use 'sdpa'"
    if call.q.dtype not in DTYPES:
        return f"it does not compute in {call.q.dtype}; use float32, bfloat16, float16 or float64"
    if call.k.shape[2] > MOST_KEYS:
        return f"it counts at most {MOST_KEYS:,} keys, these are {call.k.shape[2]:,}; use 'sdpa'"
    if call.q.shape[3] > WIDEST:
        return f"its heads are at most {WIDEST} wide, these are {call.q.shape[3]}; use 'sdpa'"
    return None


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
        None,
        problem.documents,
        problem.window,
        tolerance,
        implementation,
    )
    return out, lse.to(wide(problem.q)), dropped.amax(-1)


engines.register("windowed")(Windowed())
