"""Proven windows for FlexAttention: which blocks of keys each block of queries reads, as a BlockMask.

This is how the windows reach GPUs: FlexAttention skips blocks that its mask does not list, forward and backward. The
proof is the one of `alibi.proven_windows`; what it leaves out is at most the tolerance of any row's softmax mass.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from trainshort import alibi, clocks
from trainshort.attention.call import Call, ClockBias, LinearBias, unknown_bias

BLOCK = 128
"""FlexAttention's own block size."""


def proven_block_mask(call: Call) -> BlockMask:
    """The blocks that can matter. Blocks that every row of a query block sees whole need no mask and are listed apart.

    4 blocks, windows of 1, 1, 2 and 1 blocks      d: on the diagonal, masked   f: full   -: skipped, proven

        d
        f d
        f f d
        - - f d
    """
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    starts = torch.arange(k_len - q_len, k_len, BLOCK, device=call.q.device)
    ends = (starts + BLOCK).clamp(max=k_len)
    first = torch.where(call.v.isfinite().all(), _proven_first(call, starts), 0)  # 0 · NaN is NaN at any distance
    plain = call.window is None and call.documents is None
    if call.window is not None:
        first = torch.maximum(first, starts - call.window + 1)
    begin = first.clamp(min=0) // BLOCK
    end = (ends + BLOCK - 1) // BLOCK
    # From here on rows differ in what they see.
    masked = torch.maximum(begin, (starts + 1) // BLOCK) if plain else begin
    count, indices = _listed(masked, end.expand_as(masked), k_len)
    full_count, full_indices = _listed(begin, masked, k_len)
    return BlockMask.from_kv_blocks(
        count,
        indices,
        full_count,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_function(k_len - q_len, call.window, call.documents),
        seq_lengths=(q_len, k_len),
        compute_q_blocks=call.needs_grad,
    )


def _proven_first(call: Call, starts: Int[Tensor, " q_blocks"]) -> Int[Tensor, "batch heads q_blocks"]:
    """The first key that each block of queries must read."""
    match call.bias:
        case LinearBias(slopes):
            return starts - alibi.proven_windows(call.q, call.k, slopes, call.tolerance, BLOCK, call.factor) + 1
        case ClockBias(clock):
            rows = clocks.proven_starts(alibi.most_excess(call.q, call.k, call.factor), clock.detach(), call.tolerance)
            padded = torch.nn.functional.pad(rows, (0, -rows.shape[2] % BLOCK), value=call.k.shape[2])
            return padded.unflatten(2, (-1, BLOCK)).amin(-1)
        case unknown:
            raise unknown_bias(unknown)


def whole_block_mask(call: Call) -> BlockMask:
    """Every block that any row may see."""
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    return create_block_mask(
        _mask_function(k_len - q_len, call.window, call.documents),
        B=None if call.documents is None else call.q.shape[0],
        H=None,
        Q_LEN=q_len,
        KV_LEN=k_len,
        device=call.q.device.type,
    )


def _mask_function(past: int, window: int | None, documents: Tensor | None) -> Any:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + past - j
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        if documents is not None:
            visible = visible & (documents[b, i + past] == documents[b, j])
        return visible

    return seen


def _listed(
    begin: Int[Tensor, "batch heads q_blocks"], end: Int[Tensor, "batch heads q_blocks"], k_len: int
) -> tuple[Int[Tensor, "batch heads q_blocks"], Int[Tensor, "batch heads q_blocks k_blocks"]]:
    """Counts and numbers of the blocks from `begin` to `end`; FlexAttention reads the first `count` of each list."""
    blocks = -(-k_len // BLOCK)
    numbers = (begin[..., None] + torch.arange(blocks, device=begin.device)) % blocks
    return (end - begin).int(), numbers.int()
