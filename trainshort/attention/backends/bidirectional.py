"""Attention without a causal mask, computed as two causal calls of the operator in custom_op.py.

The left call covers the own key of each query and the keys before it. The right call covers the keys after each query.
For the right call, the text is reversed and the keys are shifted by one, so that query i is aligned with key i + 1:

    tokens 0 1 2 3       left    queries 0 1 2 3  keys 0 1 2 3        right   queries 2 1 0  keys 3 2 1

The distances of the right call are therefore too small by one. This error is the same for all keys of a query. The
error does not change the attention weights of the right call, but it changes the log-sum-exp by a constant, the shift.
The outputs of both calls are combined by their log-sum-exps.

In the backward pass, each call receives the combined output and the combined log-sum-exp (minus the shift). The score
gradients dS = P (dO·V − dO·O) need nothing else of the other call. docs/windows.md describes how keys are skipped.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trainshort.attention.backends.reference import merge_by_lse, reverse_bias
from trainshort.attention.backends.windowed_torch import count_query_tiles
from trainshort.attention.call import (
    AttentionCall,
    DecayBias,
    DistanceBias,
    LinearBias,
    accumulation_dtype,
    bias_kind_of,
    reduce_bias_grad,
    unknown_bias_error,
)
from trainshort.errors import InputError

SPLIT_SEGMENTS_MESSAGE = "it supports causal=False only if each segment is contiguous; use 'sdpa'"

# This slope replaces an infinite slope. Any key at a distance of 1 or more gets the weight 0. In contrast to infinity,
# the product of the slope and the distance 0 is 0, not NaN.
MASKING_SLOPE = 1e9


class CausalGradients(NamedTuple):
    """The gradients of one causal call.

    Attributes:
        q: The gradient of the queries.
        k: The gradient of the keys.
        v: The gradient of the values.
        bias_keys: For a distance table, the gradient of the table for each batch entry. For a decay bias, the gradient
            of the cumulative log decay as a key. Empty for slopes.
        bias_queries: The gradient of the cumulative log decay as a query. Empty for other biases.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias_keys: Tensor
    bias_queries: Tensor


@runtime_checkable
class CausalBackward(Protocol):
    """A function that computes the gradients of one causal call."""

    def __call__(
        self, call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, first_keys: Tensor
    ) -> CausalGradients: ...


@dataclass(frozen=True)
class RightCall:
    """The causal call for the keys to the right of the queries.

    Attributes:
        call: The call on the reversed text. It has no row for the last query, which sees no key on the right.
        shift: What must be added to the log-sum-exp of the call, for each query in the order of the original text.
    """

    call: AttentionCall
    shift: Float[Tensor, "one_or_batch heads rows"]


def left_call(call: AttentionCall) -> AttentionCall:
    """Return the causal half of a call without a causal mask: each query sees its own key and the keys before it.

    `right_call` returns the other half. Only the bias of the left side (the keys before a query) is kept.
    """
    match call.bias:
        case LinearBias(slopes):
            # An infinite slope hides the keys before the query. The large finite slope avoids infinity * 0 = NaN.
            left_bias = LinearBias(slopes.clamp(max=MASKING_SLOPE))
        case DistanceBias(values) | DecayBias(values):
            left_bias = type(call.bias)(values)
        case unknown:
            raise unknown_bias_error(unknown)
    return replace(call, bias=left_bias, causal=True)


def right_call(call: AttentionCall) -> RightCall | None:
    """Return the causal call for the keys after each query, on the reversed text.

    Every distance in the reversed text is one less than the distance in the original text. The shift corrects the
    log-sum-exp for this difference.

    Args:
        call: The arguments of the call without a causal mask.

    Returns:
        The call and its shift, or None if no query sees a key on the right.
    """
    q_len = call.q.shape[2]
    if q_len == 1 or call.window == 1:
        return None
    # The first query is aligned with the key after its own key.
    first_key = call.query_start + 1

    values = reverse_bias(call)
    match call.bias:
        case LinearBias():
            slopes = values.clamp(max=MASKING_SLOPE)
            right_bias = LinearBias(slopes)
            shift = -values.double().clamp(max=MASKING_SLOPE)[None, :, None]
        case DistanceBias():
            # Distance 0 of the call is distance 1 of the text, so the table starts at column 1. There is no shift.
            right_bias = DistanceBias(values[:, 1:q_len])
            heads = values.shape[0]
            shift = values.new_zeros(1, heads, 1, dtype=torch.float64)
        case DecayBias():
            right_bias = DecayBias(values[..., first_key:].flip(-1))
            cumulative = values.double()
            shift = cumulative[..., call.query_start : -1] - cumulative[..., first_key:]
        case unknown:
            raise unknown_bias_error(unknown)

    window = None if call.window is None else call.window - 1
    segment_ids = None
    if call.segment_ids is not None:
        segment_ids = call.segment_ids[:, first_key:].flip(1)
    reversed_call = replace(
        call,
        q=call.q[:, :, :-1].flip(2),
        k=call.k[:, :, first_key:].flip(2),
        v=call.v[:, :, first_key:].flip(2),
        bias=right_bias,
        window=window,
        segment_ids=segment_ids,
        causal=True,
    )
    return RightCall(reversed_call, shift)


def _ends_segment(call: AttentionCall) -> Bool[Tensor, "one_or_batch 1 rows"]:
    """Return whether each query, except for the last query, is the last token of its segment (document).

    Such a query sees no key on the right. In the right call (the call for the keys after each query), the query is
    aligned with the first key of the next segment. The result is a single False if the call has no segments.

    Example:
        segment_ids     7 7 3 3 3
        result          0 1 0 0
    """
    if call.segment_ids is None:
        return torch.zeros(1, 1, 1, dtype=torch.bool)
    query_segments = call.segment_ids[:, -call.q.shape[2] :]
    return (query_segments[:, :-1] != query_segments[:, 1:])[:, None]


def forward(call: AttentionCall, compiled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute attention without a causal mask.

    Args:
        call: The arguments of the call.
        compiled: Whether to use the compiled kernel if it is available.

    Returns:
        The results of the operator: output, log-sum-exp, first keys and dropped mass. The query tiles (groups of query
        rows) of the right call follow the query tiles of the left call.

    Raises:
        InputError: If a segment is interrupted by another segment.
    """
    # A compiled graph may have been traced with other segments, so the segments are checked again.
    if call.has_split_segments:
        raise InputError(f"The compiled attention kernel does not support this call: {SPLIT_SEGMENTS_MESSAGE}.")

    out, lse, left_first_keys, left_dropped_mass = _run_causal(left_call(call), compiled)
    right = right_call(call)
    if right is None:
        return out, lse, left_first_keys, left_dropped_mass
    right_out, right_lse, right_first_keys, right_dropped_mass = _run_causal(right.call, compiled)

    # Bring the results of the right call into the order of the original text.
    dtype = accumulation_dtype(out)
    sees_nothing = _ends_segment(call)
    right_out = right_out.flip(2).to(dtype).masked_fill(sees_nothing[..., None], 0)
    right_lse = (right_lse.flip(2) + right.shift).masked_fill(sees_nothing, -math.inf)

    # The last query sees no key on the right.
    rows = slice(0, -1)
    merged_out, merged_lse = merge_by_lse(out[:, :, rows].to(dtype), lse[:, :, rows], right_out, right_lse)
    out[:, :, rows] = merged_out
    lse[:, :, rows] = merged_lse
    first_keys = torch.cat([left_first_keys, right_first_keys], dim=2)
    dropped_mass = torch.cat([left_dropped_mass, right_dropped_mass], dim=2)
    return out, lse, first_keys, dropped_mass


def _run_causal(call: AttentionCall, compiled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the custom PyTorch operator for a causal call.

    Args:
        call: The arguments of the call. A causal call has only one bias tensor.
        compiled: Whether to use the compiled C kernel instead of plain PyTorch operations.

    Returns:
        The attention output, the log-sum-exp of each query, the first key that each query tile (group of query rows)
        reads, and the softmax mass that each query tile dropped.
    """
    return torch.ops.trainshort.attention(
        call.q,
        call.k,
        call.v,
        call.bias_tensors[0],
        bias_kind_of(call.bias).value,
        call.segment_ids,
        call.window,
        call.softmax_scale,
        call.tolerance,
        compiled,
    )


def backward(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    first_keys: Tensor,
    causal_backward: CausalBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of attention without a causal mask.

    Args:
        call: The arguments of the call.
        grad_out: The gradient of the output.
        out: The output of `forward`.
        lse: The log-sum-exp of `forward`.
        first_keys: The first keys of `forward`.
        causal_backward: The function that computes the gradients of a causal call.

    Returns:
        The gradients of the queries, the keys, the values, the bias of the left side and the bias of the right side.
        For slopes, the gradients of the bias are empty.
    """
    # The query tiles of the right call follow the query tiles of the left call.
    left_tiles = count_query_tiles(call.q.shape[2])
    left_first_keys = first_keys[..., :left_tiles].contiguous()
    right_first_keys = first_keys[..., left_tiles:].contiguous()

    left = causal_backward(left_call(call), grad_out, out, lse, left_first_keys)
    grad_q, grad_k, grad_v = left.q, left.k, left.v
    grad_left_bias = reduce_bias_grad(call, left.bias_keys, left.bias_queries)
    grad_right_bias = torch.zeros_like(call.bias_tensors[-1], dtype=torch.float64)

    right = right_call(call)
    if right is not None:
        right_lse = lse[:, :, :-1] - right.shift
        # A query at the end of a segment sees no key on the right. With a very large log-sum-exp, its weights are 0.
        right_lse = right_lse.masked_fill(_ends_segment(call), MASKING_SLOPE)
        right_grads = causal_backward(
            right.call,
            grad_out[:, :, :-1].flip(2),
            out[:, :, :-1].flip(2),
            right_lse.flip(2).contiguous(),
            right_first_keys,
        )
        first_key = call.query_start + 1
        grad_q[:, :, :-1] += right_grads.q.flip(2)
        grad_k[:, :, first_key:] += right_grads.k.flip(2)
        grad_v[:, :, first_key:] += right_grads.v.flip(2)
        _add_right_bias_grad(call, right_grads, grad_right_bias)

    if isinstance(call.bias, LinearBias):
        # The operator computes no gradient of slopes.
        grad_right_bias = grad_right_bias.new_empty(0)
    return grad_q, grad_k, grad_v, grad_left_bias, grad_right_bias


def _add_right_bias_grad(call: AttentionCall, right_grads: CausalGradients, grad_right_bias: Tensor) -> None:
    """Add the bias gradient of the right call to `grad_right_bias`, in place.

    Args:
        call: The call without a causal mask. The right call computes its attention to the keys after each query. The
            right call processes the reversed text, so the gradients are flipped.
        right_grads: The gradients of the right call.
        grad_right_bias: The gradient of the bias tensor of the right side, in the order of the original text.
    """
    q_len = call.q.shape[2]
    if isinstance(call.bias, DistanceBias):
        # The table of the right call starts at column 1. See `right_call`.
        grad_right_bias[:, 1:q_len] = right_grads.bias_keys.sum(0)
    elif isinstance(call.bias, DecayBias):
        # `reverse_bias` changes the sign of the cumulative log decay, so the gradients are subtracted.
        grad_right_bias[..., call.query_start + 1 :] -= right_grads.bias_keys.flip(2)
        grad_right_bias[..., call.query_start : -1] -= right_grads.bias_queries.flip(2)
