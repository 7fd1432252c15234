"""What the methods cost by length: speed against sinusoidal's round by round, and memory. No torch."""

import statistics
from dataclasses import replace
from typing import Any

from trainshort.claims.collection import Collection
from trainshort.claims.measured import RATES, middle, session
from trainshort.plots.figures import Figure, Series, color
from trainshort.recipes.experiments import method_name

AGAINST = "sinusoidal"


def cost_figures(collection: Collection) -> list[Figure]:
    """Speeds of training and reading as multiples of sinusoidal's, and the memory of training."""
    if not collection.costs or collection.cost_path is None:
        return []
    entries = list(collection.costs.values())
    made = []
    for one in (("cost-train", "Training speed", "train speed"), ("cost-read", "Reading speed", "read speed")):
        if timed := [entry for entry in entries if entry[RATES[one[-1]]]]:
            made.append(_speed(timed, *one) or _rates(timed, *one))
    return [_sourced(figure, collection) for figure in (*made, _memory(entries)) if figure]


def _sourced(figure: Figure, collection: Collection) -> Figure:
    return replace(figure, sources=(collection.cost_path,) if collection.cost_path else ())


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
