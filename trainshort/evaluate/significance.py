"""Decide whether a measured difference is significant, and summarize up to which input length a model works well.

The analyses and the evaluation summary use the same rule for all conclusions:

1. A difference must be at least `MIN_EFFECT_NATS`.
2. The 95 % interval of the difference must not contain zero.
3. A statement such as "up to 256 tokens" requires the effect at every tested distance up to 256.

This module does not import torch.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.errors import InputError
from trainshort.evaluate.results import Evaluation, Interval, LengthScore, interval
from trainshort.utils.io import read_with_checksum, write_with_checksum

# The smallest difference of two losses that matters. 0.01 nats are about 1 % of the perplexity.
MIN_EFFECT_NATS = 0.01


def is_significant_increase(effect: float, interval: Interval | None) -> bool:
    """Return whether an effect is at least `MIN_EFFECT_NATS` and its 95 % interval is above zero.

    Args:
        effect: The measured effect in nats.
        interval: The 95 % interval of the effect. Without an interval, no effect is significant.
    """
    if interval is None:
        return False
    return effect >= MIN_EFFECT_NATS and interval[0] > 0


def is_significant_decrease(effect: float, interval: Interval | None) -> bool:
    """Return whether an effect is at most -`MIN_EFFECT_NATS` and its 95 % interval is below zero.

    Args:
        effect: The measured effect in nats.
        interval: The 95 % interval of the effect. Without an interval, no effect is significant.
    """
    if interval is None:
        return False
    low, high = interval
    return is_significant_increase(-effect, (-high, -low))


# ---- ranges of distances


def longest_contiguous(results: Iterable[tuple[int, bool]]) -> int | None:
    """Return the largest distance for which the result at this distance and at all shorter distances is positive.

    Args:
        results: Pairs of a distance and whether its result is positive, in any order.

    Returns:
        The distance, or None if the result at the shortest distance is negative.

    Example:
        >>> longest_contiguous([(64, True), (128, True), (256, False), (512, True)])
        128
    """
    longest = None
    for distance, is_positive in sorted(results):
        if not is_positive:
            break
        longest = distance
    return longest


def format_range(task: str, results: Iterable[tuple[int, bool]]) -> str:
    """Describe at which distances a model solves a task, and add a verdict.

    Args:
        task: The name of the task.
        results: Pairs of a distance and whether the model solves the task at this distance.

    Returns:
        A verdict and its reason. The verdict is "inconclusive" if the model solves the task at a distance, but not at
        all shorter distances.

    Example:
        >>> format_range("copy", [(64, True), (128, False), (256, False)])
        'copy: supported up to 64 tokens, not supported at 128'
        >>> format_range("copy", [(64, True), (128, False), (256, True)])
        'copy: supported up to 64 tokens, inconclusive beyond (not solved at 128, but at 256)'
        >>> format_range("copy", [(64, False)])
        'copy: not supported at any tested distance'
    """
    sorted_results = sorted(results)
    solved = [distance for distance, is_solved in sorted_results if is_solved]
    failed = [distance for distance, is_solved in sorted_results if not is_solved]
    if not solved:
        return f"{task}: not supported at any tested distance"
    if not failed:
        return f"{task}: supported up to {solved[-1]:,} tokens, the longest tested distance"

    first_failed = failed[0]
    solved_beyond = [distance for distance in solved if distance > first_failed]
    # A model that fails at a distance, but not at a longer distance, allows no clear verdict.
    contradiction = f"(not solved at {first_failed:,}, but at {_join_numbers(solved_beyond)})"
    longest = longest_contiguous(sorted_results)
    if longest is None:
        return f"{task}: inconclusive {contradiction}"
    if not solved_beyond:
        return f"{task}: supported up to {longest:,} tokens, not supported at {first_failed:,}"
    return f"{task}: supported up to {longest:,} tokens, inconclusive beyond {contradiction}"


def _join_numbers(numbers: list[int]) -> str:
    """Join numbers with "and": [1024, 2048] becomes "1,024 and 2,048"."""
    return " and ".join(f"{number:,}" for number in numbers)


# ---- the loss as a function of the position in the input

# A point of the curve of loss by position has at least this many predictions. Smaller bins are merged.
MIN_PREDICTIONS_PER_BIN = 200

# A smaller difference between two mean losses is not reported as a change.
MIN_LOSS_CHANGE = 0.02

# A 95 % interval of a normal distribution is this many standard errors wide on each side of the mean.
STANDARD_ERRORS_95 = 1.96


@dataclass(frozen=True)
class Bin:
    """The losses of all predictions at neighboring positions.

    Attributes:
        first: The first position.
        end: The last position + 1.
        count: The number of predictions.
        total: The sum of the losses.
        squares: The sum of the squared losses.
    """

    first: int
    end: int
    count: int
    total: float
    squares: float

    @property
    def middle(self) -> float:
        """Return the middle of the bin. Positions are counted from 1 here, so that a logarithmic axis can show them."""
        return (self.first + self.end + 1) / 2

    @property
    def mean(self) -> float:
        """Return the mean loss."""
        return self.total / self.count

    @property
    def error(self) -> float:
        """Return the standard error of the mean loss."""
        variance = self.squares / self.count - self.mean**2
        return math.sqrt(max(0.0, variance) / self.count)  # Rounding can make a variance of 0 slightly negative.

    def merge(self, next_bin: "Bin") -> "Bin":
        """Return one bin with the predictions of this bin and of the next bin.

        The positions of the new bin begin at the first position of this bin and end where the next bin ends.
        """
        return Bin(
            first=self.first,
            end=next_bin.end,
            count=self.count + next_bin.count,
            total=self.total + next_bin.total,
            squares=self.squares + next_bin.squares,
        )


def pool_bins(row: LengthScore) -> list[Bin]:
    """Return the losses by position, with bins that have at least `MIN_PREDICTIONS_PER_BIN` predictions.

    A bin holds the number, the sum and the sum of squares of the losses at neighboring positions in the input.
    Neighboring bins are merged until each bin has enough predictions. If the last bin is too small, it is merged with
    the bin before.

    Args:
        row: The result of an evaluation at one length.

    Returns:
        The bins in the order of their positions. The list is empty if there are too few predictions in total.
    """
    bins: list[Bin] = []
    for (first, end, count, total), squares in zip(row.positions, row.position_squares, strict=True):
        new_bin = Bin(first, end, count, total, squares)
        is_last_bin_too_small = bool(bins) and bins[-1].count < MIN_PREDICTIONS_PER_BIN
        if is_last_bin_too_small:
            bins[-1] = bins[-1].merge(new_bin)
        else:
            bins.append(new_bin)

    if len(bins) > 1 and bins[-1].count < MIN_PREDICTIONS_PER_BIN:
        last_bin = bins.pop()
        bins[-1] = bins[-1].merge(last_bin)
    return [large_bin for large_bin in bins if large_bin.count >= MIN_PREDICTIONS_PER_BIN]


def describe_change_past_training(bins: list[Bin], trained: int) -> str:
    """Describe how the loss changes at positions past the training length.

    The mean loss past the training length is compared with the mean loss in the second half of the training length.

    Args:
        bins: The losses by position in the input. Each bin combines neighboring positions.
        trained: The training length.

    Returns:
        A verb phrase such as "falls by 0.12 ± 0.05". A change is reported only if it is larger than its 95 % margin and
        larger than `MIN_LOSS_CHANGE`.
    """
    bins_before = [position_bin for position_bin in bins if trained / 2 <= position_bin.middle <= trained]
    bins_after = [position_bin for position_bin in bins if position_bin.first >= trained]
    if not bins_after:
        return "was not evaluated past the training length"
    if not bins_before:
        return "has too few predictions before the training length"

    # All bins on each side of the training length are merged into one.
    before = functools.reduce(Bin.merge, bins_before)
    after = functools.reduce(Bin.merge, bins_after)
    change = after.mean - before.mean
    margin = STANDARD_ERRORS_95 * math.hypot(before.error, after.error)  # `error` is the standard error of the mean
    if abs(change) <= max(margin, MIN_LOSS_CHANGE):
        return f"shows no change ({change:+.2f} ± {margin:.2f})"
    verb = "rises" if change > 0 else "falls"
    return f"{verb} by {abs(change):.2f} ± {margin:.2f}"


def bounds(bins: list[Bin]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the lower ends and the upper ends of the 95 % intervals of the mean losses."""
    lower_ends = tuple(position_bin.mean - STANDARD_ERRORS_95 * position_bin.error for position_bin in bins)
    upper_ends = tuple(position_bin.mean + STANDARD_ERRORS_95 * position_bin.error for position_bin in bins)
    return lower_ends, upper_ends


# ---- the evaluation summary: up to which input length a model works well
#
# The summary is stored as one JSON file in the run folder. Its field "summary" is a line for readers:
#
#     trained at 128, good to 4,096+
#
# "Good" means that the loss is less than MIN_EFFECT_NATS above the loss at the training length, at this length and at
# all shorter tested lengths.

SUMMARY_FILE = "extrapolation.json"

# The version of the summary file. Files of other versions are ignored.
SUMMARY_FORMAT = 2

# The second, less strict criterion: the perplexity is at most this many times the perplexity at the training length.
MAX_PERPLEXITY_RATIO = 1.02


def make_summary(evaluation: Evaluation, source: str) -> dict[str, Any] | None:
    """Summarize up to which input length a model works well.

    All lengths are compared with the base length. The base length is the training length, or the shortest evaluated
    length if the training length is unknown.

    Args:
        evaluation: The evaluation of a model at several lengths.
        source: The path of the evaluation relative to the run folder.

    Returns:
        The content of the summary file. None if the evaluation allows no summary: it used overlapping windows or an
        override of the model, the base length was not scored, or no longer length was evaluated.
    """
    uses_overlap = evaluation.protocol.get("stride") is not None
    uses_override = evaluation.protocol.get("slopes") is not None
    if uses_overlap or uses_override:
        return None
    rows = _rows_from_training_length(evaluation)
    if len(rows) < 2:
        return None
    base = rows[0]
    if base.status != "scored" or evaluation.trained_at not in (None, base.length):
        return None

    scored_rows = [row for row in rows if row.status == "scored"]
    best = min(scored_rows, key=lambda row: row.perplexity)
    no_worse = _find_longest_good_length(rows, lambda row: row.loss - base.loss < MIN_EFFECT_NATS)
    within_2_percent = _find_longest_good_length(
        rows, lambda row: row.perplexity <= MAX_PERPLEXITY_RATIO * base.perplexity
    )
    return {
        "format": SUMMARY_FORMAT,
        "summary": _format_summary(evaluation, rows, no_worse),
        "trained_at": evaluation.trained_at,
        "base": _summarize_row(base),
        "best": _summarize_row(best),
        "no_worse": no_worse,
        "within_2_percent": within_2_percent,
        "gain": {
            "loss": base.loss - best.loss,
            "interval": interval(base, best),
            "perplexity": base.perplexity - best.perplexity,
        },
        "lengths": [_summarize_row(row) for row in rows],
        "target": {key: evaluation.target.get(key) for key in ("name", "kind", "weights", "step")},
        "corpus": evaluation.corpus,
        "source": source,
        "provenance": evaluation.provenance,
    }


def _rows_from_training_length(evaluation: Evaluation) -> list[LengthScore]:
    """Return the results at the training length and at longer lengths.

    Lengths that exceed the text are left out, because the model never read an input of such a length.
    """
    min_length = evaluation.trained_at or 0
    rows = []
    for row in evaluation.rows:
        exceeds_text = row.status == "scored" and row.length > row.tokens
        if row.length >= min_length and not exceeds_text:
            rows.append(row)
    return rows


def _find_longest_good_length(rows: list[LengthScore], is_good: Callable[[LengthScore], bool]) -> dict[str, Any]:
    """Find the longest length such that this length and all shorter lengths satisfy a criterion.

    Args:
        rows: The results, sorted by length.
        is_good: The criterion. `is_good` is called only for results with the status "scored".

    Returns:
        A dictionary with two keys. `length` is the length, or None if the shortest length does not satisfy the
        criterion. `open` is True if no longer length was evaluated, so that even longer lengths may be good.
    """
    results = [(row.length, row.status == "scored" and is_good(row)) for row in rows]
    length = longest_contiguous(results)
    longest_evaluated_length = rows[-1].length
    return {"length": length, "open": length == longest_evaluated_length}


def _summarize_row(row: LengthScore) -> dict[str, Any]:
    """Return the entry of the summary file for the result at one length. Only a scored length has numbers.

    "nll" is the sum of the losses (negative log-likelihoods) of all scored tokens.
    """
    entry: dict[str, Any] = {"length": row.length, "status": row.status, "reason": row.reason}
    if row.status == "scored":
        entry["tokens"] = row.tokens
        entry["nll"] = row.nll
        entry["perplexity"] = row.perplexity
        entry["tokens_per_second"] = row.speed
        entry["memory"] = row.memory
    return entry


def _format_summary(evaluation: Evaluation, rows: list[LengthScore], no_worse: dict[str, Any]) -> str:
    """Return the summary as a line of text.

    - "trained at 128, good to 160+": the loss at all tested lengths up to 160 is good. No longer length was tested.
    - "trained at 128, good to 160": the loss at the next tested length is higher, or there is no result.
    - "trained at 128, good to 160, inconclusive at 256 (too little text)": the loss at 256 seems to be higher, but the
      difference is not significant.
    - "trained at 128, cannot read past 160": the model supports no longer inputs.

    If the training length is unknown, the line starts with "compared with" and the shortest length.

    Args:
        evaluation: The evaluation.
        rows: The results from the training length on, sorted by length. The first result is the base.
        no_worse: The longest good length, as `_find_longest_good_length` returns it.
    """
    base = rows[0]
    if evaluation.trained_at:
        start = f"trained at {base.length:,}"
    else:
        start = f"compared with {base.length:,}"
    good = f"{start}, good to {no_worse['length']:,}"

    longer_rows = [row for row in rows if row.length > no_worse["length"]]
    if not longer_rows:
        return f"{good}+"
    next_row = longer_rows[0]  # the first length that is not good
    max_length = evaluation.target.get("max_length")
    if next_row.status == "cannot" and max_length:
        return f"{start}, cannot read past {max_length:,}"
    if next_row.status != "scored":
        return good
    is_worse = is_significant_increase(next_row.loss - base.loss, interval(next_row, base))
    if is_worse:
        return good
    return f"{good}, inconclusive at {next_row.length:,} (too little text)"


def save_summary(summary: dict[str, Any], folder: Path) -> bool:
    """Write a summary to a run folder, unless the folder has a summary of the same weights that is based on more text.

    A summary contains the most important results of an evaluation.

    Args:
        summary: The summary that `make_summary` returned.
        folder: The run folder.

    Returns:
        Whether the file was written. A summary of other weights is always replaced.
    """
    old_summary = load_summary(folder)
    if old_summary is not None:
        has_same_weights = old_summary["target"]["weights"] == summary["target"]["weights"]
        has_more_text = old_summary["base"]["tokens"] > summary["base"]["tokens"]
        if has_same_weights and has_more_text:
            return False
    write_with_checksum(folder / SUMMARY_FILE, summary)
    return True


def load_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary in a run folder, or None if there is no valid summary file."""
    try:
        summary = read_with_checksum(folder / SUMMARY_FILE)
    except InputError:
        return None
    return summary if summary.get("format") == SUMMARY_FORMAT else None
