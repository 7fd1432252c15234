"""The picture of an evaluation, as PNG and SVG: perplexity against length, and loss against position. No torch.

The right panel tells two reasons apart why longer is better: a loss that keeps falling with position uses the longer
context; a flat one gains only because fewer tokens stand at a block's beginning.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainshort.evaluate.results import Evaluation, Row, interval, perplexity
from trainshort.files import replacing

COLORS = ("#1f5fa8", "#c2571a", "#2e8540", "#8a3ffc", "#b0203a", "#5c6670")
CURVES = 6
"""Lengths drawn in the right panel at most."""
FEWEST = 50
"""Targets that a point there stands for at least; fewer are noise (the file has them all)."""


def draw(evaluations: Sequence[Evaluation], path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg; one colour per evaluation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    ):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
        for evaluation, color in zip(evaluations, COLORS * (1 + len(evaluations) // len(COLORS)), strict=False):
            _lengths(left, evaluation, color)
        _mark_training(left, evaluations)
        _finish_lengths(left, evaluations)
        _positions(right, evaluations[0])
        written = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the places are found; the second file need not look for them again
        for file in written:
            with replacing(file) as partial:
                figure.savefig(partial, format=file.suffix[1:], dpi=150)
        plt.close(figure)
    return written


def label(evaluation: Evaluation) -> str:
    stride, slopes = evaluation.protocol.get("stride"), evaluation.protocol.get("slopes")
    parts = [str(evaluation.target["name"]), f"stride {stride}" if stride else "", f"slopes {slopes}" if slopes else ""]
    return ", ".join(part for part in parts if part)


def _lengths(axes, evaluation: Evaluation, color: str) -> None:
    rows = evaluation.scored
    if not rows:
        return
    lengths = [row.length for row in rows]
    axes.plot(lengths, [row.perplexity for row in rows], "o-", color=color, markersize=4, label=label(evaluation))
    bounds = [interval(row) for row in rows]
    if all(bounds):
        low, high = ([perplexity(bound[i]) for bound in bounds if bound] for i in (0, 1))
        axes.fill_between(lengths, low, high, color=color, alpha=0.12, linewidth=0)
    top = max(row.perplexity for row in rows)
    for row in evaluation.rows:
        if row.status != "scored":
            axes.plot([row.length], [top], "x", color=color)
            axes.annotate(
                _short(row), (row.length, top), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8
            )


def _short(row: Row) -> str:
    return {"out of memory": "OOM", "cannot": "cannot", "not finite": "not finite"}[row.status]


def _mark_training(axes, evaluations: Sequence[Evaluation]) -> None:
    for length in sorted({one.trained_at for one in evaluations if one.trained_at}):
        axes.axvline(length, color="#5c6670", linestyle="--", linewidth=1)
        axes.annotate(
            f"trained at {length:,}",
            (length, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color="#5c6670",
        )


def _finish_lengths(axes, evaluations: Sequence[Evaluation]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_numbers(axes.xaxis, sorted({row.length for one in evaluations for row in one.rows}))
    rows = [row for one in evaluations for row in one.scored]
    bounds = [bound for row in rows for bound in interval(row) or ()]
    if values := [row.perplexity for row in rows] + [perplexity(bound) for bound in bounds]:
        ticks = _ticks(min(values), max(values))
        axes.set_ylim(ticks[0], ticks[-1])
        _plain_numbers(axes.yaxis, ticks)
    first = evaluations[0]
    axes.set_xlabel("tokens read at once (log scale)")
    axes.set_ylabel("perplexity per token (log scale)")
    axes.set_title(
        f"{first.corpus['name']}, {first.corpus['tokens']:,} tokens ({first.corpus['tokenizer']})", fontsize=10
    )
    axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False, fontsize=9)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around the values: about six steps of 1, 2 or 5 where they are near, doublings where they are far.

    3.9 … 4.4 → 3.8 4 4.2 4.4 4.6        18 … 400 → 16 32 64 128 256 512
    """
    if high / low > 3:
        first, last = int(np.floor(np.log2(low))), int(np.ceil(np.log2(high)))
        return [2.0**k for k in range(first, last + 1)]
    rough = (high - low) / 4 or low / 10
    size = 10.0 ** np.floor(np.log10(rough))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= rough)
    first, last = np.floor(low / step) - 1, np.ceil(high / step) + 1
    return [round(k * step, 10) for k in range(max(1, int(first)), int(last) + 1)]


def _plain_numbers(axis, ticks: Sequence[float]) -> None:
    """Ticks as plain numbers, thinned so that they do not run into one another on a log axis."""
    kept: list[float] = []
    span = np.log(max(ticks) / min(ticks)) or 1.0
    for tick in ticks:
        if not kept or np.log(tick / kept[-1]) >= span / 9:
            kept.append(tick)
    axis.set_ticks(kept, labels=[f"{tick:,.10g}" for tick in kept])
    axis.set_ticks([], minor=True)


def _positions(axes, evaluation: Evaluation) -> None:
    """Mean loss by distance from the start of the block, for a few of the lengths."""
    rows = [row for row in evaluation.scored if row.positions]
    import matplotlib

    chosen = (
        [rows[i] for i in sorted({round(k) for k in np.linspace(0, len(rows) - 1, min(CURVES, len(rows)))})]
        if rows
        else []
    )
    shades = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.85, max(1, len(chosen))))
    for row, shade in zip(chosen, shades, strict=False):
        bins = [one for one in row.positions if one[2] >= FEWEST]
        middle = [np.sqrt((first + 1) * end) for first, end, _, _ in bins]
        losses = [total / count for _, _, count, total in bins]
        axes.plot(middle, losses, ".-", color=shade, linewidth=1.2, markersize=4, label=f"read at {row.length:,}")
    if evaluation.trained_at:
        axes.axvline(evaluation.trained_at, color="#5c6670", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    if chosen:
        longest = max(row.length for row in chosen)
        _plain_numbers(axes.xaxis, [2.0**k for k in range(int(np.log2(longest)) + 1)])
    axes.set_xlabel("position in the block (log scale)")
    axes.set_ylabel("mean loss, nats per token")
    axes.set_title("loss by distance from the start of the block", fontsize=10)
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False, fontsize=9)
