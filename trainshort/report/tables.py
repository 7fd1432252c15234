"""The tables and figures of the paper with the measured numbers.

Every measured number links to the JSON file that contains it. These files are copied into the folder of the report, so
that the links also work if the folder is moved.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainshort.experiments.claims.measured import MeasuredCell, ScaleView
from trainshort.experiments.experiments import Cell, EvalProtocol, Experiment, Variant, experiments, with_methods
from trainshort.utils.figures import OTHERS, Figure, Series, method_color, thin_ticks
from trainshort.utils.io import make_folder, read_bytes, write_atomic

DATA_FOLDER = "data"
"""The folder of the copied JSON files, in the folder of the report."""

COMPARED_METHOD = "alibi"
"""The position method that is compared with all others below a table."""

MAX_OPEN_ROWS = 12
"""The HTML page folds tables with more rows."""

MAX_COLUMNS = 12
"""A table with more columns shows only the columns with a measured number."""

MIN_POINTS = 3
"""A figure is drawn only if one line has this many points and the other lines add at least two points."""


class SourceFiles:
    """Copies of the JSON files behind the report.

    Args:
        out: The folder of the report. Copies of an earlier report are removed.
    """

    def __init__(self, out: Path) -> None:
        """Create the folder for the copies, and remove the copies of an earlier report.

        Args:
            out: The folder of the report.
        """
        self.out = out
        self.links: dict[Path, str] = {}  # The link to the copy of each file that was copied.
        data_folder = make_folder(out / DATA_FOLDER)
        # The name of a copy starts with a number, such as "003-alibi-128-valid.json".
        for old_copy in data_folder.glob("[0-9][0-9][0-9]-*.json"):
            old_copy.unlink()

    def link(self, path: Path) -> str:
        """Copy a file if it was not copied before, and return the relative link to the copy.

        Args:
            path: The JSON file.

        Returns:
            A link such as "data/003-alibi-128-valid.json".
        """
        if path not in self.links:
            name = f"{len(self.links) + 1:03d}-{_safe_file_name(path)}.json"
            write_atomic(self.out / DATA_FOLDER / name, read_bytes(path))
            self.links[path] = f"{DATA_FOLDER}/{name}"
        return self.links[path]


def _safe_file_name(path: Path) -> str:
    """Return a name for the copy of a file, without folder and suffix.

    An evaluation is stored in RUN/eval/NAME.json, and its copy is named "RUN-NAME". Names of runs may contain any
    characters. Characters other than letters, digits and periods are replaced by hyphens.
    """
    name = path.stem
    if path.parent.name == "eval":
        run_folder = path.parent.parent
        name = f"{run_folder.name}-{name}"
    plain_name = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")
    return plain_name[:80] or "result"


# ---- tables


@dataclass(frozen=True)
class TableCell:
    """A cell as it is printed.

    Attributes:
        here: The measured number, or the reason why there is no number. Empty if nothing was measured.
        paper: The number of the paper. Empty if the paper has no number.
        link: The link to the file with the measured number.
        title: The number with all digits, which is shown as a tooltip.
        values: The measured number of each seed.
    """

    here: str
    paper: str
    link: str = ""
    title: str = ""
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Difference:
    """The difference between the perplexities of ALiBi and another method in the same column of a table.

    Attributes:
        row: The row of ALiBi.
        column: The column.
        baseline_row: The row of the other method.
        text: The relative difference with its interval.
    """

    row: str
    column: str
    baseline_row: str
    text: str


@dataclass(frozen=True)
class Table:
    """A table of the paper with the measured numbers.

    Attributes:
        name: The name of the experiment, such as "table5".
        title: The title.
        columns: The labels of the columns.
        rows: The label and the cells of each row.
        measured_count: The number of measured cells.
        is_folded: Whether the HTML page folds the table.
        note: Sentences about the numbers.
        differences: Comparisons of ALiBi with the other methods.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[tuple[str, list[TableCell]]]
    measured_count: int
    is_folded: bool
    note: str
    differences: list[Difference]


def paper_tables(view: ScaleView, sources: SourceFiles) -> list[Table]:
    """Return all tables of the paper with at least one measured cell.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        sources: Copies of the files that the tables link to.
    """
    tables: list[Table] = []
    for name, make_experiment in experiments.items():
        if name == "demo":
            continue  # The demo is not a table of the paper. Its results are in other sections.
        table = _make_table(_with_measured_methods(make_experiment(), view), view, sources)
        if table.measured_count:
            tables.append(table)
    return tables


def _with_measured_methods(experiment: Experiment, view: ScaleView) -> Experiment:
    """Add the position methods that were trained but are not in the paper, if the experiment compares methods.

    Args:
        experiment: The table or figure of the paper.
        view: The stored results at one scale (laptop, gpu or paper).
    """
    if len(experiment.methods) <= 1:
        return experiment
    trained_methods = [run.config.model.position for run in view.collection.runs.values()]
    return with_methods(experiment, [*experiment.methods, *trained_methods])


def _make_table(experiment: Experiment, view: ScaleView, sources: SourceFiles) -> Table:
    """Build a table from the cells of an experiment. Rows and columns without any number are left out.

    Args:
        experiment: The table or figure of the paper. A cell is one number of the paper.
        view: The stored results at one scale (laptop, gpu or paper).
        sources: Copies of the files that the table links to.
    """
    cells: dict[tuple[str, str], TableCell] = {}
    for cell in experiment.cells:
        cells[cell.row, cell.column] = _make_table_cell(cell, view.find_cell(cell), sources)

    # Dictionaries keep the order of the cells and remove duplicates.
    rows: dict[str, None] = {}
    columns: dict[str, None] = {}
    measured_columns: dict[str, None] = {}
    # A cell has a link if it was measured.
    for (row, column), table_cell in cells.items():
        if table_cell.link or table_cell.paper:
            rows[row] = None
            columns[column] = None
        if table_cell.link:
            measured_columns[column] = None
    if len(columns) > MAX_COLUMNS:
        columns = {column: None for column in columns if column in measured_columns}

    empty_cell = TableCell(here="", paper="")  # neither a measured nor a published number
    return Table(
        name=experiment.name,
        title=experiment.title,
        columns=list(columns),
        rows=[(row, [cells.get((row, column), empty_cell) for column in columns]) for row in rows],
        measured_count=sum(bool(table_cell.link) for table_cell in cells.values()),
        is_folded=len(rows) > MAX_OPEN_ROWS,
        note=_make_note(experiment, view, is_figure=False),
        differences=_find_differences(experiment, view),
    )


def _make_table_cell(cell: Cell, measured: MeasuredCell | None, sources: SourceFiles) -> TableCell:
    """Format the published and the measured number of a cell.

    Args:
        cell: The cell of the paper.
        measured: The measured values, or None if nothing was measured.
        sources: Copies of the files that the cells link to.
    """
    paper = "" if cell.published is None else format_value(cell.published, cell.quantity)
    if measured is None:
        return TableCell(here="", paper=paper)
    link = sources.link(measured.sources[0])
    if not measured.values:
        return TableCell(here=measured.status, paper=paper, link=link)  # such as "out of memory"

    here = format_value(measured.value, cell.quantity)
    if measured.std is not None:
        here += f" ± {format_value(measured.std, cell.quantity)}"
    seed_count = len(measured.values)
    seeds = "1 seed" if seed_count == 1 else f"{seed_count} seeds"
    exact_number = f"{measured.value!r} over {seeds}"  # shown as a tooltip
    return TableCell(here, paper, link, title=exact_number, values=measured.values)


def format_value(value: float, quantity: str) -> str:
    """Format a number of a table: "15.3" for a memory in GB, "28,300" for a speed, "18.40" for a perplexity.

    Args:
        value: The number.
        quantity: What the number measures, such as "train memory", "read speed" or "perplexity".
    """
    if quantity == "train memory":
        return f"{value:.3f}" if value < 1 else f"{value:.1f}"
    if quantity.endswith("speed"):
        return f"{value:,.0f}"
    return f"{value:.2f}"


def _make_note(experiment: Experiment, view: ScaleView, *, is_figure: bool) -> str:
    """Return sentences about the lengths and the costs (speed and memory) in a table or a figure.

    Args:
        experiment: The table or figure of the paper.
        view: The stored results at one scale (laptop, gpu or paper).
        is_figure: Whether the note belongs to a figure. The axis of a figure shows the actual lengths. Only its title
            and the names of its lines contain the lengths of the paper.
    """
    sentences: list[str] = []
    divisor = view.scale.length_divisor
    if divisor != 1:
        subject = "Lengths in titles and names" if is_figure else "Lengths"
        sentences.append(f"{subject} are those of the paper. The models here use lengths divided by {divisor}.")
    costs = dict.fromkeys(cell.quantity for cell in experiment.cells if cell.is_cost)
    if costs:
        sentences.append(f"Measured with random weights and random tokens: {', '.join(costs)}.")
    return " ".join(sentences)


class EvaluatedCell(NamedTuple):
    """A cell with the perplexity of a model.

    Attributes:
        row: The label of the row.
        column: The label of the column.
        variant: The model.
        protocol: How the model is evaluated.
    """

    row: str
    column: str
    variant: Variant
    protocol: EvalProtocol


def _find_differences(experiment: Experiment, view: ScaleView) -> list[Difference]:
    """Compare ALiBi's perplexities with those of the other methods in the same column, at the same evaluation length.

    Args:
        experiment: The experiment.
        view: The stored results at one scale (laptop, gpu or paper).
    """
    alibi_cells: list[EvaluatedCell] = []
    baseline_cells: list[EvaluatedCell] = []
    for cell in experiment.cells:
        if cell.quantity == "perplexity" and cell.variant is not None and cell.protocol is not None:
            evaluated_cell = EvaluatedCell(cell.row, cell.column, cell.variant, cell.protocol)
            if cell.variant.position == COMPARED_METHOD:
                alibi_cells.append(evaluated_cell)
            else:
                baseline_cells.append(evaluated_cell)

    differences: list[Difference] = []
    for cell in alibi_cells:
        for baseline in baseline_cells:
            if cell.column != baseline.column or cell.protocol != baseline.protocol:
                continue
            change = view.compare_perplexities((cell.variant, cell.protocol), (baseline.variant, baseline.protocol))
            if change is not None:
                text = str(change) if change.is_significant else f"inconclusive, {change}"
                differences.append(Difference(cell.row, cell.column, baseline_row=baseline.row, text=text))
    return differences


# ---- figures


@dataclass(frozen=True)
class Point:
    """A point of a figure.

    Attributes:
        x: The position on the x-axis.
        y: The measured value.
        spread: The standard deviation over the seeds, or 0 with one seed.
        source: The file that contains the value.
    """

    x: float
    y: float
    spread: float
    source: Path


def paper_figures(view: ScaleView) -> list[Figure]:
    """Return the figures of the paper, and figures of its tables, for which enough points were measured.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
    """
    figures: list[Figure] = []
    for _, make_experiment in experiments.items():
        figure = _make_figure(_with_measured_methods(make_experiment(), view), view)
        if figure is not None:
            figures.append(figure)
    return figures


def _make_figure(experiment: Experiment, view: ScaleView) -> Figure | None:
    """Draw an experiment with one line for each row. Return None if too few points were measured."""
    if experiment.kind not in ("lines", "by speed"):
        return None
    series: list[Series] = []
    sources: dict[Path, None] = {}
    row_names = list(dict.fromkeys(cell.row for cell in experiment.cells))
    for index, row in enumerate(row_names):
        cells = [cell for cell in experiment.cells if cell.row == row]
        points = _find_points(experiment, cells, view)
        if points:
            color = _choose_color(cells[0].variant, index, series)
            series.append(_make_series(row, points, color))
            sources.update(dict.fromkeys(point.source for point in points))
    if not _has_enough_points(series, experiment.kind):
        return None

    x_label, y_label = experiment.axes
    is_figure_of_paper = experiment.name.startswith("fig")
    number = experiment.name.replace("fig", "Figure ").replace("table", "Table ")
    note = _make_note(experiment, view, is_figure=True)
    if any(line.low for line in series):
        note += " Bands and bars: one standard deviation over the seeds."
    is_learning_curve = experiment.cells[0].quantity == "learning curve"
    x_values = [x for line in series for x in line.x if not isinstance(x, str)]
    has_length_ticks = experiment.kind == "lines" and not is_learning_curve
    return Figure(
        name=experiment.name if is_figure_of_paper else f"{experiment.name}-figure",
        title=f"{number}: {experiment.title}",
        alt=f"{experiment.title}: {y_label} against {x_label} for {_format_names(series)}.",
        series=tuple(series),
        x_label=x_label,
        y_label=y_label,
        x_log=experiment.kind == "lines",
        y_log=y_label == "perplexity",
        ticks=thin_ticks(x_values) if has_length_ticks else (),
        note=note.lstrip(),
        sources=tuple(sources),
    )


def _find_points(experiment: Experiment, cells: Sequence[Cell], view: ScaleView) -> list[Point]:
    """Return the measured points of one line of a figure, sorted by their position on the x-axis.

    Args:
        experiment: The figure of the paper. Its kind decides what the axes show.
        cells: The cells of the row that is drawn as a line.
        view: The stored results at one scale (laptop, gpu or paper).
    """
    if cells[0].quantity == "learning curve":
        points = _learning_curve_points(cells, view)
    elif experiment.kind == "by speed":
        points = _speed_points(cells, view)
    else:
        points = _length_points(cells, view)
    return sorted(points, key=lambda point: point.x)


def _length_points(cells: Sequence[Cell], view: ScaleView) -> list[Point]:
    """Return the measured values of a row of a figure, with the sequence length on the x-axis.

    Args:
        cells: The cells of the row.
        view: The stored results at one scale (laptop, gpu or paper).
    """
    # Two lengths of the paper can become the same length at a small scale, so the points are stored by length.
    points: dict[int, Point] = {}
    for cell in cells:
        measured = view.find_cell(cell)
        if measured is not None and measured.values and cell.x_value is not None:
            length = view.scale.scale_length(round(cell.x_value))
            points[length] = Point(x=length, y=measured.value, spread=measured.std or 0.0, source=measured.sources[0])
    return list(points.values())


def _speed_points(cells: Sequence[Cell], view: ScaleView) -> list[Point]:
    """Return the point of a row: its perplexity on the y-axis, and its training speed on the x-axis.

    Args:
        cells: The cells of the row. If the row has several perplexities, the last one is used.
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        A list with one point. The list is empty if the speed or the perplexity was not measured.
    """
    speed_cells = [cell for cell in cells if cell.quantity == "train speed"]
    perplexity_cells = [cell for cell in cells if cell.quantity == "perplexity"]
    if not speed_cells or not perplexity_cells:
        return []
    speed = view.find_cell(speed_cells[0])
    perplexity = view.find_cell(perplexity_cells[-1])
    if speed is None or perplexity is None or not perplexity.values:
        return []
    return [Point(x=speed.value, y=perplexity.value, spread=perplexity.std or 0.0, source=perplexity.sources[0])]


def _learning_curve_points(cells: Sequence[Cell], view: ScaleView) -> list[Point]:
    """Return the perplexities of a model during training, with the training time in minutes on the x-axis.

    The time is computed from the number of training tokens and the measured speed. Without a measured speed there are
    no points.

    Args:
        cells: The cells of one row of a figure. All cells have the same model.
        view: The stored results at one scale (laptop, gpu or paper).
    """
    variant = cells[0].variant
    protocol = cells[0].protocol
    if variant is None or protocol is None:
        return []
    speed = view.find_cost(variant, "train speed")
    if speed is None:
        return []
    points: list[Point] = []
    for curve_point in view.find_learning_curve(variant, protocol):
        minutes = curve_point.tokens / speed.value / 60
        points.append(Point(x=minutes, y=curve_point.perplexity, spread=0.0, source=curve_point.source))
    return points


def _choose_color(variant: Variant | None, index: int, series: Sequence[Series]) -> str:
    """Return the color of the position method, or another color if a line of the figure already has this color.

    Args:
        variant: The model of the line.
        index: The index of the row, which determines the other color.
        series: The lines that were drawn before.
    """
    color = method_color(variant.position if variant else "")
    if color in {line.color for line in series}:
        return OTHERS[index % len(OTHERS)]
    return color


def _make_series(name: str, points: Sequence[Point], color: str) -> Series:
    """Return a line of a figure. If there are several seeds, the line has a band of one standard deviation.

    Args:
        name: The name of the line.
        points: The points. The spread of a point is the standard deviation over the seeds, or 0 for a single seed.
        color: The color of the line.
    """
    x = tuple(point.x for point in points)
    y = tuple(point.y for point in points)
    line = Series(name, x, y, color)
    if not any(point.spread for point in points):
        return line
    low = tuple(point.y - point.spread for point in points)
    high = tuple(point.y + point.spread for point in points)
    return replace(line, low=low, high=high)


def _has_enough_points(series: Sequence[Series], kind: str) -> bool:
    """Return whether a figure has enough points to be useful.

    Args:
        series: The lines. In a figure by speed, each line has one point.
        kind: The kind of the experiment.
    """
    if kind == "by speed":
        return len(series) >= MIN_POINTS
    counts = [len(line.y) for line in series]
    has_long_line = max(counts, default=0) >= MIN_POINTS
    # Besides a line with `MIN_POINTS` points, there must be at least two more points.
    min_total = MIN_POINTS + 2
    return has_long_line and sum(counts) >= min_total


def _format_names(series: Sequence[Series]) -> str:
    """Return the names of the lines. Only the first four names are listed."""
    names = ", ".join(line.name for line in series[:4])
    hidden_count = len(series) - 4
    return f"{names} and {hidden_count} more" if hidden_count > 0 else names
