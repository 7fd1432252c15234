"""The paper's tables with the numbers obtained here beside them.

The JSON files behind a report are copied beside it (`Sources`), so that every link works anywhere. Their names are made
here and never taken from a run: a number, and what is left of the name when only plain letters stay.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trainshort.experiments.claims.measured import MeasuredCell, ScaleView
from trainshort.experiments.experiments import Cell, Experiment, experiments, with_methods
from trainshort.utils.figures import OTHERS, Figure, Series, method_color, thin_ticks
from trainshort.utils.io import make_folder, read_bytes, write_atomic

FOLDER = "data"
OURS = "alibi"
"""The method whose perplexities the paper holds against the others'."""


class Sources:
    """Files behind the page, each copied once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.links: dict[Path, str] = {}
        for old in make_folder(out / FOLDER).glob("[0-9][0-9][0-9]-*.json"):
            old.unlink()

    def link(self, path: Path) -> str:
        """A relative address of the copy of a file: data/003-alibi-128-valid.json"""
        if path not in self.links:
            near = f"{path.parent.parent.name}-{path.stem}" if path.parent.name == "eval" else path.stem
            plain = re.sub(r"[^A-Za-z0-9.]+", "-", near).strip("-.")[:80] or "result"
            name = f"{len(self.links) + 1:03d}-{plain}.json"
            write_atomic(self.out / FOLDER / name, read_bytes(path))
            self.links[path] = f"{FOLDER}/{name}"
        return self.links[path]


MOST_ROWS = 12
"""Longer tables are folded in the page."""
LEAST_POINTS = 3
"""A figure wants a line of so many points, and some of another; a few scattered dots say less than the table."""


@dataclass(frozen=True)
class TableCell:
    """One cell as it is printed."""

    here: str
    paper: str
    link: str = ""
    title: str = ""
    values: tuple[float, ...] = ()
    """What it is the mean of: one number a seed."""


@dataclass(frozen=True)
class Table:
    """A table of the paper, by rows."""

    name: str
    title: str
    columns: list[str]
    rows: list[tuple[str, list[TableCell]]]
    count: int
    """Cells that have a number here."""
    folded: bool
    note: str
    differences: list[dict[str, str]]
    """How much more perplexity ALiBi has in one cell than another method evaluated alike in the same column."""


def paper_tables(view: ScaleView, sources: Sources) -> list[Table]:
    """Every table of which at least one cell was obtained."""
    made = [_table(_with_ours(build(), view), view, sources) for name, build in experiments.items() if name != "demo"]
    return [table for table in made if table.count]


def _with_ours(experiment: Experiment, view: ScaleView) -> Experiment:
    """An experiment that compares methods, with those that were run here and the paper does not have."""
    here = dict.fromkeys(run.config.model.position for run in view.collection.runs.values())
    return with_methods(experiment, [*experiment.methods, *here]) if len(experiment.methods) > 1 else experiment


def _table(experiment: Experiment, view: ScaleView, sources: Sources) -> Table:
    found = {
        (cell.row, cell.column): _make_table_cell(cell, view.find_cell(cell), sources) for cell in experiment.cells
    }
    obtained = [place for place, one in found.items() if one.link]
    numbers = [place for place, one in found.items() if one.link or one.paper]
    rows = [row for row in dict.fromkeys(row for row, _ in found) if any(row == at for at, _ in numbers)]
    # Columns without any number, such as the points of a curve, would only push the others off the page.
    columns = [column for column in dict.fromkeys(at for _, at in found) if any(column == at for _, at in numbers)]
    if len(columns) > 12:
        columns = [column for column in columns if any(column == at for _, at in obtained)]
    return Table(
        name=experiment.name,
        title=experiment.title,
        columns=columns,
        rows=[(row, [found.get((row, column), TableCell("", "")) for column in columns]) for row in rows],
        count=len(obtained),
        folded=len(rows) > MOST_ROWS,
        note=_note(experiment, view),
        differences=list(_differences(experiment, view)),
    )


def _differences(experiment: Experiment, view: ScaleView) -> Iterator[dict[str, str]]:
    """Told by the one rule about noise: the wider interval of two, over stretches of the text and over the seeds."""
    cells = [cell for cell in experiment.cells if cell.quantity == "perplexity"]
    read = [(cell, cell.variant, cell.protocol) for cell in cells if cell.variant and cell.protocol]
    for (ours, model, far), (other, theirs, as_far) in itertools.product(read, read):
        alike = (ours.column, far) == (other.column, as_far)
        if alike and model.position == OURS != theirs.position:
            change = view.compare_perplexities((model, far), (theirs, as_far))
            if change is not None:
                told = str(change) if change.is_significant else f"cannot tell, {change}"
                yield {"row": ours.row, "column": ours.column, "other": other.row, "told": told}


def _note(experiment: Experiment, view: ScaleView, *, drawn: bool = False) -> str:
    told = []
    if view.scale.length_divisor != 1:
        which = "Lengths in titles and names" if drawn else "Lengths"  # a figure's axis has those of here
        told.append(f"{which} are the paper's; here they are divided by {view.scale.length_divisor}.")
    if costs := dict.fromkeys(cell.quantity for cell in experiment.cells if cell.is_cost):
        told.append(f"Of random weights and tokens here: {', '.join(costs)}.")
    return " ".join(told)


def number(value: float, quantity: str) -> str:
    if quantity == "train memory":
        return f"{value:.3f}" if value < 1 else f"{value:.1f}"
    if quantity.endswith("speed"):
        return f"{value:,.0f}"
    return f"{value:.2f}"


def _make_table_cell(cell: Cell, measured: MeasuredCell | None, sources: Sources) -> TableCell:
    paper = "" if cell.published is None else number(cell.published, cell.quantity)
    if measured is None:
        return TableCell("", paper)
    link = sources.link(measured.sources[0])
    if not measured.values:
        return TableCell(measured.status, paper, link)
    spread = "" if measured.std is None else f" ± {number(measured.std, cell.quantity)}"
    title = f"{measured.value!r} over {len(measured.values)} seed{'s' if len(measured.values) > 1 else ''}"
    return TableCell(number(measured.value, cell.quantity) + spread, paper, link, title, measured.values)


def paper_figures(view: ScaleView) -> list[Figure]:
    """Tables and figures of the paper that can be drawn, where enough points were obtained here to see something."""
    made = [_figure(_with_ours(build(), view), view) for _, build in experiments.items()]
    return [figure for figure in made if figure]


@dataclass(frozen=True)
class Point:
    """A place in a figure, how far the seeds lie from it (standard deviation; 0 with one), and the file behind it."""

    x: float
    y: float
    spread: float
    source: Path


def _figure(experiment: Experiment, view: ScaleView) -> Figure | None:
    if experiment.kind not in POINTS:
        return None
    series: list[Series] = []
    sources: list[Path] = []
    for index, row in enumerate(dict.fromkeys(cell.row for cell in experiment.cells)):
        cells = [cell for cell in experiment.cells if cell.row == row]
        curve = cells[0].quantity == "learning curve"
        points = sorted((_curve if curve else POINTS[experiment.kind])(cells, view), key=lambda point: point.x)
        if not points:
            continue
        variant = cells[0].variant
        own = method_color(variant.position if variant else "")
        taken = own in {one.color for one in series}  # a method's second line needs another colour
        series.append(_series(row, points, OTHERS[index % len(OTHERS)] if taken else own))
        sources += [point.source for point in points]
    if not _enough([len(one.y) for one in series], experiment.kind):
        return None
    names = ", ".join(one.name for one in series[:4]) + (f" and {len(series) - 4} more" if series[4:] else "")
    number = experiment.name.replace("fig", "Figure ").replace("table", "Table ")
    note = _note(experiment, view, drawn=True)
    if any(one.low for one in series):
        note += " Bands and bars: one standard deviation over the seeds."
    by_length = experiment.kind == "lines" and experiment.cells[0].quantity != "learning curve"
    places = [x for one in series for x in one.x if not isinstance(x, str)]  # bars have names there
    return Figure(
        name=experiment.name if experiment.name.startswith("fig") else f"{experiment.name}-figure",
        title=f"{number}: {experiment.title}",
        alt=f"{experiment.title}: {experiment.axes[1]} against {experiment.axes[0]} for {names}.",
        series=tuple(series),
        x_label=experiment.axes[0],
        y_label=experiment.axes[1],
        x_log=experiment.kind == "lines",
        y_log=experiment.axes[1] == "perplexity",
        ticks=thin_ticks(places) if by_length else (),
        note=note.lstrip(),
        sources=tuple(dict.fromkeys(sources)),
    )


def _series(name: str, points: list[Point], shade: str) -> Series:
    line = Series(name, tuple(point.x for point in points), tuple(point.y for point in points), shade)
    if not any(point.spread for point in points):
        return line
    low, high = (tuple(point.y + side * point.spread for point in points) for side in (-1, 1))
    return replace(line, low=low, high=high)


def _enough(counts: list[int], kind: str) -> bool:
    """Whether there is something to see: a line and some points of another, or a few single points."""
    if kind == "by speed":
        return len(counts) >= LEAST_POINTS
    return max(counts, default=0) >= LEAST_POINTS and sum(counts) >= 2 * LEAST_POINTS - 1


def _by_length(cells: list[Cell], view: ScaleView) -> list[Point]:
    found = {}
    for cell in cells:
        measured = view.find_cell(cell)
        if measured and measured.values and cell.x_value is not None:
            at = view.scale.scale_length(round(cell.x_value))
            found[at] = Point(at, measured.value, measured.std or 0.0, measured.sources[0])
    return list(found.values())


def _by_speed(cells: list[Cell], view: ScaleView) -> list[Point]:
    """A row's last perplexity against its training speed: what a model is worth, and what it takes to have it."""
    speeds = [view.find_cell(cell) for cell in cells if cell.quantity == "train speed"]
    scores = [view.find_cell(cell) for cell in cells if cell.quantity == "perplexity"]
    if not speeds or not scores or speeds[0] is None or scores[-1] is None or not scores[-1].values:
        return []
    return [Point(speeds[0].value, scores[-1].value, scores[-1].std or 0.0, scores[-1].sources[0])]


POINTS = {"lines": _by_length, "by speed": _by_speed}
"""How the points of a row are found, for each kind of experiment that is drawn here."""


def _curve(cells: list[Cell], view: ScaleView) -> list[Point]:
    """Training time in minutes, from tokens and measured speed; without a speed, millions of tokens would mislead."""
    variant, reading = cells[0].variant, cells[0].protocol
    speed = view.find_cost(variant, "train speed") if variant else None
    if variant is None or reading is None or speed is None:
        return []
    points = view.find_learning_curve(variant, reading)
    return [Point(tokens / speed.value / 60, value, 0.0, path) for tokens, value, path in points]
