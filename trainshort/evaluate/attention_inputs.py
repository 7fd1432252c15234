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
        chunk: How many tokens are read at a time. None reads the text in one forward pass, which needs much memory for
            a long text.

    Returns:
        One call per layer, in the order of the layers. Each call holds q, k and v of all tokens.
        With `chunk`, the bias of each call is the bias of the last chunk.
    """
    calls_by_layer: dict[Attention, list[AttentionCall]] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            calls_by_layer[module] = []

    def record_call(layer: Attention, arguments: tuple[Any, ...]) -> None:
        """Forward pre-hook: compute and store the attention call that the layer will make.

        An attention call consists of the queries, keys, values and masks that the attention function receives.

        Args:
            layer: The attention layer.
            arguments: The positional arguments of the layer's `forward`.
        """
        x, position, step, cache = arguments[:4]
        q, k, v = layer.project(x, position, step.position_ids)
        old_method_cache = {} if cache is None else dict(cache.method_cache)
        bias = layer.bias(x, position, step, cache)
        # `layer.bias` changes the cache. `forward` will call `layer.bias` again, so the cache is restored here.
        if cache is not None:
            cache.method_cache = old_method_cache
        calls_by_layer[layer].append(AttentionCall(q, k, v, bias, layer.window, step.segment_ids))

    with ExitStack() as stack, torch.no_grad():
        for layer in calls_by_layer:
            hook = layer.register_forward_pre_hook(record_call)
            stack.callback(hook.remove)
        cache = None if chunk is None else Cache()
        chunk_length = chunk or tokens.shape[1]
        for token_chunk in tokens.split(chunk_length, dim=1):
            model.hidden(token_chunk, cache=cache)
    return tuple(_concatenate_chunks(calls) for calls in calls_by_layer.values())


def _concatenate_chunks(calls: list[AttentionCall]) -> AttentionCall:
    """Combine the attention calls of one layer for consecutive chunks of a text into one call for all tokens.

    The bias is that of the last call. Dimension 2 of the queries, keys and values is the position in the text.
    """
    last_call = calls[-1]
    if len(calls) == 1:
        return last_call
    return replace(
        last_call,
        q=torch.cat([call.q for call in calls], dim=2),
        k=torch.cat([call.k for call in calls], dim=2),
        v=torch.cat([call.v for call in calls], dim=2),
    )
