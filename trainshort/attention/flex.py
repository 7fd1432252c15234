"""FlexAttention: the bias as a score function, compiled into torch's own kernel. The engine for GPUs.

ALiBi's proven windows become its block mask, so that it skips what `windowed` skips on the CPU.

Forward only on the CPU (torch has no backward there), where it serves to test the same code that a GPU runs.
Training on a GPU has not been run by us: no GPU was at hand.
"""

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

from trainshort.attention.call import Bias, Call, ClockBias, DenseBias, DistanceBias, LinearBias, unknown_bias
from trainshort.attention.op import Result, engines
from trainshort.attention.windowed_flex import BLOCK, proven_block_mask, whole_block_mask


class Flex:
    """FlexAttention with a score function: GPUs (training too), forward on the CPU; never writes the bias out."""

    def rank(self, call: Call) -> int:
        """On GPUs only this one adds the bias to float32 scores without writing it out."""
        return 50 if call.q.device.type == "cuda" else 0

    def unsupported(self, call: Call) -> str | None:
        on_cpu = call.q.device.type == "cpu"
        if on_cpu and call.needs_grad:
            return "FlexAttention has no backward on the CPU; use 'sdpa', or train on a GPU"
        if on_cpu and call.needs_lse:
            return "FlexAttention returns no log-sum-exp on the CPU; use 'windowed' or 'sdpa'"
        if call.dropout:
            return "FlexAttention has no dropout; use 'sdpa'"
        if isinstance(call.bias, DenseBias):
            return "a written-out bias gains nothing from it; use 'sdpa'"
        if call.is_transformed:
            return "FlexAttention knows neither torch.func nor forward-mode derivatives; use 'reference'"
        return None

    def run(self, call: Call) -> Result:
        """The certificate is the promise itself: what was really left out is not looked at again."""
        mask = proven_block_mask(call) if _may_skip(call) else whole_block_mask(call)
        result = _compiled(call.q.device.type)(
            call.q,
            call.k,
            call.v,
            score_mod=_score_function(call.bias, call.k.shape[2] - call.q.shape[2]),
            block_mask=mask,
            scale=call.factor,
            enable_gqa=call.group > 1,
            return_lse=call.needs_lse,
        )
        out, lse = result if call.needs_lse else (result, None)
        most = call.tolerance if _may_skip(call) else 0.0
        return Result(out, lse, call.q.new_full(call.q.shape[:2], most, dtype=torch.float32))


def _may_skip(call: Call) -> bool:
    """Whether there can be blocks to leave out, and somebody asked for no gradient of the slopes that decide it."""
    longer = call.k.shape[2] > BLOCK
    return isinstance(call.bias, LinearBias | ClockBias) and longer and call.tolerance > 0 and not call.bias_needs_grad


@cache
def _compiled(device: str) -> Any:
    """Compiled once per process; uncompiled, FlexAttention writes out all scores.

    On the CPU every shape is compiled for itself: with sizes left open, torch 2.13 writes C++ that does not compile.
    """
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)


def _score_function(bias: Bias | None, past: int) -> Any:
    match bias:
        case None:
            return None
        case LinearBias(slopes):
            slopes = slopes.float()
            return lambda score, b, h, i, j: score - slopes[h] * (i + past - j)
        case DistanceBias(table):
            last = table.shape[1] - 1
            return lambda score, b, h, i, j: score + table[h, (i + past - j).clamp(0, last)]
        case ClockBias(clock):
            high = clock.float()  # two floats for each reading; what is lost of the first is in the second
            low = (clock.double() - high.double()).float()
            return lambda score, b, h, i, j: (
                score + ((high[b, h, i + past] - high[b, h, j]) + (low[b, h, i + past] - low[b, h, j]))
            )
        case unknown:
            raise unknown_bias(unknown)


engines.register("flex")(Flex())
