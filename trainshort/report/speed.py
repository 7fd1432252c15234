"""Speed and memory on the page: stored benchmark results (`trainshort bench`), and what the methods cost. No torch."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainshort.bench.compare import number
from trainshort.bench.measurements import BenchResult, Measure, Measurement
from trainshort.claims.collection import Collection
from trainshort.claims.measured import RATES, middle, session
from trainshort.plots.figures import OTHERS, Figure, Series, color
from trainshort.recipes.experiments import method_name

SHADES = {"windowed": color("alibi"), "bounded": color("alibi"), "plain": color("none"), "full": color("none")}


@dataclass(frozen=True)
class SpeedTable:
    """Rows of one kind: head, and per row its name and (shown, exact) values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    source: Path


@dataclass(frozen=True)
class Speed:
    """What the page shows of benchmark results."""

    figures: tuple[Figure, ...]
    tables: tuple[SpeedTable, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """A figure over some rows: a line per `line`, with `across` on the x-axis."""

    name: str
    title: str
    line: str
    across: str
    measure: str
    label: str
    log: bool = True


ATTENTION = (
    Wanted("time", "Attention: time of a forward pass", "engine", "tokens", "forward", "ms"),
    Wanted("ratio", "Attention: time to plain causal attention", "engine", "tokens", "to plain", "times plain"),
    Wanted("memory", "Attention: peak memory, forward and backward", "engine", "tokens", "peak", "MB"),
)
DECODE = Wanted("decode", "Decoding: time per token by context", "cache", "context", "time per token", "ms")
TRAINING = Wanted("training", "Training speed by method", "model", "tokens", "speed", "tokens/s", log=False)
EVALUATE = Wanted("evaluate", "Reading speed by method", "model", "tokens", "speed", "tokens/s", log=False)


def speed(collection: Collection) -> Speed | None:
    """Of every suite the newest result; attention once for each kind of inputs. None without results."""
    figures: list[Figure] = []
    used: dict[Path, dict[str, None]] = {}
    tables: list[SpeedTable] = []

    def add(
        suite: str, wanted: tuple[Wanted, ...], keep: Callable[[Measurement], bool], suffix: str = "", more: str = ""
    ) -> None:
        found = [(path, bench) for path, bench in collection.benches if any(map(keep, bench.suites.get(suite, ())))]
        if not found:
            return
        path, bench = found[-1]
        rows = [row for row in bench.suites[suite] if keep(row)]
        used.setdefault(path, {})[suite] = None
        figures.extend(made for one in wanted if (made := _figure(one, rows, path, suffix, more)))
        tables.extend(_tables(f"{suite}{more}", rows, path))

    everything = [row for _, bench in collection.benches for row in bench.suites.get("attention", ())]
    for index, inputs in enumerate(dict.fromkeys(str(row.case.get("inputs", "")) for row in everything)):
        same = lambda row, inputs=inputs: str(row.case.get("inputs", "")) == inputs  # noqa: E731
        add("attention", ATTENTION, same, f"-{index + 1}" if index else "", f", {inputs} inputs")
    add("training", (TRAINING,), lambda row: True)
    add("evaluate", (EVALUATE,), lambda row: True)
    add("decode", (DECODE,), lambda row: row.case.get("part") == "context")
    for part in ("weights", "greedy", "mpt", "endless"):
        add("decode", (), lambda row, part=part: row.case.get("part") == part)
    add("prepare", (), lambda row: True)
    benches = dict(collection.benches)
    notes = tuple(f"{', '.join(suites).capitalize()}: {_note(benches[path])}" for path, suites in used.items())
    return Speed(tuple(figures), tuple(tables), notes) if tables else None


def _figure(wanted: Wanted, rows: list[Measurement], path: Path, suffix: str, more: str) -> Figure | None:
    """Lines with a band of their spread; None where nothing was measured at two places."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        measure, at = row.measured.get(wanted.measure), row.case.get(wanted.across)
        if measure is not None and isinstance(at, int) and measure.value > 0:
            spread = measure.value * (measure.spread or 0.0)
            lines.setdefault(str(row.case.get(wanted.line)), []).append((at, measure.value, spread))
    series = []
    for index, (name, points) in enumerate(lines.items()):
        points.sort()
        x, y = tuple(p[0] for p in points), tuple(p[1] for p in points)
        low, high = tuple(max(p[1] - p[2], 0.05 * p[1]) for p in points), tuple(p[1] + p[2] for p in points)
        shade = SHADES.get(name) or (color(name) if wanted.line == "model" else OTHERS[index % len(OTHERS)])
        series.append(Series(method_name(name), x, y, shade, low, high))
    places = sorted({int(at) for one in series for at in one.x if not isinstance(at, str)})
    if not places:
        return None
    told = "; ".join(
        f"{one.name} "
        + ", ".join(f"{number(Measure(value=y))} at {int(x):,}" for x, y in zip(one.x, one.y, strict=True))
        for one in series
    )
    return Figure(
        name=f"speed-{wanted.name}{suffix}",
        title=f"{wanted.title}{more}",
        alt=f"{wanted.title}{more}, {wanted.label} against {wanted.across}: {told}.",
        series=tuple(series),
        x_label=wanted.across,
        y_label=wanted.label,
        x_log=True,
        y_log=wanted.log,
        ticks=tuple((at, f"{at:,}") for at in places),
        sources=(path,),
    )


def _tables(title: str, rows: list[Measurement], path: Path) -> list[SpeedTable]:
    """One for each kind of case."""
    kinds: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        kinds.setdefault(tuple(row.case), []).append(row)
    made = []
    for kind in kinds.values():
        heads = {name: measure.unit for row in kind for name, measure in row.measured.items()}
        cells = tuple(
            (
                row.name,
                tuple(
                    (number(row.measured[name]), repr(row.measured[name].value)) if name in row.measured else ("", "")
                    for name in heads
                ),
            )
            for row in kind
        )
        columns = tuple(f"{name}, {unit}" if unit else name for name, unit in heads.items())
        made.append(SpeedTable(title, columns, cells, path))
    return made


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
    """Speeds of training and reading as multiples of sinusoidal's, and the memory of training."""
    entries = list(collection.costs.values())
    if not entries:
        return []
    made = []
    for one in (("cost-train", "Training speed", "train speed"), ("cost-read", "Reading speed", "read speed")):
        if timed := [entry for entry in entries if entry[RATES[one[-1]]]]:
            made.append(_speed(timed, *one) or _rates(timed, *one))
    sources = tuple(dict.fromkeys(entry["path"] for entry in entries))
    return [replace(figure, sources=sources) for figure in (*made, _memory(entries))]


def _speed(entries: list[dict[str, Any]], name: str, title: str, quantity: str) -> Figure | None:
    """A line per method over the lengths at which it took turns with sinusoidal; None when that is one length."""
    base = {(session(one), one["length"]): one[RATES[quantity]] for one in entries if one["position"] == AGAINST}
    lines: dict[str, dict[int, tuple[float, float, float]]] = {}
    for entry in entries:
        turns = base.get((session(entry), entry["length"]))
        if turns and entry["position"] != AGAINST:
            ratios = [theirs / ours for ours, theirs in zip(entry[RATES[quantity]], turns, strict=True)]
            lines.setdefault(entry["position"], {})[entry["length"]] = middle(ratios)
    lengths = sorted({at for points in lines.values() for at in points})
    if len(lengths) < 2:
        return None
    series = []
    for position, points in lines.items():
        at = sorted(points)
        low, high = (tuple(points[length][side] for length in at) for side in (1, 2))
        series.append(
            Series(
                method_name(position),
                tuple(at),
                tuple(points[one][0] for one in at),
                color(position),
                low=low,
                high=high,
            )
        )
    told = "; ".join(
        f"{one.name} {one.y[0]:.2f} at {one.x[0]:,} and {one.y[-1]:.2f} at {one.x[-1]:,}" for one in series
    )
    return Figure(
        name=name,
        title=f"{title}, as a multiple of sinusoidal's",
        alt=f"{title} by length, as a multiple of sinusoidal's: {told}.",
        series=tuple(series),
        x_label="tokens in a sequence",
        y_label="times sinusoidal's speed",
        x_log=True,
        ticks=tuple((length, f"{length:,}") for length in lengths),
    )


def _rates(entries: list[dict[str, Any]], name: str, title: str, quantity: str) -> Figure:
    """Bars at the length that most configurations share."""
    length, alike = _most(entries)
    values = [entry["tokens"] / statistics.median(entry[RATES[quantity]]) for entry in alike]
    return _bars(name, f"{title} at {length:,} tokens", "tokens/s", alike, values)


def _memory(entries: list[dict[str, Any]]) -> Figure:
    length, alike = _most([entry for entry in entries if entry["train_memory"]] or entries)
    values = [(entry["train_memory"] or 0) / 1e6 for entry in alike]
    return _bars("cost-memory", f"Training memory at {length:,} tokens", "MB", alike, values)


def _most(entries: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    length = statistics.mode(entry["length"] for entry in entries)
    return length, [entry for entry in entries if entry["length"] == length]


def _bars(name: str, title: str, unit: str, entries: list[dict[str, Any]], values: list[float]) -> Figure:
    names = [method_name(str(entry["position"])) for entry in entries]
    told = ", ".join(f"{method} {value:,.0f}" for method, value in zip(names, values, strict=True))
    bars = tuple(
        Series(method, (method,), (value,), color(entry["position"]))
        for method, value, entry in zip(names, values, entries, strict=True)
    )
    return Figure(
        name=name,
        title=title,
        alt=f"{title} in {unit}: {told}.",
        series=bars,
        x_label="",
        y_label=unit,
        kind="bars",
    )
