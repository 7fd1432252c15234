"""Two stored results side by side: what changed, and whether by more than both of them vary. No torch."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainshort.train.run_folder import flatten
from trainshort.utils.bench_results import BenchResult, Measure, Measurement, format_measure, group_by_case_keys
from trainshort.utils.terminal import new_console

SINGLE_RUN_NOISE = 0.02
"""Spread that is allowed to a value measured once, such as peak memory."""
Rows = dict[tuple[str, str], Measurement]
"""Those of a result, by suite and case."""


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
    def verdict(self) -> str:
        """better, worse or changed; nothing when the two are no farther apart than their spreads together."""
        room = sum(
            abs(one.value) * (SINGLE_RUN_NOISE if one.spread is None else one.spread) for one in (self.old, self.new)
        )
        if abs(self.new.value - self.old.value) <= room:
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
        counts = Counter(one.verdict for one in self.changes)
        words = ("better", "worse", "changed") if counts["changed"] else ("better", "worse")
        moved = ", ".join(f"{counts[word]} {word}" for word in words)
        return f"{moved} by more than their spreads; {counts['']} within them."


def compare(old: BenchResult, new: BenchResult) -> Comparison:
    """Case by case, in the order of the new result."""
    before, after = (
        {(suite, row.key): row for suite, rows in one.suites.items() for row in rows} for one in (old, new)
    )
    changes = [
        Difference(place[0], row.name, name, before[place].measured[name], measure)
        for place, row in after.items()
        for name, measure in row.measured.items()
        if place in before and name in before[place].measured
    ]
    return Comparison(tuple(changes), _only(before, after), _only(after, before), tuple(_warnings(old, new)))


def _only(rows: Rows, others: Rows) -> tuple[str, ...]:
    """Cases that the others do not have, and measures of the cases that they have."""
    found = []
    for place, row in rows.items():
        name = f"{place[0]}: {row.name}"
        if place in others:
            found += [f"{name}: {measure}" for measure in row.measured if measure not in others[place].measured]
        else:
            found.append(name)
    return tuple(found)


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


def print_rows(rows: list[Measurement], title: str, console: Console) -> None:
    """Rows of one kind under one head; each kind gets a table of its own."""
    for kind, heads in group_by_case_keys(rows):
        table = Table(title=title, title_justify="left")
        for key in kind[0].case:
            table.add_column(key, justify="left" if isinstance(kind[0].case[key], str) else "right", no_wrap=True)
        for name, unit in heads.items():
            table.add_column(Text(f"{name}\n{unit}".rstrip()), justify="right", vertical="bottom")
        for row in kind:
            cells = [f"{value:,}" if isinstance(value, int) else value for value in row.case.values()]
            cells += [format_measure(row.measured[name]) if name in row.measured else "" for name in heads]
            table.add_row(*(Text(cell) for cell in cells))
        console.print(table)
        for row in kind:
            if row.note:
                console.print(Text(f"{row.name}: {row.note}"))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """What changed, suite by suite, then what only one side has."""
    for suite, changes in groupby(comparison.changes, lambda change: change.suite):
        table = Table("case", "measure", title=f"{suite}, old to new", title_justify="left")
        for head in ("old", "new", "change"):
            table.add_column(head, justify="right")
        table.add_column("")
        last = None
        for one in changes:
            name = "" if one.case == last else one.case
            last = one.case
            change = "" if one.relative is None else f"{100 * one.relative:+.1f} %"
            values = (format_measure(one.old), f"{format_measure(one.new)} {one.new.unit}".rstrip())
            table.add_row(*(Text(cell) for cell in (name, one.name, *values, change, one.verdict)))
        console.print(table)
    for word, names in (("old", comparison.only_old), ("new", comparison.only_new)):
        if names:
            console.print(Text(f"Only in the {word} result: {'; '.join(names)}."))
    console.print(Text(comparison.summary))
