"""Position methods, chosen by one name."""

from trainshort.positions.base import Gate, LayerInput, PositionMethod, build_position, for_heads, positions
from trainshort.positions.growth import ScoreGrowth

__all__ = [
    "Gate",
    "LayerInput",
    "PositionMethod",
    "ScoreGrowth",
    "build_position",
    "for_heads",
    "positions",
]
