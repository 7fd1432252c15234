"""Other slopes at inference than in training: does any of them let a model use context beyond its training length?

    interpolate     slopes · L / length once length > L, so that the farthest bias is one that training has seen
    max_bias=16     the slopes of another maximum bias: the flattest head becomes 2^-16 and looks farther
    window=512      the trained slopes under a sliding-window mask: ALiBi as a plain window

Weights are not touched, and the model is as before when the context ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.model import Attention, TransformerLM

EXAMPLES = "interpolate, max_bias=16 or window=512"


@dataclass(frozen=True)
class OtherSlopes:
    """A change of ALiBi's slopes, or of how far they reach."""

    kind: Literal["interpolate", "max_bias", "window"]
    value: float = 0.0

    @staticmethod
    def read(text: str) -> "OtherSlopes":
        """From the command line: `interpolate`, `max_bias=16`, `window=512`."""
        kind, _, value = text.partition("=")
        if kind == "interpolate" and not value:
            return OtherSlopes("interpolate")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if kind == "max_bias" and number > 0:
            return OtherSlopes("max_bias", number)
        if kind == "window" and number >= 1 and number.is_integer():
            return OtherSlopes("window", number)
        raise InputError(f"slopes are {EXAMPLES}; got '{text}'.")

    def __str__(self) -> str:
        return self.kind if self.kind == "interpolate" else f"{self.kind}={self.value:g}"


def new_slopes(trained: Float[Tensor, " heads"], slopes: OtherSlopes, trained_at: int, length: int) -> Tensor:
    """The slopes for inputs of this length.

    interpolate, trained at 128:   length 64 or 128 → as trained      length 512 → a quarter of them
    """
    if slopes.kind == "interpolate":
        return trained * min(1.0, trained_at / length)
    if slopes.kind == "max_bias":
        return alibi.slopes(len(trained), slopes.value).to(trained.device)
    return trained


@contextmanager
def changed(model: TransformerLM, slopes: OtherSlopes, trained_at: int, length: int) -> Iterator[None]:
    """Inside, `model` runs with other slopes, or under a window."""
    trained = model.position.linear_slopes()
    if trained is None:
        raise InputError(
            f"--slopes needs a model with ALiBi positions; this one has position='{model.config.position}'."
        )
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    configs = [attention.config for attention in attentions]
    before = trained.detach().clone()
    with torch.no_grad():
        trained.copy_(new_slopes(before, slopes, trained_at, length))
    if slopes.kind == "window":
        for attention in attentions:
            attention.config = attention.config.replace(window=int(slopes.value))
    try:
        yield
    finally:
        with torch.no_grad():
            trained.copy_(before)
        for attention, config in zip(attentions, configs, strict=True):
            attention.config = config
