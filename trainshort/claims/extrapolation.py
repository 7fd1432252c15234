"""Claims about perplexity: how far each method is good, and why.

Thresholds were set before any run was looked at. That a difference within chance is called "cannot tell" came later,
and is said at each claim (`rule`).
"""

import math
from itertools import pairwise

from trainshort.claims.measured import Compared, Measured, View
from trainshort.claims.verdicts import (
    BY_CHANCE,
    Outcome,
    Rule,
    Verdict,
    above,
    below,
    claim,
    detectable,
    every,
    missing,
    opposite,
    sources,
    verdict,
)
from trainshort.evaluate.results import interval
from trainshort.methods import PAPER as ORDER
from trainshort.recipes.experiments import EvalProtocol, method_name, queries
from trainshort.recipes.scales import Variant

BASE = 512
"""The training length of the demo and of Figure 1's left half, in the paper's numbers."""
SLACK = 1.01
"""A perplexity counts as no worse up to this many times the one at the training length."""
WORSE = 1.10
"""Clearly worse: ten per cent."""
FLAT = 0.03
"""Flat: within three per cent (the paper's own ALiBi rows move by 1.8 and 2.6 per cent)."""


def ppl(view: View, position: str, at: float, *, length: int = BASE, stride: int | None = None) -> Measured | None:
    """Perplexity of a WikiText-103 model read at a multiple of its training length."""
    found = view.read(Variant("wikitext103", position, length), EvalProtocol(round(length * at), stride))
    return found if found and found.values else None


def further(view: View, position: str, at: float, stride: int | None = None) -> Compared | None:
    """How much more perplexity a model has at a multiple of its length than at its length."""
    variant = Variant("wikitext103", position, BASE)
    return view.perplexities((variant, EvalProtocol(round(BASE * at), stride)), (variant, EvalProtocol(BASE, stride)))


def usable(view: View, position: str) -> tuple[int, bool, Measured] | None:
    """The longest length without a worse one before it, whether nothing longer was tried, and the base."""
    base = ppl(view, position, 1)
    runs = view.runs(Variant("wikitext103", position, BASE))
    rows = [row for row, _ in view.rows(runs[0], EvalProtocol(BASE)).values()] if runs else []
    rows = [row for row in rows if row.length >= view.scale.length(BASE)]
    if base is None or not rows:
        return None
    longest, opened = rows[0].length, True
    for row in rows:
        if row.status != "scored" or row.perplexity > SLACK * rows[0].perplexity:
            opened = False
            break
        longest = row.length
    return longest, opened, base


def bounds(view: View, position: str) -> tuple[float, float]:
    """The longest length up to which a method is surely no worse than at its own, and the first at which it surely is;
    lengths in between cannot be told from chance."""
    good, bad = float(view.scale.length(BASE)), math.inf
    runs = view.runs(Variant("wikitext103", position, BASE))
    lengths = sorted(view.rows(runs[0], EvalProtocol(BASE))) if runs else []
    for length in (one for one in lengths if one > good):
        change = further(view, position, length / view.scale.length(BASE))
        told = above(change, SLACK - 1) if change else "holds"  # a method that cannot be read there is worse there
        if told == "holds":
            return good, length
        good = length if told == "does not hold" else good
    return good, bad


@claim(
    "extrapolation-order",
    "Sinusoidal positions stop being useful soonest, then rotary, then the T5 bias; ALiBi goes farthest.",
    "trained at 512, best at 512 + 20…50, + 200, + 600 and + 12,000 or more",
    rule=Rule(
        "a8d97b8",
        "2026-11-16",
        seen=True,
        change="methods that were not read equally far are not compared, nor differences within chance",
    ),
)
def extrapolation_order(view: View) -> Outcome:
    found = {method: usable(view, method) for method in ORDER}
    if any(one is None for one in found.values()):
        return missing("the four methods trained at one length (`--only demo`)")
    reach = [one[0] for one in found.values() if one]
    if any(one and one[1] and one[0] < max(reach) for one in found.values()):
        return missing("the four methods read equally far (`--only demo`)")  # a short one may yet go on
    text = ", ".join(f"{method_name(m)} {one[0]:,}{'+' if one[1] else ''}" for m, one in found.items() if one)
    reason = f"Longest length at most {SLACK - 1:.0%} above the perplexity at its own; +: no longer one was tried. "
    reason += "One stops sooner than the next when it is surely worse at a length up to which the next surely is not."
    told = every(_sooner(bounds(view, one), bounds(view, other)) for one, other in pairwise(ORDER))
    least = detectable(*(further(view, method, 2) for method in ORDER))
    return Outcome(told, text, reason, sources(*(one[2] for one in found.values() if one)), least)


def _sooner(one: tuple[float, float], other: tuple[float, float]) -> Verdict:
    if one[1] <= other[0]:
        return "holds"
    return "does not hold" if other[1] <= one[0] else "cannot tell"


@claim(
    "alibi-holds",
    "ALiBi is no worse at many times its training length.",
    "19.73 at 512, 18.34 at 8,512 (16.6 times)",
    rule=BY_CHANCE,
)
def alibi_holds(view: View) -> Outcome:
    base, far, change = ppl(view, "alibi", 1), ppl(view, "alibi", 16), further(view, "alibi", 16)
    if base is None or far is None or change is None:
        return missing("an ALiBi model read at 1 and 16 times its length")
    reason = f"{change}; up to {SLACK - 1:+.0%} counts as no worse."
    text = f"{base.value:.2f}, then {far.value:.2f} at 16 times"
    return Outcome(opposite(above(change, SLACK - 1)), text, reason, change.sources, detectable(change))


@claim(
    "sinusoidal-fails",
    "Sinusoidal positions fail soon after the training length.",
    "20.05 at 512, 43.54 at 1,012, 305.65 at 8,512",
    rule=BY_CHANCE,
)
def sinusoidal_fails(view: View) -> Outcome:
    base, double, far = (ppl(view, "sinusoidal", times) for times in (1, 2, 16))
    change = further(view, "sinusoidal", 2)
    if base is None or double is None or change is None:
        return missing("a sinusoidal model read at 1 and 2 times its length")
    text = f"{base.value:.2f}, then {double.value:.2f} at twice" + (f", {far.value:.2f} at 16 times" if far else "")
    reason = f"{change} at twice the length; {WORSE - 1:+.0%} counts as clearly worse."
    return Outcome(above(change, WORSE - 1), text, reason, sources(base, double, far), detectable(change))


@claim(
    "short-beats-long",
    "ALiBi trained at 512 and read at 3,072 beats sinusoidal trained at 3,072, on equally many tokens.",
    "18.40 against 18.67 ± 0.24",
    rule=BY_CHANCE,
)
def short_beats_long(view: View) -> Outcome:
    short, long = ppl(view, "alibi", 6), ppl(view, "sinusoidal", 1, length=3072)
    far = EvalProtocol(3072)
    models = (Variant("wikitext103", "alibi", BASE), far), (Variant("wikitext103", "sinusoidal", 3072), far)
    change = view.perplexities(*models)
    if short is None or long is None or change is None:
        return missing("sinusoidal trained at six times the length (`--only demo` or `table6`)")
    reason = f"ALiBi is {change} from sinusoidal; both saw equally many tokens."
    text = f"{short.value:.2f} against {long.value:.2f}"
    return Outcome(below(change, 0), text, reason, change.sources, detectable(change))


@claim(
    "recency-helps",
    "ALiBi is better than sinusoidal already at the training length: preferring near tokens helps.",
    "19.73 against 20.05 at 512; 17.60 against 18.67 at 3,072",
    rule=BY_CHANCE,
)
def recency_helps(view: View) -> Outcome:
    pairs = []
    for length in view.scale.lengths:
        alibi, sinusoidal = (ppl(view, method, 1, length=length) for method in ("alibi", "sinusoidal"))
        models = ((Variant("wikitext103", method, length), EvalProtocol(length)) for method in ("alibi", "sinusoidal"))
        change = view.perplexities(*models)
        if alibi and sinusoidal and change:
            pairs.append((view.scale.length(length), alibi, sinusoidal, change))
    if not pairs:
        return missing("ALiBi and sinusoidal models of one length")
    text = "; ".join(f"{a.value:.2f} against {s.value:.2f} at {length:,}" for length, a, s, _ in pairs)
    found: list[Verdict] = [below(change, 0) for *_, change in pairs]
    reason = f"ALiBi is better at {found.count('holds')} of {len(pairs)} lengths."
    files = sources(*(one for _, a, s, _ in pairs for one in (a, s)))
    return Outcome(every(found), text, reason, files, detectable(*(change for *_, change in pairs)))


@claim(
    "flat-sliding",
    "With a sliding window ALiBi's curve is flat: it does not use more context than it was trained with.",
    "stride 1: 17.98 at 512, 17.92 at 1,024, 18.28 at 2,048",
    rule=BY_CHANCE,
)
def flat_sliding(view: View) -> Outcome:
    rows = [ppl(view, "alibi", times, stride=1) for times in (1, 2, 4)]
    changes = [further(view, "alibi", times, stride=1) for times in (2, 4)]
    if any(row is None for row in rows):
        return missing("ALiBi read with a sliding window at 1, 2 and 4 times its length")
    known = [change for change in changes if change]
    reason = f"{' and '.join(map(str, known))}; up to {FLAT:.0%} either way counts as flat. "
    reason += f"The stride here is {view.scale.stride(1)}."
    text = ", ".join(f"{row.value:.2f}" for row in rows if row) + " at 1, 2, 4 times"
    flat = every(part for one in known for part in (opposite(above(one, FLAT)), above(one, -FLAT)))
    return Outcome(flat, text, reason, sources(*rows), detectable(*known))


@claim(
    "sliding-no-rescue",
    "Sinusoidal's failure is no matter of evaluation: it fails with a sliding window as well.",
    "stride 1: 18.35 at 512, 204.42 at 1,024",
    rule=BY_CHANCE,
)
def sliding_no_rescue(view: View) -> Outcome:
    base, double = (ppl(view, "sinusoidal", times, stride=1) for times in (1, 2))
    change = further(view, "sinusoidal", 2, stride=1)
    if base is None or double is None or change is None:
        return missing("sinusoidal read with a sliding window")
    reason = f"{change}; {WORSE - 1:+.0%} counts as clearly worse."
    text = f"{base.value:.2f}, then {double.value:.2f} at twice"
    return Outcome(above(change, WORSE - 1), text, reason, change.sources, detectable(change))


@claim(
    "early-tokens",
    "What ALiBi gains from longer inputs comes mostly from fewer predictions with little context.",
    "512 to 1,024: 0.92 without overlap (19.73 to 18.81), 0.06 with stride 1 (17.98 to 17.92)",
    rule=BY_CHANCE,
)
def early_tokens(view: View) -> Outcome:
    runs = view.runs(Variant("wikitext103", "alibi", BASE))
    sliding_query, plain_query = queries(view.scale, EvalProtocol(BASE, stride=1))
    lengths = [view.scale.length(times * BASE) for times in (1, 2)]
    found = [run.rows(query) for run in runs[:1] for query in (plain_query, sliding_query)]
    read = [rows[length] for rows in found for length in lengths if length in rows]
    rows = [row for row, _ in read if row.status == "scored"]
    if len(rows) < 4:
        return missing("ALiBi read with and without overlap on the same text")
    plain, sliding = rows[0].perplexity - rows[1].perplexity, rows[2].perplexity - rows[3].perplexity
    text = f"1 to 2 times: {plain:.2f} without overlap, {sliding:.2f} with stride {view.scale.stride(1)}"
    reason = "It holds when less than half of the gain is left with a sliding window."
    gains = [interval(first, second) or (0.0, 0.0) for first, second in (rows[:2], rows[2:])]
    chance = sum(share * (high - low) / 2 for share, (low, high) in zip((0.5, 1.0), gains, strict=True))
    left = math.log(rows[2].perplexity / rows[3].perplexity) - math.log(rows[0].perplexity / rows[1].perplexity) / 2
    files = tuple(dict.fromkeys(path for _, path in read))
    found = Compared(left, left - chance, left + chance, files)
    told = below(found, 0) if plain > 0 else "does not hold"
    return Outcome(told, text, reason, files, detectable(found))


@claim(
    "optimum-near-2l",
    "With much data and a large model ALiBi is best near twice its length, then rises mildly (a limit of the method).",
    "1.3B, trained at 512: 9.79, best 9.30 at 1,012, then 9.96 at 10,512",
)
def optimum(view: View) -> Outcome:
    if view.scale.stand_in:
        return missing("the 1.3B model on CC100+RoBERTa; a small model on little text says nothing about it")
    variant = Variant("cc100", "alibi", BASE)
    runs = view.runs(variant)
    found = view.rows(runs[0], EvalProtocol(BASE)).values() if runs else ()
    rows = [row for row, _ in found if row.status == "scored"]
    if len(rows) < 3:
        return missing("the 1.3B model read at many lengths (`--only fig6`)")
    best = min(rows, key=lambda row: row.perplexity)
    files = tuple(dict.fromkeys(path for _, path in found))
    near = 1.5 * BASE <= best.length <= 3 * BASE
    text = f"best {best.perplexity:.2f} at {best.length:,}; {rows[-1].perplexity:.2f} at {rows[-1].length:,}"
    return Outcome(verdict(near), text, "Near means between 1.5 and 3 times the length.", files)
