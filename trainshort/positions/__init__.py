"""Position methods, chosen by one name."""

from trainshort.positions.base import (
    Gate,
    LayerInput,
    PositionMethod,
    build_position,
    positions,
    zero_bias_for_nope_heads,
)
from trainshort.positions.growth import LengthScaling

__all__ = [
    "Gate",
    "LayerInput",
    "LengthScaling",
    "PositionMethod",
    "build_position",
    "positions",
    "zero_bias_for_nope_heads",
]
