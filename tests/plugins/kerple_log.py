"""A plug-in for tests: KERPLE (Chi et al., 2022). Subtracts a * log(1 + b * distance) from the attention scores."""

import torch
from pydantic import Field
from torch import Tensor, nn

from trainshort.attention import DistanceBias
from trainshort.config.position_config import PositionConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions import PositionMethod, positions


class KerpleLogConfig(PositionConfig):
    a: float = Field(default=1.0, gt=0)
    """Initial factor on the logarithm."""
    b: float = Field(default=1.0, gt=0)
    """Initial factor on the distance."""


@positions.register("kerple-log")
class KerpleLog(PositionMethod):
    """A penalty that grows with the logarithm of the distance, trained for each head."""

    Config = KerpleLogConfig
    float32 = ("a", "b")
    a: Tensor
    b: Tensor

    def __init__(self, config: ModelConfig, settings: KerpleLogConfig) -> None:
        super().__init__(config, settings)
        self.a = nn.Parameter(torch.full((config.heads, 1), settings.a))
        self.b = nn.Parameter(torch.full((config.heads, 1), settings.b))

    def score_bias(self, length: int) -> DistanceBias:
        a = self.a.clamp(min=0.01)
        b = self.b.clamp(min=0.01)
        distances = torch.arange(length, device=a.device)
        return DistanceBias(-a * torch.log1p(b * distances))
