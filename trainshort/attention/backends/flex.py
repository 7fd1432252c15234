"""The backend `flex`, which uses PyTorch's FlexAttention. This backend is the default on GPUs.

The bias is a `score_mod` function, which FlexAttention compiles into its own kernel. Blocks of keys whose softmax mass
is proven to be at most the tolerance are removed from FlexAttention's block mask. FlexAttention skips these blocks in
the forward and in the backward pass. The proof is the proof of `trainshort.alibi.proven_windows`.

On the CPU, FlexAttention supports only the forward pass. The tests run there. The backend was never run on a GPU.
"""

from collections.abc import Callable
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

# The number of queries and the number of keys in a block of FlexAttention's block mask. 128 is FlexAttention's default.
FLEX_BLOCK_SIZE = 128


class Flex:
    """FlexAttention with a `score_mod` for the bias: training on GPUs, only the forward pass on the CPU."""

    rank = 20

    def skip_reason(self, call: AttentionCall) -> str | None:
        """Return why `backend="auto"` should prefer another backend for a call, or None."""
        if call.q.device.type == "cuda":
            return None
        return "'auto' uses FlexAttention on GPUs only"

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return why this backend does not support a call, or None if the backend supports the call."""
        is_on_cpu = call.q.device.type == "cpu"
        if is_on_cpu and call.needs_grad:
            return "FlexAttention has no backward on the CPU; use 'sdpa', or train on a GPU"
        if is_on_cpu and call.needs_lse:
            return "FlexAttention returns no log-sum-exp on the CPU; use 'windowed' or 'sdpa'"
        if call.dropout_p:
            return "FlexAttention has no dropout; use 'sdpa'"
        if isinstance(call.bias, DenseBias):
            return "a dense bias gains nothing from FlexAttention; use 'sdpa'"
        if call.is_transformed:
            return "FlexAttention does not support torch.func and forward-mode derivatives; use 'reference'"
        return None

    def run(self, call: AttentionCall) -> AttentionOutput:
        """Compute attention with PyTorch's FlexAttention.

        An ALiBi or decay bias lowers the scores of distant keys. Blocks of distant keys are skipped if their softmax
        mass (the sum of their attention weights) is proven to be at most `call.tolerance` for every query.

        Args:
            call: The arguments of the call.

        Returns:
            The attention output, the log-sum-exp if `call.needs_lse` is True, and the certificate (an upper bound on
            the softmax mass that was skipped).
        """
        can_skip_blocks = _can_skip_blocks(call)
        if can_skip_blocks:
            block_mask = proven_block_mask(call)
        else:
            block_mask = full_block_mask(call)

        compiled_flex_attention = _compile_flex_attention(call.q.device.type)
        result = compiled_flex_attention(
            call.q,
            call.k,
            call.v,
            score_mod=_make_score_mod(call),
            block_mask=block_mask,
            scale=call.softmax_scale,
            enable_gqa=call.heads_per_kv_head > 1,
            return_lse=call.needs_lse,
        )
        if call.needs_lse:
            out, lse = result
        else:
            out = result
            lse = None

        # The certificate is the proven bound. The softmax mass that was actually skipped is not measured.
        max_skipped_mass = call.tolerance if can_skip_blocks else 0.0
        batch_and_heads = call.q.shape[:2]
        certificate = call.q.new_full(batch_and_heads, max_skipped_mass, dtype=torch.float32)
        return AttentionOutput(out, lse, certificate)


def _can_skip_blocks(call: AttentionCall) -> bool:
    """Return whether there can be blocks of keys to skip. Blocks are never skipped if the bias is trained."""
    has_falling_bias = isinstance(call.bias, LinearBias | DecayBias)
    has_several_blocks = call.k.shape[2] > FLEX_BLOCK_SIZE
    return has_falling_bias and has_several_blocks and call.tolerance > 0 and not call.bias_needs_grad


@cache
def _compile_flex_attention(device_type: str) -> Any:
    """Return FlexAttention, compiled by torch.compile. The uncompiled function would store all scores in memory."""
    # On the CPU, each shape is compiled separately. With dynamic shapes, torch 2.13 generates invalid C++ code.
    dynamic = False if device_type == "cpu" else None
    return torch.compile(flex_attention, dynamic=dynamic)


def _make_score_mod(call: AttentionCall) -> Callable[..., Tensor] | None:
    """Return a function that adds the bias to a score, or None if the call has no bias.

    FlexAttention takes the function as its argument `score_mod` and applies the function to every score. The function
    has the arguments (score, batch, head, row, key). Rows count from the first query of the call.
    """
    if call.bias is None:
        return None
    query_start = call.query_start  # the key position of the first query
    left_bias = _make_bias_function(call.bias, call.bias_tensors[0])

    def causal_score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        position = row + query_start
        return score + left_bias(b, h, position, key, position - key)

    if call.causal:
        return causal_score_mod
    right_bias = _make_bias_function(call.bias, reverse_bias(call))

    def bidirectional_score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        position = row + query_start
        left = left_bias(b, h, position, key, position - key)
        right = right_bias(b, h, position, key, key - position)
        return score + torch.where(position >= key, left, right)

    return bidirectional_score_mod


def _make_bias_function(bias: Bias, values: Tensor) -> Callable[..., Tensor]:
    """Return a function that computes the bias of one side of the text: of the keys before or after each query.

    Args:
        bias: The bias of the call. Its type defines how `values` are used.
        values: The slopes, the distance table or the cumulative log decay (sums of log forget gates) of this side.

    Returns:
        A function with the arguments (batch, head, query position, key position, distance).
    """
    match bias:
        case LinearBias():
            # MASKING_SLOPE is large and finite. An infinite slope would give infinity * 0 = NaN at distance 0.
            slopes = values.float().clamp(max=MASKING_SLOPE)
            return lambda b, h, position, key, distance: -slopes[h] * distance
        case DistanceBias():
            last_column = values.shape[1] - 1
            return lambda b, h, position, key, distance: values[h, distance.clamp(0, last_column)]
        case DecayBias():
            # The float64 values are split into two float32 tensors. `low` holds the rounding error of `high`.
            high = values.float()
            low = (values.double() - high.double()).float()
            return lambda b, h, position, key, distance: (
                (high[b, h, position] - high[b, h, key]) + (low[b, h, position] - low[b, h, key])
            )
        case unknown:
            raise unknown_bias_error(unknown)


def proven_block_mask(call: AttentionCall) -> BlockMask:
    """Return a block mask without the blocks of keys that can be skipped.

    FlexAttention evaluates the mask function only in masked blocks. In full blocks, every query sees every key. For
    example, with four blocks and windows of 1, 2, 3 and 2 blocks (m: masked block, f: full block, -: skipped block):

        m
        f m
        f f m
        - - f m

    Args:
        call: The arguments of the call, with a `LinearBias` or a `DecayBias`.

    Returns:
        The block mask. The softmax mass of all skipped blocks is at most `call.tolerance` for every query.
    """
    q_len = call.q.shape[2]
    k_len = call.k.shape[2]
    # The key position of the first query of each query block, and the position after its last query.
    starts = torch.arange(call.query_start, k_len, FLEX_BLOCK_SIZE, device=call.q.device)
    ends = (starts + FLEX_BLOCK_SIZE).clamp(max=k_len)

    # A value that is infinite or NaN changes the output at any distance, because 0 · NaN is NaN.
    values_are_finite = call.v.isfinite().all()
    proven_first_key = _group_rows_by_block(_proven_first_keys(call)).amin(-1)
    first_key = torch.where(values_are_finite, proven_first_key, 0)
    if call.causal:
        end_key = ends.expand_as(first_key)
    else:
        proven_end_key = _group_rows_by_block(_proven_end_keys(call)).amax(-1)
        end_key = torch.where(values_are_finite, proven_end_key, k_len)
    if call.window is not None:
        keys_after_query = 0 if call.causal else call.window - 1
        first_key = torch.maximum(first_key, starts - call.window + 1)
        end_key = torch.minimum(end_key, ends + keys_after_query)

    # The range of key blocks that each query block reads.
    first_block = first_key.clamp(min=0) // FLEX_BLOCK_SIZE
    end_block = (end_key + FLEX_BLOCK_SIZE - 1) // FLEX_BLOCK_SIZE

    # Each query block first reads its full blocks. Its masked blocks, in which some keys are hidden, follow.
    if call.window is not None or call.segment_ids is not None:
        first_masked_block = first_block  # All blocks are masked.
    elif call.causal:
        # Only the blocks on the diagonal contain keys that some queries of the block do not see.
        first_masked_block = torch.maximum(first_block, (starts + 1) // FLEX_BLOCK_SIZE)
    else:
        first_masked_block = end_block  # No block is masked.

    masked_count, masked_indices = _block_indices(first_masked_block, end_block, k_len)
    full_count, full_indices = _block_indices(first_block, first_masked_block, k_len)
    return BlockMask.from_kv_blocks(
        masked_count,
        masked_indices,
        full_count,
        full_indices,
        BLOCK_SIZE=FLEX_BLOCK_SIZE,
        mask_mod=_make_mask_mod(call),
        seq_lengths=(q_len, k_len),
        compute_q_blocks=call.needs_grad,
    )


def _group_rows_by_block(rows: Int[Tensor, "batch heads q_len"]) -> Int[Tensor, "batch heads q_blocks block"]:
    """Reshape one value per query to one row of values per query block.

    A query block is a group of `FLEX_BLOCK_SIZE` neighboring queries. An incomplete last block is filled with
    copies of the last value.
    """
    batch, heads, q_len = rows.shape
    missing_rows = -q_len % FLEX_BLOCK_SIZE
    filling = rows[..., -1:].expand(batch, heads, missing_rows)
    return torch.cat([rows, filling], dim=2).unflatten(2, (-1, FLEX_BLOCK_SIZE))


def _proven_first_keys(call: AttentionCall) -> Int[Tensor, "batch heads q_len"]:
    """Return the position of the first key that each query must read.

    An upper bound proves that all keys before this key together have at most the tolerated softmax mass (sum of
    attention weights).
    """
    # Without a causal mask, keys may also be skipped on the right. Each side may skip half of the tolerance.
    tolerance = call.tolerance if call.causal else call.tolerance / 2
    k_len = call.k.shape[2]
    values = call.bias_tensors[0].detach()
    match call.bias:
        case LinearBias():
            slopes = values.clamp(max=MASKING_SLOPE)  # Infinite slopes become large and finite.
            # The number of nearest keys that each query must read: its own key and the keys before.
            windows = alibi.proven_windows(call.q, call.k, slopes, tolerance, block=1, scale=call.softmax_scale)
            positions = torch.arange(call.query_start, k_len, device=call.q.device)
            # A window of k_len means that no key can be skipped.
            return torch.where(windows >= k_len, 0, positions - windows + 1)
        case DecayBias():
            excess = alibi.max_excess(call.q, call.k, call.softmax_scale)
            return decay.proven_first_keys(excess, values, tolerance)
        case unknown:
            raise unknown_bias_error(unknown)


def _proven_end_keys(call: AttentionCall) -> Int[Tensor, "batch heads q_len"]:
    """Return the position after the last key that each query must read, in a call without a causal mask.

    An upper bound proves that all later keys together have at most the tolerated softmax mass (sum of attention
    weights). The position is found with `_proven_first_keys` on the reversed text.
    """
    query_start = call.query_start
    values = reverse_bias(call)
    if isinstance(call.bias, DecayBias):
        reversed_bias = DecayBias(values[..., query_start:].flip(-1))
    else:
        reversed_bias = LinearBias(values)
    reversed_call = replace(
        call,
        q=call.q.flip(2),
        k=call.k[:, :, query_start:].flip(2),
        v=call.v[:, :, query_start:],
        bias=reversed_bias,
    )
    # The first key in the reversed text is the last key in the original text.
    return call.k.shape[2] - _proven_first_keys(reversed_call).flip(2)


def full_block_mask(call: AttentionCall) -> BlockMask:
    """Return the block mask of a call that skips no visible keys.

    FlexAttention divides queries and keys into blocks, and computes only the pairs of blocks that the mask contains.
    This mask contains every pair in which some query sees some key.
    """
    # Without segments, all sequences have the same mask.
    batch = None if call.segment_ids is None else call.q.shape[0]
    return create_block_mask(
        _make_mask_mod(call),
        B=batch,
        H=None,
        Q_LEN=call.q.shape[2],
        KV_LEN=call.k.shape[2],
        device=call.q.device.type,
    )


def _make_mask_mod(call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function that returns whether a query sees a key. FlexAttention calls such a function `mask_mod`.

    The function has the arguments (batch, head, row, key). Rows count from the first query of the call.
    """
    # FlexAttention compiles the function, so the function must not read the attributes of `call`.
    query_start = call.query_start
    k_len = call.k.shape[2]
    window = call.window
    segment_ids = call.segment_ids
    causal = call.causal

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        # Return whether a query sees a key. The query has the position row + query_start.
        distance = row + query_start - key
        if causal:
            is_visible = distance >= 0
        else:
            is_visible = distance < k_len  # True for every key.
        if window is not None:
            is_visible = is_visible & (distance < window) & (distance > -window)
        if segment_ids is not None:
            is_visible = is_visible & (segment_ids[b, row + query_start] == segment_ids[b, key])
        return is_visible

    return mask_mod


def _block_indices(
    first_block: Int[Tensor, "batch heads q_blocks"], end_block: Int[Tensor, "batch heads q_blocks"], k_len: int
) -> tuple[Int[Tensor, "batch heads q_blocks"], Int[Tensor, "batch heads q_blocks k_blocks"]]:
    """Return the blocks from `first_block` to `end_block - 1` in the format of FlexAttention.

    Args:
        first_block: The first key block of each query block.
        end_block: The key block after the last key block of each query block.
        k_len: The number of keys.

    Returns:
        The number of blocks and the list of block indices, for each query block. FlexAttention reads only the first
        entries of each list.

    Example:
        With 5 key blocks, `first_block=3` and `end_block=5` give the count 2 and the indices 3, 4, 0, 1, 2.
    """
    total_blocks = -(-k_len // FLEX_BLOCK_SIZE)  # rounded up
    all_blocks = torch.arange(total_blocks, device=first_block.device)
    # The list starts at `first_block` and wraps around, because each list must contain every block once.
    indices = (first_block[..., None] + all_blocks) % total_blocks
    count = end_block - first_block
    return count.int(), indices.int()


FLEX = Flex()
