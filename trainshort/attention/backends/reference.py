"""The backend `reference`, which computes the plain attention formula, and functions that several backends share.

All other backends are tested against this backend. The shared functions compute the bias and the mask as tensors, and
combine attention outputs.
"""

import math

import torch
import torch.nn.functional as F
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
    """The plain attention formula in float32 or float64. This backend supports every call, but is slow."""

    rank = 1

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return None, because this backend supports every call."""
        return None

    def run(self, call: AttentionCall) -> AttentionOutput:
        """Compute attention with the plain formula. No key is dropped, so the certificate is None."""
        out, lse = reference_attention(call)
        return AttentionOutput(out, lse)


REFERENCE = Reference()


def reference_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute softmax(q·k · scale + bias) · v with one tensor of scores for all queries and keys.

    Args:
        call: The arguments of the call.

    Returns:
        The attention output in the dtype of the queries, and the log-sum-exp of the scores of each query in float32.
    """
    dtype = accumulation_dtype(call.q)
    q = call.q.to(dtype)
    k = call.k.to(dtype).repeat_interleave(call.heads_per_kv_head, dim=1)
    v = call.v.to(dtype).repeat_interleave(call.heads_per_kv_head, dim=1)
    all_rows = slice(0, call.q.shape[2])
    all_keys = slice(0, call.k.shape[2])

    scores = q @ k.transpose(-1, -2) * call.softmax_scale
    bias = materialize_bias(call, all_rows, all_keys)
    if bias is not None:
        scores = scores + bias.to(dtype)
    is_visible = visibility_mask(call, all_rows, all_keys)
    scores = scores.masked_fill(~is_visible, -math.inf)

    weights = F.dropout(scores.softmax(-1), call.dropout_p)
    out = (weights @ v).to(call.q.dtype)
    lse = scores.logsumexp(-1).float()
    return out, lse


def merge_by_lse(
    out: Float[Tensor, "batch heads q_len dim"],
    lse: Float[Tensor, "batch heads q_len"],
    other_out: Float[Tensor, "batch heads q_len dim"],
    other_lse: Float[Tensor, "batch heads q_len"],
) -> tuple[Tensor, Tensor]:
    """Combine the attention of the same queries over two disjoint ranges of keys.

    The result equals the attention over all keys of both ranges.

    Args:
        out: The attention output over the first range of keys.
        lse: The log-sum-exp of the scores of each query over the first range of keys.
        other_out: The attention output over the second range of keys.
        other_lse: The log-sum-exp of the scores of each query over the second range of keys.

    Returns:
        The combined attention output and the combined log-sum-exp.

    Example:
        >>> q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 20, 20))
        >>> far = attend(q, k[:, :, :12], v[:, :, :12], causal=False, return_stats=True)
        >>> near = attend(q, k[:, :, 12:], v[:, :, 12:], causal=False, return_stats=True)
        >>> out, lse = merge_by_lse(near.out, near.lse, far.out, far.lse)
        >>> torch.allclose(out, attend(q, k, v), atol=1e-6)
        True
    """
    # The share of the second range in the softmax denominator of both ranges.
    other_share = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    merged_out = out + (other_out - out) * other_share
    merged_lse = torch.logaddexp(lse, other_lse)
    return merged_out, merged_lse


def distance_between(call: AttentionCall, rows: slice, keys: slice) -> Int[Tensor, "rows keys"]:
    """Return the distance of some queries to some keys. The distance is negative for keys in the future of a query.

    Args:
        call: The arguments of the call.
        rows: The queries, where 0 is the first query of the call.
        keys: The keys.
    """
    device = call.q.device
    # The last query is aligned with the last key.
    query_positions = torch.arange(call.query_start + rows.start, call.query_start + rows.stop, device=device)
    key_positions = torch.arange(keys.start, keys.stop, device=device)
    return query_positions[:, None] - key_positions


def materialize_bias(call: AttentionCall, rows: slice, keys: slice) -> Float[Tensor, "*batch heads rows keys"] | None:
    """Return the bias of some queries and some keys as a tensor, or None if the call has no bias.

    Args:
        call: The arguments of the call.
        rows: The queries, where 0 is the first query of the call.
        keys: The keys.
    """
    bias = call.bias
    if bias is None:
        return None
    if isinstance(bias, DenseBias):
        return bias.values[..., rows, keys]

    distance = distance_between(call, rows, keys)
    left_bias = _materialize_one_side(call, call.bias_tensors[0], distance, rows, keys)
    if call.causal:
        return left_bias
    right_bias = _materialize_one_side(call, reverse_bias(call), -distance, rows, keys)
    return torch.where(distance < 0, right_bias, left_bias)


def reverse_bias(call: AttentionCall) -> Tensor:
    """Return the bias tensor of the right side in the form that the left side of the reversed text needs.

    The right side of a query consists of the keys after it. In the reversed text, these keys come before the query.

    The bias of a cumulative log decay is c_i − c_j on the left side and c_j − c_i on the right side. The sign of the
    cumulative log decay therefore changes. Slopes and distance tables do not change.
    """
    right_values = call.bias_tensors[-1]
    if isinstance(call.bias, DecayBias):
        return -right_values
    return right_values


def _materialize_one_side(
    call: AttentionCall, values: Tensor, distance: Int[Tensor, "rows keys"], rows: slice, keys: slice
) -> Tensor:
    """Return the bias of some queries and some keys on one side of the text.

    Args:
        call: The arguments of the call. `call.bias` defines how `values` are used.
        values: The slopes, the distance table or the cumulative log decay (sums of log forget gates) of this side: the
            keys before or after each query.
        distance: The distance between query and key. The result has no meaning for negative distances.
        rows: The queries, where 0 is the first query of the call.
        keys: The keys.
    """
    match call.bias:
        case LinearBias():
            slopes = values.float()[:, None, None]
            if call.causal:
                return -slopes * distance
            # The bias of the own key is 0, even if the slope is infinite. Infinity times 0 would be NaN.
            return torch.where(distance == 0, 0.0, -slopes * distance)
        case DistanceBias():
            # Distances beyond the end of the table use its last column.
            last_column = values.shape[1] - 1
            return values[:, distance.clamp(0, last_column)]
        case DecayBias():
            query_values = values[..., call.query_start :]  # The queries are the last tokens of the keys.
            return query_values[..., rows, None] - values[..., None, keys]
        case unknown:
            raise unknown_bias_error(unknown)


def visibility_mask(call: AttentionCall, rows: slice, keys: slice) -> Bool[Tensor, "one_or_batch 1 rows keys"]:
    """Return which keys each query sees, according to the causal mask, the sliding window and the segments.

    Args:
        call: The arguments of the call.
        rows: The queries, where 0 is the first query of the call.
        keys: The keys.

    Returns:
        A mask that is True where the query sees the key. The mask has a batch dimension only if the call has segments.
    """
    distance = distance_between(call, rows, keys)
    if call.causal:
        is_visible = distance >= 0
    else:
        is_visible = torch.ones_like(distance, dtype=torch.bool)
    if call.window is not None:
        is_visible = is_visible & (distance.abs() < call.window)
    if call.segment_ids is None:
        return is_visible[None, None]

    query_segments = call.segment_ids[:, -call.q.shape[2] :][:, rows]
    key_segments = call.segment_ids[:, keys]
    is_same_segment = query_segments[:, :, None] == key_segments[:, None, :]
    return (is_visible & is_same_segment)[:, None]


def segment_starts(
    segment_ids: Int[Tensor, "batch k_len"],
) -> tuple[Int[Tensor, "batch k_len"], Int[Tensor, "batch k_len"]]:
    """Renumber segments (documents in one sequence) from 0, and return the first position of the segment of each key.

    Args:
        segment_ids: The segment that each key belongs to.

    Returns:
        The new segment numbers and the first positions, both as contiguous int32 tensors.

    Example:
        >>> segment_starts(torch.tensor([[7, 7, 7, 3, 3]]))
        (tensor([[1, 1, 1, 0, 0]], dtype=torch.int32), tensor([[0, 0, 0, 3, 3]], dtype=torch.int32))
    """
    batch, length = segment_ids.shape
    unique_ids, segment_numbers = segment_ids.unique(return_inverse=True)
    positions = torch.arange(length).expand(batch, length)
    # first_position[b, s] is the first position of segment s in sequence b.
    first_position = torch.full((batch, len(unique_ids)), length)
    first_position = first_position.scatter_reduce(1, segment_numbers, positions, "amin")
    first_position_of_keys = first_position.gather(1, segment_numbers)
    return segment_numbers.int().contiguous(), first_position_of_keys.int().contiguous()
