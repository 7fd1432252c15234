"""FlexAttention: the bias as a score function, compiled into torch's own kernel. The engine for GPUs.

Forward only on the CPU (torch has no backward there), where it serves to test the same code that a GPU runs.
Training on a GPU has not been run by us: no GPU was at hand.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainshort.attention.op import Call, DenseBias, DistanceBias, LinearBias, engines


class Flex:
    """FlexAttention with a score function: GPUs (training too), forward on the CPU; never writes the bias out."""

    def unsupported(self, call: Call) -> str | None:
        on_cpu = call.q.device.type == "cpu"
        if on_cpu and call.needs_grad:
            return "FlexAttention has no backward on the CPU; use 'squares' or 'sdpa', or train on a GPU"
        if on_cpu and call.needs_lse:
            return "FlexAttention returns no log-sum-exp on the CPU; use 'squares' or 'sdpa'"
        if call.dropout:
            return "FlexAttention has no dropout; use 'sdpa'"
        if isinstance(call.bias, DenseBias):
            return "a written-out bias gains nothing from it; use 'sdpa'"
        return None

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        documents = call.documents
        mask = create_block_mask(
            _mask_function(k_len - q_len, call.window, documents),
            B=None if documents is None else call.q.shape[0],
            H=None,
            Q_LEN=q_len,
            KV_LEN=k_len,
            device=call.q.device.type,
        )
        result = _compiled(call.q.device.type)(
            call.q,
            call.k,
            call.v,
            score_mod=_score_function(call.bias, k_len - q_len),
            block_mask=mask,
            enable_gqa=call.group > 1,
            return_lse=call.needs_lse,
        )
        return result if call.needs_lse else (result, None)


@cache
def _compiled(device: str) -> Any:
    """Compiled once per process; uncompiled, FlexAttention writes out all scores.

    On the CPU every shape is compiled for itself: with sizes left open, torch 2.13 writes C++ that does not compile.
    """
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)


def _mask_function(past: int, window: int | None, documents: Tensor | None) -> Any:
    def seen(b, h, i, j):
        distance = i + past - j
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        if documents is not None:
            visible = visible & (documents[b, i + past] == documents[b, j])
        return visible

    return seen


def _score_function(bias: LinearBias | DistanceBias | DenseBias | None, past: int) -> Any:
    match bias:
        case LinearBias(slopes):
            slopes = slopes.float()
            return lambda score, b, h, i, j: score - slopes[h] * (i + past - j)
        case DistanceBias(table):
            last = table.shape[1] - 1
            return lambda score, b, h, i, j: score + table[h, (i + past - j).clamp(0, last)]
    return None


engines.register("flex")(Flex())
