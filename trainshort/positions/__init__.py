"""Position methods, chosen by one name. Importing this package registers them all."""

from trainshort.positions import bias, clock, distance, embed, rotate
from trainshort.positions.base import LayerInput, PositionMethod, build_position, for_heads, positions
from trainshort.positions.growth import ScoreGrowth

__all__ = [
    "LayerInput",
    "PositionMethod",
    "ScoreGrowth",
    "bias",
    "build_position",
    "clock",
    "distance",
    "embed",
    "for_heads",
    "positions",
    "rotate",
]
