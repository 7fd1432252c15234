"""Where the paper does not agree with itself, and a run can say something. "Holds": the oddity is seen here too."""

from trainshort.claims.extrapolation import BASE, FLAT, further, ppl
from trainshort.claims.measured import View
from trainshort.claims.verdicts import BY_CHANCE, Outcome, above, below, claim, detectable, missing, sources, verdict
from trainshort.recipes.experiments import EvalProtocol
from trainshort.recipes.scales import Variant


@claim(
    "every-length",
    "The text has ALiBi ahead of sinusoidal at every training length; the table has it behind at the two shortest.",
    "at 64: 28.46 against 28.03; at 128: 23.98 against 23.81",
    oddity=True,
)
def every_length(view: View) -> Outcome:
    pairs = [
        (length, ppl(view, "alibi", 1, length=length), ppl(view, "sinusoidal", 1, length=length))
        for length in (64, 128)
    ]
    known = [(length, a, s) for length, a, s in pairs if a and s]
    if not known:
        return missing("models trained at the paper's 64 and 128, which this scale leaves out")
    text = "; ".join(f"{a.value:.2f} against {s.value:.2f} at {view.scale.length(length)}" for length, a, s in known)
    ahead = all(s.value < a.value for _, a, s in known)
    return Outcome(
        verdict(ahead), text, "It holds when sinusoidal is ahead.", sources(*(m for _, a, s in known for m in (a, s)))
    )


@claim(
    "t5-ahead",
    "The T5 bias is slightly ahead of ALiBi at 512; the text claims ALiBi's superiority only for 1,024 and 3,072.",
    "19.65 against 19.73",
    oddity=True,
    rule=BY_CHANCE,
)
def t5_ahead(view: View) -> Outcome:
    alibi, t5 = ppl(view, "alibi", 1), ppl(view, "t5", 1)
    models = ((Variant("wikitext103", method, BASE), EvalProtocol(BASE)) for method in ("t5", "alibi"))
    change = view.perplexities(*models)
    if alibi is None or t5 is None or change is None:
        return missing("ALiBi and T5 models of one length")
    text = f"{t5.value:.2f} against {alibi.value:.2f}"
    reason = f"T5 is {change} from ALiBi. It holds when T5 is ahead."
    return Outcome(below(change, 0), text, reason, change.sources, detectable(change))


@claim(
    "t5-not-flat",
    "The T5 bias is called relatively flat under stride 1, but rises by 26 % at four times its length.",
    "17.92 at 512, 22.62 at 2,048",
    oddity=True,
    rule=BY_CHANCE,
)
def t5_not_flat(view: View) -> Outcome:
    base, far, change = ppl(view, "t5", 1, stride=1), ppl(view, "t5", 4, stride=1), further(view, "t5", 4, stride=1)
    if base is None or far is None or change is None:
        return missing("T5 read with a sliding window")
    reason = f"{change}. It holds when the rise is more than {FLAT:.0%}."
    text = f"{base.value:.2f}, then {far.value:.2f}"
    return Outcome(above(change, FLAT), text, reason, change.sources, detectable(change))


@claim(
    "significant",
    "18.40 against 18.67 ± 0.24 is called significant; it is 1.1 deviations, against one ALiBi run.",
    "1.1 deviations",
    oddity=True,
)
def significant(view: View) -> Outcome:
    short, long = ppl(view, "alibi", 6), ppl(view, "sinusoidal", 1, length=3072)
    if short is None or long is None or long.spread is None:
        return missing("several seeds of sinusoidal at the longest length (`--only table6 --seeds 3`)")
    deviations = (long.value - short.value) / long.spread
    text = f"{deviations:.1f} deviations ({short.value:.2f} against {long.value:.2f} ± {long.spread:.2f})"
    return Outcome(
        verdict(abs(deviations) < 2), text, "It holds when the gap is below two deviations.", sources(short, long)
    )


@claim(
    "stride-512",
    "At 3,072 a stride of 512 is slightly better than a stride of 1, though it gives less context.",
    "sinusoidal 17.95 against 18.03; T5 17.37 against 17.41",
    oddity=True,
)
def coarse_stride(view: View) -> Outcome:
    variant = Variant("wikitext103", "sinusoidal", 3072)
    coarse, fine = (view.read(variant, EvalProtocol(3072, stride)) for stride in (512, 1))
    if coarse is None or fine is None or not coarse.values or not fine.values:
        return missing("sinusoidal at the longest length with both strides (`--only table7,table13`)")
    text = f"{coarse.value:.2f} against {fine.value:.2f}"
    return Outcome(
        verdict(coarse.value < fine.value), text, "It holds when the coarse stride is better.", sources(coarse, fine)
    )


@claim(
    "sliding-worse",
    "On BookCorpus ALiBi trained at 512 and read at 3,072 is worse with a sliding window than without.",
    "13.76 against 13.55",
    oddity=True,
)
def sliding_worse(view: View) -> Outcome:
    variant = Variant("books", "alibi", BASE)
    sliding, plain = (view.read(variant, EvalProtocol(3072, stride)) for stride in (512, None))
    if sliding is None or plain is None or not sliding.values or not plain.values:
        return missing("ALiBi read at six times its length both ways (`--only table9,table10`)")
    reason = "It holds when the window is worse." + (
        " The embedded corpus stands for BookCorpus." if view.scale.stand_in else ""
    )
    return Outcome(
        verdict(sliding.value > plain.value),
        f"{sliding.value:.2f} against {plain.value:.2f}",
        reason,
        sources(sliding, plain),
    )
