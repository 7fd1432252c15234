"""Two stored results side by side: what changed, and whether by more than both of them vary. No torch."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainshort.bench.measurements import BenchResult, Measure, Measurement
from trainshort.runs import flatten
from trainshort.terminal import new_console

SINGLE = 0.02
"""Spread that is allowed to a value measured once, such as peak memory."""


@dataclass(frozen=True)
class Difference:
    """One measure of one case, then and now."""

    suite: str
    case: str
    name: str
    old: Measure
    new: Measure

    @property
    def relative(self) -> float | None:
        """New to old, less one; None where the old value was zero."""
        return self.new.value / self.old.value - 1 if self.old.value else None

    @property
    def outside(self) -> bool:
        """Whether the two values are farther apart than their spreads together."""
        room = sum(abs(one.value) * (SINGLE if one.spread is None else one.spread) for one in (self.old, self.new))
        return abs(self.new.value - self.old.value) > room

    @property
    def verdict(self) -> str:
        """better, worse or changed; nothing when the change is within the spreads."""
        if not self.outside:
            return ""
        if self.new.better is None:
            return "changed"
        return "better" if (self.new.value < self.old.value) == (self.new.better == "lower") else "worse"


@dataclass(frozen=True)
class Comparison:
    """All changes, and what only one side has."""

    changes: tuple[Difference, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def summary(self) -> str:
        """`1 better, 2 worse by more than their spreads; 40 within them.`"""
        counts = {word: sum(one.verdict == word for one in self.changes) for word in ("better", "worse", "changed", "")}
        moved = [
            f"{counts[word]} {word}" for word in ("better", "worse", "changed") if counts[word] or word != "changed"
        ]
        return f"{', '.join(moved)} by more than their spreads; {counts['']} within them."


def compare(old: BenchResult, new: BenchResult) -> Comparison:
    """Case by case, in the order of the new result."""
    changes, only_old, only_new = [], [], []
    for suite in dict.fromkeys((*new.suites, *old.suites)):
        before = {row.key: row for row in old.suites.get(suite, ())}
        after = {row.key: row for row in new.suites.get(suite, ())}
        only_old += [f"{suite}: {row.name}" for key, row in before.items() if key not in after]
        only_new += [f"{suite}: {row.name}" for key, row in after.items() if key not in before]
        for key, row in after.items():
            if key in before:
                changes += _changes(suite, before[key], row)
                only_old += [
                    f"{suite}: {row.name}: {name}" for name in before[key].measured if name not in row.measured
                ]
                only_new += [
                    f"{suite}: {row.name}: {name}" for name in row.measured if name not in before[key].measured
                ]
    return Comparison(tuple(changes), tuple(only_old), tuple(only_new), tuple(_warnings(old, new)))


def _changes(suite: str, old: Measurement, new: Measurement) -> list[Difference]:
    shared = [name for name in new.measured if name in old.measured]
    return [Difference(suite, new.name, name, old.measured[name], new.measured[name]) for name in shared]


def _warnings(old: BenchResult, new: BenchResult) -> list[str]:
    told = []
    if _place(old) != _place(new):
        told.append(f"Measured on different machines: {old.machine} then, {new.machine} now; compare ratios only.")
    both = old.suites.keys() & new.suites.keys()
    then, now = (flatten({k: v for k, v in one.settings.items() if k in both | {"dtype"}}) for one in (old, new))
    # A plan of other cases is told by the cases that only one side has.
    sizes = ("lengths", "contexts", "engines", "methods", "parts", "prompts", "vocabularies")
    other = [
        f"{name} {then.get(name)} then, {now.get(name)} now"
        for name in sorted(then.keys() | now.keys())
        if json.dumps(then.get(name)) != json.dumps(now.get(name)) and name.rpartition(".")[2] not in sizes
    ]
    if other:
        told.append(f"Measured with other settings: {'; '.join(other)}.")
    for word, one in (("old", old), ("new", new)):
        if not one.finished:
            told.append(f"The {word} result is of a run that was stopped before its end.")
    return told


def _place(bench: BenchResult) -> dict[str, Any]:
    machine = bench.made.get("machine") or {}
    return {key: machine.get(key) for key in ("cpu", "cores", "system")} | {"threads": bench.made.get("threads")}


# ---- in the terminal

PLAIN_WIDTH = 150
"""Columns of a table that goes into a file."""


def wide_console() -> Console:
    return new_console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def number(measure: Measure) -> str:
    """`1,234`, `0.57`, `4.3e-08`"""
    value = measure.value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shown(measure: Measure) -> str:
    """With its spread, as a reader's first question is how sure a number is."""
    return number(measure) + ("" if measure.spread is None else f" ±{100 * measure.spread:.0f}%")


def print_rows(rows: list[Measurement], title: str, console: Console) -> None:
    """Rows of one kind under one head; each kind gets a table of its own."""
    kinds: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        kinds.setdefault(tuple(row.case), []).append(row)
    for kind in kinds.values():
        heads = {name: measure.unit for row in kind for name, measure in row.measured.items()}
        table = Table(title=title, title_justify="left")
        for key in kind[0].case:
            table.add_column(key, justify="left" if isinstance(kind[0].case[key], str) else "right", no_wrap=True)
        for name, unit in heads.items():
            table.add_column(Text(f"{name}\n{unit}".rstrip()), justify="right", vertical="bottom")
        for row in kind:
            cells = [f"{value:,}" if isinstance(value, int) else value for value in row.case.values()]
            cells += [shown(row.measured[name]) if name in row.measured else "" for name in heads]
            table.add_row(*(Text(cell) for cell in cells))
        console.print(table)
        for row in kind:
            if row.note:
                console.print(Text(f"{row.name}: {row.note}"))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """What changed, suite by suite, then what only one side has."""
    suites = dict.fromkeys(change.suite for change in comparison.changes)
    for suite in suites:
        table = Table(title=f"{suite}, old to new", title_justify="left")
        for head, side in (("case", "left"), ("measure", "left"), ("old", "right"), ("new", "right"), ("", "left")):
            table.add_column(head, justify=side)  # pyright: ignore[reportArgumentType]
            if head == "new":
                table.add_column("change", justify="right")
        last = None
        for one in comparison.changes:
            if one.suite != suite:
                continue
            name = "" if one.case == last else one.case
            last = one.case
            change = "" if one.relative is None else f"{100 * one.relative:+.1f} %"
            values = (shown(one.old), f"{shown(one.new)} {one.new.unit}".rstrip())
            table.add_row(*(Text(cell) for cell in (name, one.name, *values, change, one.verdict)))
        console.print(table)
    for word, names in (("old", comparison.only_old), ("new", comparison.only_new)):
        if names:
            console.print(Text(f"Only in the {word} result: {'; '.join(names)}."))
    console.print(Text(comparison.summary))
