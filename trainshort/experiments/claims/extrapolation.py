"""Check the claims about perplexity: how well each position method extrapolates, and why.

All thresholds were chosen before the first results were available. The verdict "inconclusive" was added later. The
criterion version of each claim (`criterion=`) states this.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from trainshort.config.position_config import PAPER_METHODS
from trainshort.evaluate.results import LengthScore, Query, interval
from trainshort.evaluate.significance import longest_contiguous
from trainshort.experiments.claims.measured import MeasuredCell, RatioWithInterval, ScaleView
from trainshort.experiments.claims.verdicts import (
    INTERVAL_CRITERION,
    CriterionVersion,
    Outcome,
    Verdict,
    combine_verdicts,
    judge_above,
    judge_below,
    make_outcome,
    missing_outcome,
    negate_verdict,
    register_claim,
    verdict_of_condition,
)
from trainshort.experiments.experiments import EvalProtocol, Variant, build_queries, method_name

BASE_LENGTH = 512
"""The paper's training length of the models that most checks compare. A scale can divide all lengths of the paper."""

MAX_PERPLEXITY_RATIO = 1.01
"""A perplexity counts as "no worse" up to this multiple of the perplexity at the training length."""

CLEARLY_WORSE_RATIO = 1.10
"""A perplexity counts as "clearly worse" above this multiple of the perplexity at the training length."""

FLAT_CHANGE = 0.03
"""Perplexities count as "flat" if they differ by at most 3 %. ALiBi's rows in the paper differ by 1.8 % and 2.6 %."""


def wikitext_variant(position: str, length: int = BASE_LENGTH) -> Variant:
    """Return the WikiText-103 model of the paper with a position method and a training length."""
    return Variant("wikitext103", position, length)


# The two models that the title of the paper compares: "Train Short, Test Long".
ALIBI_SHORT = wikitext_variant("alibi")
SINUSOIDAL_LONG = wikitext_variant("sinusoidal", 3072)


# ---- looking up and comparing perplexities


def find_perplexity(view: ScaleView, variant: Variant, length: int, stride: int | None = None) -> MeasuredCell | None:
    """Return the perplexity of a model, or None if there is no perplexity.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        variant: The model.
        length: The evaluation length in the paper. The scale converts it to the actual length.
        stride: The stride of a sliding window. None evaluates windows that do not overlap.
    """
    cell = view.find_evaluation(variant, EvalProtocol(length, stride))
    if cell is None or not cell.values:
        return None
    return cell


def compare_lengths(
    view: ScaleView, position: str, multiple: float, stride: int | None = None
) -> RatioWithInterval | None:
    """Compare the perplexity at a multiple of the training length with the perplexity at the training length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        position: The position method of the model.
        multiple: The evaluation length as a multiple of the training length.
        stride: The stride of a sliding window. None evaluates windows that do not overlap.

    Returns:
        How much higher the perplexity at the longer length is, with a 95 % interval: 0.1 means 10 % higher. None if one
        of the perplexities is missing.
    """
    model = wikitext_variant(position)
    far_protocol = EvalProtocol(round(BASE_LENGTH * multiple), stride)
    near_protocol = EvalProtocol(BASE_LENGTH, stride)
    return view.compare_perplexities((model, far_protocol), (model, near_protocol))


def compare_methods(view: ScaleView, length: int, position: str, baseline: str) -> RatioWithInterval | None:
    """Compare the perplexities of two position methods on WikiText-103.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        length: The training length and evaluation length of both models in the paper. The scale converts it to the
            actual length.
        position: The position method.
        baseline: The position method that it is compared with.

    Returns:
        How much higher the perplexity of `position` is than the perplexity of `baseline`, with a 95 % interval: 0.1
        means 10 % higher. None if one of the perplexities is missing.
    """
    protocol = EvalProtocol(length)
    model = wikitext_variant(position, length)
    baseline_model = wikitext_variant(baseline, length)
    return view.compare_perplexities((model, protocol), (baseline_model, protocol))


def find_rows_by_length(view: ScaleView, variant: Variant) -> dict[int, tuple[LengthScore, Path]]:
    """Return the results of a model by evaluation length, each with its file. Only the first seed is used.

    The results are those of the standard evaluation: windows that do not overlap, on the default split.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        variant: The model.
    """
    runs = view.find_runs(variant)
    if not runs:
        return {}
    # `find_rows` ignores the length of the protocol, and returns the results of all lengths.
    return view.find_rows(runs[0], EvalProtocol(BASE_LENGTH))


class UsableLength(NamedTuple):
    """How far a model extrapolates.

    Attributes:
        length: The longest usable length. At this length and at all shorter lengths that were evaluated, the
            perplexity is no worse than at the training length.
        is_longest_evaluated: Whether no longer length was evaluated.
    """

    length: int
    is_longest_evaluated: bool

    def __str__(self) -> str:
        """Return the length. A plus sign means that no longer length was evaluated, as in "2,048+"."""
        suffix = "+" if self.is_longest_evaluated else ""
        return f"{self.length:,}{suffix}"


def longest_usable_length(view: ScaleView, position: str) -> UsableLength | None:
    """Return the longest length at which a position method is no worse than at its training length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        position: The position method.

    Returns:
        The length, or None if the model was not evaluated.
    """
    variant = wikitext_variant(position)
    training_length = view.scale.scale_length(BASE_LENGTH)  # 512 in the paper, 128 on a laptop
    rows = [row for length, (row, _) in find_rows_by_length(view, variant).items() if length >= training_length]
    if not rows or find_perplexity(view, variant, BASE_LENGTH) is None:
        return None

    # The rows are sorted by length, so the first row is the training length.
    max_perplexity = MAX_PERPLEXITY_RATIO * rows[0].perplexity
    usable_by_length: list[tuple[int, bool]] = []
    for row in rows:
        is_usable = row.status == "scored" and row.perplexity <= max_perplexity
        usable_by_length.append((row.length, is_usable))
    # The last length before the first length that is not usable.
    longest_usable = longest_contiguous(usable_by_length)
    is_longest_evaluated = longest_usable == rows[-1].length
    # The training length is the smallest possible result.
    return UsableLength(longest_usable or rows[0].length, is_longest_evaluated)


def usable_length_bounds(view: ScaleView, position: str) -> tuple[float, float]:
    """Return a lower and an upper bound of the longest usable length of a position method.

    At lengths between the two bounds, the difference to the training length may be due to chance.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        position: The position method.

    Returns:
        The longest length at which the perplexity is certainly no worse than at the training length, and the first
        length at which the perplexity is certainly worse (infinity if there is no such length).
    """
    training_length = view.scale.scale_length(BASE_LENGTH)  # 512 in the paper, 128 on a laptop
    longest_good_length = training_length
    for length in find_rows_by_length(view, wikitext_variant(position)):
        if length <= training_length:
            continue
        change = compare_lengths(view, position, length / training_length)
        if change is None:
            return longest_good_length, length  # The model could not be evaluated at this length.
        # Is the complete 95 % interval of the change above the limit of 1 %?
        worse_verdict = judge_above(change, MAX_PERPLEXITY_RATIO - 1)
        if worse_verdict == "supported":
            return longest_good_length, length
        if worse_verdict == "not supported":
            longest_good_length = length
    return longest_good_length, math.inf


# ---- the checks


@register_claim(
    "extrapolation-order",
    statement="Sinusoidal embeddings stop extrapolating first, then rotary embeddings, then the T5 bias. "
    "ALiBi extrapolates furthest.",
    published="trained at 512: best at 512 + 20 to 50 (sinusoidal), + 200 (rotary), + 600 (T5 bias) and "
    "+ 12,000 or more (ALiBi)",
    criterion=CriterionVersion(
        "a8d97b8",
        "2026-11-16",
        results_were_known=True,
        change="methods that were evaluated up to different lengths are not compared, "
        "and a difference within its interval of chance is inconclusive",
    ),
)
def check_extrapolation_order(view: ScaleView) -> Outcome:
    """Check that each method of the paper extrapolates less far than the next one.

    Method A extrapolates less far than method B if A is certainly worse at a length up to which B is certainly no
    worse.
    """
    usable_lengths: dict[str, UsableLength] = {}
    for method in PAPER_METHODS:
        usable_length = longest_usable_length(view, method)
        if usable_length is None:
            return missing_outcome("models of the four methods with one training length (`--only demo`)")
        usable_lengths[method] = usable_length

    longest = max(usable.length for usable in usable_lengths.values())
    for usable in usable_lengths.values():
        # A method that was not evaluated up to the longest length may extrapolate further than its last length.
        if usable.is_longest_evaluated and usable.length < longest:
            return missing_outcome("evaluations of the four methods up to the same length (`--only demo`)")

    measured = ", ".join(f"{method_name(method)} {usable}" for method, usable in usable_lengths.items())
    reason = (
        "The numbers are the longest lengths at which the perplexity is at most "
        f"{MAX_PERPLEXITY_RATIO - 1:.0%} higher than at the training length. "
        "A plus sign means that no longer length was evaluated. "
        "The claim is supported if each method is significantly worse at a length at which the next method is not."
    )
    verdict = combine_verdicts(
        _degrades_earlier(usable_length_bounds(view, method), usable_length_bounds(view, next_method))
        for method, next_method in pairwise(PAPER_METHODS)
    )
    base_cells = [find_perplexity(view, wikitext_variant(method), BASE_LENGTH) for method in PAPER_METHODS]
    changes_at_twice = [compare_lengths(view, method, 2) for method in PAPER_METHODS]
    return make_outcome(verdict, measured, reason, *base_cells, *changes_at_twice)


def _degrades_earlier(bounds: tuple[float, float], other_bounds: tuple[float, float]) -> Verdict:
    """Judge whether a method becomes worse at a shorter length than another method.

    Args:
        bounds: Two lengths of the method: the longest length at which its perplexity is certainly no worse than at the
            training length, and the first length at which its perplexity is certainly worse.
        other_bounds: The two lengths of the other method.
    """
    longest_good, first_worse = bounds
    other_longest_good, other_first_worse = other_bounds
    if first_worse <= other_longest_good:
        return "supported"
    if other_first_worse <= longest_good:
        return "not supported"
    return "inconclusive"


@register_claim(
    "alibi-holds",
    statement="ALiBi's perplexity at many times its training length is no worse than at the training length.",
    published="19.73 at 512, 18.34 at 8,512 (16.6 times the training length)",
    criterion=INTERVAL_CRITERION,
)
def check_alibi_extrapolates(view: ScaleView) -> Outcome:
    """Check that ALiBi's perplexity at 16 times the training length is at most 1 % higher.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    change = compare_lengths(view, "alibi", 16)
    if change is None:
        return missing_outcome("an ALiBi model that was evaluated at 1 and 16 times its training length")
    reason = (
        f"ALiBi's perplexity at 16 times the training length differs by {change}. "
        f"Up to {MAX_PERPLEXITY_RATIO - 1:+.0%} counts as no worse."
    )
    # `is_worse` is a verdict. It is "supported" if the complete interval of the change is above 1 %.
    is_worse = judge_above(change, MAX_PERPLEXITY_RATIO - 1)
    measured = f"{change.format_before_after()} at 16 times the length"
    return make_outcome(negate_verdict(is_worse), measured, reason, change)


@register_claim(
    "sinusoidal-fails",
    statement="The perplexity of sinusoidal embeddings rises soon after the training length.",
    published="20.05 at 512, 43.54 at 1,012, 305.65 at 8,512",
    criterion=INTERVAL_CRITERION,
)
def check_sinusoidal_fails(view: ScaleView) -> Outcome:
    """Check that the perplexity of the sinusoidal model at twice the training length is more than 10 % higher.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    change = compare_lengths(view, "sinusoidal", 2)
    if change is None:
        return missing_outcome("a sinusoidal model that was evaluated at 1 and 2 times its training length")
    measured = f"{change.format_before_after()} at twice the length"
    far_cell = find_perplexity(view, wikitext_variant("sinusoidal"), 16 * BASE_LENGTH)
    if far_cell is not None:
        measured += f", {far_cell.value:.2f} at 16 times the length"
    reason = (
        f"The perplexity at twice the training length differs by {change}. "
        f"More than {CLEARLY_WORSE_RATIO - 1:+.0%} counts as clearly worse."
    )
    verdict = judge_above(change, CLEARLY_WORSE_RATIO - 1)
    return make_outcome(verdict, measured, reason, change, far_cell)


@register_claim(
    "short-beats-long",
    statement="ALiBi trained at 512 has a lower perplexity at 3,072 than sinusoidal embeddings trained at 3,072. "
    "Both models are trained on the same number of tokens.",
    published="18.40 against 18.67 ± 0.24",
    criterion=INTERVAL_CRITERION,
)
def check_short_beats_long(view: ScaleView) -> Outcome:
    """Check that ALiBi trained short has a lower perplexity at the long length than the sinusoidal model.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    protocol = EvalProtocol(SINUSOIDAL_LONG.length)
    change = view.compare_perplexities((ALIBI_SHORT, protocol), (SINUSOIDAL_LONG, protocol))
    if change is None:
        return missing_outcome("a sinusoidal model trained at six times the length (`--only demo` or `table6`)")
    reason = (
        f"ALiBi's perplexity differs by {change} from the sinusoidal model. "
        "Both models were trained on the same number of tokens."
    )
    # ALiBi is better if the complete interval of the difference is below 0.
    return make_outcome(judge_below(change, 0), change.format_versus(), reason, change)


@register_claim(
    "recency-helps",
    statement="ALiBi has a lower perplexity than sinusoidal embeddings already at the training length, "
    "because it prefers recent tokens.",
    published="19.73 against 20.05 at 512; 17.60 against 18.67 at 3,072",
    criterion=INTERVAL_CRITERION,
)
def check_recency_helps(view: ScaleView) -> Outcome:
    """Check that ALiBi has a lower perplexity than the sinusoidal model at every training length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    changes: dict[int, RatioWithInterval] = {}
    for length in view.scale.training_lengths:
        change = compare_methods(view, length, "alibi", "sinusoidal")
        if change is not None:
            changes[length] = change
    if not changes:
        return missing_outcome("an ALiBi model and a sinusoidal model with the same training length")

    measured = "; ".join(
        f"{change.format_versus()} at {view.scale.scale_length(length):,}" for length, change in changes.items()
    )
    # ALiBi is better at a length if the complete interval of the difference is below 0.
    verdicts: list[Verdict] = [judge_below(change, 0) for change in changes.values()]
    reason = f"ALiBi is significantly better at {verdicts.count('supported')} of {len(verdicts)} lengths."
    return make_outcome(combine_verdicts(verdicts), measured, reason, *changes.values())


@register_claim(
    "flat-sliding",
    statement="ALiBi's perplexity with a sliding window does not depend on the length of the window. "
    "ALiBi does not use more context than it was trained with.",
    published="stride 1: 17.98 at 512, 17.92 at 1,024, 18.28 at 2,048",
    criterion=INTERVAL_CRITERION,
)
def check_flat_sliding(view: ScaleView) -> Outcome:
    """Check that ALiBi's sliding-window perplexity changes by at most 3 % at 2 and 4 times the training length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    at_twice = compare_lengths(view, "alibi", 2, stride=1)
    at_four_times = compare_lengths(view, "alibi", 4, stride=1)
    if at_twice is None or at_four_times is None:
        return missing_outcome("ALiBi evaluated with a sliding window at 1, 2 and 4 times its training length")

    # `values` holds the perplexity at the longer length and the perplexity at the training length.
    twice_perplexity, base_perplexity = at_twice.values
    four_times_perplexity, _ = at_four_times.values
    measured = (
        f"{base_perplexity:.2f}, {twice_perplexity:.2f}, {four_times_perplexity:.2f} at 1, 2 and 4 times the length"
    )
    reason = (
        f"The perplexity differs by {at_twice} at twice the training length, and by {at_four_times} at four times. "
        f"Up to {FLAT_CHANGE:.0%} in both directions counts as flat. "
        f"The stride is {view.scale.scale_stride(1)}."
    )
    verdicts: list[Verdict] = []
    for change in (at_twice, at_four_times):
        # The change must be neither above +3 % nor below -3 %.
        verdicts.append(negate_verdict(judge_above(change, FLAT_CHANGE)))
        verdicts.append(judge_above(change, -FLAT_CHANGE))
    return make_outcome(combine_verdicts(verdicts), measured, reason, at_twice, at_four_times)


@register_claim(
    "sliding-no-rescue",
    statement="A sliding window does not prevent the failure of sinusoidal embeddings beyond the training length.",
    published="stride 1: 18.35 at 512, 204.42 at 1,024",
    criterion=INTERVAL_CRITERION,
)
def check_sliding_does_not_rescue(view: ScaleView) -> Outcome:
    """Check that the sinusoidal model's sliding-window perplexity is more than 10 % higher at twice the length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    change = compare_lengths(view, "sinusoidal", 2, stride=1)
    if change is None:
        return missing_outcome("a sinusoidal model that was evaluated with a sliding window")
    reason = (
        f"The perplexity at twice the training length differs by {change}. "
        f"More than {CLEARLY_WORSE_RATIO - 1:+.0%} counts as clearly worse."
    )
    verdict = judge_above(change, CLEARLY_WORSE_RATIO - 1)
    return make_outcome(verdict, f"{change.format_before_after()} at twice the length", reason, change)


@register_claim(
    "early-tokens",
    statement="ALiBi gains from longer inputs mostly because fewer tokens are predicted with little context.",
    published="512 to 1,024: 0.92 without overlap (19.73 to 18.81), 0.06 with stride 1 (17.98 to 17.92)",
    criterion=INTERVAL_CRITERION,
)
def check_early_tokens(view: ScaleView) -> Outcome:
    """Check that less than half of ALiBi's gain from twice the length is left with a sliding window.

    With a sliding window, every token is predicted with much context. The gain is the decrease of the perplexity from
    the training length to twice the training length.
    """
    sliding_query, plain_query = build_queries(view.scale, EvalProtocol(BASE_LENGTH, stride=1))
    plain_results = _find_scored_rows(view, plain_query)
    sliding_results = _find_scored_rows(view, sliding_query)
    if len(plain_results) < 2 or len(sliding_results) < 2:
        return missing_outcome("ALiBi evaluated with and without overlap on the same text")

    # The results at 1 and 2 times the training length, each without the path of its file.
    plain_base, plain_twice = [row for row, _ in plain_results]
    sliding_base, sliding_twice = [row for row, _ in sliding_results]
    plain_gain = plain_base.perplexity - plain_twice.perplexity
    sliding_gain = sliding_base.perplexity - sliding_twice.perplexity
    measured = (
        f"gain from 1 to 2 times the length: {plain_gain:.2f} without overlap, "
        f"{sliding_gain:.2f} with stride {view.scale.scale_stride(1)}"
    )
    reason = "The claim is supported if less than half of the gain is left with a sliding window."

    # Intervals are known for mean losses (log-perplexities), so the gains are compared on a log scale.
    # The claim is supported if the excess is negative.
    plain_log_gain = math.log(plain_base.perplexity / plain_twice.perplexity)
    sliding_log_gain = math.log(sliding_base.perplexity / sliding_twice.perplexity)
    excess = sliding_log_gain - plain_log_gain / 2
    noise = 0.5 * _half_width(plain_base, plain_twice) + _half_width(sliding_base, sliding_twice)
    sources = tuple(path for _, path in (*plain_results, *sliding_results))
    change = RatioWithInterval(excess, excess - noise, excess + noise, sources)
    verdict = judge_below(change, 0) if plain_gain > 0 else "not supported"
    return make_outcome(verdict, measured, reason, change)


def _find_scored_rows(view: ScaleView, query: Query) -> list[tuple[LengthScore, Path]]:
    """Return the results of an ALiBi model at 1 and 2 times its training length, each with its file.

    The model was trained with length 512 of the paper (or the corresponding length of the scale). Its first seed is
    used. Missing results and failed evaluations are left out.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        query: The split, the stride and the number of tokens of the evaluation.
    """
    runs = view.find_runs(wikitext_variant("alibi"))
    if not runs:
        return []
    rows = runs[0].rows(query)
    results: list[tuple[LengthScore, Path]] = []
    for multiple in (1, 2):
        # `scale_length` converts a length of the paper to the corresponding length of this scale.
        length = view.scale.scale_length(multiple * BASE_LENGTH)
        if length in rows and rows[length][0].status == "scored":
            results.append(rows[length])
    return results


def _half_width(row: LengthScore, baseline: LengthScore) -> float:
    """Return half the width of the 95 % interval of the difference between two mean losses.

    Args:
        row: The result at one evaluation length.
        baseline: The result that it is compared with.

    Returns:
        Half the width. 0 if the text is too short for an interval.
    """
    bounds = interval(row, baseline)
    if bounds is None:
        return 0.0
    low, high = bounds
    return (high - low) / 2


@register_claim(
    "optimum-near-2l",
    statement="With much data and a large model, ALiBi's perplexity is lowest near twice the training length. "
    "At longer lengths the perplexity rises slowly.",
    published="1.3B parameters, trained at 512: 9.79, lowest 9.30 at 1,012, then 9.96 at 10,512",
)
def check_optimum(view: ScaleView) -> Outcome:
    """Check that the large ALiBi model has its lowest perplexity between 1.5 and 3 times the training length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    if view.scale.uses_single_corpus:  # Only the scale "paper" has the large dataset.
        return missing_outcome("the model with 1.3B parameters on CC100+RoBERTa. Small models cannot test the claim")
    # The results are sorted by evaluation length. Each result has the path of its file.
    results = find_rows_by_length(view, Variant("cc100", "alibi", BASE_LENGTH)).values()
    rows = [row for row, _ in results if row.status == "scored"]
    if len(rows) < 3:
        return missing_outcome("the model with 1.3B parameters, evaluated at many lengths (`--only fig6`)")
    best_row = min(rows, key=lambda row: row.perplexity)
    longest_row = rows[-1]
    is_near_twice = 1.5 * BASE_LENGTH <= best_row.length <= 3 * BASE_LENGTH
    measured = (
        f"lowest perplexity {best_row.perplexity:.2f} at {best_row.length:,}; "
        f"{longest_row.perplexity:.2f} at {longest_row.length:,}"
    )
    reason = "The claim is supported if the best length lies between 1.5 and 3 times the training length."
    # The files of all lengths are sources of the verdict.
    best_cell = MeasuredCell(values=(best_row.perplexity,), sources=tuple(path for _, path in results))
    return make_outcome(verdict_of_condition(is_near_twice), measured, reason, best_cell)
