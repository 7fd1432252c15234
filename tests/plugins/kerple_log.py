"""KERPLE, logarithmic (Chi et al., 2022): score(i, j) −= a · log(1 + b · (i − j)), a and b trained for each head."""

import torch
from pydantic import Field
from torch import Tensor, nn

from trainshort.attention import DistanceBias
from trainshort.config.position_config import PositionConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions import PositionMethod, positions


class Settings(PositionConfig):
    a: float = Field(default=1.0, gt=0)
    """First value of each head's a: how much a distance costs."""
    b: float = Field(default=1.0, gt=0)
    """First value of each head's b: how soon the cost grows."""


@positions.register("kerple-log")
class KerpleLog(PositionMethod):
    """A penalty that grows with the logarithm of the distance, trained for each head."""

    Config = Settings
    float32 = ("a", "b")
    a: Tensor
    b: Tensor

    def __init__(self, config: ModelConfig, settings: Config) -> None:
        super().__init__(config, settings)
        self.a = nn.Parameter(torch.full((config.heads, 1), settings.a))
        self.b = nn.Parameter(torch.full((config.heads, 1), settings.b))

    def score_bias(self, length: int) -> DistanceBias:
        a, b = self.a.clamp(min=0.01), self.b.clamp(min=0.01)
        return DistanceBias(-a * torch.log1p(b * torch.arange(length, device=a.device)))
