"""Position methods. The setting `ModelConfig.position` selects a method by its name."""

from trainshort.model.positions.base import (
    Gate,
    LayerInput,
    PositionMethod,
    build_position,
    positions,
    zero_bias_for_nope_heads,
)
from trainshort.model.positions.length_scaling import LengthScaling

__all__ = [
    "Gate",
    "LayerInput",
    "LengthScaling",
    "PositionMethod",
    "build_position",
    "positions",
    "zero_bias_for_nope_heads",
]
