"""Position methods, chosen by one name. Importing this package registers them all."""

from trainshort.positions import bias, clock, distance, embed, rotate
from trainshort.positions.base import LayerInput, PositionMethod, build_position, positions

__all__ = [
    "LayerInput",
    "PositionMethod",
    "bias",
    "build_position",
    "clock",
    "distance",
    "embed",
    "positions",
    "rotate",
]
