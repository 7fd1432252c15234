"""When a measured difference may be told as one: the rule behind every sentence that concludes. No torch.

1. It matters: at least EFFECT nats, which is one per cent of perplexity.
2. It is not chance: its 95 % interval lies on one side of zero. No interval, no conclusion.
3. A range has no holes: "up to 256" means that every distance tried up to there holds.
4. Where several probes ask the same thing they agree, or the sentence says that they do not.

Below it, the loss by position in the input (what a point of it needs, its interval, and what may be concluded), and the
extrapolation card, which says by this rule how far a model is good.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from trainshort.errors import InputError
from trainshort.evaluate.results import Evaluation, Interval, LengthScore, interval
from trainshort.utils.io import read_with_checksum, write_with_checksum

MIN_EFFECT_NATS = 0.01


def is_significant_increase(effect: float, interval: Interval | None) -> bool:
    """Whether a positive effect is large enough to matter and surely not zero."""
    return interval is not None and effect >= MIN_EFFECT_NATS and interval[0] > 0


def is_significant_decrease(effect: float, interval: Interval | None) -> bool:
    """The same of a negative one."""
    return interval is not None and is_significant_increase(-effect, (-interval[1], -interval[0]))


def longest_contiguous(found: Iterable[tuple[int, bool]]) -> int | None:
    """The farthest distance such that it and all nearer ones hold; None when the nearest does not.

    64 holds, 128 holds, 256 does not, 512 holds:   128
    """
    holding = list(takewhile(lambda tried: tried[1], sorted(found)))
    return holding[-1][0] if holding else None


def format_range(what: str, found: Iterable[tuple[int, bool]]) -> str:
    """A range in words, with what lies behind a hole told as such.

    copy up to 128 tokens (at 512 again, but not at 256)
    """
    tried = sorted(found)
    farthest = longest_contiguous(tried)
    behind = [distance for distance, holds in tried if holds and distance > (farthest or 0)]
    if farthest is None and not behind:
        return f"no {what} at any distance tried"
    hole = next((distance for distance, holds in tried if not holds), 0)
    if farthest is None:
        return f"{what} at {_join_numbers(behind)} tokens, but not at {hole:,}"
    again = f" (at {_join_numbers(behind)} again, but not at {hole:,})" if behind else ""
    return f"{what} up to {farthest:,} tokens{again}"


def _join_numbers(numbers: list[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


MIN_PREDICTIONS_PER_BIN = 200
"""Predictions that a point of the loss by position stands for at least; neighbouring bins are put together."""
MIN_LOSS_CHANGE = 0.02
"""Nats that a change of the mean loss must exceed, beside its interval excluding none, before it is called one."""


@dataclass(frozen=True)
class Bin:
    """Predictions at neighbouring positions."""

    first: int
    end: int
    count: int
    total: float
    squares: float
    """Sum of the squared losses."""

    @property
    def middle(self) -> float:
        return (self.first + self.end + 1) / 2

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2) / self.count)

    def and_also(self, other: "Bin") -> "Bin":
        squares = self.squares + other.squares
        return Bin(self.first, other.end, self.count + other.count, self.total + other.total, squares)


def pool_bins(row: LengthScore) -> list[Bin]:
    """A row's bins, neighbours put together until each has enough predictions; what is left at the end joins the last
    one."""
    bins: list[Bin] = []
    for position, square in zip(row.positions, row.position_squares, strict=True):
        one = Bin(*position, square)
        if bins and bins[-1].count < MIN_PREDICTIONS_PER_BIN:
            bins[-1] = bins[-1].and_also(one)
        else:
            bins.append(one)
    if len(bins) > 1 and bins[-1].count < MIN_PREDICTIONS_PER_BIN:
        bins[-2:] = [bins[-2].and_also(bins[-1])]
    return [one for one in bins if one.count >= MIN_PREDICTIONS_PER_BIN]


def describe_change_past_training(bins: list[Bin], trained: int) -> str:
    """`falls by 0.12 ± 0.05`, `rises by ...`, or that no change shows: only what the interval bears out is said."""
    before = [one for one in bins if trained / 2 <= one.middle <= trained]
    after = [one for one in bins if one.first >= trained]
    if not after:
        return "was not read past it"
    if not before:
        return "has too few predictions before it to tell"
    near, far = functools.reduce(Bin.and_also, before), functools.reduce(Bin.and_also, after)
    change = far.mean - near.mean
    margin = 1.96 * math.hypot(near.error, far.error)
    if abs(change) <= max(margin, MIN_LOSS_CHANGE):
        return f"shows no change ({change:+.2f} ± {margin:.2f})"
    return f"{'rises' if change > 0 else 'falls'} by {abs(change):.2f} ± {margin:.2f}"


def bounds(bins: list[Bin]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the lower and the upper ends of the 95 % intervals of the mean losses."""
    low = [one.mean - 1.96 * one.error for one in bins]
    high = [one.mean + 1.96 * one.error for one in bins]
    return tuple(low), tuple(high)


# ---- the extrapolation card: how far a model is good, in one file of its folder and one line for people
#
#     trained at 128, good to 4,096+        no worse at 4,096 tokens than at 128; nothing longer was tried
#     trained at 128, good to 160           worse from there on
#     trained at 128, good to 160, cannot tell at 256 (too little text)
#     trained at 128, cannot read past 128
#
# "Good" has no holes: at every length tried up to there the loss is higher than at the training length by less than
# what matters. "Worse" is more than that, beyond doubt. Whoever loads the model shows the line, the file's "summary".

CARD = "extrapolation.json"
CARD_FORMAT = 2
MAX_PERPLEXITY_RATIO = 1.02
"""The looser of the two marks counts a perplexity as good up to this many times that at the training length."""


def make_summary(evaluation: Evaluation, source: str) -> dict[str, Any] | None:
    """The card of a sweep, or None when it says nothing about extrapolation: it needs the training length (the shortest
    length, for a model that does not tell its own) and at least one longer, scored without overlap and as trained."""
    if evaluation.protocol.get("stride") is not None or evaluation.protocol.get("slopes") is not None:
        return None
    # A length beyond the end of the text was given no longer inputs than the text: it says nothing about that length.
    told = [row for row in evaluation.rows if row.status != "scored" or row.length <= row.tokens]
    rows = [row for row in told if row.length >= (evaluation.trained_at or 0)]
    base = rows[0] if rows else None
    if base is None or base.status != "scored" or len(rows) < 2 or evaluation.trained_at not in (None, base.length):
        return None
    scored = [row for row in rows if row.status == "scored"]
    best = min(scored, key=lambda row: row.perplexity)
    marks = {
        "no_worse": _mark(rows, lambda row: row.loss - base.loss < MIN_EFFECT_NATS),
        "within_2_percent": _mark(rows, lambda row: row.perplexity <= MAX_PERPLEXITY_RATIO * base.perplexity),
    }
    return {
        "format": CARD_FORMAT,
        "summary": _summary(evaluation, rows, base, marks["no_worse"]),
        "trained_at": evaluation.trained_at,
        "base": _entry(base),
        "best": _entry(best),
        **marks,
        "gain": {
            "loss": base.loss - best.loss,
            "interval": interval(base, best),
            "perplexity": base.perplexity - best.perplexity,
        },
        "lengths": [_entry(row) for row in rows],
        "target": {key: evaluation.target.get(key) for key in ("name", "kind", "weights", "step")},
        "corpus": evaluation.corpus,
        "source": source,
        "provenance": evaluation.provenance,
    }


def _mark(rows: list[LengthScore], good: Callable[[LengthScore], bool]) -> dict[str, Any]:
    """The longest length that is good with all before it; `open` when nothing longer was tried, so that it may be good
    farther still."""
    length = longest_contiguous((row.length, row.status == "scored" and good(row)) for row in rows)
    return {"length": length, "open": length == rows[-1].length}


def _entry(row: LengthScore) -> dict[str, Any]:
    told = {"length": row.length, "status": row.status, "reason": row.reason}
    if row.status != "scored":
        return told
    numbers = {"tokens": row.tokens, "nll": row.nll, "perplexity": row.perplexity}
    return {**told, **numbers, "tokens_per_second": row.speed, "memory": row.memory}


def _summary(evaluation: Evaluation, rows: list[LengthScore], base: LengthScore, mark: dict[str, Any]) -> str:
    begin = f"trained at {base.length:,}" if evaluation.trained_at else f"compared with {base.length:,}"
    next_row = next((row for row in rows if row.length > mark["length"]), None)
    longest = evaluation.target.get("max_length")
    if next_row is not None and next_row.status == "cannot" and longest:
        return f"{begin}, cannot read past {longest:,}"
    good = f"{begin}, good to {mark['length']:,}{'+' if mark['open'] else ''}"
    if (
        next_row is None
        or next_row.status != "scored"
        or is_significant_increase(next_row.loss - base.loss, interval(next_row, base))
    ):
        return good
    return f"{good}, cannot tell at {next_row.length:,} (too little text)"


def save_summary(card: dict[str, Any], folder: Path) -> bool:
    """Write the card, unless the folder has one of the same weights on more tokens; whether it was written."""
    old = load_summary(folder)
    if old and old["target"]["weights"] == card["target"]["weights"] and old["base"]["tokens"] > card["base"]["tokens"]:
        return False
    write_with_checksum(folder / CARD, card)
    return True


def load_summary(folder: Path) -> dict[str, Any] | None:
    """A folder's card; None when there is none that can be read."""
    try:
        card = read_with_checksum(folder / CARD)
    except InputError:
        return None
    return card if card.get("format") == CARD_FORMAT else None
