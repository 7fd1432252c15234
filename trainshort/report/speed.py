"""Speed and memory on the page: stored benchmark results (`trainshort bench`), and what the methods cost. No torch."""

import statistics
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class SpeedTable:
    """Rows of one kind: head, and per row its name and (shown, exact) values."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[tuple[str, str]]]]
    source: Path


@dataclass(frozen=True)
class Speed:
    """What the page shows of benchmark results."""

    figures: list[Figure]
    tables: list[SpeedTable]
    notes: list[str]


@dataclass(frozen=True)
class FigureSpec:
    """A figure over some rows: a line per `line`, with `across` on the x-axis."""

    name: str
    title: str
    line: str
    across: str
    measure: str
    label: str
    log: bool = True


ATTENTION = (
    FigureSpec("time", "Attention: time of a forward pass", "engine", "tokens", "forward", "ms"),
    FigureSpec("ratio", "Attention: time to plain causal attention", "engine", "tokens", "to plain", "times plain"),
    FigureSpec("memory", "Attention: peak memory, forward and backward", "engine", "tokens", "peak", "MB"),
)
DECODE = FigureSpec("decode", "Decoding: time per token by context", "cache", "context", "time per token", "ms")
TRAINING = FigureSpec("training", "Training speed by method", "model", "tokens", "speed", "tokens/s", log=False)
EVALUATE = FigureSpec("evaluate", "Evaluation speed by method", "model", "tokens", "speed", "tokens/s", log=False)


def speed(collection: Collection) -> Speed | None:
    """Of every suite the newest result: of attention for each kind of inputs, of decode for each part. None without
    results."""
    made = Speed([], [], [])
    used: dict[Path, dict[str, None]] = {}

    def add(suite: str, *wanted: FigureSpec, suffix: str = "", more: str = "", **case: str) -> None:
        found = [(path, rows) for path, bench in collection.benchmark_results if (rows := _rows(bench, suite, case))]
        if found:
            path, rows = found[-1]
            used.setdefault(path, {})[suite] = None
            made.figures.extend(drawn for one in wanted if (drawn := _figure(one, rows, path, suffix, more)))
            made.tables.extend(_tables(f"{suite}{more}", rows, path))

    def values(suite: str, name: str) -> dict[str, None]:
        rows = (row for _, bench in collection.benchmark_results for row in bench.suites.get(suite, ()))
        return dict.fromkeys(str(row.case.get(name, "")) for row in rows)

    for index, inputs in enumerate(values("attention", "inputs")):
        suffix = f"-{index + 1}" if index else ""
        add("attention", *ATTENTION, suffix=suffix, more=f", {inputs} inputs", inputs=inputs)
    add("training", TRAINING)
    add("evaluate", EVALUATE)
    for part in values("decode", "part"):
        add("decode", *([DECODE] if part == "context" else []), part=part)
    add("patch")
    add("prepare")
    benches = dict(collection.benchmark_results)
    made.notes.extend(f"{', '.join(suites).capitalize()}: {_note(benches[path])}" for path, suites in used.items())
    return made if made.tables else None


def _rows(bench: BenchResult, suite: str, case: dict[str, str]) -> list[Measurement]:
    rows = bench.suites.get(suite, ())
    return [row for row in rows if all(row.case.get(name, "") == value for name, value in case.items())]


Lines = dict[str, dict[int, tuple[float, float, float]]]
"""Of each line its points by their place: how much, and the lower and upper end of its band."""


def _figure(wanted: FigureSpec, rows: list[Measurement], path: Path, suffix: str, more: str) -> Figure | None:
    """Lines with a band of their spread; None where nothing was measured."""
    lines: Lines = {}
    for row in rows:
        measure, at = row.measured.get(wanted.measure), row.case.get(wanted.across)
        if measure is not None and isinstance(at, int) and measure.value > 0:
            value, spread = measure.value, measure.value * (measure.spread or 0.0)
            point = value, max(value - spread, 0.05 * value), value + spread
            lines.setdefault(str(row.case.get(wanted.line)), {})[at] = point
    if not lines:
        return None
    shades = dict(zip(lines, cycle(OTHERS), strict=False)) if wanted.line != "model" else {}
    name, title = f"speed-{wanted.name}{suffix}", f"{wanted.title}{more}"
    drawn = _lines(lines, shades | BACKEND_COLORS, name, title, wanted.across, wanted.label)
    return replace(drawn, y_log=wanted.log, sources=(path,))


def _lines(lines: Lines, shades: dict[str, str], name: str, title: str, x_label: str, y_label: str) -> Figure:
    """A line of a shade, or else of its method's colour, with a tick at every point."""
    series = []
    for line, points in lines.items():
        x, y, low, high = zip(*((at, *points[at]) for at in sorted(points)), strict=True)
        series.append(Series(method_name(line), x, y, shades.get(line) or method_color(line), low, high))
    told = "; ".join(
        f"{one.name} " + ", ".join(f"{format_number(y)} at {x:,}" for x, y in zip(one.x, one.y, strict=True))
        for one in series
    )
    return Figure(
        name=name,
        title=title,
        alt=f"{title}, {y_label} against {x_label}: {told}.",
        series=tuple(series),
        x_label=x_label,
        y_label=y_label,
        x_log=True,
        ticks=tuple((at, f"{at:,}") for at in sorted({at for points in lines.values() for at in points})),
    )


def _tables(title: str, rows: list[Measurement], path: Path) -> list[SpeedTable]:
    """One for each kind of case."""
    made = []
    for kind, heads in group_by_case_keys(rows):
        cells = [(row.name, [_cell(row.measured.get(name)) for name in heads]) for row in kind]
        columns = [f"{name}, {unit}" if unit else name for name, unit in heads.items()]
        made.append(SpeedTable(title, columns, cells, path))
    return made


def _cell(measure: Measure | None) -> tuple[str, str]:
    return (format_number(measure.value), repr(measure.value)) if measure else ("", "")


def _note(bench: BenchResult) -> str:
    """Where and how it was measured, in a sentence."""
    parts = [f"measured {bench.made.get('time', 'at an unknown time')} on {bench.machine}"]
    if bench.made.get("commit"):
        commit, plus, changes = str(bench.made["commit"]).partition("+")
        parts.append(f"commit {commit[:12]}{plus}{changes}")
    tolerances = {
        str(plan["tolerance"]) for plan in bench.settings.values() if isinstance(plan, dict) and "tolerance" in plan
    }
    if tolerances:
        parts.append(f"tolerance {', '.join(sorted(tolerances))}")
    quick = " A quick run: not numbers to quote." if bench.settings.get("quick") else ""
    stopped = "" if bench.finished else " It was stopped before its end."
    return f"{', '.join(parts)}.{quick}{stopped}"


# ---- what the methods cost by length: speed against sinusoidal's round by round, and memory

AGAINST = "sinusoidal"


def cost_figures(collection: Collection) -> list[Figure]:
    """Speeds of training and evaluation as multiples of sinusoidal's, and the memory of training."""
    entries = list(collection.costs.values())
    if not entries:
        return []
    made = []
    for what, title in (("train", "Training speed"), ("read", "Evaluation speed")):
        name, rounds = f"cost-{what}", COST_ENTRY_KEYS[f"{what} speed"]
        if timed := [entry for entry in entries if entry[rounds]]:
            rates = [(entry, entry["tokens"] / statistics.median(entry[rounds])) for entry in timed]
            made.append(_speed(timed, name, title, rounds) or _bars(rates, name, title, "tokens/s"))
    weighed = [entry for entry in entries if entry["train_memory"]] or entries
    memories = [(entry, (entry["train_memory"] or 0) / 1e6) for entry in weighed]
    made.append(_bars(memories, "cost-memory", "Training memory", "MB"))
    sources = tuple(dict.fromkeys(entry["path"] for entry in entries))
    return [replace(figure, sources=sources) for figure in made]


def _speed(entries: list[dict[str, Any]], name: str, title: str, rounds: str) -> Figure | None:
    """A line per method over the lengths at which it took turns with sinusoidal; None when that is one length."""
    base = {(one["session"], one["length"]): one[rounds] for one in entries if one["position"] == AGAINST}
    lines: Lines = {}
    for entry in entries:
        turns = base.get((entry["session"], entry["length"]))
        if turns and entry["position"] != AGAINST:
            ratios = [theirs / ours for ours, theirs in zip(entry[rounds], turns, strict=True)]
            lines.setdefault(entry["position"], {})[entry["length"]] = median_with_interval(ratios)
    if len({at for points in lines.values() for at in points}) < 2:
        return None
    title = f"{title}, as a multiple of sinusoidal's"
    return _lines(lines, {}, name, title, "tokens in a sequence", "times sinusoidal's speed")


def _bars(found: list[tuple[dict[str, Any], float]], name: str, title: str, unit: str) -> Figure:
    """What each configuration was measured to have, at the length that most of them share."""
    length = statistics.mode(entry["length"] for entry, _ in found)
    title = f"{title} at {length:,} tokens"
    alike = [(str(entry["position"]), value) for entry, value in found if entry["length"] == length]
    told = ", ".join(f"{method_name(position)} {value:,.0f}" for position, value in alike)
    return Figure(
        name=name,
        title=title,
        alt=f"{title} in {unit}: {told}.",
        series=tuple(
            Series(method_name(one), (method_name(one),), (value,), method_color(one)) for one, value in alike
        ),
        x_label="",
        y_label=unit,
        kind="bars",
    )
