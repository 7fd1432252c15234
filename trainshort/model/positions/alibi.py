"""ALiBi (attention with linear biases), and a variant that uses the logarithm of the distance."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort import alibi
from trainshort.attention import Bias, DistanceBias, LinearBias
from trainshort.config.position_config import AlibiConfig, EmptyPositionConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import PositionMethod, distance_range


class Alibi(PositionMethod):
    """ALiBi: subtracts `slope * distance` from the attention scores, with one slope per head.

    The slopes are fixed. With `settings.learned_slopes`, the slopes are trained.
    """

    Config = AlibiConfig
    float32 = ("slopes",)
    slopes: Tensor

    def __init__(self, config: ModelConfig, settings: AlibiConfig) -> None:
        super().__init__(config, settings)
        self.settings = settings
        self.nope_heads = config.nope_heads
        slopes = torch.empty(config.heads, dtype=torch.float32)
        if settings.learned_slopes:
            self.slopes = nn.Parameter(slopes)
        else:
            # Fixed slopes follow from the settings, so they are not stored in checkpoints.
            self.register_buffer("slopes", slopes, persistent=False)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        """Set the slopes to those of the settings, or to those of the ALiBi paper by default.

        NoPE heads (heads without positions) have the slope 0. They are the last heads.
        """
        num_position_heads = len(self.slopes) - self.nope_heads
        if self.settings.slopes is None:
            slopes = alibi.slopes(num_position_heads, self.settings.max_bias)
        else:
            slopes = torch.tensor(self.settings.slopes)[:num_position_heads]
        self.slopes.data.zero_()
        self.slopes.data[:num_position_heads].copy_(slopes)

    def score_bias(self, length: int) -> Bias:
        """Return the linear bias. The bias does not depend on `length`, the number of keys."""
        return LinearBias(self.slopes)


def alibi_bias(slopes: Float[Tensor, " heads"], max_distance: int | None, length: int) -> LinearBias | DistanceBias:
    """Return ALiBi's bias, optionally with a maximum distance.

    Args:
        slopes: One slope per head.
        max_distance: Larger distances get the bias of this distance. None means no maximum.
        length: The number of keys.

    Returns:
        The slopes, or a table with the bias of each head and distance if there is a maximum distance.
    """
    if max_distance is None:
        return LinearBias(slopes)
    # A distance beyond the end of the table uses the last column of the table.
    distances = torch.arange(min(length, max_distance + 1), device=slopes.device)
    return DistanceBias(-slopes[:, None] * distances)


class LogAlibi(PositionMethod):
    """Logarithmic ALiBi: subtracts `slope * ln(1 + distance)` from the attention scores, with ALiBi's fixed slopes."""

    float32 = ("slopes",)
    slopes: Tensor

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        self.register_buffer("slopes", torch.empty(config.heads), persistent=False)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        """Set the slopes of the ALiBi paper."""
        self.slopes.data.copy_(alibi.slopes(len(self.slopes)))

    def score_bias(self, length: int) -> DistanceBias:
        """Return the bias of each head at the distances 0 to `length - 1`."""
        distances = distance_range(length, self.slopes.device)
        return DistanceBias(-self.slopes[:, None] * torch.log1p(distances))
