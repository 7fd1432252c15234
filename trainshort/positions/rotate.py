"""Methods at the second door: queries and keys are turned by an angle that grows with their position."""

import torch
from torch import Tensor

from trainshort.config import ModelConfig
from trainshort.methods import RotarySettings
from trainshort.positions.base import PositionMethod, positions


@positions.register("rotary")
class Rotary(PositionMethod):
    """Pairs of each query and key turn with their position, so that scores see only distances; values stay.

    Interleaved pairs (x0, x1), (x2, x3), …; pair i turns by position / base^(2i/dim), over the whole head.
    """

    Settings = RotarySettings

    def __init__(self, config: ModelConfig, settings: RotarySettings) -> None:
        super().__init__(config, settings)
        self.base = settings.base
        self.dim = config.head_width

    def rotate(self, q: Tensor, k: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.arange(0, self.dim, 2, dtype=torch.float32, device=q.device)
        # Angles in float32 whatever the model's dtype: a position of 16,000 has no neighbours in bfloat16.
        angle = where.float()[:, None, :, None] * self.base ** (-pair / self.dim)
        cos, sin = angle.cos(), angle.sin()
        return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
