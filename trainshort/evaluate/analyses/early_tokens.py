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

A loss can differ by position alone: a model that was never trained has losses that depend on where a token stands. So
each part is told only if the context itself is used: other text put in its place, at the same positions, must be
noticed (at L everything but the last token is replaced, at longer lengths everything beyond L).
"""

from typing import Any

import numpy as np
from rich.console import Group

from trainshort.data.passes import Passes
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, compare, new_table, with_title
from trainshort.evaluate.results import block_sums, interval_of
from trainshort.evaluate.significance import Interval, is_significant_decrease, is_significant_increase
from trainshort.utils.terminal import perplexity

PER_SAMPLE = 8
"""Targets measured for each sample that the other analyses take: here a sample is one token, there it is a stretch."""


def scope(lab: AnalysisContext) -> list[int]:
    """The lengths of the blocks."""
    return lab.multiples(1, 2, 4, 8)


def run(lab: AnalysisContext) -> dict[str, Any]:
    lengths = scope(lab)
    count = min(len(lab.tokens), lab.samples * PER_SAMPLE)
    # Drawn, not every n-th: a fixed step would meet the same few positions of every block.
    chosen = np.sort(lab.rng().choice(len(lab.tokens), size=count, replace=False))
    lab.meter.start(sum(len(lab.tokens) + 2 * length * (chosen >= length).sum() for length in lengths))
    losses = []
    for length in lengths:
        apart = lab.score_all(Passes(len(lab.tokens), length, length))
        losses.append((apart, stride_one(lab, length, chosen, apart)))
    rows = []
    for length, here in zip(lengths, losses, strict=True):
        kept = 1 if length == lengths[0] else lengths[0]
        rows.append(
            _row(length, chosen, losses[0], here)
            | {"replaced": loss_increase_with_replaced_context(lab, length, chosen, here[1], kept)}
        )
    return {"summary": summary(rows), "samples": len(chosen), "rows": rows}


def stride_one(lab: AnalysisContext, length: int, chosen: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """Losses of the chosen targets, each the last of `length` that are read. The first `length` targets are read from
    the beginning of the text, as without overlap."""
    losses = apart[chosen].copy()
    later = chosen >= length
    if later.any():
        losses[later] = lab.score(lab.sample_windows(chosen[later] + 1, length), 1)[:, 0]
    return losses


def loss_increase_with_replaced_context(
    lab: AnalysisContext, length: int, chosen: np.ndarray, sliding: np.ndarray, kept: int
) -> dict[str, Any] | None:
    """How much the chosen targets' losses rise when all but the last `kept` tokens before them are another text's."""
    later = chosen >= length
    if not later.any():
        return None
    rows = lab.sample_windows(chosen[later] + 1, length)
    starts = lab.rng().integers(len(lab.tokens) - length, size=len(rows))
    rows[:, : length - kept] = lab.rows(starts, length - kept)
    return compare(sliding[later][:, None], lab.score(rows, 1))


Losses = tuple[np.ndarray, np.ndarray]
"""At one length: of all targets without overlap, and of the chosen ones with stride 1."""


def _row(length: int, chosen: np.ndarray, base: Losses, here: Losses) -> dict[str, Any]:
    """One length against the first; the two parts of the gain add up to it exactly."""
    (base_apart, base_sliding), (apart, sliding) = base, here
    context = base_sliding - sliding
    gain = float(base_apart.mean() - apart.mean())
    stride_1 = float(base_apart.mean() - (base_apart[chosen] - base_sliding).mean() - context.mean())
    counts, sums = np.array(block_sums(base_apart - apart)).T
    gain_interval, context_interval = interval_of(sums, counts), interval_of(context)
    return {
        "length": length,
        "tokens": len(apart),
        "non_overlapping": float(apart.mean()),
        "stride_1": stride_1,
        "curse": float(apart.mean()) - stride_1,
        "curse_interval": interval_of(apart[chosen] - sliding),
        "gain": gain,
        "gain_interval": gain_interval,
        "from_context": float(context.mean()),
        "context_interval": context_interval,
        "from_early": gain - float(context.mean()),
        "early_interval": _difference(gain_interval, context_interval),
    }


def _difference(one: Interval | None, other: Interval | None) -> Interval | None:
    """An interval that surely holds the difference of what two others hold."""
    return None if one is None or other is None else (one[0] - other[1], one[1] - other[0])


def summary(rows: list[dict[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    if not any(_is_significant(row) for row in rows):
        return f"no use of context shows: after other text the loss at {first['length']:,} tokens is the same"
    if len(rows) == 1:
        if not is_significant_increase(first["curse"], first["curse_interval"]):
            return f"at {first['length']:,} tokens no early-token curse shows"
        return f"at {first['length']:,} tokens the early-token curse is {first['curse']:.4f} nats"
    if is_significant_decrease(last["gain"], last["gain_interval"]):
        return f"reading at {last['length']:,} tokens is {-last['gain']:.4f} nats worse than at {first['length']:,}"
    if not is_significant_increase(last["gain"], last["gain_interval"]):
        return f"reading at {last['length']:,} tokens gains nothing over {first['length']:,} that can be told from none"
    early = _part("fewer early tokens", last["from_early"], last["early_interval"])
    context = _part("longer context", last["from_context"], last["context_interval"])
    if is_significant_increase(last["from_context"], last["context_interval"]) and not _is_significant(last):
        context += " (and the probes do not agree: other text there is not noticed)"
    return (
        f"of the gain of {last['gain']:.4f} nats from {first['length']:,} to {last['length']:,} tokens, "
        f"{early} and {context}"
    )


def _is_significant(row: dict[str, Any]) -> bool:
    return row["replaced"] is not None and is_significant_increase(row["replaced"]["rise"], row["replaced"]["interval"])


def _part(name: str, effect: float, interval: Interval | None) -> str:
    if is_significant_increase(effect, interval) or is_significant_decrease(effect, interval):
        return f"{effect:+.4f} comes from {name}"
    return f"nothing that can be told from zero comes from {name}"


def table(result: dict[str, Any]) -> Group:
    title = f"Early-token curse, stride 1 on {result['samples']:,} targets (gains in nats)"
    shown = new_table("length", "ppl apart", "stride 1", "curse", "gain", "early", "context", "± 95 %")
    for row in result["rows"]:
        gains = (f"{row[name]:+.4f}" for name in ("curse", "gain", "from_early", "from_context"))
        ppl = (f"{perplexity(row[name]):.3f}" for name in ("non_overlapping", "stride_1"))
        low, high = row["context_interval"] or (0.0, 0.0)
        shown.add_row(f"{row['length']:,}", *ppl, *gains, f"{(high - low) / 2:.4f}")
    return with_title(title, shown)


EARLY_TOKENS = Analysis("longer context, or only fewer early tokens?", run, table, fits=scope)
