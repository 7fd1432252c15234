"""The oracle: attention as the formula reads, nothing clever. Every other engine is measured against it."""

import math

import torch
from torch import Tensor

from trainshort.attention.op import Call, engines, scale, visible, written_bias


class Reference:
    """The plain formula in float32 (float64 for float64 inputs); the oracle of the tests, any call, no hurry."""

    def unsupported(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        k, v = (x.to(dtype).repeat_interleave(call.group, dim=1) for x in (call.k, call.v))
        rows, keys = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
        scores = call.q.to(dtype) @ k.transpose(-1, -2) * scale(call)
        if (bias := written_bias(call, rows, keys)) is not None:
            scores = scores + bias.to(dtype)
        scores = scores.masked_fill(~visible(call, rows, keys), -math.inf)
        weights = torch.nn.functional.dropout(scores.softmax(-1), call.dropout)
        return (weights @ v).to(call.q.dtype), scores.logsumexp(-1).float()


engines.register("reference")(Reference())
