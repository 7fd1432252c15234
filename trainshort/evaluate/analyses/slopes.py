"""Analysis `slopes`: does a model use a longer context if its ALiBi slopes are changed?

The same targets are scored with contexts of increasing length, with the trained slopes and with changed slopes (see
`trainshort.evaluate.overrides`). The baseline is the trained slopes at the shortest context. If a model uses a longer
context, its loss is below the baseline.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Group

from trainshort.errors import InputError
from trainshort.evaluate.analyses.base import (
    SCORED_TOKENS,
    Analysis,
    AnalysisContext,
    compare,
    format_effect,
    format_interval,
    new_table,
    with_title,
)
from trainshort.evaluate.overrides import Override, apply_override
from trainshort.evaluate.significance import is_significant_increase
from trainshort.model.transformer import TransformerLM

# The name of the slopes that the model was trained with.
TRAINED = "trained"


def list_slope_variants(trained_at: int) -> list[str]:
    """Return the names of the slopes to test: the trained slopes, and values of the option `--slopes`."""
    return [TRAINED, "interpolate", "max_bias=16", f"window={trained_at}"]


def choose_model_and_lengths(context: AnalysisContext) -> tuple[TransformerLM, list[int]]:
    """Return the model and the lengths of the context: by default 1, 2, 4 and 8 times the training length.

    Raises:
        InputError: If the model has no ALiBi slopes, or if no length is possible.
    """
    model = context.require_model("slopes")
    if model.position.linear_slopes() is None:
        raise InputError(
            f"The analysis 'slopes' requires a model with ALiBi positions, got position='{model.config.position}'."
        )
    return model, context.choose_lengths(1, 2, 4, 8)


def run(context: AnalysisContext) -> dict[str, Any]:
    """Measure the loss of the same targets for all variants of the ALiBi slopes and all lengths of the context.

    A variant is the name of a change of the slopes, such as "max_bias=16". `TRAINED` is the variant without a change.
    """
    model, lengths = choose_model_and_lengths(context)
    variants = list_slope_variants(context.trained_at)
    ends = context.sample_ends(lengths[-1])
    num_scored = min(SCORED_TOKENS, lengths[0])
    context.meter.start(len(variants) * len(ends) * sum(lengths))

    losses: dict[tuple[str, int], np.ndarray] = {}
    for variant in variants:
        for length in lengths:
            if variant == TRAINED:
                changed_slopes = nullcontext()  # The slopes do not change.
            else:
                override = Override.parse("slopes", variant)
                changed_slopes = apply_override(model, override, context.trained_at, length)
            with changed_slopes:
                windows = context.sample_windows(ends, length)
                losses[variant, length] = context.score(windows, num_scored)

    baseline_losses = losses[TRAINED, lengths[0]]
    rows = []
    for (variant, length), variant_losses in losses.items():
        rows.append(_make_row(variant, length, baseline_losses, variant_losses))
    return {
        "summary": summary(rows, lengths[0]),
        "probes": len(ends),
        "scored": int(baseline_losses.size),
        "rows": rows,
    }


def _make_row(
    variant: str,
    length: int,
    baseline_losses: Float[np.ndarray, "samples scored"],
    losses: Float[np.ndarray, "samples scored"],
) -> dict[str, Any]:
    """Return the measurement of one variant of the slopes at one length of the context.

    Args:
        variant: The name of the slopes, such as "max_bias=16".
        length: The length of the context.
        baseline_losses: The losses with the trained slopes at the shortest context.
        losses: The losses of this variant at this length.
    """
    comparison = compare(losses, changed_losses=baseline_losses)
    # The gain is the loss of the baseline minus the loss of this variant.
    return {
        "slopes": variant,
        "context": length,
        "loss": float(losses.mean()),
        "gain": comparison["rise"],
        "interval": comparison["interval"],
    }


def summary(rows: list[dict[str, Any]], shortest_length: int) -> str:
    """Return a sentence that says which slopes gain most from a longer context, if any gain is significant.

    Each measurement uses some variant of the ALiBi slopes and some length of the context. The gain is the loss with the
    trained slopes at the shortest context (the baseline), minus the loss of the measurement.

    Args:
        rows: The measurements of `run`.
        shortest_length: The length of the context of the baseline.
    """
    rows_at_longer_context = [row for row in rows if row["context"] > shortest_length]
    if not rows_at_longer_context:
        return f"Not tested: {shortest_length:,} tokens is the only length"
    significant_rows = [row for row in rows_at_longer_context if is_significant_increase(row["gain"], row["interval"])]
    if not significant_rows:
        return (
            f"Not supported: use of context beyond {shortest_length:,} tokens (no slopes lower the loss significantly)"
        )
    best = max(significant_rows, key=lambda row: row["gain"])
    return (
        f"Supported: use of context beyond {shortest_length:,} tokens (slopes '{best['slopes']}' at "
        f"{best['context']:,} tokens gain {format_effect(best['gain'], best['interval'])} over the trained slopes at "
        f"{shortest_length:,} tokens)"
    )


def table(result: dict[str, Any]) -> Group:
    """Return the table of the losses for all slopes and all lengths of the context."""
    title = f"Loss of the same {result['scored']:,} targets; gain over the trained slopes at the shortest context"
    rows_table = new_table("slopes", "context", "loss", "gain", "95 %")
    for row in result["rows"]:
        rows_table.add_row(
            row["slopes"],
            f"{row['context']:,}",
            f"{row['loss']:.4f}",
            f"{row['gain']:+.4f}",
            format_interval(row["interval"]),
        )
    return with_title(title, rows_table)


SLOPES = Analysis(
    "does the model use a longer context with other ALiBi slopes?", run, table, check=choose_model_and_lengths
)
