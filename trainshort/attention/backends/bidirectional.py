"""Attention to both sides, made of two causal calls: to the left as it stands, to the right on the text read backwards.

A query's own key belongs to the left. So on the right query i stands on key i + 1, the first that it sees there:

    tokens 0 1 2 3       left    queries 0 1 2 3  keys 0 1 2 3        right   queries 2 1 0  keys 3 2 1

There every distance is short by one, the same for all keys of a row: that leaves the part's weights as they are, and
moves its log-sum-exp by minus one slope (`right`). The two parts are merged by log-sum-exp. Backward, each part gets
the merged output and log-sum-exp, shifted back: its score gradients dS = P (dO·V − dO·O) need nothing else of the other
part. So the operator of causal attention computes both sides, each with its own proof (docs/windows.md).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trainshort.attention.backends.reference import merge_by_lse, reverse_bias
from trainshort.attention.backends.windowed_torch import QUERY_TILE
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
MASKING_SLOPE = 1e9
"""A slope in place of an infinite one: no product of queries and keys makes up for it, and 0 times it is 0."""


def left_call(call: AttentionCall) -> AttentionCall:
    """The call over a row's own key and those before it."""
    match call.bias:
        case LinearBias(slopes):
            bias = LinearBias(slopes.clamp(max=MASKING_SLOPE))
        case DistanceBias(values) | DecayBias(values):
            bias = type(call.bias)(values)
        case unknown:
            raise unknown_bias_error(unknown)
    return replace(call, bias=bias, causal=True)


def right_call(call: AttentionCall) -> tuple[AttentionCall, Float[Tensor, "one_or_batch heads rows"]] | None:
    """The call over the keys after each row's own, read backwards, and what each row's own place there, short by one,
    adds to its scores; None where no row sees any."""
    q_len, past = call.q.shape[2], call.k.shape[2] - call.q.shape[2]
    if q_len == 1 or call.window == 1:
        return None
    values = reverse_bias(call)
    match call.bias:
        case LinearBias():
            bias, shift = (
                LinearBias(values.clamp(max=MASKING_SLOPE)),
                -values.double().clamp(max=MASKING_SLOPE)[None, :, None],
            )
        case DistanceBias():
            bias, shift = DistanceBias(values[:, 1:q_len]), values.new_zeros(1, len(values), 1, dtype=torch.float64)
        case DecayBias():
            bias = DecayBias(values[..., past + 1 :].flip(-1))
            shift = values.double()[..., past:-1] - values.double()[..., past + 1 :]
        case unknown:
            raise unknown_bias_error(unknown)
    q, k, v = call.q[:, :, :-1], call.k[:, :, past + 1 :], call.v[:, :, past + 1 :]
    backwards = replace(
        call,
        **{name: x.flip(2) for name, x in (("q", q), ("k", k), ("v", v))},
        bias=bias,
        window=None if call.window is None else call.window - 1,
        segment_ids=None if call.segment_ids is None else call.segment_ids[:, past + 1 :].flip(1),
        causal=True,
    )
    return backwards, shift


def _segment_ends(call: AttentionCall) -> Bool[Tensor, "one_or_batch 1 rows"]:
    """Rows that are the last of their segment: they see nothing on the right, where they stand on another's key."""
    if call.segment_ids is None:
        return torch.zeros(1, 1, 1, dtype=torch.bool)
    own = call.segment_ids[:, -call.q.shape[2] :]
    return (own[:, :-1] != own[:, 1:])[:, None]


def forward(call: AttentionCall, compiled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both sides by the operator's causal calls: output, log-sum-exp, and what it tells of each panel of rows, those of
    the right side after those of the left."""
    if call.has_split_segments:  # of a graph, which was made before there were segments
        raise InputError(f"The compiled attention kernel does not support this call: {SPLIT_SEGMENTS_MESSAGE}.")
    out, lse, first, dropped = _causal(left_call(call), compiled)
    if (mirror := right_call(call)) is None:
        return out, lse, first, dropped
    backwards, shift = mirror
    right_out, right_lse, right_first, right_dropped = _causal(backwards, compiled)
    ends, rows, dtype = _segment_ends(call), slice(0, -1), accumulation_dtype(out)
    found = right_out.flip(2).to(dtype).masked_fill(ends[..., None], 0)
    weight = (right_lse.flip(2) + shift).masked_fill(ends, -math.inf)
    both = merge_by_lse(out[:, :, rows].to(dtype), lse[:, :, rows], found, weight)
    for into, merged in zip((out, lse), both, strict=True):
        into[:, :, rows] = merged
    return out, lse, torch.cat([first, right_first], dim=2), torch.cat([dropped, right_dropped], dim=2)


def _causal(call: AttentionCall, compiled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    first: Tensor,
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the bias on the left and on the right, by the operator's causal `gradients`."""
    q_len, past = call.q.shape[2], call.k.shape[2] - call.q.shape[2]
    panels, values = -(-q_len // QUERY_TILE), call.bias_tensors[-1]
    grad_q, grad_k, grad_v, keys, rows = gradients(
        left_call(call), grad_out, out, lse, first[..., :panels].contiguous()
    )
    of_left, of_right = reduce_bias_grad(call, keys, rows), torch.zeros_like(values, dtype=torch.float64)
    if (mirror := right_call(call)) is not None:
        backwards, shift = mirror
        # Where a row sees nothing on the right, a log-sum-exp so large that no key has a weight.
        whole = (lse[:, :, :-1] - shift).masked_fill(_segment_ends(call), MASKING_SLOPE).flip(2).contiguous()
        others = (x[:, :, :-1].flip(2) for x in (grad_out, out))
        more_q, more_k, more_v, keys, rows = gradients(backwards, *others, whole, first[..., panels:].contiguous())
        grad_q[:, :, :-1] += more_q.flip(2)
        grad_k[:, :, past + 1 :] += more_k.flip(2)
        grad_v[:, :, past + 1 :] += more_v.flip(2)
        if isinstance(call.bias, DistanceBias):
            of_right[:, 1:q_len] = keys.sum(0)
        elif isinstance(call.bias, DecayBias):  # its readings count with the other sign there (`mirrored`)
            of_right[..., past + 1 :] -= keys.flip(2)
            of_right[..., past:-1] -= rows.flip(2)
    if isinstance(call.bias, LinearBias):
        of_right = of_right.new_empty(0)  # The operator computes no gradient of slopes.
    return grad_q, grad_k, grad_v, of_left, of_right
