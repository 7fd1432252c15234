"""Position methods, chosen by one name. Importing this package registers them all."""

from trainshort.positions import bias, embed, rotate
from trainshort.positions.base import LayerInput, PositionMethod, build_position, positions

__all__ = ["LayerInput", "PositionMethod", "bias", "build_position", "embed", "positions", "rotate"]
