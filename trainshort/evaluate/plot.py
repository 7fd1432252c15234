"""An evaluation as a picture: perplexity against length, and loss against position. No torch.

The right panel tells two reasons apart why longer is better: a loss that keeps falling with position uses the
longer context; a flat one gains only because fewer tokens stand at a block's beginning.
"""

from collections.abc import Sequence
from pathlib import Path

from trainshort.evaluate.results import Evaluation, interval, perplexity
from trainshort.evaluate.significance import bounds, pool_bins
from trainshort.utils.figures import OTHERS, Figure, Series, method_color, thin_ticks
from trainshort.utils.figures import draw_figures as draw_figures

LENGTH_COLORS = ("#482475", "#414487", "#2f6c8e", "#1f988b", "#42be71", "#a2da37")
"""Of the lengths in the right panel, from short to long; as many are drawn at most."""
STATUS_LABELS = {"out of memory": "OOM", "cannot": "cannot", "not finite": "not finite"}


def draw(evaluations: Sequence[Evaluation], path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg; the first evaluation in its method's colour."""
    return draw_figures([lengths_figure(evaluations), positions_figure(evaluations[0])], path, (11.0, 4.4))


def label(evaluation: Evaluation) -> str:
    stride, slopes = evaluation.protocol.get("stride"), evaluation.protocol.get("slopes")
    parts = [str(evaluation.target["name"]), f"stride {stride}" if stride else "", f"slopes {slopes}" if slopes else ""]
    return ", ".join(part for part in parts if part)


def lengths_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """Perplexity against length with 95 % intervals, a line for each evaluation; where there is no number, why."""
    first = evaluations[0]
    own = method_color(str(first.target.get("position") or first.target["name"]))
    series, absent = [], []
    for index, evaluation in enumerate(evaluations):
        shade = OTHERS[(index - 1) % len(OTHERS)] if index else own
        rows = evaluation.scored
        found = [bound for row in rows if (bound := interval(row))]
        low, high = (tuple(perplexity(bound[i]) for bound in found if len(found) == len(rows)) for i in (0, 1))
        at, values = tuple(row.length for row in rows), tuple(row.perplexity for row in rows)
        series += [Series(label(evaluation), at, values, shade, low, high)] if rows else []
        absent += [(row.length, shade, STATUS_LABELS[row.status]) for row in evaluation.rows if row.status != "scored"]
    trained = sorted({one.trained_at for one in evaluations if one.trained_at})
    return Figure(
        name="lengths",
        title=f"{first.corpus['name']}, {first.corpus['tokens']:,} tokens ({first.corpus['tokenizer']})",
        alt=f"{first.measure.capitalize()} against the number of tokens read at once.",
        series=tuple(series),
        x_label="tokens read at once (log scale)",
        y_label=f"{first.measure} per token (log scale)",
        x_log=True,
        y_log=True,
        ticks=thin_ticks([row.length for one in evaluations for row in one.rows]),
        vertical_lines=tuple((length, f"trained at {length:,}") for length in trained),
        missing_points=tuple(absent),
        shows_single_name=True,
    )


def positions_figure(evaluation: Evaluation) -> Figure:
    """Mean loss by distance from the start of the block, for a few of the lengths."""
    read = [(row.length, bins) for row in evaluation.scored if (bins := pool_bins(row))]
    last = max(1, min(len(LENGTH_COLORS), len(read)) - 1)
    chosen = [read[i] for i in sorted({round(k * (len(read) - 1) / last) for k in range(last + 1)})] if read else []
    series = [
        Series(f"read at {at:,}", tuple(b.middle for b in bins), tuple(b.mean for b in bins), shade, *bounds(bins))
        for (at, bins), shade in zip(chosen, LENGTH_COLORS, strict=False)
    ]
    return Figure(
        name="positions",
        title="loss by distance from the start of the block",
        alt="Mean loss against the position in the block.",
        series=tuple(series),
        x_label="position in the block (log scale)",
        y_label="mean loss, nats per token",
        x_log=True,
        shows_single_name=True,
        vertical_lines=((evaluation.trained_at, ""),) if evaluation.trained_at and series else (),
    )
