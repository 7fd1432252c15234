"""FlexAttention: the bias as a score function, compiled into torch's own kernel. The engine for GPUs.

Proven windows become its block mask: FlexAttention skips blocks that its mask does not list, forward and backward. The
proof is the one of `alibi.proven_windows`; what it leaves out is at most the tolerance of any row's softmax mass.

Forward only on the CPU (torch has no backward there), where it serves to test the same code that a GPU runs.
Training on a GPU has not been run by us: no GPU was at hand.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainshort import alibi, clocks
from trainshort.attention.call import Bias, Call, ClockBias, DenseBias, DistanceBias, LinearBias, unknown_bias
from trainshort.attention.op import Result, engines

BLOCK = 128
"""FlexAttention's own block size."""


class Flex:
    """FlexAttention with a score function: GPUs (training too), forward on the CPU; never writes the bias out."""

    def rank(self, call: Call) -> int:
        """On GPUs only this one adds the bias to float32 scores without writing it out."""
        return 50 if call.q.device.type == "cuda" else 0

    def unsupported(self, call: Call) -> str | None:
        on_cpu = call.q.device.type == "cpu"
        if on_cpu and call.needs_grad:
            return "FlexAttention has no backward on the CPU; use 'sdpa', or train on a GPU"
        if on_cpu and call.needs_lse:
            return "FlexAttention returns no log-sum-exp on the CPU; use 'windowed' or 'sdpa'"
        if call.dropout:
            return "FlexAttention has no dropout; use 'sdpa'"
        if isinstance(call.bias, DenseBias):
            return "a written-out bias gains nothing from it; use 'sdpa'"
        if call.is_transformed:
            return "FlexAttention knows neither torch.func nor forward-mode derivatives; use 'reference'"
        return None

    def run(self, call: Call) -> Result:
        """The certificate is the promise itself: what was really left out is not looked at again."""
        mask = proven_block_mask(call) if _may_skip(call) else whole_block_mask(call)
        result = _compiled(call.q.device.type)(
            call.q,
            call.k,
            call.v,
            score_mod=_score_function(call.bias, call.k.shape[2] - call.q.shape[2]),
            block_mask=mask,
            scale=call.factor,
            enable_gqa=call.group > 1,
            return_lse=call.needs_lse,
        )
        out, lse = result if call.needs_lse else (result, None)
        most = call.tolerance if _may_skip(call) else 0.0
        return Result(out, lse, call.q.new_full(call.q.shape[:2], most, dtype=torch.float32))


def _may_skip(call: Call) -> bool:
    """Whether there can be blocks to leave out, and somebody asked for no gradient of the slopes that decide it."""
    longer = call.k.shape[2] > BLOCK
    return isinstance(call.bias, LinearBias | ClockBias) and longer and call.tolerance > 0 and not call.bias_needs_grad


@cache
def _compiled(device: str) -> Any:
    """Compiled once per process; uncompiled, FlexAttention writes out all scores.

    On the CPU every shape is compiled for itself: with sizes left open, torch 2.13 writes C++ that does not compile.
    """
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)


def _score_function(bias: Bias | None, past: int) -> Any:
    match bias:
        case None:
            return None
        case LinearBias(slopes):
            slopes = slopes.float()
            return lambda score, b, h, i, j: score - slopes[h] * (i + past - j)
        case DistanceBias(table):
            last = table.shape[1] - 1
            return lambda score, b, h, i, j: score + table[h, (i + past - j).clamp(0, last)]
        case ClockBias(clock):
            high = clock.float()  # two floats for each reading; what is lost of the first is in the second
            low = (clock.double() - high.double()).float()
            return lambda score, b, h, i, j: (
                score + ((high[b, h, i + past] - high[b, h, j]) + (low[b, h, i + past] - low[b, h, j]))
            )
        case unknown:
            raise unknown_bias(unknown)


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


engines.register("flex")(Flex())
