"""Methods at the third door: a number added to each score that depends on the distance alone."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort import alibi
from trainshort.attention import Bias, DistanceBias, LinearBias
from trainshort.config.position_config import AlibiConfig, T5Config
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions.base import PositionMethod


class Alibi(PositionMethod):
    """Attention with Linear Biases: a penalty that grows linearly with distance, one fixed slope per head."""

    Config = AlibiConfig
    float32 = ("slopes",)
    slopes: Tensor

    def __init__(self, config: ModelConfig, settings: AlibiConfig) -> None:
        super().__init__(config, settings)
        self.settings, self.nope_heads = settings, config.nope_heads
        slopes = torch.empty(config.heads, dtype=torch.float32)
        if settings.learned_slopes:
            self.slopes = nn.Parameter(slopes)
        else:
            # Not persistent: slopes follow from the number of heads and have no place in a checkpoint.
            self.register_buffer("slopes", slopes, persistent=False)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        given, sloped = self.settings.slopes, len(self.slopes) - self.nope_heads
        first = alibi.slopes(sloped, self.settings.max_bias) if given is None else torch.tensor(given)[:sloped]
        self.slopes.data.zero_()[:sloped].copy_(first)

    def score_bias(self, length: int) -> Bias:
        return LinearBias(self.slopes)


def alibi_bias(slopes: Float[Tensor, " heads"], farthest: int | None, length: int) -> LinearBias | DistanceBias:
    """ALiBi's bias; with `farthest`, what is farther than that counts as that far."""
    if farthest is None:
        return LinearBias(slopes)
    distance = torch.arange(min(length, farthest + 1), device=slopes.device)
    return DistanceBias(-slopes[:, None] * distance)  # whose last column holds for all that is farther


class T5(PositionMethod):
    """T5's bias: one trained number per head and bucket of distances, one table shared by all layers."""

    Config = T5Config

    def __init__(self, config: ModelConfig, settings: T5Config) -> None:
        super().__init__(config, settings)
        self.table = nn.Parameter(torch.zeros(config.heads, settings.buckets))
        self.buckets, self.max_distance, self.causal = settings.buckets, settings.max_distance, config.causal
        if not config.causal and settings.buckets % 2:
            raise InputError(f"an encoder's T5 has half of its buckets on each side; {settings.buckets} is odd.")
        nn.init.normal_(self.table, std=0.02)

    def score_bias(self, length: int) -> Bias:
        # Every distance from max_distance on shares the last bucket, which is what DistanceBias does past its table.
        distance = torch.arange(self.max_distance + 1, device=self.table.device)
        if self.causal:
            return DistanceBias(self.table[:, buckets(distance, self.buckets, self.max_distance)])
        each = buckets(distance, self.buckets // 2, self.max_distance)
        return DistanceBias(self.table[:, each], self.table[:, self.buckets // 2 + each])


def buckets(distance: Int[Tensor, " n"], count: int, max_distance: int) -> Int[Tensor, " n"]:
    """T5's causal buckets: the first half one distance each, the other half logarithmic up to max_distance.

    count 8, max_distance 32:   distance  0 1 2 3 4 5 6 8 11 12 16 20 32 99
                                bucket    0 1 2 3 4 4 4 5  5  6  6  7  7  7
    """
    exact = count // 2
    ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (count - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=count - 1))
