"""Position methods, chosen by one name. Importing this package registers them all."""

from trainshort.positions import bias, embed, rotate
from trainshort.positions.base import PositionMethod, positions

__all__ = ["PositionMethod", "bias", "embed", "positions", "rotate"]
