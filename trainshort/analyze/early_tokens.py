"""The early-token curse (the paper's Appendix B) as numbers: why does reading longer blocks help?

Without overlap, the first tokens of every block have little context; longer blocks have fewer of them. With stride 1
every token has full context, so going from L to a longer length can only help if the longer context itself does. With
N(l) and S(l) the losses at length l without overlap and with stride 1:

    gain of reading at l      N(L) − N(l)   =   [S(L) − S(l)]   +   [(N(L) − S(L)) − (N(l) − S(l))]
                                                longer context       fewer early tokens

Stride 1 reads length tokens for each one that it scores. So S is measured on a random sample of targets, and
only in differences on the same targets, which vary far less than losses: S(L) as N(L) over all targets less the
sample's mean of N − S at L; S(l) as S(L) less the sample's mean of S(L) − S(l). With as many samples as targets this is
stride 1 itself.
"""

from typing import Any

import numpy as np
from rich.console import Group

from trainshort.analyze.base import Analysis, Lab, analyses, mean_interval, new_table, score_rows, titled
from trainshort.evaluate.results import perplexity
from trainshort.evaluate.sweep import score
from trainshort.windows import Windows

PER_SAMPLE = 8
"""Targets measured for each sample that the other analyses take: here a sample is one token, there it is a stretch."""


def run(lab: Lab) -> dict[str, Any]:
    lengths = lab.multiples(1, 2, 4, 8)
    count = min(len(lab.tokens), lab.samples * PER_SAMPLE)
    # Drawn, not every n-th: a fixed step would meet the same few positions of every block.
    chosen = np.sort(lab.rng().choice(len(lab.tokens), size=count, replace=False))
    losses = []
    for length in lengths:
        apart = non_overlapping(lab, length)
        losses.append((apart, stride_one(lab, length, chosen, apart)))
    rows = [_row(length, chosen, losses[0], here) for length, here in zip(lengths, losses, strict=True)]
    return {"summary": summary(rows), "samples": len(chosen), "rows": rows}


def non_overlapping(lab: Lab, length: int) -> np.ndarray:
    """Losses of all targets."""
    windows = Windows(len(lab.tokens), length, length)
    with lab.target.at(None, length):
        parts = list(score(lab.target, lab.tokens, windows, batch_tokens=lab.batch_tokens))
    return np.concatenate(parts).astype(np.float64)


def stride_one(lab: Lab, length: int, chosen: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """Losses of the chosen targets, each the last of `length` that are read. The first `length` targets are read from
    the beginning of the text, as without overlap."""
    losses = apart[chosen].copy()
    later = chosen[chosen >= length]
    if len(later):
        rows = np.stack([np.asarray(lab.tokens[t - length : t + 1]) for t in later])
        losses[chosen >= length] = score_rows(lab.target, rows, 1, lab.batch_tokens)[:, 0]
    return losses


Losses = tuple[np.ndarray, np.ndarray]
"""At one length: of all targets without overlap, and of the chosen ones with stride 1."""


def _row(length: int, chosen: np.ndarray, base: Losses, here: Losses) -> dict[str, Any]:
    """One length against the first; the two parts of the gain add up to it exactly."""
    (base_apart, base_sliding), (apart, sliding) = base, here
    context = base_sliding - sliding
    gain = float(base_apart.mean() - apart.mean())
    stride_1 = float(base_apart.mean() - (base_apart[chosen] - base_sliding).mean() - context.mean())
    return {
        "length": length,
        "tokens": len(apart),
        "non_overlapping": float(apart.mean()),
        "stride_1": stride_1,
        "curse": float(apart.mean()) - stride_1,
        "gain": gain,
        "from_context": float(context.mean()),
        "from_early": gain - float(context.mean()),
        "context_interval": mean_interval(context),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return f"at {first['length']:,} tokens the early-token curse is {first['curse']:.4f} nats"
    if last["gain"] <= 0:
        return f"reading at {last['length']:,} tokens gains nothing over {first['length']:,}"
    return (
        f"of the gain of {last['gain']:.4f} nats from {first['length']:,} to {last['length']:,} tokens, "
        f"{last['from_early']:+.4f} comes from fewer early tokens and {last['from_context']:+.4f} from longer context"
    )


def table(result: dict[str, Any]) -> Group:
    title = f"Early-token curse, stride 1 on {result['samples']:,} targets (gains in nats)"
    shown = new_table(
        "length",
        "ppl apart",
        "stride 1",
        "curse",
        "gain",
        "early",
        "context",
        "± 95 %",
    )
    for row in result["rows"]:
        gains = (f"{row[name]:+.4f}" for name in ("curse", "gain", "from_early", "from_context"))
        ppl = (f"{perplexity(row[name]):.3f}" for name in ("non_overlapping", "stride_1"))
        low, high = row["context_interval"] or (0.0, 0.0)
        shown.add_row(f"{row['length']:,}", *ppl, *gains, f"{(high - low) / 2:.4f}")
    return titled(title, shown)


analyses.register("early-tokens")(Analysis("longer context, or only fewer early tokens?", run, table))
