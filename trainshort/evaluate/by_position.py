"""Loss by position in the input: what a point needs, its interval, and what may be concluded. No torch."""

import functools
import math
from dataclasses import dataclass

from trainshort.evaluate.results import LengthScore

ENOUGH = 200
"""Predictions that a point of the loss by position stands for at least; neighbouring bins are put together."""
MATTERS = 0.02
"""Nats that a change of the mean loss must exceed, beside its interval excluding none, before it is called one."""


@dataclass(frozen=True)
class Bin:
    """Predictions at neighbouring positions."""

    first: int
    end: int
    count: int
    total: float
    squares: float | None
    """Sum of the squared losses; None where it was not stored."""

    @property
    def middle(self) -> float:
        return (self.first + self.end + 1) / 2

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        if self.squares is None:
            return None
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2) / self.count)

    def and_also(self, other: "Bin") -> "Bin":
        squares = None if self.squares is None or other.squares is None else self.squares + other.squares
        return Bin(self.first, other.end, self.count + other.count, self.total + other.total, squares)


def pooled(row: LengthScore) -> list[Bin]:
    """A row's bins, neighbours put together until each has enough predictions; what is left at the end joins the last
    one."""
    squares = row.position_squares or (None,) * len(row.positions)
    bins: list[Bin] = []
    for position, square in zip(row.positions, squares, strict=True):
        one = Bin(*position, square)
        if bins and bins[-1].count < ENOUGH:
            bins[-1] = bins[-1].and_also(one)
        else:
            bins.append(one)
    if len(bins) > 1 and bins[-1].count < ENOUGH:
        last = bins.pop()
        bins[-1] = bins[-1].and_also(last)
    return [one for one in bins if one.count >= ENOUGH]


def past_training(bins: list[Bin], trained: int) -> str:
    """`falls by 0.12 ± 0.05`, `rises by ...`, or that no change shows: only what the interval bears out is said."""
    before = [one for one in bins if trained / 2 <= one.middle <= trained]
    after = [one for one in bins if one.first >= trained]
    if not after:
        return "was not read past it"
    if not before:
        return "has too few predictions before it to tell"
    near, far = functools.reduce(Bin.and_also, before), functools.reduce(Bin.and_also, after)
    change = far.mean - near.mean
    if near.error is None or far.error is None:
        return f"{change:+.2f}, without an interval"
    margin = 1.96 * math.hypot(near.error, far.error)
    if abs(change) <= max(margin, MATTERS):
        return f"shows no change ({change:+.2f} ± {margin:.2f})"
    return f"{'rises' if change > 0 else 'falls'} by {abs(change):.2f} ± {margin:.2f}"


def bounds(bins: list[Bin]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lower and upper ends of the 95 % intervals; both empty where the results hold none."""
    errors = [one.error for one in bins if one.error is not None]
    if len(errors) < len(bins):
        return (), ()
    low, high = ([one.mean + sign * 1.96 * error for one, error in zip(bins, errors, strict=True)] for sign in (-1, 1))
    return tuple(low), tuple(high)
