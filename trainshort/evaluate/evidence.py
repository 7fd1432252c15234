"""When a measured difference may be told as one: the rule behind every sentence that concludes. No torch.

1. It matters: at least EFFECT nats, which is one per cent of perplexity.
2. It is not chance: its 95 % interval lies on one side of zero. No interval, no conclusion.
3. A range has no holes: "up to 256" means that every distance tried up to there holds.
4. Where several probes ask the same thing they agree, or the sentence says that they do not.

Below it, the loss by position in the input: what a point of it needs, its interval, and what may be concluded.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainshort.evaluate.results import LengthScore

EFFECT = 0.01
RESAMPLES = 1000
LEVEL = 0.95

Interval = tuple[float, float]


def shows(effect: float, interval: Interval | None) -> bool:
    """Whether a positive effect is large enough to matter and surely not zero."""
    return interval is not None and effect >= EFFECT and interval[0] > 0


def costs(effect: float, interval: Interval | None) -> bool:
    """The same of a negative one."""
    return interval is not None and shows(-effect, (-interval[1], -interval[0]))


def unbroken(found: Iterable[tuple[int, bool]]) -> int | None:
    """The farthest distance such that it and all nearer ones hold; None when the nearest does not.

    64 holds, 128 holds, 256 does not, 512 holds:   128
    """
    farthest = None
    for distance, holds in sorted(found):
        if not holds:
            break
        farthest = distance
    return farthest


def span(what: str, found: Iterable[tuple[int, bool]]) -> str:
    """A range in words, with what lies behind a hole told as such.

    copy up to 128 tokens (at 512 again, but not at 256)
    """
    tried = sorted(found)
    farthest = unbroken(tried)
    behind = [distance for distance, holds in tried if holds and distance > (farthest or 0)]
    if farthest is None and not behind:
        return f"no {what} at any distance tried"
    hole = next((distance for distance, holds in tried if not holds), 0)
    if farthest is None:
        return f"{what} at {_listed(behind)} tokens, but not at {hole:,}"
    again = f" (at {_listed(behind)} again, but not at {hole:,})" if behind else ""
    return f"{what} up to {farthest:,} tokens{again}"


def _listed(numbers: list[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


def interval_of(sums: np.ndarray, counts: np.ndarray | None = None) -> Interval | None:
    """Bootstrap interval of the mean, from one sum and count per stretch of text or per probe; None for fewer than
    two. Sums may be differences of two measurements on the same stretches, which takes out what both share."""
    if len(sums) < 2:
        return None
    weights = np.ones(len(sums)) if counts is None else counts.astype(np.float64)
    draws = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums.astype(np.float64)[draws].sum(axis=1) / weights[draws].sum(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


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


def pooled(row: "LengthScore") -> list[Bin]:
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
