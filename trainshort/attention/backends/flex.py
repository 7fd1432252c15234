"""FlexAttention: the bias as a score function, compiled into torch's own kernel. The backend for GPUs.

Proven windows become its block mask: FlexAttention skips blocks that its mask does not list, forward and backward. The
proof is the one of `alibi.proven_windows`; what it leaves out is at most the tolerance of any row's softmax mass.

Forward only on the CPU (torch has no backward there), where it serves to test the same code that a GPU runs.
Training on a GPU has not been run by us: no GPU was at hand.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainshort import alibi
from trainshort.attention import decay
from trainshort.attention.backends.bidirectional import MASKING_SLOPE
from trainshort.attention.backends.reference import reverse_bias
from trainshort.attention.call import (
    AttentionCall,
    Bias,
    DecayBias,
    DenseBias,
    DistanceBias,
    LinearBias,
    unknown_bias_error,
)
from trainshort.attention.functional import AttentionOutput

FLEX_BLOCK_SIZE = 128
"""FlexAttention's own block size."""


class Flex:
    """FlexAttention with a score function: GPUs (training too), forward on the CPU; never writes the bias out."""

    rank = 20

    def skip_reason(self, call: AttentionCall) -> str | None:
        """On GPUs only this one adds the bias to float32 scores without writing it out."""
        return None if call.q.device.type == "cuda" else "FlexAttention is taken by itself on GPUs only"

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        on_cpu = call.q.device.type == "cpu"
        if on_cpu and call.needs_grad:
            return "FlexAttention has no backward on the CPU; use 'sdpa', or train on a GPU"
        if on_cpu and call.needs_lse:
            return "FlexAttention returns no log-sum-exp on the CPU; use 'windowed' or 'sdpa'"
        if call.dropout_p:
            return "FlexAttention has no dropout; use 'sdpa'"
        if isinstance(call.bias, DenseBias):
            return "a written-out bias gains nothing from it; use 'sdpa'"
        if call.is_transformed:
            return "FlexAttention knows neither torch.func nor forward-mode derivatives; use 'reference'"
        return None

    def run(self, call: AttentionCall) -> AttentionOutput:
        """The certificate is the promise itself: what was really left out is not looked at again."""
        mask = proven_block_mask(call) if _can_skip_blocks(call) else full_block_mask(call)
        result = _compiled(call.q.device.type)(
            call.q,
            call.k,
            call.v,
            score_mod=_score_function(call),
            block_mask=mask,
            scale=call.softmax_scale,
            enable_gqa=call.heads_per_kv_head > 1,
            return_lse=call.needs_lse,
        )
        out, lse = result if call.needs_lse else (result, None)
        most = call.tolerance if _can_skip_blocks(call) else 0.0
        return AttentionOutput(out, lse, call.q.new_full(call.q.shape[:2], most, dtype=torch.float32))


def _can_skip_blocks(call: AttentionCall) -> bool:
    """Whether there can be blocks to leave out, and somebody asked for no gradient of the slopes that decide it."""
    longer = call.k.shape[2] > FLEX_BLOCK_SIZE
    return isinstance(call.bias, LinearBias | DecayBias) and longer and call.tolerance > 0 and not call.bias_needs_grad


@cache
def _compiled(device: str) -> Any:
    """Compiled once per process; uncompiled, FlexAttention writes out all scores.

    On the CPU every shape is compiled for itself: with sizes left open, torch 2.13 writes C++ that does not compile.
    """
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)


def _score_function(call: AttentionCall) -> Any:
    """The bias as FlexAttention wants it: of the score at query i, counted from the first query, and key j."""
    if call.bias is None:
        return None
    past, left = call.k.shape[2] - call.q.shape[2], _one_sided(call.bias, call.bias_tensors[0])
    if call.causal:
        return lambda score, b, h, i, j: score + left(b, h, i + past, j, i + past - j)
    right = _one_sided(call.bias, reverse_bias(call))
    return lambda score, b, h, i, j: (
        score
        + torch.where(i + past >= j, left(b, h, i + past, j, i + past - j), right(b, h, i + past, j, j - i - past))
    )


def _one_sided(bias: Bias, values: Tensor) -> Any:
    """What one side's slopes, table or clock say of query i, key j and their distance towards that side."""
    match bias:
        case LinearBias():
            slopes = values.float().clamp(max=MASKING_SLOPE)
            return lambda b, h, i, j, distance: -slopes[h] * distance
        case DistanceBias():
            last = values.shape[1] - 1
            return lambda b, h, i, j, distance: values[h, distance.clamp(0, last)]
        case DecayBias():
            high = values.float()  # two floats for each reading; what is lost of the first is in the second
            low = (values.double() - high.double()).float()
            return lambda b, h, i, j, distance: (high[b, h, i] - high[b, h, j]) + (low[b, h, i] - low[b, h, j])
        case unknown:
            raise unknown_bias_error(unknown)


def proven_block_mask(call: AttentionCall) -> BlockMask:
    """The blocks that can matter. Blocks that every row of a query block sees whole need no mask and are listed apart.

    4 blocks, windows of 1, 1, 2 and 1 blocks      d: on the diagonal, masked   f: full   -: skipped, proven

        d
        f d
        f f d
        - - f d
    """
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    starts = torch.arange(k_len - q_len, k_len, FLEX_BLOCK_SIZE, device=call.q.device)
    ends = (starts + FLEX_BLOCK_SIZE).clamp(max=k_len)
    finite = call.v.isfinite().all()  # 0 · NaN is NaN at any distance
    first = torch.where(finite, _group_rows_by_block(_proven_first(call)).amin(-1), 0)
    last = (
        ends.expand_as(first)
        if call.causal
        else torch.where(finite, _group_rows_by_block(_proven_last(call)).amax(-1), k_len)
    )
    plain = call.window is None and call.segment_ids is None
    if call.window is not None:
        first = torch.maximum(first, starts - call.window + 1)
        last = torch.minimum(last, ends + (0 if call.causal else call.window - 1))
    begin, end = first.clamp(min=0) // FLEX_BLOCK_SIZE, (last + FLEX_BLOCK_SIZE - 1) // FLEX_BLOCK_SIZE
    # Rows of a block differ in what they see: at the end of causal attention, or by windows and segments anywhere.
    differ = torch.maximum(begin, (starts + 1) // FLEX_BLOCK_SIZE) if call.causal else end
    masked = differ if plain else begin
    count, indices = _block_indices(masked, end, k_len)
    full_count, full_indices = _block_indices(begin, masked, k_len)
    return BlockMask.from_kv_blocks(
        count,
        indices,
        full_count,
        full_indices,
        BLOCK_SIZE=FLEX_BLOCK_SIZE,
        mask_mod=_mask_function(call),
        seq_lengths=(q_len, k_len),
        compute_q_blocks=call.needs_grad,
    )


def _group_rows_by_block(rows: Int[Tensor, "batch heads q_len"]) -> Int[Tensor, "batch heads q_blocks block"]:
    """Rows by blocks of them; the last one is filled up with its last row."""
    more = rows[..., -1:].expand(*rows.shape[:2], -rows.shape[2] % FLEX_BLOCK_SIZE)
    return torch.cat([rows, more], dim=2).unflatten(2, (-1, FLEX_BLOCK_SIZE))


def _proven_first(call: AttentionCall) -> Int[Tensor, "batch heads q_len"]:
    """The first key that each query must read. Half the tolerance where there is a right side to be promised, too: both
    bounds are against the same own key."""
    tolerance = call.tolerance if call.causal else call.tolerance / 2
    values = call.bias_tensors[0].detach()
    match call.bias:
        case LinearBias():
            windows = alibi.proven_windows(
                call.q, call.k, values.clamp(max=MASKING_SLOPE), tolerance, 1, call.softmax_scale
            )
            positions = torch.arange(call.k.shape[2] - call.q.shape[2], call.k.shape[2], device=call.q.device)
            return torch.where(windows >= call.k.shape[2], 0, positions - windows + 1)
        case DecayBias():
            return decay.proven_first_keys(alibi.most_excess(call.q, call.k, call.softmax_scale), values, tolerance)
        case unknown:
            raise unknown_bias_error(unknown)


def _proven_last(call: AttentionCall) -> Int[Tensor, "batch heads q_len"]:
    """Behind the last key that each query must read: the same on the text read backwards."""
    past, values = call.k.shape[2] - call.q.shape[2], reverse_bias(call)
    bias = DecayBias(values[..., past:].flip(-1)) if isinstance(call.bias, DecayBias) else LinearBias(values)
    backwards = replace(call, q=call.q.flip(2), k=call.k[:, :, past:].flip(2), v=call.v[:, :, past:], bias=bias)
    return call.k.shape[2] - _proven_first(backwards).flip(2)


def full_block_mask(call: AttentionCall) -> BlockMask:
    """Every block that any row may see."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    return create_block_mask(
        _mask_function(call),
        B=None if call.segment_ids is None else call.q.shape[0],
        H=None,
        Q_LEN=q_len,
        KV_LEN=k_len,
        device=call.q.device.type,
    )


def _mask_function(call: AttentionCall) -> Any:
    past, window, segment_ids, causal = call.k.shape[2] - call.q.shape[2], call.window, call.segment_ids, call.causal

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + past - j
        visible = distance >= 0 if causal else distance < call.k.shape[2]  # all of them
        if window is not None:
            visible = visible & (distance < window) & (distance > -window)
        if segment_ids is not None:
            visible = visible & (segment_ids[b, i + past] == segment_ids[b, j])
        return visible

    return seen


def _block_indices(
    begin: Int[Tensor, "batch heads q_blocks"], end: Int[Tensor, "batch heads q_blocks"], k_len: int
) -> tuple[Int[Tensor, "batch heads q_blocks"], Int[Tensor, "batch heads q_blocks k_blocks"]]:
    """Counts and numbers of the blocks from `begin` to `end`; FlexAttention reads the first `count` of each list."""
    blocks = -(-k_len // FLEX_BLOCK_SIZE)
    numbers = (begin[..., None] + torch.arange(blocks, device=begin.device)) % blocks
    return (end - begin).int(), numbers.int()


FLEX = Flex()
