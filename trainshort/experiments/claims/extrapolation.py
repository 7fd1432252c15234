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
    BY_CHANCE,
    Outcome,
    Rule,
    Verdict,
    above,
    all_parts_hold,
    below,
    claim,
    make_outcome,
    missing_outcome,
    opposite,
    verdict,
)
from trainshort.experiments.experiments import EvalProtocol, Variant, method_name, queries

BASE = 512
"""The training length of the demo and of Figure 1's left half, in the paper's numbers."""
MAX_PERPLEXITY_RATIO = 1.01
"""A perplexity counts as no worse up to this many times the one at the training length."""
WORSE = 1.10
"""Clearly worse: ten per cent."""
FLAT = 0.03
"""Flat: within three per cent (the paper's own ALiBi rows move by 1.8 and 2.6 per cent)."""


def trained(position: str, length: int = BASE) -> Variant:
    return Variant("wikitext103", position, length)


SHORT, LONG = trained("alibi"), trained("sinusoidal", 3072)
"""The paper's title: trained short, against trained long."""


def ppl(view: ScaleView, variant: Variant, length: int, stride: int | None = None) -> MeasuredCell | None:
    """Perplexity of a model at a length; None also where there is only a reason why it has none."""
    found = view.read(variant, EvalProtocol(length, stride))
    return found if found and found.values else None


def change_with_length(
    view: ScaleView, position: str, at: float, stride: int | None = None
) -> RatioWithInterval | None:
    """How much more perplexity a model has at a multiple of its length than at its length."""
    far, near = (EvalProtocol(round(BASE * times), stride) for times in (at, 1))
    return view.perplexities((trained(position), far), (trained(position), near))


def at_length(view: ScaleView, length: int, *positions: str) -> RatioWithInterval | None:
    """How much more perplexity one method has than another, both trained and evaluated at a length."""
    one, other = ((trained(position, length), EvalProtocol(length)) for position in positions)
    return view.perplexities(one, other)


def sweep(view: ScaleView, variant: Variant) -> dict[int, tuple[LengthScore, Path]]:
    """Rows of a model's first run, by length."""
    runs = view.runs(variant)
    return view.rows(runs[0], EvalProtocol(BASE)) if runs else {}


def longest_usable_length(view: ScaleView, position: str) -> tuple[int, bool] | None:
    """The longest length without a worse one before it, and whether nothing longer was tried."""
    rows = [row for length, (row, _) in sweep(view, trained(position)).items() if length >= view.scale.length(BASE)]
    if not rows or ppl(view, trained(position), BASE) is None:
        return None
    most = MAX_PERPLEXITY_RATIO * rows[0].perplexity
    longest = longest_contiguous((row.length, row.status == "scored" and row.perplexity <= most) for row in rows)
    return longest or rows[0].length, longest == rows[-1].length


def bounds(view: ScaleView, position: str) -> tuple[float, float]:
    """The longest length up to which a method is surely no worse than at its own, and the first at which it surely is;
    lengths in between cannot be told from chance."""
    own = good = view.scale.length(BASE)
    for length in (one for one in sweep(view, trained(position)) if one > own):
        change = change_with_length(view, position, length / own)
        told = (
            above(change, MAX_PERPLEXITY_RATIO - 1) if change else "holds"
        )  # a method that cannot be evaluated there is worse there
        if told == "holds":
            return good, length
        good = length if told == "does not hold" else good
    return good, math.inf


@claim(
    "extrapolation-order",
    "trained at 512, best at 512 + 20…50, + 200, + 600 and + 12,000 or more",
    rule=Rule(
        "a8d97b8",
        "2026-11-16",
        seen=True,
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
    reason = f"Longest length at most {MAX_PERPLEXITY_RATIO - 1:.0%} above the perplexity at its own; +: no longer one was tried. "
    reason += "One stops sooner than the next when it is surely worse at a length up to which the next surely is not."
    told = all_parts_hold(_degrades_earlier(bounds(view, one), bounds(view, other)) for one, other in pairwise(ORDER))
    bases = (ppl(view, trained(method), BASE) for method in ORDER)
    return make_outcome(told, text, reason, *bases, *(change_with_length(view, method, 2) for method in ORDER))


def _degrades_earlier(one: tuple[float, float], other: tuple[float, float]) -> Verdict:
    if one[1] <= other[0]:
        return "holds"
    return "does not hold" if other[1] <= one[0] else "cannot tell"


@claim("alibi-holds", "19.73 at 512, 18.34 at 8,512 (16.6 times)", rule=BY_CHANCE)
def alibi_holds(view: ScaleView) -> Outcome:
    """ALiBi is no worse at many times its training length."""
    change = change_with_length(view, "alibi", 16)
    if change is None:
        return missing_outcome("an ALiBi model evaluated at 1 and 16 times its length")
    reason = f"{change}; up to {MAX_PERPLEXITY_RATIO - 1:+.0%} counts as no worse."
    return make_outcome(
        opposite(above(change, MAX_PERPLEXITY_RATIO - 1)), f"{change.format_before_after} at 16 times", reason, change
    )


@claim("sinusoidal-fails", "20.05 at 512, 43.54 at 1,012, 305.65 at 8,512", rule=BY_CHANCE)
def sinusoidal_fails(view: ScaleView) -> Outcome:
    """Sinusoidal positions fail soon after the training length."""
    change, far = change_with_length(view, "sinusoidal", 2), ppl(view, trained("sinusoidal"), 16 * BASE)
    if change is None:
        return missing_outcome("a sinusoidal model evaluated at 1 and 2 times its length")
    text = f"{change.format_before_after} at twice" + (f", {far.value:.2f} at 16 times" if far else "")
    reason = f"{change} at twice the length; {WORSE - 1:+.0%} counts as clearly worse."
    return make_outcome(above(change, WORSE - 1), text, reason, change, far)


@claim("short-beats-long", "18.40 against 18.67 ± 0.24", rule=BY_CHANCE)
def short_beats_long(view: ScaleView) -> Outcome:
    """ALiBi trained at 512 and evaluated at 3,072 beats sinusoidal trained at 3,072, on equally many tokens."""
    change = view.perplexities((SHORT, EvalProtocol(LONG.length)), (LONG, EvalProtocol(LONG.length)))
    if change is None:
        return missing_outcome("sinusoidal trained at six times the length (`--only demo` or `table6`)")
    reason = f"ALiBi is {change} from sinusoidal; both saw equally many tokens."
    return make_outcome(below(change, 0), change.against, reason, change)


@claim("recency-helps", "19.73 against 20.05 at 512; 17.60 against 18.67 at 3,072", rule=BY_CHANCE)
def recency_helps(view: ScaleView) -> Outcome:
    """ALiBi is better than sinusoidal already at the training length: preferring near tokens helps."""
    changes = {at: one for at in view.scale.lengths if (one := at_length(view, at, "alibi", "sinusoidal"))}
    if not changes:
        return missing_outcome("ALiBi and sinusoidal models of one length")
    text = "; ".join(f"{change.against} at {view.scale.length(at):,}" for at, change in changes.items())
    found: list[Verdict] = [below(change, 0) for change in changes.values()]
    reason = f"ALiBi is better at {found.count('holds')} of {len(found)} lengths."
    return make_outcome(all_parts_hold(found), text, reason, *changes.values())


@claim("flat-sliding", "stride 1: 17.98 at 512, 17.92 at 1,024, 18.28 at 2,048", rule=BY_CHANCE)
def flat_sliding(view: ScaleView) -> Outcome:
    """With a sliding window ALiBi's curve is flat: it does not use more context than it was trained with."""
    twice, four = (change_with_length(view, "alibi", times, stride=1) for times in (2, 4))
    if twice is None or four is None:
        return missing_outcome("ALiBi evaluated with a sliding window at 1, 2 and 4 times its length")
    reason = f"{twice} and {four}; up to {FLAT:.0%} either way counts as flat. "
    reason += f"The stride here is {view.scale.stride(1)}."
    text = f"{twice.values[1]:.2f}, {twice.values[0]:.2f}, {four.values[0]:.2f} at 1, 2, 4 times"
    flat = all_parts_hold(part for one in (twice, four) for part in (opposite(above(one, FLAT)), above(one, -FLAT)))
    return make_outcome(flat, text, reason, twice, four)


@claim("sliding-no-rescue", "stride 1: 18.35 at 512, 204.42 at 1,024", rule=BY_CHANCE)
def sliding_no_rescue(view: ScaleView) -> Outcome:
    """Sinusoidal's failure is no matter of evaluation: it fails with a sliding window as well."""
    change = change_with_length(view, "sinusoidal", 2, stride=1)
    if change is None:
        return missing_outcome("sinusoidal evaluated with a sliding window")
    reason = f"{change}; {WORSE - 1:+.0%} counts as clearly worse."
    return make_outcome(above(change, WORSE - 1), f"{change.format_before_after} at twice", reason, change)


@claim(
    "early-tokens",
    "512 to 1,024: 0.92 without overlap (19.73 to 18.81), 0.06 with stride 1 (17.98 to 17.92)",
    rule=BY_CHANCE,
)
def early_tokens(view: ScaleView) -> Outcome:
    """What ALiBi gains from longer inputs comes mostly from fewer predictions with little context."""
    runs = view.runs(trained("alibi"))
    sliding_query, plain_query = queries(view.scale, EvalProtocol(BASE, stride=1))
    lengths = [view.scale.length(times * BASE) for times in (1, 2)]
    found = [run.rows(query) for run in runs[:1] for query in (plain_query, sliding_query)]
    read = [rows[length] for rows in found for length in lengths if length in rows]
    rows = [row for row, _ in read if row.status == "scored"]
    if len(rows) < 4:
        return missing_outcome("ALiBi evaluated with and without overlap on the same text")
    plain, sliding = rows[0].perplexity - rows[1].perplexity, rows[2].perplexity - rows[3].perplexity
    text = f"1 to 2 times: {plain:.2f} without overlap, {sliding:.2f} with stride {view.scale.stride(1)}"
    reason = "It holds when less than half of the gain is left with a sliding window."
    gains = [interval(first, second) or (0.0, 0.0) for first, second in (rows[:2], rows[2:])]
    chance = sum(share * (high - low) / 2 for share, (low, high) in zip((0.5, 1.0), gains, strict=True))
    left = math.log(rows[2].perplexity / rows[3].perplexity) - math.log(rows[0].perplexity / rows[1].perplexity) / 2
    change = RatioWithInterval(left, left - chance, left + chance, tuple(path for _, path in read))
    return make_outcome(below(change, 0) if plain > 0 else "does not hold", text, reason, change)


@claim("optimum-near-2l", "1.3B, trained at 512: 9.79, best 9.30 at 1,012, then 9.96 at 10,512")
def optimum(view: ScaleView) -> Outcome:
    """With much data and a large model ALiBi is best near twice its length, then rises mildly (a limit of the
    method)."""
    if view.scale.uses_single_corpus:
        return missing_outcome("the 1.3B model on CC100+RoBERTa; a small model on little text says nothing about it")
    found = sweep(view, Variant("cc100", "alibi", BASE)).values()
    rows = [row for row, _ in found if row.status == "scored"]
    if len(rows) < 3:
        return missing_outcome("the 1.3B model evaluated at many lengths (`--only fig6`)")
    best = min(rows, key=lambda row: row.perplexity)
    near = 1.5 * BASE <= best.length <= 3 * BASE
    text = f"best {best.perplexity:.2f} at {best.length:,}; {rows[-1].perplexity:.2f} at {rows[-1].length:,}"
    measured = MeasuredCell((best.perplexity,), tuple(path for _, path in found))
    return make_outcome(verdict(near), text, "Near means between 1.5 and 3 times the length.", measured)
