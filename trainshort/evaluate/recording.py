"""What every layer's attention is asked when a model reads a text: the queries, keys and values that `attend` gets."""

from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from trainshort.attention import Call
from trainshort.cache import Cache
from trainshort.model import Attention, TransformerLM


def attention_calls(
    model: TransformerLM, tokens: Int[Tensor, "batch length"], chunk: int | None = None
) -> tuple[Call, ...]:
    """One call per layer, from the first to the last. `chunk` tokens are read at a time where a long text would take
    too much memory at once; the calls are those of the whole text all the same (their bias is the last chunk's)."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    parts: dict[Attention, list[Call]] = {layer: [] for layer in layers}

    def record(layer: Attention, arguments: tuple[Any, ...]) -> None:
        x, position, step = arguments[:3]
        q, k, v = layer.project(x, position, step.where)
        cache = arguments[3]
        remembered = {} if cache is None else dict(cache.place)
        bias = layer.bias(x, position, step, cache)
        if cache is not None:  # the layer itself asks again, and must find its place as it was
            cache.place = remembered
        parts[layer].append(Call(q, k, v, bias, layer.window, step.documents))

    with ExitStack() as held, torch.no_grad():
        for layer in layers:
            held.callback(layer.register_forward_pre_hook(record).remove)
        cache = None if chunk is None else Cache()
        for part in tokens.split(chunk or tokens.shape[1], dim=1):
            model.hidden(part, cache=cache)
    return tuple(_joined(parts[layer]) for layer in layers)


def _joined(calls: list[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]
    q, k, v = (torch.cat([getattr(call, name) for call in calls], dim=2) for name in "qkv")
    return Call(q, k, v, calls[-1].bias, calls[-1].window)
