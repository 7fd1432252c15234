"""Draw evaluations: perplexity by input length, and loss by position in the input.

The loss by position shows why a longer input helps. If the loss keeps falling with the position, the model uses its
longer context. If the loss is flat, longer inputs only help because fewer tokens are near the start of an input.

This module does not import torch.
"""

from collections.abc import Sequence
from pathlib import Path

from trainshort.evaluate.results import Evaluation, interval, perplexity
from trainshort.evaluate.significance import Bin, bounds, pool_bins
from trainshort.utils.figures import OTHERS, Figure, Series, method_color, thin_ticks
from trainshort.utils.figures import draw_figures as draw_figures

# The colors of the lengths in the figure of loss by position, from the shortest to the longest length. The figure shows
# at most this many lengths.
LENGTH_COLORS = ("#482475", "#414487", "#2f6c8e", "#1f988b", "#42be71", "#a2da37")

# Short labels for lengths without a result.
STATUS_LABELS = {"out of memory": "OOM", "cannot": "cannot", "not finite": "not finite"}


def draw(evaluations: Sequence[Evaluation], path: Path) -> list[Path]:
    """Draw perplexity by input length for all evaluations, and loss by position for the first evaluation.

    Args:
        evaluations: The evaluations. The first evaluation gets the color of its position method.
        path: The path of the image files without the suffix.

    Returns:
        The paths of the PNG file and the SVG file.
    """
    figures = [lengths_figure(evaluations), positions_figure(evaluations[0])]
    return draw_figures(figures, path, (11.0, 4.4))


def label(evaluation: Evaluation) -> str:
    """Return the label of an evaluation in a figure, for example "demo-alibi, stride 64, slopes ntk=4"."""
    parts = [str(evaluation.target["name"])]
    stride = evaluation.protocol.get("stride")
    if stride:
        parts.append(f"stride {stride}")
    override = evaluation.protocol.get("slopes")
    if override:
        parts.append(f"slopes {override}")
    return ", ".join(parts)


def lengths_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """Return a figure of perplexity by input length, with one line and its 95 % intervals for each evaluation.

    Lengths without a result are marked with the reason, for example "OOM".
    """
    first = evaluations[0]
    series = []
    missing_points = []
    for index, evaluation in enumerate(evaluations):
        if index == 0:
            color = method_color(str(first.target.get("position") or first.target["name"]))
        else:
            color = OTHERS[(index - 1) % len(OTHERS)]
        if evaluation.scored:
            series.append(_perplexity_series(evaluation, color))
        for row in evaluation.rows:
            if row.status != "scored":
                missing_points.append((row.length, color, STATUS_LABELS[row.status]))

    training_lengths = sorted({evaluation.trained_at for evaluation in evaluations if evaluation.trained_at})
    all_lengths = [row.length for evaluation in evaluations for row in evaluation.rows]
    return Figure(
        name="lengths",
        title=f"{first.corpus['name']}, {first.corpus['tokens']:,} tokens ({first.corpus['tokenizer']})",
        alt=f"{first.metric_name.capitalize()} against the number of tokens read at once.",
        series=tuple(series),
        x_label="tokens read at once (log scale)",
        y_label=f"{first.metric_name} per token (log scale)",
        x_log=True,
        y_log=True,
        ticks=thin_ticks(all_lengths),
        vertical_lines=tuple((length, f"trained at {length:,}") for length in training_lengths),
        missing_points=tuple(missing_points),
        shows_single_name=True,
    )


def _perplexity_series(evaluation: Evaluation, color: str) -> Series:
    """Return the line of an evaluation in the figure of perplexity by input length, with its 95 % band."""
    rows = evaluation.scored
    loss_intervals = [interval(row) for row in rows]  # None if the text is too short for an interval
    known_intervals = [loss_interval for loss_interval in loss_intervals if loss_interval is not None]
    lower_ends: tuple[float, ...] = ()
    upper_ends: tuple[float, ...] = ()
    # A band is drawn only if all points of the line have an interval.
    if len(known_intervals) == len(rows):
        lower_ends = tuple(perplexity(low) for low, _ in known_intervals)
        upper_ends = tuple(perplexity(high) for _, high in known_intervals)
    return Series(
        name=label(evaluation),
        x=tuple(row.length for row in rows),
        y=tuple(row.perplexity for row in rows),
        color=color,
        low=lower_ends,
        high=upper_ends,
    )


def positions_figure(evaluation: Evaluation) -> Figure:
    """Return a figure of the mean loss by position in the input, for some of the evaluated lengths.

    A bin contains the mean loss of neighboring positions. A vertical line marks the training length.
    """
    bins_by_length = {row.length: pool_bins(row) for row in evaluation.scored}
    lengths_with_bins = [length for length, bins in bins_by_length.items() if bins]
    shown_lengths = _spread_evenly(lengths_with_bins, len(LENGTH_COLORS))
    series = []
    for length, color in zip(shown_lengths, LENGTH_COLORS, strict=False):
        series.append(_loss_series(f"read at {length:,}", bins_by_length[length], color))

    vertical_lines: tuple[tuple[float, str], ...] = ()
    if evaluation.trained_at and series:
        vertical_lines = ((evaluation.trained_at, ""),)
    return Figure(
        name="positions",
        title="loss by distance from the start of the block",
        alt="Mean loss against the position in the block.",
        series=tuple(series),
        x_label="position in the block (log scale)",
        y_label="mean loss, nats per token",
        x_log=True,
        shows_single_name=True,
        vertical_lines=vertical_lines,
    )


def _spread_evenly(lengths: list[int], max_count: int) -> list[int]:
    """Choose at most `max_count` lengths that are spread evenly over the list, including the first and the last."""
    if len(lengths) <= 1:
        return lengths
    num_steps = min(max_count, len(lengths)) - 1
    last_index = len(lengths) - 1
    indices = [round(step * last_index / num_steps) for step in range(num_steps + 1)]
    return [lengths[index] for index in sorted(set(indices))]


def _loss_series(name: str, bins: list[Bin], color: str) -> Series:
    """Return a line of the mean loss by position, with its 95 % intervals.

    Args:
        name: The name of the line in the legend.
        bins: The mean loss of neighboring positions, in the order of the positions. Each bin is a point of the line.
        color: The color of the line.
    """
    lower_ends, upper_ends = bounds(bins)
    return Series(
        name=name,
        x=tuple(position_bin.middle for position_bin in bins),
        y=tuple(position_bin.mean for position_bin in bins),
        color=color,
        low=lower_ends,
        high=upper_ends,
    )
