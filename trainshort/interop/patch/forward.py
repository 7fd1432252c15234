"""Attention of the three families, by `attend`: each projects, splits and caches as its class does. And their
feed-forward layers, which keep one wide tensor for the backward pass where the classes keep two, and make none as long
as the text where there is no backward pass."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort.alibi import distances
from trainshort.attention import LinearBias, attend
from trainshort.interop.patch.masks import MaskInfo, Method
from trainshort.model.embeddings import apply_linear, has_hooks

ROWS = 512
"""Tokens that a feed-forward layer takes at once without gradients: its wide tensors then stay in the cache, and large
models still read their weights seldom."""


def mpt_attention(
    original: Method,
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: MaskInfo | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(attention_mask, MaskInfo):  # a block that is called by itself is what it was
        return original(self, hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
    mixed = apply_linear(self.Wqkv, hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    k, v = update_cache(past_key_values, k, v, self.layer_idx, attention_mask)
    dropout = self.attn_dropout_p if self.training else 0.0
    out, weights = run_attention(q, k, v, attention_mask, self.softmax_scale, dropout)
    return apply_linear(self.out_proj, out), weights


def bloom_attention(
    original: Method,
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor | None,
    attention_mask: MaskInfo | None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(attention_mask, MaskInfo):
        return original(self, hidden_states, residual, alibi, attention_mask, layer_past, **kwargs)
    q, k, v = self._reshape(apply_linear(self.query_key_value, hidden_states))
    k, v = update_cache(layer_past, k, v, self.layer_idx, attention_mask)
    dropout = self.attention_dropout.p if self.training else 0.0
    out, weights = run_attention(q, k, v, attention_mask, self.inv_norm_factor, dropout)
    out = nn.functional.dropout(apply_linear(self.dense, out), self.hidden_dropout, self.training)
    return out + residual, weights


def falcon_attention(
    original: Method,
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: MaskInfo | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(attention_mask, MaskInfo):
        return original(self, hidden_states, alibi, attention_mask, position_ids, layer_past, **kwargs)
    q, k, v = (part.transpose(1, 2) for part in self._split_heads(apply_linear(self.query_key_value, hidden_states)))
    k, v = update_cache(layer_past, k, v, self.layer_idx, attention_mask)
    dropout = self.attention_dropout.p if self.training else 0.0
    out, weights = run_attention(q, k, v, attention_mask, self.inv_norm_factor, dropout)
    return apply_linear(self.dense, out), weights


def mpt_ffn(original: Method, self: Any, hidden_states: Tensor, residual: Tensor) -> Tensor:
    out = run_ffn(hidden_states, self.up_proj, self.act, self.down_proj)
    return nn.functional.dropout(out, self.hidden_dropout, self.training) + residual


def bloom_ffn(original: Method, self: Any, hidden_states: Tensor, residual: Tensor) -> Tensor:
    if self.pretraining_tp > 1 and self.slow_but_exact:
        return original(self, hidden_states, residual)
    out = run_ffn(hidden_states, self.dense_h_to_4h, self.gelu_impl, self.dense_4h_to_h)
    return residual + nn.functional.dropout(out, self.hidden_dropout, self.training)


def falcon_ffn(original: Method, self: Any, x: Tensor) -> Tensor:
    return run_ffn(x, self.dense_h_to_4h, self.act, self.dense_4h_to_h)


def run_ffn(
    x: Float[Tensor, "batch length width"], widen: nn.Module, activate: nn.Module, narrow: nn.Module
) -> Float[Tensor, "batch length width"]:
    """A feed-forward layer: whole where gradients are wanted, or somebody watches its parts, else a slice of the tokens
    after the other, which computes the same of each token."""
    rows = x.flatten(0, -2)
    if torch.is_grad_enabled() or x.device.type != "cpu" or len(rows) <= ROWS or has_hooks(widen, activate, narrow):
        return recompute_activation_ffn(apply_linear(widen, x), activate, narrow)
    return torch.cat([apply_linear(narrow, activate(apply_linear(widen, part))) for part in rows.split(ROWS)]).view_as(
        x
    )


def recompute_activation_ffn(wide: Tensor, activate: nn.Module, narrow: nn.Module) -> Tensor:
    """`narrow(activate(wide))`, of which the backward pass finds `wide` and makes the activation's output again. Where
    somebody else says what is kept (gradient checkpointing, offloading), it is his affair."""
    active = activate(wide)
    others = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
    if not active.requires_grad or others(False) is not None:
        return apply_linear(narrow, active)
    before, place = wide.detach(), active.untyped_storage().data_ptr()

    def pack(kept: Tensor) -> Tensor | tuple[int, ...]:
        whole = kept.untyped_storage().data_ptr() == place and kept.numel() == before.numel() and kept.is_contiguous()
        return tuple(kept.shape) if whole else kept

    def unpack(kept: Tensor | tuple[int, ...]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return activate(before).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return apply_linear(narrow, active)


def update_cache(cache: Any, k: Tensor, v: Tensor, layer: int, seen: MaskInfo) -> tuple[Tensor, Tensor]:
    """The keys and values up to here, these put into the cache. Where nothing came before, they are these themselves:
    the cache's are copies, and a training step, which asks for a cache by default, would keep them to its end."""
    kept = (k, v) if cache is None else cache.update(k, v, layer)
    return (k, v) if seen.total == k.shape[2] else kept


def run_attention(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    v: Float[Tensor, "batch kv_heads k_len dim"],
    seen: MaskInfo,
    scale: float,
    dropout: float,
) -> tuple[Float[Tensor, "batch q_len width"], Tensor | None]:
    """What attention gives, heads side by side, and the weights where they are asked for."""
    k, v = (x[:, :, : seen.total].to(q.dtype) for x in (k, v))  # static caches give back all their room
    slopes = seen.settings.slopes.to(q.device)
    if seen.weights or seen.mask is not None or seen.places is not None:
        out, weights = _materialized_attention(q, k, v, seen, scale, dropout)
        return out.transpose(1, 2).flatten(2), weights if seen.weights else None
    segment_ids = None if seen.segment_ids is None else seen.segment_ids.to(q.device)
    settings: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "tolerance": seen.settings.tolerance}
    out = attend(q, k, v, bias=LinearBias(slopes), segment_ids=segment_ids, **settings)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).flatten(2), None


def _materialized_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: MaskInfo, scale: float, dropout: float
) -> tuple[Tensor, Float[Tensor, "batch heads q_len k_len"]]:
    """The formula itself, for what has to be written out: the weights, a mask of the caller's, padding in between."""
    new, total = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    places = torch.arange(total, device=q.device)[None] if seen.places is None else seen.places.to(q.device)
    distance = places[:, None, -new:, None] - places[:, None, None, :]
    slopes = seen.settings.slopes.to(q.device)[:, None, None]
    scores = q.float() @ k.float().mT * scale - slopes * distance
    least = torch.finfo(torch.float32).min / 2
    if seen.mask is None:
        hidden = distances(new, total, q.device) < 0
        if seen.segment_ids is not None:
            numbers = seen.segment_ids.to(q.device)[:, None]
            hidden = hidden | (numbers[..., -new:, None] != numbers[..., None, :])
        scores = scores.masked_fill(hidden, least)
    else:
        mask = seen.mask[..., :total].to(q.device)
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask.float().clamp(least)
    weights = nn.functional.dropout(scores.softmax(-1).to(v.dtype), dropout)
    return weights @ v, weights
