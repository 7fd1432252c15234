"""Does far context matter? Spoil everything farther than d tokens and see whether the last tokens notice.

    context of 12, the last 2 scored, d = 4:     far far far far far far  near near near near  scored scored

Three ways to spoil it: *shuffle* keeps the words and loses their order; *replace* puts other text of the same corpus
there; *cut* leaves it away, so that the model also sees a shorter input. The near d tokens and the targets are the
same in all of them, so the rise of the loss is what the far part was worth. Foreign text can also mislead, and a cut
also shortens the input, so far context counts as used only where all three ways are noticed.
"""

from typing import Any

import numpy as np
from rich.console import Group

from trainshort.errors import InputError
from trainshort.evaluate.analyses.base import (
    SCORED_TOKENS,
    Analysis,
    AnalysisContext,
    compare,
    interval_text,
    new_table,
    with_title,
)
from trainshort.evaluate.significance import MIN_EFFECT_NATS, is_significant_increase, longest_contiguous

CORRUPTIONS = ("shuffle", "replace", "cut")


def scope(lab: AnalysisContext) -> tuple[int, list[int]]:
    """The length of the context, and the distances beyond which it is spoiled."""
    length = max(lab.multiples(8, 4, 2, 1))
    distances = near_distances(lab.trained_at, length)
    if not distances:
        raise InputError(
            f"far-context scores the last {SCORED_TOKENS} tokens and corrupts the text that is at least "
            f"{first_distance(lab.trained_at):,} tokens earlier. No text is that far away at length {length:,}. "
            "Use longer --lengths or a longer text."
        )
    return length, distances


def run(lab: AnalysisContext) -> dict[str, Any]:
    length, distances = scope(lab)
    ends = lab.sample_ends(length)
    whole = lab.sample_windows(ends, length)
    lab.meter.start(len(ends) * (length + sum(2 * length + near + SCORED_TOKENS - 1 for near in distances)))
    losses = lab.score(whole, SCORED_TOKENS)
    rows = []
    for near in distances:
        for way in CORRUPTIONS:
            found = lab.score(corrupt_far_context(whole, near, way, lab), SCORED_TOKENS)
            rows.append({"near": near, "way": way, **compare(losses, found)})
    return {
        "summary": summary(rows, length),
        "length": length,
        "probes": len(ends),
        "scored": int(losses.size),
        "loss": float(losses.mean()),
        "rows": rows,
    }


def near_distances(trained_at: int, length: int) -> list[int]:
    """Doublings from an eighth of the training length up to half the length, as far as something is left to spoil.

    trained at 128, length 1024:   16 32 64 128 256 512
    trained at 16, length 40:      2 4 8
    """
    first = first_distance(trained_at)
    return [first * 2**k for k in range(20) if first * 2**k <= min(length // 2, length - SCORED_TOKENS)]


def first_distance(trained_at: int) -> int:
    return max(1, trained_at // 8)


def corrupt_far_context(rows: np.ndarray, near: int, way: str, lab: AnalysisContext) -> np.ndarray:
    """The rows with everything farther than `near` tokens before the first scored one spoiled."""
    far = rows.shape[1] - SCORED_TOKENS - near
    rng = lab.rng()
    if way == "cut":
        return rows[:, far:]
    spoiled = rows.copy()
    if way == "shuffle":
        spoiled[:, :far] = rng.permuted(rows[:, :far], axis=1)
    else:
        starts = rng.integers(len(lab.tokens) - far + 1, size=len(rows))
        spoiled[:, :far] = lab.rows(starts, far)
    return spoiled


def summary(rows: list[dict[str, Any]], length: int) -> str:
    """The farthest distance at which every way of spoiling is noticed, as at all nearer ones; then what only some of
    the ways notice farther away."""
    noticed: dict[int, list[str]] = {row["near"]: [] for row in rows}
    for row in rows:
        if is_significant_increase(row["rise"], row["interval"]):
            noticed[row["near"]].append(row["way"])
    used = longest_contiguous((near, len(ways) == len(CORRUPTIONS)) for near, ways in noticed.items())
    farther = [near for near, ways in noticed.items() if ways and near > (used or 0)]
    if used is not None:
        told = f"at {length:,} tokens the model uses context farther away than {used:,} tokens"
    else:
        told = f"at {length:,} tokens no use of far context shows"
    if not farther:
        return told if used else f"{told}: no rise of the loss is at least {MIN_EFFECT_NATS} nats and surely above zero"
    ways = noticed[max(farther)]
    which = f"only {' and '.join(ways)} {'notices' if len(ways) == 1 else 'notice'}"
    if len(ways) == len(CORRUPTIONS):
        which = "all probes notice again, but not nearer"
    return f"{told}, and the probes do not agree: farther away than {max(farther):,} {which}"


def table(result: dict[str, Any]) -> Group:
    title = (
        f"Loss of the last {SCORED_TOKENS} of {result['length']:,} tokens (intact {result['loss']:.4f}), "
        "with corrupted far context"
    )
    shown = new_table("farther than", "way", "loss", "rise", "95 %")
    for row in result["rows"]:
        numbers = (f"{row['loss']:.4f}", f"{row['rise']:+.4f}", interval_text(row["interval"]))
        shown.add_row(f"{row['near']:,}", row["way"], *numbers)
    return with_title(title, shown)


FAR_CONTEXT = Analysis("does context farther than d tokens matter?", run, table, fits=scope)
