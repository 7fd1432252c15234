"""The compiled kernel without skipping: no bias, or any bias by distance, trained or not.

Torch's fast kernel on the CPU takes a bias but gives it no gradient, so a trained one (T5's table, ALiBi with trained
slopes) would be written out, with all scores, weights and their gradients. Here the bias is a row of numbers by
distance, read and summed along the diagonals where the scores are: at 768 tokens a ninth of the time. Without a bias
the same kernel takes between 0.38 and 0.89 of the time of torch's on a processor with AVX2 (docs/design.md), so
position methods that differ in nothing else are also computed alike.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention.op import Call, DistanceBias, LinearBias, engines, wide
from trainshort.attention.reference import formula, is_short
from trainshort.attention.registered import kernel_fault
from trainshort.attention.windowed import beyond_kernel


class Compiled:
    """The compiled CPU kernel, skipping nothing: no bias, T5's table, ALiBi's slopes; trains the bias."""

    def unsupported(self, call: Call) -> str | None:
        if not (call.bias is None or isinstance(call.bias, DistanceBias | LinearBias)):
            return "it computes biases by distance only (T5, ALiBi) or none; use 'sdpa'"
        if reason := beyond_kernel(call):
            return reason
        fault = kernel_fault(call.q.dtype)
        return f"it needs the compiled kernel, and {fault}; use 'sdpa'" if fault else None

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        if is_short(call):
            return formula(call)
        out, lse, _, _ = torch.ops.trainshort.windowed(
            call.q,
            call.k,
            call.v,
            torch.zeros(call.q.shape[1]),
            None if call.bias is None else table_by_distance(call),
            call.documents,
            call.window,
            0.0,
            "compiled",
        )
        return out, lse.to(wide(call.q))


def table_by_distance(call: Call) -> Float[Tensor, "heads k_len"]:
    """The bias at every distance that can occur."""
    distance = torch.arange(call.k.shape[2])
    match call.bias:
        case LinearBias(slopes):
            return -slopes.to(wide(call.q))[:, None] * distance
        case DistanceBias(table):
            known = table[:, : len(distance)]
            beyond = len(distance) - known.shape[1]
            return torch.cat([known, known[:, -1:].expand(-1, beyond)], dim=1) if beyond else known
    raise AssertionError("checked before")


engines.register("compiled")(Compiled())
