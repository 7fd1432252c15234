"""The oracle: attention as the formula reads, nothing clever. Every other engine is measured against it.

The other engines also use it where there is nothing to be clever about: see `is_short`."""

import math

import torch
from torch import Tensor

from trainshort.attention.op import Call, engines, scale, visible, wide, written_bias


class Reference:
    """The plain formula in float32 (float64 for float64 inputs); the oracle of the tests, any call, no hurry."""

    def unsupported(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        return formula(call)


FEW_KEYS = 16


def is_short(call: Call) -> bool:
    """Whether a call is best trained through by the formula itself, by every engine.

    A kernel's backward pass recomputes the weights from a rounded log-sum-exp. Among a few keys that is most of its
    error, and shows where the formula is exact: one key alone has weight 1 and passes no gradient to its query. So few
    keys are no slower to compute plainly.
    """
    return call.needs_grad and call.k.shape[2] <= FEW_KEYS


def formula(call: Call) -> tuple[Tensor, Tensor]:
    """softmax(q·k/√d + bias) · v over what each row may see, and the log-sum-exp of its scores."""
    dtype = wide(call.q)
    k, v = (x.to(dtype).repeat_interleave(call.group, dim=1) for x in (call.k, call.v))
    rows, keys = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    scores = call.q.to(dtype) @ k.transpose(-1, -2) * scale(call)
    if (bias := written_bias(call, rows, keys)) is not None:
        scores = scores + bias.to(dtype)
    scores = scores.masked_fill(~visible(call, rows, keys), -math.inf)
    weights = torch.nn.functional.dropout(scores.softmax(-1), call.dropout)
    return (weights @ v).to(call.q.dtype), scores.logsumexp(-1).float()


engines.register("reference")(Reference())
