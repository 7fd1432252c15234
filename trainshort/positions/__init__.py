"""Position methods, chosen by one name. Importing this package registers them all."""

# The paper's methods come first: what is registered first is listed first.
from trainshort.positions import bias, embed, rotate

# isort: split
from trainshort.positions import clock, distance
from trainshort.positions.base import Gate, LayerInput, PositionMethod, build_position, for_heads, positions
from trainshort.positions.growth import ScoreGrowth

__all__ = [
    "Gate",
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
