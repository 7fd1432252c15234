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
        if where.stride(0) == 0:  # all rows of the batch stand at the same places: their angles are computed once
            where = where[:1]
        # Angles in float64 whatever the model's dtype: at position 16,384 a float32 angle is 1e-3 off.
        exact = torch.float64 if q.device.type != "mps" else torch.float32
        pair = torch.arange(0, self.dim, 2, dtype=exact, device=q.device)
        angle = where.to(exact)[:, None, :, None] * self.base ** (-pair / self.dim)
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
