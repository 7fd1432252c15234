"""Replacements for `forward` of the attention and feed-forward modules of MPT, BLOOM and Falcon.

- The attention replacements compute attention with `attend`, which builds no tensor of size length x length.
- The feed-forward replacements use less memory. In training, the output of the activation function is recomputed in the
  backward pass. Without gradients, long inputs are processed in chunks of tokens.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort.alibi import distances
from trainshort.attention import LinearBias, attend
from trainshort.interop.patch.masks import MaskInfo, ReplacementMethod
from trainshort.model.linear import apply_linear, has_hooks

FFN_CHUNK = 512
"""The number of tokens that a feed-forward module processes at once without gradients.

The wide intermediate tensors of 512 tokens fit into the processor cache. Large models still read their weights rarely.
"""


def mpt_attention(
    original: ReplacementMethod,
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: MaskInfo | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Replace `MptAttention.forward`.

    The patched model passes a `MaskInfo` as `attention_mask`, which states the keys that each query may attend to and
    the ALiBi slopes. If `attention_mask` is not a `MaskInfo`, the original method runs. This happens if a caller runs
    one block without its model.

    Args:
        original: The original method of the class.
        self: The attention module.
        hidden_states: The inputs of the attention module.
        position_bias: The ALiBi bias table. Not used.
        past_key_values: The KV cache, or None.
        attention_mask: The `MaskInfo` of the current forward pass.
        **kwargs: Further arguments of the original method.

    Returns:
        The output of the attention module, and the attention weights if the caller asked for them (otherwise None).
    """
    if not isinstance(attention_mask, MaskInfo):
        return original(self, hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
    qkv = apply_linear(self.Wqkv, hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    # Split into q, k and v of shape (batch, heads, length, head width).
    q, k, v = [tensor.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for tensor in qkv.chunk(3, dim=2)]
    k, v = update_cache(past_key_values, k, v, self.layer_idx, attention_mask)
    dropout = self.attn_dropout_p if self.training else 0.0
    out, weights = run_attention(q, k, v, attention_mask, self.softmax_scale, dropout)
    return apply_linear(self.out_proj, out), weights


def bloom_attention(
    original: ReplacementMethod,
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor | None,
    attention_mask: MaskInfo | None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Replace `BloomAttention.forward`.

    The patched model passes a `MaskInfo` as `attention_mask`, which states the keys that each query may attend to and
    the ALiBi slopes. If `attention_mask` is not a `MaskInfo`, the original method runs. This happens if a caller runs
    one block without its model.

    Args:
        original: The original method of the class.
        self: The attention module.
        hidden_states: The inputs of the attention module.
        residual: The tensor that is added to the output.
        alibi: The ALiBi bias table. Not used.
        attention_mask: The `MaskInfo` of the current forward pass.
        layer_past: The KV cache, or None.
        **kwargs: Further arguments of the original method.

    Returns:
        The residual plus the output of the attention module, and the attention weights if the caller asked for them
        (otherwise None).
    """
    if not isinstance(attention_mask, MaskInfo):
        return original(self, hidden_states, residual, alibi, attention_mask, layer_past, **kwargs)
    q, k, v = self._reshape(apply_linear(self.query_key_value, hidden_states))
    k, v = update_cache(layer_past, k, v, self.layer_idx, attention_mask)
    dropout = self.attention_dropout.p if self.training else 0.0
    out, weights = run_attention(q, k, v, attention_mask, self.inv_norm_factor, dropout)
    out = nn.functional.dropout(apply_linear(self.dense, out), self.hidden_dropout, self.training)
    return out + residual, weights


def falcon_attention(
    original: ReplacementMethod,
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: MaskInfo | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Replace `FalconAttention.forward`.

    The patched model passes a `MaskInfo` as `attention_mask`, which states the keys that each query may attend to and
    the ALiBi slopes. If `attention_mask` is not a `MaskInfo`, the original method runs. This happens if a caller runs
    one block without its model.

    Args:
        original: The original method of the class.
        self: The attention module.
        hidden_states: The inputs of the attention module.
        alibi: The ALiBi bias table. Not used.
        attention_mask: The `MaskInfo` of the current forward pass.
        position_ids: Not used, because ALiBi depends on distances only.
        layer_past: The KV cache, or None.
        **kwargs: Further arguments of the original method.

    Returns:
        The output of the attention module, and the attention weights if the caller asked for them (otherwise None).
    """
    if not isinstance(attention_mask, MaskInfo):
        return original(self, hidden_states, alibi, attention_mask, position_ids, layer_past, **kwargs)
    qkv = apply_linear(self.query_key_value, hidden_states)
    # `_split_heads` returns q, k and v of shape (batch, length, heads, head width).
    q, k, v = [tensor.transpose(1, 2) for tensor in self._split_heads(qkv)]
    k, v = update_cache(layer_past, k, v, self.layer_idx, attention_mask)
    dropout = self.attention_dropout.p if self.training else 0.0
    out, weights = run_attention(q, k, v, attention_mask, self.inv_norm_factor, dropout)
    return apply_linear(self.dense, out), weights


def mpt_ffn(original: ReplacementMethod, self: Any, hidden_states: Tensor, residual: Tensor) -> Tensor:
    """Replace `MptMLP.forward`, and use less memory. See `run_ffn`."""
    out = run_ffn(hidden_states, self.up_proj, self.act, self.down_proj)
    return nn.functional.dropout(out, self.hidden_dropout, self.training) + residual


def bloom_ffn(original: ReplacementMethod, self: Any, hidden_states: Tensor, residual: Tensor) -> Tensor:
    """Replace `BloomMLP.forward`, and use less memory. See `run_ffn`."""
    if self.pretraining_tp > 1 and self.slow_but_exact:
        # This mode sums partial products in the order of the original tensor-parallel training.
        return original(self, hidden_states, residual)
    out = run_ffn(hidden_states, self.dense_h_to_4h, self.gelu_impl, self.dense_4h_to_h)
    return residual + nn.functional.dropout(out, self.hidden_dropout, self.training)


def falcon_ffn(original: ReplacementMethod, self: Any, x: Tensor) -> Tensor:
    """Replace `FalconMLP.forward`, and use less memory. See `run_ffn`."""
    return run_ffn(x, self.dense_h_to_4h, self.act, self.dense_4h_to_h)


def run_ffn(
    x: Float[Tensor, "batch length width"],
    up_projection: nn.Module,
    activation: nn.Module,
    down_projection: nn.Module,
) -> Float[Tensor, "batch length width"]:
    """Compute `down_projection(activation(up_projection(x)))` with little memory.

    Without gradients, a long input on the CPU is processed in chunks of `FFN_CHUNK` tokens. The chunks do not change
    the result of any token, because a feed-forward module processes each token separately. Modules with hooks receive
    the complete input.
    """
    tokens = x.flatten(0, -2)  # (batch * length, width)
    is_short = len(tokens) <= FFN_CHUNK
    needs_full_input = torch.is_grad_enabled() or has_hooks(up_projection, activation, down_projection)
    if needs_full_input or is_short or x.device.type != "cpu":
        wide = apply_linear(up_projection, x)
        return recompute_activation_ffn(wide, activation, down_projection)

    outputs = []
    for chunk in tokens.split(FFN_CHUNK):
        wide_chunk = apply_linear(up_projection, chunk)
        outputs.append(apply_linear(down_projection, activation(wide_chunk)))
    return torch.cat(outputs).view_as(x)


def recompute_activation_ffn(wide: Tensor, activation: nn.Module, down_projection: nn.Module) -> Tensor:
    """Compute `down_projection(activation(wide))`, and recompute the activation in the backward pass.

    Autograd normally saves both `wide` and `activation(wide)`. This function saves only `wide` and recomputes
    `activation(wide)` in the backward pass. If other saved-tensor hooks are active (gradient checkpointing,
    offloading), this function saves both tensors as usual.

    Args:
        wide: The output of the up projection.
        activation: The activation function. It must compute each element separately and without randomness.
        down_projection: The linear layer after the activation.
    """
    activated = activation(wide)
    # PyTorch has no public function that returns the active saved-tensor hooks.
    get_active_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
    has_other_hooks = get_active_hooks(False) is not None
    if not activated.requires_grad or has_other_hooks:
        return apply_linear(down_projection, activated)

    activation_input = wide.detach()
    activated_address = activated.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Tensor | tuple[int, ...]:
        """Return what autograd saves in place of a tensor: only the shape if the tensor is the activation output.

        `activation_input` and `activated_address` belong to the surrounding function. They are the input of the
        activation, and the memory address of its output. Other tensors are saved unchanged.
        """
        has_same_storage = saved.untyped_storage().data_ptr() == activated_address
        is_complete = saved.numel() == activation_input.numel() and saved.is_contiguous()
        if has_same_storage and is_complete:
            return tuple(saved.shape)
        return saved

    def unpack(packed: Tensor | tuple[int, ...]) -> Tensor:
        """Return a saved tensor in the backward pass. Recompute the activation output if only its shape was saved."""
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return activation(activation_input).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return apply_linear(down_projection, activated)


def update_cache(cache: Any, k: Tensor, v: Tensor, layer_index: int, mask_info: MaskInfo) -> tuple[Tensor, Tensor]:
    """Store new keys and values in the KV cache. Return all keys and values of the layer.

    Args:
        cache: The KV cache of the model, or None if the model runs without a cache.
        k: The keys of the new tokens.
        v: The values of the new tokens.
        layer_index: The index of the attention layer.
        mask_info: Its `num_keys` is the number of keys after the update.
    """
    if cache is None:
        return k, v
    cached_k, cached_v = cache.update(k, v, layer_index)  # (batch, heads, all tokens, head width)
    if mask_info.num_keys == k.shape[2]:
        # There are no keys besides the new ones, so the cache was empty. Return the new tensors, because autograd would
        # keep the copies of the cache in memory.
        return k, v
    return cached_k, cached_v


def run_attention(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    mask_info: MaskInfo,
    scale: float,
    dropout: float,
) -> tuple[Float[Tensor, "batch q_len width"], Tensor | None]:
    """Compute ALiBi attention.

    Attention weights are built as a tensor only if that is necessary: if the caller asked for the weights, passed a
    mask of four dimensions, or if padding between tokens must not count for distances.

    Args:
        q: The queries of the new tokens.
        k: The keys. A static cache returns unused slots after the last key.
        v: The values.
        mask_info: The keys that each query may attend to, and the ALiBi slopes.
        scale: The factor by which the products of queries and keys are multiplied.
        dropout: The dropout probability of the attention weights.

    Returns:
        The outputs of all heads, concatenated, and the attention weights if the caller asked for them (otherwise None).
    """
    # Drop unused slots of a static cache.
    k = k[:, :, : mask_info.num_keys].to(q.dtype)
    v = v[:, :, : mask_info.num_keys].to(q.dtype)

    has_special_mask = mask_info.explicit_mask is not None or mask_info.token_positions is not None
    if mask_info.needs_weights or has_special_mask:
        out, weights = _materialized_attention(q, k, v, mask_info, scale, dropout)
        returned_weights = weights if mask_info.needs_weights else None
        return out.transpose(1, 2).flatten(2), returned_weights

    segment_ids = None
    if mask_info.segment_ids is not None:
        segment_ids = mask_info.segment_ids.to(q.device)
    out = attend(
        q,
        k,
        v,
        bias=LinearBias(mask_info.settings.slopes.to(q.device)),
        segment_ids=segment_ids,
        scale=scale,
        dropout_p=dropout,
        tolerance=mask_info.settings.tolerance,
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).flatten(2), None


def _materialized_attention(
    q: Tensor, k: Tensor, v: Tensor, mask_info: MaskInfo, scale: float, dropout: float
) -> tuple[Tensor, Float[Tensor, "batch heads q_len k_len"]]:
    """Compute ALiBi attention with a tensor of all attention weights.

    The function computes softmax(q @ k.T * scale - slope * distance) @ v. Memory grows with the square of the length.

    Args:
        q: The queries of the new tokens.
        k: The keys.
        v: The values.
        mask_info: The keys that each query may attend to, and the ALiBi slopes.
        scale: The factor by which the products of queries and keys are multiplied.
        dropout: The dropout probability of the attention weights.

    Returns:
        The output of each head, and the attention weights after dropout.
    """
    num_queries = q.shape[2]
    num_keys = k.shape[2]
    queries_per_key_head = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_per_key_head, dim=1)
    v = v.repeat_interleave(queries_per_key_head, dim=1)

    if mask_info.token_positions is None:
        key_positions = torch.arange(num_keys, device=q.device)[None]
    else:
        key_positions = mask_info.token_positions.to(q.device)
    # The queries are the last `num_queries` tokens.
    query_positions = key_positions[:, -num_queries:]
    distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]  # (batch, 1, queries, keys)
    slopes = mask_info.settings.slopes.to(q.device)[:, None, None]
    scores = q.float() @ k.float().mT * scale - slopes * distance

    # A finite value instead of -inf: a query that may attend to no key then gets no NaN.
    masked_score = torch.finfo(torch.float32).min / 2
    if mask_info.explicit_mask is not None:
        mask = mask_info.explicit_mask[..., :num_keys].to(q.device)
        if mask.dtype == torch.bool:  # True for keys that the query may attend to
            scores = scores.masked_fill(~mask, masked_score)
        else:  # The mask holds large negative numbers for hidden keys.
            scores = scores + mask.float().clamp(masked_score)
    else:
        is_hidden = distances(num_queries, num_keys, q.device) < 0  # keys after the query
        if mask_info.segment_ids is not None:
            segment_ids = mask_info.segment_ids.to(q.device)[:, None]
            query_segments = segment_ids[..., -num_queries:, None]
            key_segments = segment_ids[..., None, :]
            is_hidden = is_hidden | (query_segments != key_segments)
        scores = scores.masked_fill(is_hidden, masked_score)

    weights = nn.functional.dropout(scores.softmax(-1).to(v.dtype), dropout)
    return weights @ v, weights
