"""Attention as the formula reads, nothing clever: the engine `reference`, which every other is measured against.

And what engines share: what a row may see, biases written out, and results put together.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainshort.attention.call import Call, ClockBias, DenseBias, DistanceBias, LinearBias, tracer, unknown_bias
from trainshort.attention.op import Result, engines


class Reference:
    """The plain formula in float32 (float64 for float64 inputs); the oracle of the tests, any call, no hurry."""

    def rank(self, call: Call) -> int:
        """Derivatives of any order and direction, and graphs for elsewhere, need plain operations of torch."""
        return 100 if tracer() == "export" or call.is_transformed else 1

    def unsupported(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> Result:
        return Result(*formula(call))


engines.register("reference")(Reference())


def formula(call: Call) -> tuple[Tensor, Tensor]:
    """softmax(q·k/√d + bias) · v over what each row may see, and the log-sum-exp of its scores."""
    dtype = wide(call.q)
    k, v = (x.to(dtype).repeat_interleave(call.group, dim=1) for x in (call.k, call.v))
    rows, keys = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    scores = call.q.to(dtype) @ k.transpose(-1, -2) * call.factor
    if (bias := written_bias(call, rows, keys)) is not None:
        scores = scores + bias.to(dtype)
    scores = scores.masked_fill(~visible(call, rows, keys), -math.inf)
    weights = torch.nn.functional.dropout(scores.softmax(-1), call.dropout)
    return (weights @ v).to(call.q.dtype), scores.logsumexp(-1).float()


def merge(
    out: Float[Tensor, "batch heads q_len dim"],
    lse: Float[Tensor, "batch heads q_len"],
    other_out: Float[Tensor, "batch heads q_len dim"],
    other_lse: Float[Tensor, "batch heads q_len"],
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint ranges of keys, put together as if it had been one."""
    share = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    return out + (other_out - out) * share, torch.logaddexp(lse, other_lse)


def distance_between(call: Call, rows: slice, keys: slice) -> Int[Tensor, "rows keys"]:
    """How far some keys lie behind some query rows; negative in the future."""
    past, device = call.k.shape[2] - call.q.shape[2], call.q.device
    queries = torch.arange(past + rows.start, past + rows.stop, device=device)
    return queries[:, None] - torch.arange(keys.start, keys.stop, device=device)


def written_bias(call: Call, rows: slice, keys: slice) -> Float[Tensor, "*batch heads rows keys"] | None:
    """The bias of some query rows on some keys, for engines that need it written out."""
    match call.bias:
        case None:
            return None
        case LinearBias(slopes):
            return -slopes.float()[:, None, None] * distance_between(call, rows, keys)
        case DistanceBias(table):
            return table[:, distance_between(call, rows, keys).clamp(0, table.shape[1] - 1)]
        case ClockBias(clock):
            own = clock[..., call.k.shape[2] - call.q.shape[2] :]
            return own[..., rows, None] - clock[..., None, keys]
        case DenseBias(values):
            return values[..., rows, keys]
        case unknown:
            raise unknown_bias(unknown)


def visible(call: Call, rows: slice, keys: slice) -> Bool[Tensor, "one_or_batch 1 rows keys"]:
    """Which of some keys some query rows may see."""
    distance = distance_between(call, rows, keys)
    seen = distance >= 0
    if call.window is not None:
        seen = seen & (distance < call.window)
    if call.documents is None:
        return seen[None, None]
    queries = call.documents[:, -call.q.shape[2] :][:, rows]
    return (seen & (queries[:, :, None] == call.documents[:, None, keys]))[:, None]


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


def wide(x: Tensor) -> torch.dtype:
    """What sums over `x` are made in: its own precision, and float32 at the least."""
    return torch.promote_types(x.dtype, torch.float32)
