"""Claims about speed and memory."""

from itertools import pairwise

from trainshort.experiments.claims.extrapolation import BASE_LENGTH, wikitext_variant
from trainshort.experiments.claims.measured import MeasuredCell, RatioWithInterval, ScaleView
from trainshort.experiments.claims.verdicts import (
    Outcome,
    Rule,
    combine_verdicts,
    judge_above,
    judge_below,
    make_outcome,
    missing_outcome,
    negate_verdict,
    register_claim,
)
from trainshort.experiments.experiments import EvalProtocol, Variant
from trainshort.experiments.tables import COST_LENGTHS

NEEDS = "the costs of the four methods, measured in turns (`--only demo` or `table1`)"
BY_ROUNDS = Rule(
    "36d23a9",
    "2026-11-16",
    results_were_known=True,
    change="one rule for all methods, by paired rounds, at every length that was measured",
)
BY_WEIGHINGS = Rule(
    "1d2079f",
    "2026-11-17",
    results_were_known=True,
    change="each is weighed several times, and their spread is the noise",
)
LENGTHS = (BASE_LENGTH, *COST_LENGTHS)
"""Training lengths at which speeds are compared, in the paper's numbers; those that were measured count."""


def faster(view: ScaleView, position: str) -> dict[int, RatioWithInterval]:
    """How much faster a method trains than sinusoidal, by length."""
    found = {
        at: view.compare_speeds(wikitext_variant(position, at), wikitext_variant("sinusoidal", at)) for at in LENGTHS
    }
    return {view.scale.scale_length(at): one for at, one in found.items() if one}


def at_lengths(found: dict[int, RatioWithInterval]) -> str:
    return "; ".join(f"{one} at {length:,}" for length, one in found.items())


@register_claim("same-speed", "28.3k against 28.5k tokens/s (-0.7 %)", rule=BY_ROUNDS)
def same_speed(view: ScaleView) -> Outcome:
    """ALiBi trains within 1 % of sinusoidal's speed."""
    found = faster(view, "alibi")
    if not found:
        return missing_outcome(NEEDS)
    reason = "It holds when ALiBi is at most 1 % slower at every length; rounds compared one by one, on this machine."
    told = combine_verdicts(judge_above(one, -0.01) for one in found.values())
    return make_outcome(told, at_lengths(found), reason, *found.values())


@register_claim("same-memory", "15.3 against 15.3 GB at 512, 19.3 against 19.2 at 1,024", rule=BY_WEIGHINGS)
def same_memory(view: ScaleView) -> Outcome:
    """ALiBi needs hardly more memory than sinusoidal to train: under 1 %, and at most 100 MB."""
    alibi, sinusoidal = (view.find_cost(wikitext_variant(method), "train memory") for method in ("alibi", "sinusoidal"))
    change = view.compare_memories(wikitext_variant("alibi"), wikitext_variant("sinusoidal"))
    if alibi is None or sinusoidal is None or change is None:
        return missing_outcome(NEEDS)
    text = f"{alibi.value:.3f} against {sinusoidal.value:.3f} GB"
    reason = f"{change}; it holds up to 1 % or 100 MB more, whichever is less here. Peak above the idle program."
    return make_outcome(negate_verdict(judge_above(change, min(0.01, 0.1 / sinusoidal.value))), text, reason, change)


@register_claim("others-slower", "at 512: rotary -30 %, T5 bias -49 %, in the authors' code", rule=BY_ROUNDS)
def others_slower(view: ScaleView) -> Outcome:
    """Rotary and the T5 bias train more slowly than sinusoidal."""
    rotary, t5 = faster(view, "rotary"), faster(view, "t5")
    if not rotary or not t5:
        return missing_outcome(NEEDS)
    found = [*rotary.values(), *t5.values()]
    text = f"rotary {at_lengths(rotary)}. T5 bias {at_lengths(t5)}"
    reason = "It holds when both are more than 1 % slower at every length, by the rule of ALiBi's own speed. "
    reason += "The size of the gap is a matter of the code, as the paper says."
    return make_outcome(combine_verdicts(judge_below(one, -0.01) for one in found), text, reason, *found)


@register_claim(
    "sooner",
    "1.3B: 11 % sooner on the mean of five points, 26.2 against 29.3 GB",
    rule=Rule(
        "a8d97b8",
        "2026-11-16",
        results_were_known=True,
        change="where these two were not trained, 512 and 3,072 take their place; speeds are compared by rounds",
    ),
)
def check_time_to_perplexity(view: ScaleView) -> Outcome:
    """Trained at 1,024, ALiBi reaches a perplexity at 2,048 about 11 % sooner than sinusoidal trained at 2,048."""
    for setup, near, far in (("cc100", 1024, 2048), ("wikitext103", BASE_LENGTH, 3072)):
        if found := _time_to_perplexity_outcome(view, Variant(setup, "alibi", near), Variant(setup, "sinusoidal", far)):
            return found
    return missing_outcome(
        "both models evaluated at several moments of their training (`--only demo` or `fig5,table11`)"
    )


def _time_to_perplexity_outcome(view: ScaleView, short: Variant, long: Variant) -> Outcome | None:
    speed = view.compare_speeds(short, long)
    curves = [view.find_learning_curve(one, EvalProtocol(long.length)) for one in (short, long)]
    if speed is None or any(len(curve) < 2 for curve in curves):
        return None
    learned = [[(float(tokens), value) for tokens, value, _ in curve] for curve in curves]
    found = tuple(path for curve in curves for *_, path in curve) + speed.sources
    lengths = f"{view.scale.scale_length(short.length):,} against {view.scale.scale_length(long.length):,}"
    reason = "Time to the same perplexity on the overlapping part of the two curves, from tokens and paired speeds; "
    reason += "the interval is that of the speeds."
    if learned[0][0][1] < learned[1][-1][1]:
        text = f"ALiBi at its first evaluation is better than sinusoidal at its end (trained at {lengths})"
        return make_outcome("holds", text, reason, MeasuredCell((), found))
    fewer = time_saved(*learned)
    if fewer is None:
        return make_outcome(
            "does not hold", f"ALiBi never gets there (trained at {lengths})", reason, MeasuredCell((), found)
        )
    # As many tokens sooner, each of them faster: 1 − (share of the tokens) / (how many times as fast).
    change, low, high = (1 - (1 - fewer) / (1 + one) for one in (speed.change, speed.low, speed.high))
    saved = RatioWithInterval(change, low, high, found)
    return make_outcome(judge_above(saved, 0), f"{saved} time saved (trained at {lengths})", reason, saved)


def time_saved(short: list[tuple[float, float]], long: list[tuple[float, float]]) -> float | None:
    """Mean share of the longer model's time that the shorter one saves, at five perplexities both curves pass.

    curves (time, perplexity):  short (1, 20) (2, 10)   long (2, 20) (4, 10)   →   0.5
    """
    low, high = max(short[-1][1], long[-1][1]), min(short[0][1], long[0][1])
    if not low < high:
        return None
    points = [low + (high - low) * k / 4 for k in range(5)]
    savings = [1 - _when(short, point) / _when(long, point) for point in points]
    return sum(savings) / len(savings)


def _when(curve: list[tuple[float, float]], value: float) -> float:
    """Time at which a falling curve first reaches a perplexity, by straight lines between its points."""
    for (t0, p0), (t1, p1) in pairwise(curve):
        if p1 <= value <= p0:
            return t0 + (t1 - t0) * ((p0 - value) / (p0 - p1) if p0 > p1 else 0.0)
    return curve[-1][0]
