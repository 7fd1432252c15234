"""BAM: a trained power of the distance as attention bias."""

import torch
from torch import nn

from trainshort import alibi
from trainshort.attention import DistanceBias
from trainshort.config.position_config import EmptyPositionConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import PositionMethod, distance_range

DISTANCE_EPSILON = 1e-5
"""BAM adds this number to every distance, because negative powers of 0 are infinite."""


class Bam(PositionMethod):
    """BAM: subtracts `exp(scale) * |distance - centre|**power` from the attention scores.

    The three parameters are trained for each head. All layers share these parameters. The initial bias is the bias of
    ALiBi: `exp(scale)` is ALiBi's slope, `centre` is 0 and `power` is 1.
    """

    float32 = ("scale", "centre", "power")

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        # The bias of a head is -exp(scale) * |distance - centre|**power.
        self.scale = nn.Parameter(torch.empty(config.heads))
        self.centre = nn.Parameter(torch.empty(config.heads))
        self.power = nn.Parameter(torch.empty(config.heads))
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        """Set the initial parameters, with which the bias equals ALiBi's bias -slope * distance."""
        self.scale.data.copy_(alibi.slopes(len(self.scale)).log())
        self.centre.data.zero_()
        self.power.data.fill_(1)

    def score_bias(self, length: int) -> DistanceBias:
        """Return the bias `-exp(scale) * |distance - centre|**power` at the distances 0 to `length - 1`."""
        distances = distance_range(length, self.scale.device)
        distances_to_centre = (distances - self.centre[:, None]).abs() + DISTANCE_EPSILON
        return DistanceBias(-self.scale.exp()[:, None] * distances_to_centre ** self.power[:, None])
