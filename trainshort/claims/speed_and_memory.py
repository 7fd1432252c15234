"""Claims about speed and memory."""

import math
from itertools import pairwise

from trainshort.claims.extrapolation import BASE
from trainshort.claims.measured import Measured, View
from trainshort.claims.verdicts import Outcome, Rule, claim, missing, sources, verdict
from trainshort.recipes.experiments import EvalProtocol
from trainshort.recipes.scales import Variant

NEEDS = "the costs of the four methods (`--only demo` or `table1`)"


def cost(view: View, position: str, quantity: str) -> Measured | None:
    return view.cost(Variant("wikitext103", position, BASE), quantity)


def noise_of(view: View, position: str) -> float:
    return view.cost_noise(Variant("wikitext103", position, BASE), "train speed")


@claim(
    "same-speed",
    "ALiBi trains within 1 % of sinusoidal's speed.",
    "28.3k against 28.5k tokens/s (-0.7 %)",
    rule=Rule("6146f30", "2026-11-16", seen=True, change="a difference within the machine's noise is no longer judged"),
)
def same_speed(view: View) -> Outcome:
    alibi, sinusoidal = (cost(view, method, "train speed") for method in ("alibi", "sinusoidal"))
    if alibi is None or sinusoidal is None:
        return missing(NEEDS)
    change = alibi.value / sinusoidal.value - 1
    noise = 2 * math.hypot(*(noise_of(view, method) for method in ("alibi", "sinusoidal")))
    text = f"{alibi.value:,.0f} against {sinusoidal.value:,.0f} tokens/s ({change:+.1%}, ± {noise:.1%})"
    if abs(change + 0.01) < noise:
        reason = "It holds when ALiBi is at most 1 % slower; this machine's speed varies too much to tell."
        return Outcome("not testable at this scale", text, reason, sources(alibi, sinusoidal))
    reason = "It holds when ALiBi is at most 1 % slower; medians of rounds in turns, on this machine."
    return Outcome(verdict(change >= -0.01), text, reason, sources(alibi, sinusoidal))


@claim(
    "same-memory",
    "ALiBi needs hardly more memory than sinusoidal to train: under 1 %, and at most 100 MB.",
    "15.3 against 15.3 GB at 512, 19.3 against 19.2 at 1,024",
)
def same_memory(view: View) -> Outcome:
    alibi, sinusoidal = (cost(view, method, "train memory") for method in ("alibi", "sinusoidal"))
    if alibi is None or sinusoidal is None:
        return missing(NEEDS)
    more = 1e3 * (alibi.value - sinusoidal.value)
    text = f"{alibi.value:.3f} against {sinusoidal.value:.3f} GB ({more:+.0f} MB)"
    reason = "It holds up to 1 % or 100 MB more, whichever is less here; peak above the idle program."
    return Outcome(verdict(more <= min(100, 10 * sinusoidal.value)), text, reason, sources(alibi, sinusoidal))


@claim(
    "others-slower",
    "Rotary and the T5 bias train more slowly than sinusoidal.",
    "at 512: rotary -30 %, T5 bias -49 %, in the authors' code",
)
def others_slower(view: View) -> Outcome:
    base, rotary, t5 = (cost(view, method, "train speed") for method in ("sinusoidal", "rotary", "t5"))
    if base is None or rotary is None or t5 is None:
        return missing(NEEDS)
    changes = [one.value / base.value - 1 for one in (rotary, t5)]
    text = f"rotary {changes[0]:+.1%}, T5 bias {changes[1]:+.1%}"
    reason = (
        "It holds when both are more than 1 % slower. The size of the gap is a matter of the code, as the paper says."
    )
    return Outcome(verdict(max(changes) < -0.01), text, reason, sources(base, rotary, t5))


@claim(
    "sooner",
    "Trained at 1,024, ALiBi reaches a perplexity at 2,048 about 11 % sooner than sinusoidal trained at 2,048.",
    "1.3B: 11 % sooner on the mean of five points, 26.2 against 29.3 GB",
)
def sooner(view: View) -> Outcome:
    reading = EvalProtocol(2048)
    short, long = Variant("cc100", "alibi", 1024), Variant("cc100", "sinusoidal", 2048)
    speeds = [view.cost(one, "train speed") for one in (short, long)]
    curves = [view.curve(one, reading) for one in (short, long)]
    if any(speed is None for speed in speeds) or any(len(curve) < 2 for curve in curves):
        return missing("both models read at several moments of their training (`--only fig5,table11`)")
    times = [
        [(tokens / speed.value, value) for tokens, value, _ in curve]
        for speed, curve in zip(speeds, curves, strict=True)
        if speed
    ]
    saved = time_saved(*times)
    if saved is None:
        return missing("curves that pass the same perplexities")
    found = tuple(dict.fromkeys(path for curve in curves for *_, path in curve))
    reason = "Time to the same perplexity on the overlapping part of the two curves, from tokens and measured speeds."
    return Outcome(verdict(saved > 0), f"{saved:+.1%} time saved", reason, found + sources(*speeds))


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
