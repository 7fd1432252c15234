"""Compare two stored benchmark results, and print results as tables. This module does not import torch."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainshort.train.run_folder import flatten
from trainshort.utils.bench_results import BenchResult, Measure, Measurement, format_measure, group_by_case_keys
from trainshort.utils.terminal import new_console

# The relative spread that is assumed for a value that was measured once, such as peak memory.
SINGLE_RUN_NOISE = 0.02

# Settings that only choose which cases are measured. They do not change the values of a case, so no warning is needed
# if they differ. Older results call the setting "backends" "engines".
CASE_SETTINGS = ("lengths", "contexts", "backends", "engines", "methods", "parts", "prompts", "vocabularies")

# The width of tables in characters if the output is not a terminal.
FILE_TABLE_WIDTH = 150

RowsByCase = dict[tuple[str, str], Measurement]
"""The measurements of a result, by the name of the suite and the key of the case."""


@dataclass(frozen=True)
class Difference:
    """The old and the new value of one measure.

    Attributes:
        suite: The name of the suite.
        case: The name of the case, such as "windowed, 1,024 tokens".
        name: The name of the measured value, such as "forward".
        old: The value in the old result.
        new: The value in the new result.
    """

    suite: str
    case: str
    name: str
    old: Measure
    new: Measure

    @property
    def relative_change(self) -> float | None:
        """Return the change relative to the old value: 0.2 is an increase of 20 %. None if the old value is 0."""
        if not self.old.value:
            return None
        return self.new.value / self.old.value - 1

    @property
    def verdict(self) -> str:
        """Return "better", "worse", "changed", or an empty string if the change is within the spreads of both values.

        The verdict "changed" is used for values for which neither lower nor higher is better.
        """
        allowed_change = _absolute_spread(self.old) + _absolute_spread(self.new)
        if abs(self.new.value - self.old.value) <= allowed_change:
            return ""
        if self.new.better is None:
            return "changed"
        direction = "lower" if self.new.value < self.old.value else "higher"
        return "better" if direction == self.new.better else "worse"


def _absolute_spread(measure: Measure) -> float:
    """Return the spread of a measured value in the unit of the value."""
    relative_spread = SINGLE_RUN_NOISE if measure.spread is None else measure.spread
    return abs(measure.value) * relative_spread


@dataclass(frozen=True)
class Comparison:
    """The differences between two benchmark results.

    Attributes:
        differences: The values that both results contain.
        only_old: Names of cases and values that only the old result contains.
        only_new: Names of cases and values that only the new result contains.
        warnings: Reasons why the two results may not be comparable.
    """

    differences: tuple[Difference, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def summary(self) -> str:
        """Return the number of each verdict: "1 better, 2 worse by more than their spreads; 40 within them."."""
        counts = Counter(difference.verdict for difference in self.differences)
        parts = [f"{counts['better']} better", f"{counts['worse']} worse"]
        if counts["changed"]:
            parts.append(f"{counts['changed']} changed")
        return f"{', '.join(parts)} by more than their spreads; {counts['']} within them."


def compare(old: BenchResult, new: BenchResult) -> Comparison:
    """Compare two benchmark results case by case, in the order of the new result."""
    old_rows = _rows_by_case(old)
    new_rows = _rows_by_case(new)
    differences = []
    for (suite, case_key), new_row in new_rows.items():
        old_row = old_rows.get((suite, case_key))
        if old_row is None:
            continue
        for name, new_measure in new_row.measured.items():
            if name in old_row.measured:
                differences.append(Difference(suite, new_row.name, name, old_row.measured[name], new_measure))
    return Comparison(
        differences=tuple(differences),
        only_old=_names_missing_in(new_rows, old_rows),
        only_new=_names_missing_in(old_rows, new_rows),
        warnings=tuple(_find_warnings(old, new)),
    )


def _rows_by_case(result: BenchResult) -> RowsByCase:
    """Return all measurements of a result by suite and case."""
    rows_by_case = {}
    for suite, rows in result.suites.items():
        for row in rows:
            rows_by_case[suite, row.key] = row
    return rows_by_case


def _names_missing_in(rows: RowsByCase, complete_rows: RowsByCase) -> tuple[str, ...]:
    """Return the names of cases and measured values in `complete_rows` that `rows` does not contain."""
    missing = []
    for key, row in complete_rows.items():
        suite, _ = key
        case_name = f"{suite}: {row.name}"
        if key not in rows:
            missing.append(case_name)
            continue
        for measure_name in row.measured:
            if measure_name not in rows[key].measured:
                missing.append(f"{case_name}: {measure_name}")
    return tuple(missing)


def _find_warnings(old: BenchResult, new: BenchResult) -> list[str]:
    """Return the reasons why two results may not be comparable, as sentences."""
    warnings = []
    if _machine_description(old) != _machine_description(new):
        warnings.append(f"Measured on different machines: {old.machine} then, {new.machine} now; compare ratios only.")
    changed_settings = _describe_changed_settings(old, new)
    if changed_settings:
        warnings.append(f"Measured with other settings: {'; '.join(changed_settings)}.")
    for age, result in (("old", old), ("new", new)):
        if not result.finished:
            warnings.append(f"The {age} result is incomplete, because its measurement was stopped.")
    return warnings


def _describe_changed_settings(old: BenchResult, new: BenchResult) -> list[str]:
    """Describe the settings that differ, such as "attention.tolerance 1e-06 then, 0.0001 now".

    Only suites that both results contain are compared.
    """
    common_suites = old.suites.keys() & new.suites.keys()
    compared_groups = common_suites | {"dtype"}
    old_settings = _flatten_groups(old.settings, compared_groups)
    new_settings = _flatten_groups(new.settings, compared_groups)
    descriptions = []
    for name in sorted(old_settings.keys() | new_settings.keys()):
        last_part = name.rpartition(".")[2]
        if last_part in CASE_SETTINGS:
            continue
        old_value = old_settings.get(name)
        new_value = new_settings.get(name)
        # Values are compared as JSON, because a stored tuple is a list.
        if json.dumps(old_value) != json.dumps(new_value):
            descriptions.append(f"{name} {old_value} then, {new_value} now")
    return descriptions


def _flatten_groups(settings: Mapping[str, Any], groups: set[str]) -> dict[str, Any]:
    """Return the settings of some groups by their dotted names, such as "attention.tolerance"."""
    return flatten({name: value for name, value in settings.items() if name in groups})


def _machine_description(result: BenchResult) -> dict[str, Any]:
    """Return the values by which two machines are compared: processor, cores, operating system and threads."""
    machine = result.made.get("machine") or {}
    return {
        "cpu": machine.get("cpu"),
        "cores": machine.get("cores"),
        "system": machine.get("system"),
        "threads": result.made.get("threads"),
    }


# ---- tables in the terminal


def make_table_console() -> Console:
    """Return a console for tables. Tables are wide if the output is a file."""
    width = None if sys.stdout.isatty() else FILE_TABLE_WIDTH
    return new_console(width=width)


def print_rows(rows: list[Measurement], title: str, console: Console) -> None:
    """Print measurements as tables. Measurements whose cases have different keys are printed in separate tables."""
    for group, units in group_by_case_keys(rows):
        table = Table(title=title, title_justify="left")
        for case_key, case_value in group[0].case.items():
            justify = "left" if isinstance(case_value, str) else "right"
            table.add_column(case_key, justify=justify, no_wrap=True)
        for name, unit in units.items():
            header = Text(f"{name}\n{unit}".rstrip())
            table.add_column(header, justify="right", vertical="bottom")
        for row in group:
            cells = [Text(cell) for cell in _row_cells(row, list(units))]
            table.add_row(*cells)
        console.print(table)
        for row in group:
            if row.note:
                console.print(Text(f"{row.name}: {row.note}"))


def _row_cells(row: Measurement, measure_names: list[str]) -> list[str]:
    """Return the cells of one table row: the values of the case, and then the measured values."""
    cells = []
    for value in row.case.values():
        cells.append(f"{value:,}" if isinstance(value, int) else value)
    for name in measure_names:
        cells.append(format_measure(row.measured[name]) if name in row.measured else "")
    return cells


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a table of the differences for each suite, the missing cases and a summary."""
    for suite, differences in groupby(comparison.differences, lambda difference: difference.suite):
        table = Table("case", "measure", title=f"{suite}, old to new", title_justify="left")
        for header in ("old", "new", "change"):
            table.add_column(header, justify="right")
        table.add_column("")  # The verdict.
        previous_case = None
        for difference in differences:
            # The name of a case is printed only in its first row.
            case_name = "" if difference.case == previous_case else difference.case
            previous_case = difference.case
            cells = [Text(cell) for cell in (case_name, *_difference_cells(difference))]
            table.add_row(*cells)
        console.print(table)
    for age, names in (("old", comparison.only_old), ("new", comparison.only_new)):
        if names:
            console.print(Text(f"Only in the {age} result: {'; '.join(names)}."))
    console.print(Text(comparison.summary))


def _difference_cells(difference: Difference) -> list[str]:
    """Return the cells of one row: the name, the old value, the new value with its unit, the change and the verdict."""
    new_value = f"{format_measure(difference.new)} {difference.new.unit}".rstrip()
    change = ""
    if difference.relative_change is not None:
        change = f"{100 * difference.relative_change:+.1f} %"
    return [difference.name, format_measure(difference.old), new_value, change, difference.verdict]
