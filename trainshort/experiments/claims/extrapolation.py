"""Claims about perplexity: how far each method is good, and why.

Thresholds were set before any run was looked at. That a difference within chance is called "cannot tell" came later,
and is said at each claim (`rule`).
"""

import math
from itertools import pairwise
from pathlib import Path

from trainshort.config.position_config import PAPER_METHODS as ORDER
from trainshort.evaluate.results import LengthScore, interval
from trainshort.evaluate.significance import longest_contiguous
from trainshort.experiments.claims.measured import MeasuredCell, RatioWithInterval, ScaleView
from trainshort.experiments.claims.verdicts import (
    INTERVAL_RULE,
    Outcome,
    Rule,
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
"""The training length of the demo and of Figure 1's left half, in the paper's numbers."""
MAX_PERPLEXITY_RATIO = 1.01
"""A perplexity counts as no worse up to this many times the one at the training length."""
WORSE = 1.10
"""Clearly worse: ten per cent."""
FLAT = 0.03
"""Flat: within three per cent (the paper's own ALiBi rows move by 1.8 and 2.6 per cent)."""


def wikitext_variant(position: str, length: int = BASE_LENGTH) -> Variant:
    return Variant("wikitext103", position, length)


ALIBI_SHORT, SINUSOIDAL_LONG = wikitext_variant("alibi"), wikitext_variant("sinusoidal", 3072)
"""The paper's title: trained short, against trained long."""


def find_perplexity(view: ScaleView, variant: Variant, length: int, stride: int | None = None) -> MeasuredCell | None:
    """Perplexity of a model at a length; None also where there is only a reason why it has none."""
    found = view.find_evaluation(variant, EvalProtocol(length, stride))
    return found if found and found.values else None


def compare_lengths(view: ScaleView, position: str, at: float, stride: int | None = None) -> RatioWithInterval | None:
    """How much more perplexity a model has at a multiple of its length than at its length."""
    far, near = (EvalProtocol(round(BASE_LENGTH * times), stride) for times in (at, 1))
    return view.compare_perplexities((wikitext_variant(position), far), (wikitext_variant(position), near))


def compare_methods(view: ScaleView, length: int, *positions: str) -> RatioWithInterval | None:
    """How much more perplexity one method has than another, both trained and evaluated at a length."""
    one, other = ((wikitext_variant(position, length), EvalProtocol(length)) for position in positions)
    return view.compare_perplexities(one, other)


def find_rows_by_length(view: ScaleView, variant: Variant) -> dict[int, tuple[LengthScore, Path]]:
    """Rows of a model's first run, by length."""
    runs = view.find_runs(variant)
    return view.find_rows(runs[0], EvalProtocol(BASE_LENGTH)) if runs else {}


def longest_usable_length(view: ScaleView, position: str) -> tuple[int, bool] | None:
    """The longest length without a worse one before it, and whether nothing longer was tried."""
    rows = [
        row
        for length, (row, _) in find_rows_by_length(view, wikitext_variant(position)).items()
        if length >= view.scale.scale_length(BASE_LENGTH)
    ]
    if not rows or find_perplexity(view, wikitext_variant(position), BASE_LENGTH) is None:
        return None
    most = MAX_PERPLEXITY_RATIO * rows[0].perplexity
    longest = longest_contiguous((row.length, row.status == "scored" and row.perplexity <= most) for row in rows)
    return longest or rows[0].length, longest == rows[-1].length


def usable_length_bounds(view: ScaleView, position: str) -> tuple[float, float]:
    """The longest length up to which a method is surely no worse than at its own, and the first at which it surely is;
    lengths in between cannot be told from chance."""
    own = good = view.scale.scale_length(BASE_LENGTH)
    for length in (one for one in find_rows_by_length(view, wikitext_variant(position)) if one > own):
        change = compare_lengths(view, position, length / own)
        told = (
            judge_above(change, MAX_PERPLEXITY_RATIO - 1) if change else "holds"
        )  # a method that cannot be evaluated there is worse there
        if told == "holds":
            return good, length
        good = length if told == "does not hold" else good
    return good, math.inf


@register_claim(
    "extrapolation-order",
    "trained at 512, best at 512 + 20…50, + 200, + 600 and + 12,000 or more",
    rule=Rule(
        "a8d97b8",
        "2026-11-16",
        results_were_known=True,
        change="methods that were not evaluated equally far are not compared, nor differences within chance",
    ),
)
def extrapolation_order(view: ScaleView) -> Outcome:
    """Sinusoidal positions stop being useful soonest, then rotary, then the T5 bias; ALiBi goes farthest."""
    found = {method: one for method in ORDER if (one := longest_usable_length(view, method))}
    if len(found) < len(ORDER):
        return missing_outcome("the four methods trained at one length (`--only demo`)")
    farthest = max(length for length, _ in found.values())
    if any(opened and length < farthest for length, opened in found.values()):
        return missing_outcome("the four methods evaluated equally far (`--only demo`)")  # a short one may yet go on
    text = ", ".join(f"{method_name(m)} {length:,}{'+' if opened else ''}" for m, (length, opened) in found.items())
    reason = (
        f"Longest length at most {MAX_PERPLEXITY_RATIO - 1:.0%} above the perplexity at its own; "
        "+: no longer one was tried. "
    )
    reason += "One stops sooner than the next when it is surely worse at a length up to which the next surely is not."
    told = combine_verdicts(
        _degrades_earlier(usable_length_bounds(view, one), usable_length_bounds(view, other))
        for one, other in pairwise(ORDER)
    )
    bases = (find_perplexity(view, wikitext_variant(method), BASE_LENGTH) for method in ORDER)
    return make_outcome(told, text, reason, *bases, *(compare_lengths(view, method, 2) for method in ORDER))


def _degrades_earlier(one: tuple[float, float], other: tuple[float, float]) -> Verdict:
    if one[1] <= other[0]:
        return "holds"
    return "does not hold" if other[1] <= one[0] else "cannot tell"


@register_claim("alibi-holds", "19.73 at 512, 18.34 at 8,512 (16.6 times)", rule=INTERVAL_RULE)
def alibi_holds(view: ScaleView) -> Outcome:
    """ALiBi is no worse at many times its training length."""
    change = compare_lengths(view, "alibi", 16)
    if change is None:
        return missing_outcome("an ALiBi model evaluated at 1 and 16 times its length")
    reason = f"{change}; up to {MAX_PERPLEXITY_RATIO - 1:+.0%} counts as no worse."
    return make_outcome(
        negate_verdict(judge_above(change, MAX_PERPLEXITY_RATIO - 1)),
        f"{change.format_before_after} at 16 times",
        reason,
        change,
    )


@register_claim("sinusoidal-fails", "20.05 at 512, 43.54 at 1,012, 305.65 at 8,512", rule=INTERVAL_RULE)
def sinusoidal_fails(view: ScaleView) -> Outcome:
    """Sinusoidal positions fail soon after the training length."""
    change, far = (
        compare_lengths(view, "sinusoidal", 2),
        find_perplexity(view, wikitext_variant("sinusoidal"), 16 * BASE_LENGTH),
    )
    if change is None:
        return missing_outcome("a sinusoidal model evaluated at 1 and 2 times its length")
    text = f"{change.format_before_after} at twice" + (f", {far.value:.2f} at 16 times" if far else "")
    reason = f"{change} at twice the length; {WORSE - 1:+.0%} counts as clearly worse."
    return make_outcome(judge_above(change, WORSE - 1), text, reason, change, far)


@register_claim("short-beats-long", "18.40 against 18.67 ± 0.24", rule=INTERVAL_RULE)
def short_beats_long(view: ScaleView) -> Outcome:
    """ALiBi trained at 512 and evaluated at 3,072 beats sinusoidal trained at 3,072, on equally many tokens."""
    change = view.compare_perplexities(
        (ALIBI_SHORT, EvalProtocol(SINUSOIDAL_LONG.length)), (SINUSOIDAL_LONG, EvalProtocol(SINUSOIDAL_LONG.length))
    )
    if change is None:
        return missing_outcome("sinusoidal trained at six times the length (`--only demo` or `table6`)")
    reason = f"ALiBi is {change} from sinusoidal; both saw equally many tokens."
    return make_outcome(judge_below(change, 0), change.format_versus, reason, change)


@register_claim("recency-helps", "19.73 against 20.05 at 512; 17.60 against 18.67 at 3,072", rule=INTERVAL_RULE)
def recency_helps(view: ScaleView) -> Outcome:
    """ALiBi is better than sinusoidal already at the training length: preferring near tokens helps."""
    changes = {
        at: one for at in view.scale.training_lengths if (one := compare_methods(view, at, "alibi", "sinusoidal"))
    }
    if not changes:
        return missing_outcome("ALiBi and sinusoidal models of one length")
    text = "; ".join(f"{change.format_versus} at {view.scale.scale_length(at):,}" for at, change in changes.items())
    found: list[Verdict] = [judge_below(change, 0) for change in changes.values()]
    reason = f"ALiBi is better at {found.count('holds')} of {len(found)} lengths."
    return make_outcome(combine_verdicts(found), text, reason, *changes.values())


@register_claim("flat-sliding", "stride 1: 17.98 at 512, 17.92 at 1,024, 18.28 at 2,048", rule=INTERVAL_RULE)
def flat_sliding(view: ScaleView) -> Outcome:
    """With a sliding window ALiBi's curve is flat: it does not use more context than it was trained with."""
    twice, four = (compare_lengths(view, "alibi", times, stride=1) for times in (2, 4))
    if twice is None or four is None:
        return missing_outcome("ALiBi evaluated with a sliding window at 1, 2 and 4 times its length")
    reason = f"{twice} and {four}; up to {FLAT:.0%} either way counts as flat. "
    reason += f"The stride here is {view.scale.scale_stride(1)}."
    text = f"{twice.values[1]:.2f}, {twice.values[0]:.2f}, {four.values[0]:.2f} at 1, 2, 4 times"
    flat = combine_verdicts(
        part for one in (twice, four) for part in (negate_verdict(judge_above(one, FLAT)), judge_above(one, -FLAT))
    )
    return make_outcome(flat, text, reason, twice, four)


@register_claim("sliding-no-rescue", "stride 1: 18.35 at 512, 204.42 at 1,024", rule=INTERVAL_RULE)
def sliding_no_rescue(view: ScaleView) -> Outcome:
    """Sinusoidal's failure is no matter of evaluation: it fails with a sliding window as well."""
    change = compare_lengths(view, "sinusoidal", 2, stride=1)
    if change is None:
        return missing_outcome("sinusoidal evaluated with a sliding window")
    reason = f"{change}; {WORSE - 1:+.0%} counts as clearly worse."
    return make_outcome(judge_above(change, WORSE - 1), f"{change.format_before_after} at twice", reason, change)


@register_claim(
    "early-tokens",
    "512 to 1,024: 0.92 without overlap (19.73 to 18.81), 0.06 with stride 1 (17.98 to 17.92)",
    rule=INTERVAL_RULE,
)
def early_tokens(view: ScaleView) -> Outcome:
    """What ALiBi gains from longer inputs comes mostly from fewer predictions with little context."""
    runs = view.find_runs(wikitext_variant("alibi"))
    sliding_query, plain_query = build_queries(view.scale, EvalProtocol(BASE_LENGTH, stride=1))
    lengths = [view.scale.scale_length(times * BASE_LENGTH) for times in (1, 2)]
    found = [run.rows(query) for run in runs[:1] for query in (plain_query, sliding_query)]
    read = [rows[length] for rows in found for length in lengths if length in rows]
    rows = [row for row, _ in read if row.status == "scored"]
    if len(rows) < 4:
        return missing_outcome("ALiBi evaluated with and without overlap on the same text")
    plain, sliding = rows[0].perplexity - rows[1].perplexity, rows[2].perplexity - rows[3].perplexity
    text = f"1 to 2 times: {plain:.2f} without overlap, {sliding:.2f} with stride {view.scale.scale_stride(1)}"
    reason = "It holds when less than half of the gain is left with a sliding window."
    gains = [interval(first, second) or (0.0, 0.0) for first, second in (rows[:2], rows[2:])]
    chance = sum(share * (high - low) / 2 for share, (low, high) in zip((0.5, 1.0), gains, strict=True))
    left = math.log(rows[2].perplexity / rows[3].perplexity) - math.log(rows[0].perplexity / rows[1].perplexity) / 2
    change = RatioWithInterval(left, left - chance, left + chance, tuple(path for _, path in read))
    return make_outcome(judge_below(change, 0) if plain > 0 else "does not hold", text, reason, change)


@register_claim("optimum-near-2l", "1.3B, trained at 512: 9.79, best 9.30 at 1,012, then 9.96 at 10,512")
def optimum(view: ScaleView) -> Outcome:
    """With much data and a large model ALiBi is best near twice its length, then rises mildly (a limit of the
    method)."""
    if view.scale.uses_single_corpus:
        return missing_outcome("the 1.3B model on CC100+RoBERTa; a small model on little text says nothing about it")
    found = find_rows_by_length(view, Variant("cc100", "alibi", BASE_LENGTH)).values()
    rows = [row for row, _ in found if row.status == "scored"]
    if len(rows) < 3:
        return missing_outcome("the 1.3B model evaluated at many lengths (`--only fig6`)")
    best = min(rows, key=lambda row: row.perplexity)
    near = 1.5 * BASE_LENGTH <= best.length <= 3 * BASE_LENGTH
    text = f"best {best.perplexity:.2f} at {best.length:,}; {rows[-1].perplexity:.2f} at {rows[-1].length:,}"
    measured = MeasuredCell((best.perplexity,), tuple(path for _, path in found))
    return make_outcome(verdict_of_condition(near), text, "Near means between 1.5 and 3 times the length.", measured)
