"""Torch's own scaled_dot_product_attention, with the bias written out: any bias, any mask, any device.

Queries are taken in chunks, so that neither bias nor mask is ever larger than a chunk needs, and with a sliding window
only the keys in reach are read: a window of n costs O(length · n).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.attention.call import AttentionCall, DecayBias, accumulation_dtype, contiguous_rows
from trainshort.attention.functional import AttentionOutput

MASK_ELEMENTS = 1 << 24
"""Largest mask written at once (64 MB in float32): large enough to keep the kernel busy, small beside a model."""


class Sdpa:
    """torch's scaled_dot_product_attention; takes any bias by writing it out, a chunk of queries at a time."""

    rank = 10

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        device = call.q.device.type
        if device != "cpu" and call.bias is not None and call.q.dtype in (torch.bfloat16, torch.float16):
            return "its masks have the inputs' dtype there, which rounds the bias; use 'flex', or float32 inputs"
        if call.needs_lse and (device != "cpu" or call.dropout_p or call.bias_needs_grad):
            return (
                "it returns a log-sum-exp only on the CPU, without dropout and without a trained bias; use 'reference'"
            )
        if call.has_tangents:
            return "torch's kernel has no forward-mode derivatives; use 'reference'"
        return None

    def run(self, call: AttentionCall) -> AttentionOutput:
        square = call.q.shape[2] == call.k.shape[2]
        plain = call.bias is None and call.window is None and call.segment_ids is None
        if plain and (square or not call.causal or call.q.shape[2] == 1):
            return AttentionOutput(*_attend(call, slice(None), slice(None), mask=None, causal=call.causal and square))
        parts = [_chunk(call, rows) for rows in _chunks(call)]
        if len(parts) == 1:
            return AttentionOutput(*parts[0])
        lses = [lse for _, lse in parts if lse is not None]
        return AttentionOutput(torch.cat([out for out, _ in parts], dim=2), torch.cat(lses, dim=2) if lses else None)


def _chunks(call: AttentionCall) -> list[slice]:
    """Stretches of queries whose masks are of bounded size."""
    q_len = call.q.shape[2]
    by_text = call.segment_ids is not None or isinstance(call.bias, DecayBias)
    masks = (call.q.shape[1] if call.bias is not None else 1) * (call.q.shape[0] if by_text else 1)
    reach = call.k.shape[2] if call.window is None else min(call.k.shape[2], 2 * call.window)
    rows = max(1, min(q_len, MASK_ELEMENTS // (masks * reach)))
    if call.window is not None:
        rows = min(rows, max(call.window, 64))  # longer chunks would read keys that no row of theirs sees
    return [slice(start, min(start + rows, q_len)) for start in range(0, q_len, rows)]


def _chunk(call: AttentionCall, rows: slice) -> tuple[Tensor, Tensor | None]:
    k_len, past = call.k.shape[2], call.k.shape[2] - call.q.shape[2]
    reach = k_len if call.window is None else call.window - 1
    last = past + rows.stop if call.causal else min(k_len, past + rows.stop + reach)
    keys = slice(max(0, past + rows.start - reach), last)
    mask = visibility_mask(call, rows, keys)
    if (bias := materialize_bias(call, rows, keys)) is not None:
        # Float32 even for half-precision inputs: the CPU kernel adds the mask to float32 scores.
        dtype = accumulation_dtype(call.q) if call.q.device.type == "cpu" else call.q.dtype
        mask = torch.where(mask, bias.to(dtype), -math.inf)
    return _attend(call, rows, keys, mask=mask, causal=False)


def _attend(
    call: AttentionCall, rows: slice, keys: slice, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    q, k, v = call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys]
    if call.needs_lse:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros((), dtype=q.dtype).masked_fill(~mask, -math.inf)
        # Called directly, the kernel reads every row as if its numbers lay side by side.
        q, k, v = (
            contiguous_rows(x) for x in (q, *(x.repeat_interleave(call.heads_per_kv_head, dim=1) for x in (k, v)))
        )
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, causal, attn_mask=mask, scale=call.softmax_scale)
    if mask is not None and mask.requires_grad and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)  # the plain path, which alone can train a bias, wants one dtype
    shared = call.heads_per_kv_head > 1
    if shared and call.needs_grad and q.device.type == "cpu":
        # Torch's own grouping adds the gradients of a group up in one long float32 sum: twice the error.
        k, v, shared = *(x.repeat_interleave(call.heads_per_kv_head, dim=1) for x in (k, v)), False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=call.dropout_p, is_causal=causal, scale=call.scale, enable_gqa=shared
    )
    return out, None


SDPA = Sdpa()
