"""Methods at the third door: a number added to each score that depends on the distance alone."""

import math

import torch
from jaxtyping import Int
from torch import Tensor, nn

from trainshort import alibi
from trainshort.attention import Bias, DistanceBias, LinearBias
from trainshort.config import ModelConfig
from trainshort.positions.base import PositionMethod, positions


@positions.register("alibi")
class Alibi(PositionMethod):
    """Attention with Linear Biases: a penalty that grows linearly with distance, one fixed slope per head."""

    slopes: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads, self.max_bias, self.given = config.heads, config.max_bias, config.slopes
        slopes = self._first_slopes()
        if config.learned_slopes:
            self.slopes = nn.Parameter(slopes)
        else:
            # Not persistent: slopes follow from the number of heads and have no place in a checkpoint.
            self.register_buffer("slopes", slopes, persistent=False)

    def score_bias(self) -> Bias:
        return LinearBias(self.slopes)

    def _first_slopes(self) -> Tensor:
        given = self.given
        return alibi.slopes(self.heads, self.max_bias) if given is None else torch.tensor(given, dtype=torch.float32)

    def _apply(self, fn, recurse: bool = True):
        """Moves with the model but stays float32 (half precision has no room for fine slopes), and comes to life with
        the right values when a model built on the meta device gets its memory."""
        before = self.slopes.detach()
        super()._apply(fn, recurse)
        if before.is_meta and not self.slopes.is_meta:
            self.slopes.data = self._first_slopes().to(self.slopes.device)
        elif self.slopes.dtype != torch.float32:
            self.slopes.data = before.to(self.slopes.device)
        return self


@positions.register("t5")
class T5(PositionMethod):
    """T5's bias: one trained number per head and bucket of distances, one table shared by all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(config.heads, config.t5_buckets))
        self.buckets, self.max_distance = config.t5_buckets, config.t5_max_distance
        nn.init.normal_(self.table, std=0.02)

    def score_bias(self) -> Bias:
        # Every distance from max_distance on shares the last bucket, which is what DistanceBias does past its table.
        distance = torch.arange(self.max_distance + 1, device=self.table.device)
        return DistanceBias(self.table[:, buckets(distance, self.buckets, self.max_distance)])


def buckets(distance: Int[Tensor, " n"], count: int, max_distance: int) -> Int[Tensor, " n"]:
    """T5's causal buckets: the first half one distance each, the other half logarithmic up to max_distance.

    count 8, max_distance 32:   distance  0 1 2 3 4 5 6 8 11 12 16 20 32 99
                                bucket    0 1 2 3 4 4 4 5  5  6  6  7  7  7
    """
    exact = count // 2
    ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (count - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=count - 1))
