"""The backend `sdpa`, which uses PyTorch's `scaled_dot_product_attention`.

The backend supports every bias, every mask and every device. The bias is passed to PyTorch as a mask tensor. The
queries are processed in chunks, so that the mask tensor stays small. With a sliding window, each chunk reads only the
keys near its queries.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.attention.call import AttentionCall, DecayBias, accumulation_dtype, contiguous_rows
from trainshort.attention.functional import AttentionOutput

# The largest number of elements of a mask tensor, which is 64 MB in float32. Larger masks do not make PyTorch faster.
MAX_MASK_ELEMENTS = 1 << 24

# With a sliding window, chunks have at least this many queries, so that very short windows stay efficient.
MIN_WINDOW_CHUNK = 64


class Sdpa:
    """PyTorch's `scaled_dot_product_attention`. The bias is passed as a mask, one chunk of queries at a time."""

    rank = 10

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return why this backend does not support a call, or None if the backend supports the call."""
        device = call.q.device.type
        is_half_precision = call.q.dtype in (torch.bfloat16, torch.float16)
        if device != "cpu" and call.bias is not None and is_half_precision:
            return f"it would round the bias to {call.q.dtype} on this device; use 'flex', or float32 inputs"
        if call.needs_lse and (device != "cpu" or call.dropout_p or call.bias_needs_grad):
            return (
                "it returns a log-sum-exp only on the CPU, without dropout and without a trained bias; use 'reference'"
            )
        if call.has_tangents:
            return "torch's kernel has no forward-mode derivatives; use 'reference'"
        return None

    def run(self, call: AttentionCall) -> AttentionOutput:
        """Compute attention. No key is dropped, so the certificate is None.

        Args:
            call: The arguments of the call.

        Returns:
            The attention output, and the log-sum-exp of each query if `call.needs_lse` is True.
        """
        if _needs_no_mask_tensor(call):
            all_rows = slice(None)
            all_keys = slice(None)
            is_square = call.q.shape[2] == call.k.shape[2]
            out, lse = _run_sdpa(call, all_rows, all_keys, mask=None, causal=call.causal and is_square)
            return AttentionOutput(out, lse)

        results = [_attend_chunk(call, rows) for rows in _query_chunks(call)]
        if len(results) == 1:
            return AttentionOutput(*results[0])
        out = torch.cat([chunk_out for chunk_out, _ in results], dim=2)
        chunk_lses = [chunk_lse for _, chunk_lse in results if chunk_lse is not None]
        lse = torch.cat(chunk_lses, dim=2) if chunk_lses else None
        return AttentionOutput(out, lse)


def _needs_no_mask_tensor(call: AttentionCall) -> bool:
    """Return whether PyTorch can compute the call without a mask tensor."""
    if call.bias is not None or call.window is not None or call.segment_ids is not None:
        return False
    # PyTorch's `is_causal` aligns the first query with the first key. trainshort aligns the last query with the last
    # key. Both are the same if there are as many queries as keys.
    is_square = call.q.shape[2] == call.k.shape[2]
    has_one_query = call.q.shape[2] == 1  # A single query sees all keys.
    return is_square or not call.causal or has_one_query


def _query_chunks(call: AttentionCall) -> list[slice]:
    """Return ranges of queries such that the mask tensor of each range has at most `MAX_MASK_ELEMENTS` elements."""
    batch, heads, q_len, _ = call.q.shape
    k_len = call.k.shape[2]

    # Count the elements of the mask tensor for one query: mask_batch * mask_heads * keys_per_chunk.
    # The mask tensor has a head dimension if there is a bias, and a batch dimension if sequences have different masks.
    mask_heads = heads if call.bias is not None else 1
    differs_by_sequence = call.segment_ids is not None or isinstance(call.bias, DecayBias)
    mask_batch = batch if differs_by_sequence else 1

    keys_per_chunk = k_len
    if call.window is not None:
        # A chunk has about as many queries as the window, so its first and last query together see two windows.
        keys_per_chunk = min(k_len, 2 * call.window)

    chunk_size = MAX_MASK_ELEMENTS // (mask_heads * mask_batch * keys_per_chunk)
    chunk_size = max(1, min(q_len, chunk_size))
    if call.window is not None:
        # A longer chunk would compute scores of many keys that most of its queries do not see.
        chunk_size = min(chunk_size, max(call.window, MIN_WINDOW_CHUNK))
    return [slice(start, min(start + chunk_size, q_len)) for start in range(0, q_len, chunk_size)]


def _attend_chunk(call: AttentionCall, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a range of queries with a mask tensor.

    Args:
        call: The arguments of the call.
        rows: The queries, where 0 is the first query of the call.

    Returns:
        The attention output of these queries, and the log-sum-exp if `call.needs_lse` is True.
    """
    k_len = call.k.shape[2]
    # The largest distance at which a query of this call sees a key.
    max_distance = k_len if call.window is None else call.window - 1
    first_position = call.query_start + rows.start
    end_position = call.query_start + rows.stop
    first_key = max(0, first_position - max_distance)
    end_key = end_position if call.causal else min(k_len, end_position + max_distance)
    keys = slice(first_key, end_key)

    mask = visibility_mask(call, rows, keys)
    bias = materialize_bias(call, rows, keys)
    if bias is not None:
        # The CPU kernel adds a float32 mask to its float32 scores, also if the inputs have half precision.
        dtype = accumulation_dtype(call.q) if call.q.device.type == "cpu" else call.q.dtype
        mask = torch.where(mask, bias.to(dtype), -math.inf)
    return _run_sdpa(call, rows, keys, mask=mask, causal=False)


def _run_sdpa(
    call: AttentionCall, rows: slice, keys: slice, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Call PyTorch's attention for a range of queries and a range of keys.

    Args:
        call: The arguments of the call.
        rows: The queries.
        keys: The keys.
        mask: A boolean mask that is True for visible keys, a floating-point mask that is added to the scores, or None.
        causal: The argument `is_causal` of PyTorch.

    Returns:
        The attention output, and the log-sum-exp if `call.needs_lse` is True.
    """
    q = call.q[:, :, rows]
    k = call.k[:, :, keys]
    v = call.v[:, :, keys]
    heads_per_kv_head = call.heads_per_kv_head

    if call.needs_lse:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros((), dtype=q.dtype).masked_fill(~mask, -math.inf)
        k = k.repeat_interleave(heads_per_kv_head, dim=1)
        v = v.repeat_interleave(heads_per_kv_head, dim=1)
        # `scaled_dot_product_attention` does not return the log-sum-exp, so the kernel is called directly. The kernel
        # requires contiguous rows.
        flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash_attention(
            contiguous_rows(q),
            contiguous_rows(k),
            contiguous_rows(v),
            0.0,  # dropout
            causal,
            attn_mask=mask,
            scale=call.softmax_scale,
        )

    if mask is not None and mask.requires_grad and mask.dtype != q.dtype:
        # Only PyTorch's unfused implementation can train a mask. It requires the dtype of the queries.
        mask = mask.to(q.dtype)
    enable_gqa = heads_per_kv_head > 1
    if enable_gqa and call.needs_grad and q.device.type == "cpu":
        # With `enable_gqa`, PyTorch sums the gradients of a group of heads in float32, which doubles the error.
        k = k.repeat_interleave(heads_per_kv_head, dim=1)
        v = v.repeat_interleave(heads_per_kv_head, dim=1)
        enable_gqa = False
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=enable_gqa,
    )
    return out, None


SDPA = Sdpa()
