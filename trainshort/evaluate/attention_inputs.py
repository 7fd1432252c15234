"""Record the queries, keys and values that the attention layers of a model compute for a text."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from trainshort.attention import AttentionCall
from trainshort.model.cache import Cache
from trainshort.model.transformer import Attention, TransformerLM


def attention_calls(
    model: TransformerLM, tokens: Int[Tensor, "batch length"], chunk: int | None = None
) -> tuple[AttentionCall, ...]:
    """Run the model on a text and record the attention call of every layer.

    Args:
        model: The model.
        tokens: The text as token ids.
        chunk: How many tokens are read at a time. A long text needs too much memory in one piece.

    Returns:
        One call per layer, in the order of the layers. Each call holds q, k and v of all tokens.
        With `chunk`, the bias of each call is that of the last chunk.
    """
    parts: dict[Attention, list[AttentionCall]] = {
        layer: [] for layer in model.modules() if isinstance(layer, Attention)
    }

    def record(layer: Attention, arguments: tuple[Any, ...]) -> None:
        x, position, step, cache = arguments[:4]
        q, k, v = layer.project(x, position, step.position_ids)
        remembered = {} if cache is None else dict(cache.method_cache)
        bias = layer.bias(x, position, step, cache)
        # The layer computes its bias again after this hook. It must find the cache as it was before.
        if cache is not None:
            cache.method_cache = remembered
        parts[layer].append(AttentionCall(q, k, v, bias, layer.window, step.segment_ids))

    with ExitStack() as held, torch.no_grad():
        for layer in parts:
            held.callback(layer.register_forward_pre_hook(record).remove)
        cache = None if chunk is None else Cache()
        for part in tokens.split(chunk or tokens.shape[1], dim=1):
            model.hidden(part, cache=cache)
    return tuple(_joined(calls) for calls in parts.values())


def _joined(calls: list[AttentionCall]) -> AttentionCall:
    if len(calls) == 1:
        return calls[0]
    return replace(calls[-1], **{name: torch.cat([getattr(call, name) for call in calls], dim=2) for name in "qkv"})
