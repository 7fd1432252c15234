"""Where the paper does not agree with itself, and a run can say something. "Holds": the oddity is seen here too."""

from trainshort.claims.extrapolation import BASE, FLAT, LONG, SHORT, at_length, further, ppl, trained
from trainshort.claims.measured import View
from trainshort.claims.verdicts import BY_CHANCE, Outcome, above, below, claim, missing, outcome, verdict
from trainshort.recipes.experiments import Variant


@claim("every-length", "at 64: 28.46 against 28.03; at 128: 23.98 against 23.81", oddity=True)
def every_length(view: View) -> Outcome:
    """The text has ALiBi ahead of sinusoidal at every training length; the table has it behind at the two shortest."""
    pairs = {at: [ppl(view, trained(one, at), at) for one in ("alibi", "sinusoidal")] for at in (64, 128)}
    known = [(at, alibi, other) for at, (alibi, other) in pairs.items() if alibi and other]
    if not known:
        return missing("models trained at the paper's 64 and 128, which this scale leaves out")
    text = "; ".join(f"{a.value:.2f} against {s.value:.2f} at {view.scale.length(at)}" for at, a, s in known)
    ahead = all(s.value < a.value for _, a, s in known)
    both = (one for _, *both in known for one in both)
    return outcome(verdict(ahead), text, "It holds when sinusoidal is ahead.", *both)


@claim("t5-ahead", "19.65 against 19.73", oddity=True, rule=BY_CHANCE)
def t5_ahead(view: View) -> Outcome:
    """The T5 bias is slightly ahead of ALiBi at 512; the text claims ALiBi's superiority only for 1,024 and 3,072."""
    change = at_length(view, BASE, "t5", "alibi")
    if change is None:
        return missing("ALiBi and T5 models of one length")
    reason = f"T5 is {change} from ALiBi. It holds when T5 is ahead."
    return outcome(below(change, 0), change.against, reason, change)


@claim("t5-not-flat", "17.92 at 512, 22.62 at 2,048", oddity=True, rule=BY_CHANCE)
def t5_not_flat(view: View) -> Outcome:
    """The T5 bias is called relatively flat under stride 1, but rises by 26 % at four times its length."""
    change = further(view, "t5", 4, stride=1)
    if change is None:
        return missing("T5 evaluated with a sliding window")
    reason = f"{change}. It holds when the rise is more than {FLAT:.0%}."
    return outcome(above(change, FLAT), change.then, reason, change)


@claim("significant", "1.1 deviations", oddity=True)
def significant(view: View) -> Outcome:
    """18.40 against 18.67 ± 0.24 is called significant; it is 1.1 deviations, against one ALiBi run."""
    short, long = (ppl(view, one, LONG.length) for one in (SHORT, LONG))
    if short is None or long is None or long.spread is None:
        return missing("several seeds of sinusoidal at the longest length (`--only table6 --seeds 3`)")
    deviations = (long.value - short.value) / long.spread
    text = f"{deviations:.1f} deviations ({short.value:.2f} against {long.value:.2f} ± {long.spread:.2f})"
    told = verdict(abs(deviations) < 2)
    return outcome(told, text, "It holds when the gap is below two deviations.", short, long)


@claim("stride-512", "sinusoidal 17.95 against 18.03; T5 17.37 against 17.41", oddity=True)
def coarse_stride(view: View) -> Outcome:
    """At 3,072 a stride of 512 is slightly better than a stride of 1, though it gives less context."""
    coarse, fine = (ppl(view, LONG, LONG.length, stride) for stride in (512, 1))
    if coarse is None or fine is None:
        return missing("sinusoidal at the longest length with both strides (`--only table7,table13`)")
    text = f"{coarse.value:.2f} against {fine.value:.2f}"
    told = verdict(coarse.value < fine.value)
    return outcome(told, text, "It holds when the coarse stride is better.", coarse, fine)


@claim("sliding-worse", "13.76 against 13.55", oddity=True)
def sliding_worse(view: View) -> Outcome:
    """On BookCorpus ALiBi trained at 512 and evaluated at 3,072 is worse with a sliding window than without."""
    sliding, plain = (ppl(view, Variant("books", "alibi", BASE), 3072, stride) for stride in (512, None))
    if sliding is None or plain is None:
        return missing("ALiBi evaluated at six times its length both ways (`--only table9,table10`)")
    stands = " The embedded corpus stands for BookCorpus." if view.scale.stand_in else ""
    text = f"{sliding.value:.2f} against {plain.value:.2f}"
    told = verdict(sliding.value > plain.value)
    return outcome(told, text, f"It holds when the window is worse.{stands}", sliding, plain)
