"""Slopes at inference: does any change of them use context beyond the training length?

The same targets are read after contexts of growing length, with the trained slopes and with changed ones (see
trainshort.evaluate.overrides). If a model uses what lies beyond L, its loss at longer contexts is below that at L.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
from rich.console import Group

from trainshort.errors import InputError
from trainshort.evaluate.analyses.base import (
    SCORED_TOKENS,
    Analysis,
    AnalysisContext,
    compare,
    interval_text,
    new_table,
    with_title,
)
from trainshort.evaluate.overrides import Override, apply_override
from trainshort.evaluate.significance import is_significant_increase
from trainshort.model.transformer import TransformerLM

TRAINED = "trained"


def variants(trained_at: int) -> list[str]:
    return [TRAINED, "interpolate", "max_bias=16", f"window={trained_at}"]


def scope(lab: AnalysisContext) -> tuple[TransformerLM, list[int]]:
    """The model, which must have slopes, and the lengths of its context."""
    model = lab.model("the slopes analysis")
    if model.position.linear_slopes() is None:
        raise InputError(
            f"the slopes analysis needs a model with ALiBi's slopes; this one has position='{model.config.position}'."
        )
    return model, lab.multiples(1, 2, 4, 8)


def run(lab: AnalysisContext) -> dict[str, Any]:
    model, lengths = scope(lab)
    ends, scored = lab.sample_ends(lengths[-1]), min(SCORED_TOKENS, lengths[0])
    lab.meter.start(len(variants(lab.trained_at)) * len(ends) * sum(lengths))
    losses: dict[tuple[str, int], np.ndarray] = {}
    for variant in variants(lab.trained_at):
        for length in lengths:
            change = None if variant == TRAINED else Override.read("slopes", variant)
            with nullcontext() if change is None else apply_override(model, change, lab.trained_at, length):
                losses[variant, length] = lab.score(lab.sample_windows(ends, length), scored)
    base = losses[TRAINED, lengths[0]]
    found = [_row(variant, length, base, here) for (variant, length), here in losses.items()]
    return {"summary": summary(found, lengths[0]), "probes": len(ends), "scored": int(base.size), "rows": found}


def _row(variant: str, length: int, base: np.ndarray, losses: np.ndarray) -> dict[str, Any]:
    found = compare(losses, base)
    told = {"loss": float(losses.mean()), "gain": found["rise"], "interval": found["interval"]}
    return {"slopes": variant, "context": length, **told}


def summary(rows: list[dict[str, Any]], base: int) -> str:
    longer = [row for row in rows if row["context"] > base]
    if not longer:
        return f"only the context of {base:,} tokens was tried"
    sure = [row for row in longer if is_significant_increase(row["gain"], row["interval"])]
    if not sure:
        return f"no slopes use context beyond {base:,} tokens"
    best = max(sure, key=lambda row: row["gain"])
    return (
        f"best beyond {base:,} tokens: slopes {best['slopes']} at {best['context']:,}, {best['gain']:+.4f} nats better"
    )


def table(result: dict[str, Any]) -> Group:
    title = f"The same {result['scored']:,} targets after longer contexts (gain over the shortest, trained slopes)"
    shown = new_table("slopes", "context", "loss", "gain", "95 %")
    for row in result["rows"]:
        numbers = (f"{row['loss']:.4f}", f"{row['gain']:+.4f}", interval_text(row["interval"]))
        shown.add_row(row["slopes"], f"{row['context']:,}", *numbers)
    return with_title(title, shown)


SLOPES = Analysis("do other slopes use context beyond the training length?", run, table, fits=scope)
