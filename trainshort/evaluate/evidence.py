"""When a measured difference may be told as one: the rule behind every sentence that concludes. No torch.

1. It matters: at least EFFECT nats, which is one per cent of perplexity.
2. It is not chance: its 95 % interval lies on one side of zero. No interval, no conclusion.
3. A range has no holes: "up to 256" means that every distance tried up to there holds.
4. Where several probes ask the same thing they agree, or the sentence says that they do not.
"""

from collections.abc import Iterable

import numpy as np

EFFECT = 0.01
RESAMPLES = 1000
LEVEL = 0.95

Interval = tuple[float, float]


def shows(effect: float, interval: Interval | None) -> bool:
    """Whether a positive effect is large enough to matter and surely not zero."""
    return interval is not None and effect >= EFFECT and interval[0] > 0


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
