"""Attention as the formula reads, nothing clever: the backend `reference`, which every other is measured against.

And what backends share: what a row may see, biases written out, and results put together.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainshort.attention.call import (
    AttentionCall,
    DecayBias,
    DenseBias,
    DistanceBias,
    LinearBias,
    accumulation_dtype,
    unknown_bias_error,
)
from trainshort.attention.functional import AttentionOutput


class Reference:
    """The plain formula in float32 (float64 for float64 inputs); the oracle of the tests, any call, no hurry."""

    rank = 1

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> AttentionOutput:
        return AttentionOutput(*reference_attention(call))


REFERENCE = Reference()


def reference_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """softmax(q·k/√d + bias) · v over what each row may see, and the log-sum-exp of its scores."""
    dtype = accumulation_dtype(call.q)
    k, v = (x.to(dtype).repeat_interleave(call.heads_per_kv_head, dim=1) for x in (call.k, call.v))
    rows, keys = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    scores = call.q.to(dtype) @ k.transpose(-1, -2) * call.softmax_scale
    if (bias := materialize_bias(call, rows, keys)) is not None:
        scores = scores + bias.to(dtype)
    scores = scores.masked_fill(~visibility_mask(call, rows, keys), -math.inf)
    weights = torch.nn.functional.dropout(scores.softmax(-1), call.dropout_p)
    return (weights @ v).to(call.q.dtype), scores.logsumexp(-1).float()


def merge_by_lse(
    out: Float[Tensor, "batch heads q_len dim"],
    lse: Float[Tensor, "batch heads q_len"],
    other_out: Float[Tensor, "batch heads q_len dim"],
    other_lse: Float[Tensor, "batch heads q_len"],
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint ranges of keys, put together as if it had been one."""
    share = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    return out + (other_out - out) * share, torch.logaddexp(lse, other_lse)


def distance_between(call: AttentionCall, rows: slice, keys: slice) -> Int[Tensor, "rows keys"]:
    """How far some keys lie behind some query rows; negative in the future."""
    past, device = call.k.shape[2] - call.q.shape[2], call.q.device
    queries = torch.arange(past + rows.start, past + rows.stop, device=device)
    return queries[:, None] - torch.arange(keys.start, keys.stop, device=device)


def materialize_bias(call: AttentionCall, rows: slice, keys: slice) -> Float[Tensor, "*batch heads rows keys"] | None:
    """The bias of some query rows on some keys, for backends that need it written out."""
    bias = call.bias
    if bias is None:
        return None
    if isinstance(bias, DenseBias):
        return bias.values[..., rows, keys]
    distance = distance_between(call, rows, keys)
    left = _one_sided(call, call.bias_tensors[0], distance, rows, keys)
    if call.causal:
        return left
    return torch.where(distance < 0, _one_sided(call, reverse_bias(call), -distance, rows, keys), left)


def reverse_bias(call: AttentionCall) -> Tensor:
    """What the bias says of the right side, for a text read backwards, where a clock that falls would rise."""
    right = call.bias_tensors[-1]
    return -right if isinstance(call.bias, DecayBias) else right


def _one_sided(
    call: AttentionCall, values: Tensor, distance: Int[Tensor, "rows keys"], rows: slice, keys: slice
) -> Tensor:
    """What one side's slopes, table or clock say of keys at a distance that counts towards that side."""
    match call.bias:
        case LinearBias():
            slopes = values.float()[:, None, None]
            # One's own key has none, also for a head that is blind on this side: infinity · 0 is not a number.
            return -slopes * distance if call.causal else torch.where(distance == 0, 0.0, -slopes * distance)
        case DistanceBias():
            return values[:, distance.clamp(0, values.shape[1] - 1)]
        case DecayBias():
            own = values[..., call.k.shape[2] - call.q.shape[2] :]
            return own[..., rows, None] - values[..., None, keys]
        case unknown:
            raise unknown_bias_error(unknown)


def visibility_mask(call: AttentionCall, rows: slice, keys: slice) -> Bool[Tensor, "one_or_batch 1 rows keys"]:
    """Which of some keys some query rows may see."""
    distance = distance_between(call, rows, keys)
    seen = distance >= 0 if call.causal else torch.ones_like(distance, dtype=torch.bool)
    if call.window is not None:
        seen = seen & (distance.abs() < call.window)
    if call.segment_ids is None:
        return seen[None, None]
    queries = call.segment_ids[:, -call.q.shape[2] :][:, rows]
    return (seen & (queries[:, :, None] == call.segment_ids[:, None, keys]))[:, None]


def segment_starts(
    segment_ids: Int[Tensor, "batch k_len"],
) -> tuple[Int[Tensor, "batch k_len"], Int[Tensor, "batch k_len"]]:
    """Segments renumbered from 0, and for each position the first one of the same segment, both int32.

    segment_ids  7 7 7 3 3   ->   1 1 1 0 0   and   0 0 0 3 3
    """
    names, numbers = segment_ids.unique(return_inverse=True)
    batch, length = segment_ids.shape
    positions = torch.arange(length).expand(batch, length)
    first = torch.full((batch, len(names)), length).scatter_reduce(1, numbers, positions, "amin")
    return numbers.int().contiguous(), first.gather(1, numbers).int().contiguous()
