"""Methods at the second door: queries and keys are turned by an angle that grows with their position."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.config.position_config import RotaryConfig, XposConfig
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions.base import PositionMethod, collapse_equal_rows


class Rotary(PositionMethod):
    """Pairs of each query and key turn with their position, so that scores see only distances; values stay.

    Interleaved pairs (x0, x1), (x2, x3), …; pair i turns by position / base^(2i/dim), over the whole head or the first
    share of it.
    """

    Config = RotaryConfig

    def __init__(self, config: ModelConfig, settings: RotaryConfig) -> None:
        super().__init__(config, settings)
        self.base = settings.base
        self.dim = settings.rotary_dims(config.head_width)
        self.stretch: RotaryScaling | None = None

    def rotate(self, q: Tensor, k: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles(q, collapse_equal_rows(where))
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = cos.to(wide), sin.to(wide)
        return _apply_rotation(q, cos, sin), _apply_rotation(k, cos, sin)

    def angles(
        self, q: Tensor, where: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch 1 length pairs"], Float[Tensor, "batch 1 length pairs"]]:
        """Cosines and sines of all places and pairs, in float64 whatever the model's dtype: at position 16,384 a
        float32 angle is 1e-3 off."""
        pair = _pairs(self.dim, q)
        speed, size = self.base ** (-pair / self.dim), 1.0
        if self.stretch is not None:
            speed, size = scaled_frequencies(self.stretch, self.base, self.dim)
            speed = speed.to(pair)
        angle = where.to(pair.dtype)[:, None, :, None] * speed
        return size * angle.cos(), size * angle.sin()


class XPos(Rotary):
    """xPos: rotary, and pairs of queries and keys shrink with their distance, those that turn fast the most.

    Pair n of a query at position i is multiplied by ζ^(i/512), of a key at j by ζ^(−j/512), ζ = (2n/dim + 0.4) / 1.4,
    so its share of a score by ζ^((i − j)/512).
    """

    Config = XposConfig

    def __init__(self, config: ModelConfig, settings: XposConfig) -> None:
        super().__init__(config, settings)
        self.scale_base = settings.scale_base
        # A cache keeps keys multiplied, whatever comes after them; past this one may leave float32.
        self.max_length = int(XPOS_POWERS * settings.scale_base)

    def rotate(self, q: Tensor, k: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        where, wide = collapse_equal_rows(where), torch.promote_types(q.dtype, torch.float32)
        cos, sin = self.angles(q, where)
        zeta = (_pairs(self.dim, q) / self.dim + 0.4) / 1.4
        of_q = zeta ** (where.to(zeta.dtype)[:, None, :, None] / self.scale_base)
        turned_q = _apply_rotation(q, (of_q * cos).to(wide), (of_q * sin).to(wide))
        return turned_q, _apply_rotation(k, (cos / of_q).to(wide), (sin / of_q).to(wide))

    def check_length(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"xpos leaves the range of float32 past {self.max_length:,} positions, but this input "
                f"reaches {length:,}. Use position='alibi', or train with a larger scale_base."
            )


XPOS_POWERS = 64
"""0.4/1.4 to this power is 1e-35, and float32 ends at 1e-38."""


def _pairs(dim: int, like: Tensor) -> Float[Tensor, " pairs"]:
    """0, 2, 4, …: where each pair begins."""
    exact = torch.float64 if like.device.type != "mps" else torch.float32
    return torch.arange(0, dim, 2, dtype=exact, device=like.device)


@dataclass(frozen=True)
class RotaryScaling:
    """Slower turning at inference, so that a length never trained at has angles that were."""

    kind: Literal["linear", "ntk", "dynamic", "yarn"]
    factor: float
    trained_at: int
    length: int
    """What is going to be read; `dynamic` asks."""


FAST, SLOW = 32, 1
"""YaRN: pairs that turn more often than FAST times over the training length are left alone, and those that turn less
than SLOW times are interpolated."""


def scaled_frequencies(stretch: RotaryScaling, base: float, dim: int) -> tuple[Float[Tensor, " pairs"], float]:
    """How fast each pair turns, in float64, and a factor of queries and keys; as transformers' `rope_scaling` has it.

    linear    every pair `factor` times slower (position interpolation)
    ntk       a larger base: the slowest pair `factor` times slower, the fastest unchanged
    dynamic   the same with a factor that grows with the input, and is 1 up to the training length
    yarn      slow pairs interpolated, fast ones not, a ramp between; scores larger by (0.1 ln factor + 1)²
    """
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    factor, ratio = stretch.factor, dim / (dim - 2) if dim > 2 else 1.0
    match stretch.kind:
        case "linear":
            return base ** (-pair / dim) / factor, 1.0
        case "ntk":
            return (base * factor**ratio) ** (-pair / dim), 1.0
        case "dynamic":
            longer = max(stretch.length, stretch.trained_at) / stretch.trained_at
            return (base * (factor * longer - (factor - 1)) ** ratio) ** (-pair / dim), 1.0
        case "yarn":
            first, last = (_pair_for_rotations(turns, stretch.trained_at, base, dim) for turns in (FAST, SLOW))
            low, high = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
            ramp = ((pair / 2 - low) / (high - low if high > low else 0.001)).clamp(0, 1)
            return base ** (-pair / dim) * (ramp / factor + 1 - ramp), 0.1 * math.log(factor) + 1


def _pair_for_rotations(turns: float, length: int, base: float, dim: int) -> float:
    """The pair that turns so many times over a length."""
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first pairs of each row, as many as there are angles, turned."""
    turning, dim = x, 2 * cos.shape[-1]
    if dim < x.shape[-1]:
        turning = x[..., :dim]
    even, odd = turning.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat([turned, x[..., dim:]], dim=-1)
