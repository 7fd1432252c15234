"""The sections of the report about speed and memory.

The section "Speed" shows results of `trainshort bench`. The section "Cost" shows the measured costs of position methods
(`cost.json`). This module does not import torch.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from trainshort.experiments.claims.collection import Collection
from trainshort.experiments.claims.measured import COST_ENTRY_KEYS, median_with_interval
from trainshort.experiments.experiments import method_name
from trainshort.utils.bench_results import BenchResult, Measure, Measurement, format_number, group_by_case_keys
from trainshort.utils.figures import OTHERS, Figure, Series, method_color

BACKEND_COLORS = {
    "windowed": method_color("alibi"),
    "bounded": method_color("alibi"),
    "plain": method_color("none"),
    "full": method_color("none"),
}
"""The colors of attention backends and cache modes."""

BASELINE_METHOD = "sinusoidal"
"""The position method whose speed is the unit of the cost figures."""


@dataclass(frozen=True)
class SpeedTable:
    """A table of benchmark results.

    Attributes:
        title: The title.
        columns: The labels of the columns.
        rows: The label and the cells of each row. A cell is a pair: the rounded number and the exact number.
        source: The file with the results.
    """

    title: str
    columns: list[str]
    rows: list[tuple[str, list[tuple[str, str]]]]
    source: Path


@dataclass(frozen=True)
class SpeedSection:
    """The content of the section "Speed".

    Attributes:
        figures: The figures.
        tables: The same numbers as tables.
        notes: One sentence for each result file: when and where it was measured.
    """

    figures: list[Figure]
    tables: list[SpeedTable]
    notes: list[str]


@dataclass(frozen=True)
class FigureSpec:
    """How the rows of a benchmark result are drawn.

    Attributes:
        name: The last part of the figure's name.
        title: The title.
        line_key: The key of a benchmark case that distinguishes the lines, such as "model".
        x_key: The key of a benchmark case that contains the x-value, such as "tokens".
        measure: The name of the measured quantity, such as "forward".
        y_label: The label of the y-axis.
        y_log: Whether the y-axis is logarithmic.
    """

    name: str
    title: str
    line_key: str
    x_key: str
    measure: str
    y_label: str
    y_log: bool = True


ATTENTION_FIGURES = (
    FigureSpec("time", "Attention: time of a forward pass", "engine", "tokens", "forward", "ms"),
    FigureSpec(
        "ratio", "Attention: time relative to plain causal attention", "engine", "tokens", "to plain", "times plain"
    ),
    FigureSpec("memory", "Attention: peak memory, forward and backward", "engine", "tokens", "peak", "MB"),
)
DECODE_FIGURE = FigureSpec("decode", "Decoding: time per token by context", "cache", "context", "time per token", "ms")
TRAINING_FIGURE = FigureSpec(
    "training", "Training speed by method", "model", "tokens", "speed", "tokens/s", y_log=False
)
EVALUATE_FIGURE = FigureSpec(
    "evaluate", "Evaluation speed by method", "model", "tokens", "speed", "tokens/s", y_log=False
)


@dataclass(frozen=True)
class SuitePart:
    """A part of a benchmark suite that is shown together.

    Attributes:
        suite: The name of the suite, such as "attention".
        case: Only rows whose benchmark case has these values are shown. The benchmark case of a row says what was
            measured, such as `{"engine": "windowed", "tokens": 4096}`.
        figures: The figures to draw.
        name_suffix: Added to the names of the figures, because names must be unique.
        title_suffix: Added to the titles of the figures and tables.
    """

    suite: str
    case: Mapping[str, str]
    figures: tuple[FigureSpec, ...] = ()
    name_suffix: str = ""
    title_suffix: str = ""


class BandPoint(NamedTuple):
    """A point of a line with the lower and the upper end of its band."""

    value: float
    low: float
    high: float


Lines = dict[str, dict[int, BandPoint]]
"""The points of each line, by the name of the line and the x-value."""


# ---- benchmark results


def find_speed_results(collection: Collection) -> SpeedSection | None:
    """Build the section "Speed" from the newest result of each benchmark suite.

    A suite is a group of benchmarks, such as "attention" or "decode". It is shown in one or several parts.

    Args:
        collection: The runs and benchmark results.

    Returns:
        The section, or None if there are no benchmark results.
    """
    section = SpeedSection(figures=[], tables=[], notes=[])
    # The names of the suites in each result file. A dictionary keeps the order and removes duplicates.
    suites_by_path: dict[Path, dict[str, None]] = {}
    for part in _suite_parts(collection):
        newest = _find_newest_rows(collection, part)
        if newest is None:
            continue
        path, rows = newest
        suites_by_path.setdefault(path, {})[part.suite] = None
        for spec in part.figures:
            figure = _make_figure(spec, rows, part)
            if figure is not None:
                section.figures.append(replace(figure, sources=(path,)))
        section.tables.extend(_make_tables(f"{part.suite}{part.title_suffix}", rows, path))

    if not section.tables:
        return None
    bench_results = dict(collection.benchmark_results)
    for path, suites in suites_by_path.items():
        section.notes.append(f"{', '.join(suites).capitalize()}: {_describe_result(bench_results[path])}")
    return section


def _suite_parts(collection: Collection) -> list[SuitePart]:
    """Return the parts of the benchmark suites, in the order of the report.

    A suite is a group of benchmarks. Results that cannot be compared, such as those of different inputs, are shown in
    separate parts.

    Args:
        collection: The benchmark results.
    """
    parts: list[SuitePart] = []
    # The attention suite has one part for each kind of inputs, such as "normal".
    for index, inputs in enumerate(_find_case_values(collection, "attention", "inputs")):
        name_suffix = f"-{index + 1}" if index else ""  # Names of figures become "speed-time", "speed-time-2", ...
        title_suffix = f", {inputs} inputs"  # Titles of figures and tables end with ", normal inputs", for example.
        parts.append(SuitePart("attention", {"inputs": inputs}, ATTENTION_FIGURES, name_suffix, title_suffix))

    # An empty dictionary selects all rows of a suite.
    parts.append(SuitePart("training", {}, (TRAINING_FIGURE,)))
    parts.append(SuitePart("evaluate", {}, (EVALUATE_FIGURE,)))
    for decode_part in _find_case_values(collection, "decode", "part"):
        figures = (DECODE_FIGURE,) if decode_part == "context" else ()
        parts.append(SuitePart("decode", {"part": decode_part}, figures))
    parts.append(SuitePart("patch", {}))
    parts.append(SuitePart("prepare", {}))
    return parts


def _find_case_values(collection: Collection, suite: str, key: str) -> list[str]:
    """Return the different values of a key in the cases of a benchmark suite, in the order of the results.

    Args:
        collection: The benchmark results.
        suite: The name of the suite, such as "attention".
        key: The key. The case of a row says what was measured, such as `{"inputs": "normal", "tokens": 4096}`.

    Returns:
        The values as strings, such as `["normal"]`. A row without the key has the value "".
    """
    values: dict[str, None] = {}
    for _, bench_result in collection.benchmark_results:
        for row in bench_result.suites.get(suite, ()):
            values[str(row.case.get(key, ""))] = None
    return list(values)


def _find_newest_rows(collection: Collection, part: SuitePart) -> tuple[Path, list[Measurement]] | None:
    """Return the rows of the newest benchmark result that contains a part of a suite.

    Args:
        collection: The benchmark results.
        part: The suite, and the values that its rows must have.

    Returns:
        The file of the result and its rows, or None if no result contains the part.
    """
    newest = None
    for path, bench_result in collection.benchmark_results:  # The newest result is the last one.
        rows = [row for row in bench_result.suites.get(part.suite, ()) if _matches_case(row, part.case)]
        if rows:
            newest = (path, rows)
    return newest


def _matches_case(row: Measurement, case: Mapping[str, str]) -> bool:
    """Return whether the benchmark case of a row has certain values.

    Args:
        row: A row of a benchmark result.
        case: The required values by key, such as `{"inputs": "normal"}`. A missing key counts as an empty string.
    """
    return all(row.case.get(key, "") == value for key, value in case.items())


def _make_figure(spec: FigureSpec, rows: Sequence[Measurement], part: SuitePart) -> Figure | None:
    """Draw benchmark rows as lines. The band of a line is the spread of the measurements.

    Args:
        spec: What is drawn.
        rows: The rows of the benchmark result.
        part: The part of the suite, which determines the name and the title.

    Returns:
        The figure, or None if no row contains the measured quantity.
    """
    lines: Lines = {}
    for row in rows:
        measure = row.measured.get(spec.measure)
        x = row.case.get(spec.x_key)
        if measure is not None and isinstance(x, int) and measure.value > 0:
            name = str(row.case.get(spec.line_key))
            lines.setdefault(name, {})[x] = _make_band_point(measure)
    if not lines:
        return None

    colors: dict[str, str] = {}
    if spec.line_key != "model":  # Lines of models have the color of their position method.
        colors = dict(zip(lines, cycle(OTHERS), strict=False))  # one color for each line
    colors |= BACKEND_COLORS
    name = f"speed-{spec.name}{part.name_suffix}"
    title = f"{spec.title}{part.title_suffix}"
    figure = _draw_lines(lines, colors, name, title, x_label=spec.x_key, y_label=spec.y_label)
    return replace(figure, y_log=spec.y_log)


def _make_band_point(measure: Measure) -> BandPoint:
    """Return a measured value with a band that shows how much the measurements vary.

    The lower end of the band is at least 5 % of the value, because a logarithmic axis cannot show 0.

    Args:
        measure: The median of the measurements, and their spread relative to the median.
    """
    relative_spread = measure.spread or 0.0  # The spread is None if the value was measured only once.
    spread = measure.value * relative_spread
    smallest_low = 0.05 * measure.value
    low = max(measure.value - spread, smallest_low)
    return BandPoint(measure.value, low, high=measure.value + spread)


def _draw_lines(lines: Lines, colors: Mapping[str, str], name: str, title: str, x_label: str, y_label: str) -> Figure:
    """Return a figure with a tick at every x-value.

    Args:
        lines: The points of each line.
        colors: The colors of the lines. A line without an entry has the color of the position method of its name.
        name: The name of the figure.
        title: The title.
        x_label: The label of the x-axis.
        y_label: The label of the y-axis.
    """
    series: list[Series] = []
    descriptions: list[str] = []
    all_x: set[int] = set()
    for line_name, points in lines.items():
        x_values = tuple(sorted(points))
        y_values = tuple(points[x].value for x in x_values)
        low = tuple(points[x].low for x in x_values)
        high = tuple(points[x].high for x in x_values)
        label = method_name(line_name)
        color = colors.get(line_name) or method_color(line_name)
        series.append(Series(label, x_values, y_values, color, low, high))
        all_x.update(x_values)
        values = ", ".join(f"{format_number(points[x].value)} at {x:,}" for x in x_values)
        descriptions.append(f"{label} {values}")
    return Figure(
        name=name,
        title=title,
        alt=f"{title}, {y_label} against {x_label}: {'; '.join(descriptions)}.",
        series=tuple(series),
        x_label=x_label,
        y_label=y_label,
        x_log=True,
        ticks=tuple((x, f"{x:,}") for x in sorted(all_x)),
    )


def _make_tables(title: str, rows: Sequence[Measurement], path: Path) -> list[SpeedTable]:
    """Return one table for each group of rows whose benchmark cases have the same keys.

    Args:
        title: The title of the tables.
        rows: The rows of the benchmark result.
        path: The file with the result.
    """
    tables: list[SpeedTable] = []
    # `units` maps the name of each measured quantity to its unit. There is one column for each quantity.
    for group, units in group_by_case_keys(rows):
        columns = [f"{measure_name}, {unit}" if unit else measure_name for measure_name, unit in units.items()]
        table_rows: list[tuple[str, list[tuple[str, str]]]] = []
        for row in group:
            cells = [_format_cell(row.measured.get(measure_name)) for measure_name in units]
            table_rows.append((row.name, cells))
        tables.append(SpeedTable(title, columns, table_rows, path))
    return tables


def _format_cell(measure: Measure | None) -> tuple[str, str]:
    """Return two texts: a measured value rounded, and with all digits. Both are empty if nothing was measured."""
    if measure is None:
        return "", ""
    return format_number(measure.value), repr(measure.value)


def _describe_result(bench_result: BenchResult) -> str:
    """Return a text about when, where and how a benchmark result was measured."""
    parts = [f"measured {bench_result.made.get('time', 'at an unknown time')} on {bench_result.machine}"]
    if bench_result.made.get("commit"):
        # A commit with local changes is stored as "HASH+changes".
        commit, plus, changes = str(bench_result.made["commit"]).partition("+")
        parts.append(f"commit {commit[:12]}{plus}{changes}")

    tolerances: set[str] = set()
    # The tolerance is the share of the attention weights that approximate attention may skip per query.
    for setting in bench_result.settings.values():
        if isinstance(setting, dict) and "tolerance" in setting:
            tolerances.add(str(setting["tolerance"]))
    if tolerances:
        parts.append(f"tolerance {', '.join(sorted(tolerances))}")

    description = f"{', '.join(parts)}."
    if bench_result.settings.get("quick"):
        description += " This was a quick run with small inputs. Do not quote its numbers."
    if not bench_result.finished:
        description += " The run was stopped before its end."
    return description


# ---- costs of position methods


def cost_figures(collection: Collection) -> list[Figure]:
    """Return figures of the training speed, the evaluation speed and the training memory of position methods.

    Speeds are shown relative to sinusoidal embeddings if several lengths were measured, otherwise in tokens/s.

    Args:
        collection: The runs and measured costs.
    """
    entries = list(collection.costs.values())
    if not entries:
        return []

    figures: list[Figure] = []
    # The cost file calls the evaluation speed "read speed".
    for name, title in (("train", "Training speed"), ("read", "Evaluation speed")):
        seconds_key = COST_ENTRY_KEYS[f"{name} speed"]
        timed_entries = [entry for entry in entries if entry[seconds_key]]
        if timed_entries:
            figures.append(_speed_figure(timed_entries, f"cost-{name}", title, seconds_key))
    figures.append(_memory_figure(entries))

    sources = tuple(dict.fromkeys(entry["path"] for entry in entries))
    return [replace(figure, sources=sources) for figure in figures]


def _speed_figure(entries: Sequence[dict[str, Any]], name: str, title: str, seconds_key: str) -> Figure:
    """Return a figure of the speeds of position methods.

    Args:
        entries: Entries of the cost file.
        name: The name of the figure.
        title: The title.
        seconds_key: The key of an entry that contains the seconds of each round.
    """
    lines = _relative_speeds(entries, seconds_key)
    lengths: set[int] = set()
    for points in lines.values():
        lengths.update(points)
    if len(lengths) >= 2:
        title = f"{title}, relative to sinusoidal"
        # Without entries in `colors`, each line has the color of its position method.
        return _draw_lines(
            lines,
            colors={},
            name=name,
            title=title,
            x_label="sequence length in tokens",
            y_label="times the speed of sinusoidal",
        )
    speeds = [(entry, entry["tokens"] / statistics.median(entry[seconds_key])) for entry in entries]
    return _draw_bars(speeds, name, title, "tokens/s")


def _relative_speeds(entries: Sequence[dict[str, Any]], seconds_key: str) -> Lines:
    """Compare the speeds of all methods with sinusoidal embeddings, round by round.

    In each round of a measurement, every model did one step. Models with the same value of "session" were measured in
    the same rounds, so other load on the machine affects them equally.

    Args:
        entries: Entries of the cost file.
        seconds_key: The key of an entry that contains the seconds of each round.

    Returns:
        The relative speeds with their intervals, by method and length. Lengths at which sinusoidal embeddings were not
        measured in the same session are left out.
    """
    # The seconds of each round of the baseline, by session and length.
    baseline_seconds: dict[tuple[str, int], Sequence[float]] = {}
    for entry in entries:
        if entry["position"] == BASELINE_METHOD:
            baseline_seconds[entry["session"], entry["length"]] = entry[seconds_key]

    lines: Lines = {}
    for entry in entries:
        position = entry["position"]
        baseline = baseline_seconds.get((entry["session"], entry["length"]))
        if not baseline or position == BASELINE_METHOD:
            continue
        ratios = [baseline_time / time for time, baseline_time in zip(entry[seconds_key], baseline, strict=True)]
        median, low, high = median_with_interval(ratios)
        lines.setdefault(position, {})[entry["length"]] = BandPoint(median, low, high)
    return lines


def _memory_figure(entries: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure of the training memory of position methods. A memory of 0 means that it was not measured."""
    measured_entries = [entry for entry in entries if entry["train_memory"]] or entries
    megabytes = [(entry, (entry["train_memory"] or 0) / 1e6) for entry in measured_entries]
    return _draw_bars(megabytes, "cost-memory", "Training memory", "MB")


def _draw_bars(values: Sequence[tuple[dict[str, Any], float]], name: str, title: str, unit: str) -> Figure:
    """Return a figure with one bar for each method, at the length that most entries have in common.

    Args:
        values: Pairs of an entry of the cost file and the value of its bar. An entry contains the position method and
            the training length of a model.
        name: The name of the figure.
        title: The title.
        unit: The unit of the values.
    """
    length = statistics.mode(entry["length"] for entry, _ in values)  # the most common length
    title = f"{title} at {length:,} tokens"
    series: list[Series] = []
    descriptions: list[str] = []
    for entry, value in values:
        if entry["length"] == length:
            position = str(entry["position"])
            label = method_name(position)
            series.append(Series(label, x=(label,), y=(value,), color=method_color(position)))
            descriptions.append(f"{label} {value:,.0f}")
    return Figure(
        name=name,
        title=title,
        alt=f"{title} in {unit}: {', '.join(descriptions)}.",
        series=tuple(series),
        x_label="",
        y_label=unit,
        kind="bars",
    )
