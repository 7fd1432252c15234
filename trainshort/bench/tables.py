"""Rows and comparisons as tables in the terminal. No torch."""

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainshort.bench.compare import Comparison
from trainshort.bench.results import Measure, Row

PLAIN_WIDTH = 150
"""Columns of a table that goes into a file."""


def wide_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def number(measure: Measure, *, unit: bool = False) -> str:
    """`1,234`, `0.57`, `4.3e-08`; with its unit if asked for."""
    value = measure.value
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {measure.unit}".strip() if unit else text


def shown(measure: Measure) -> str:
    """With its spread, as a reader's first question is how sure a number is."""
    return number(measure) + ("" if measure.spread is None else f" ±{100 * measure.spread:.0f}%")


def print_rows(rows: list[Row], title: str, console: Console) -> None:
    """Rows of one kind under one head; each kind gets a table of its own."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
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
