"""The result file of `trainshort bench`: measured values, and where they come from. This module does not import torch.

The file has the following form. A case says what was measured, for example which backend at which length. Two files are
compared case by case. `seconds` are the times of all rounds. The measured value is computed from them.

    {"format": 2,
     "made": {time, commit, versions, machine, threads},
     "settings": {"dtype": "float32", "quick": false, "attention": {"lengths": [...], "tolerance": 1e-6, ...}, ...},
     "finished": true,
     "suites": {"attention": [{"case": {"engine": "windowed", "tokens": 1024},
                               "measured": {"forward": {"value": 2.1, "unit": "ms", "spread": 0.03, ...}, ...},
                               "seconds": {"forward": [...]}}, ...]}}
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from trainshort.config.base import StrictConfig
from trainshort.errors import InputError
from trainshort.utils.io import MissingFileError, make_folder, read_json, read_with_checksum, write_with_checksum

BENCH_FORMAT = 2
"""The version of the file format. Files with another version are rejected."""

RATIO = "×"  # noqa: RUF001  (the multiplication sign)
"""The unit of a ratio."""

Case = dict[str, str | int]
"""What was measured, for example {"engine": "windowed", "tokens": 1024}."""


class Measure(StrictConfig):
    """One measured value."""

    value: FiniteFloat
    """The value. If it was measured several times, the median."""
    unit: str = ""
    """The unit: ms, tokens/s, MB, %, `RATIO` or empty."""
    spread: FiniteFloat | None = None
    """Half of the interquartile range of all rounds, divided by the value. None if it was measured once."""
    better: Literal["lower", "higher"] | None = None
    """Whether lower or higher values are better."""


class Measurement(StrictConfig):
    """All values that were measured for one case."""

    case: Case
    """What was measured."""
    measured: dict[str, Measure]
    """The measured values by name."""
    seconds: dict[str, tuple[FiniteFloat, ...]] = Field(default_factory=dict)
    """The times of all rounds in their order, so that other statistics can be computed later."""
    note: str = ""
    """A remark on the values."""

    @property
    def name(self) -> str:
        """What was measured as text. The case {"engine": "windowed", "tokens": 1024} is "windowed, 1,024 tokens"."""
        parts = []
        for key, value in self.case.items():
            parts.append(f"{value:,} {key}" if isinstance(value, int) else value)
        return ", ".join(parts)

    @property
    def key(self) -> str:
        """The case as a string that is the same for equal cases."""
        return json.dumps(self.case, sort_keys=True)


class BenchResult(StrictConfig):
    """The results of one run of `trainshort bench`."""

    format: int = BENCH_FORMAT
    """The version of the file format."""
    made: dict[str, Any]
    """Where the result comes from: the time, the commit, versions of packages, the machine and the threads."""
    settings: dict[str, Any]
    """The settings of the run and of each suite."""
    finished: bool = False
    """Whether the file contains everything that the user requested."""
    suites: dict[str, tuple[Measurement, ...]] = Field(default_factory=dict)
    """The measurements of each suite."""

    def with_rows(self, suite: str, rows: Sequence[Measurement]) -> "BenchResult":
        """Return a copy with further measurements of a suite."""
        earlier_rows = self.suites.get(suite, ())
        suites = {**self.suites, suite: (*earlier_rows, *rows)}
        return self.model_copy(update={"suites": suites})

    @property
    def machine(self) -> str:
        """The machine as text: "AMD EPYC, 2 cores, 2 threads"."""
        machine = self.made.get("machine") or {}
        threads = self.made.get("threads")
        thread_text = "1 thread" if threads == 1 else f"{threads} threads"
        parts = [machine.get("cpu"), f"{machine.get('cores')} cores", thread_text]
        return ", ".join(str(part) for part in parts if part)


def median_of(values: Sequence[float], unit: str, better: Literal["lower", "higher"]) -> Measure:
    """Return the median of several measurements with its spread.

    The spread is half of the interquartile range, divided by the median. For two or three values, half of their range
    is used instead. The spread of a single value is None.

    Args:
        values: The measurements.
        unit: The unit of the values.
        better: Whether lower or higher values are better.

    Example:
        The median of 1, 2, 3, 4 and 100 is 3. The quartiles are 1.5 and 52, so the spread is (52 - 1.5) / 2 / 3.
    """
    median = statistics.median(values)
    if len(values) < 2 or median == 0:
        return Measure(value=median, unit=unit, better=better)
    if len(values) < 4:
        low = min(values)
        high = max(values)
    else:
        low, _, high = statistics.quantiles(values, n=4)
    spread = (high - low) / 2 / abs(median)
    return Measure(value=median, unit=unit, better=better, spread=spread)


def to_megabytes(byte_count: float) -> Measure:
    """Return a number of bytes as a measure in MB (2**20 bytes)."""
    return Measure(value=byte_count / 2**20, unit="MB", better="lower")


def to_percent(part: float, total: float, better: Literal["lower", "higher"]) -> Measure:
    """Return `part` as a percentage of `total`."""
    return Measure(value=100 * part / total, unit="%", better=better)


def to_ratio(value: float, baseline: float, better: Literal["lower", "higher"]) -> Measure:
    """Return the ratio of a value to a baseline."""
    return Measure(value=value / baseline, unit=RATIO, better=better)


def format_number(value: float) -> str:
    """Format a number for a table: `1,234`, `0.57` or `4.3e-08`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_measure(measure: Measure) -> str:
    """Format a measured value with its spread: `2.1 ±3%`."""
    if measure.spread is None:
        return format_number(measure.value)
    return f"{format_number(measure.value)} ±{100 * measure.spread:.0f}%"


def group_by_case_keys(rows: Sequence[Measurement]) -> list[tuple[list[Measurement], dict[str, str]]]:
    """Group measurements whose cases have the same keys. Each group is shown as a table.

    A case says what was measured, such as {"engine": "windowed", "tokens": 1024}. Its keys are "engine" and "tokens".

    Args:
        rows: The measurements.

    Returns:
        The measurements of each group, and the columns of its table: the unit of each measured value by name.
    """
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        case_keys = tuple(row.case)
        groups.setdefault(case_keys, []).append(row)

    tables = []
    for group in groups.values():
        units = {}
        for row in group:
            for name, measure in row.measured.items():
                units[name] = measure.unit
        tables.append((group, units))
    return tables


def save_bench_result(bench: BenchResult, path: Path) -> None:
    """Save a benchmark result as a JSON file with a checksum. The folder is created if it does not exist."""
    make_folder(path.parent)
    write_with_checksum(path, json.loads(bench.model_dump_json()))


def load_bench_result(path: Path) -> BenchResult:
    """Load a benchmark result.

    Args:
        path: The JSON file.

    Raises:
        InputError: If the file does not exist, is damaged, or is not a benchmark result of this format.
    """
    try:
        values = read_with_checksum(path, hint="Measure again.")
    except MissingFileError:
        raise InputError(
            f"There is no benchmark result at {path}. Create it with: trainshort bench --out {path}"
        ) from None
    if not is_bench_result(values):
        raise InputError(f"{path} is not a result of `trainshort bench`.")
    if values["format"] != BENCH_FORMAT:
        raise InputError(
            f"{path} is a benchmark result of format {values['format']!r}; this version reads {BENCH_FORMAT}. "
            "Measure again."
        )
    try:
        return BenchResult.parse(values)
    except InputError as error:
        raise InputError(f"{path} is a damaged benchmark result: {error} Measure again.") from None


def is_bench_result(values: Any) -> bool:
    """Return whether a JSON value has the keys of a benchmark result."""
    return isinstance(values, dict) and {"format", "made", "suites"} <= values.keys()


def find_bench_results(folder: Path) -> list[tuple[Path, BenchResult]]:
    """Find all benchmark results in a folder and in its subfolder `bench`.

    All JSON files in the subfolder must be benchmark results. Other JSON files in the folder itself are ignored.

    Args:
        folder: The folder.

    Returns:
        The paths and the results, sorted by the time of the measurement.

    Raises:
        InputError: If a benchmark result is damaged.
    """
    paths = sorted((folder / "bench").glob("*.json"))
    for path in sorted(folder.glob("*.json")):
        try:
            values = read_json(path)
        except InputError:
            continue  # The file is not valid JSON, so it is not a benchmark result.
        if is_bench_result(values):
            paths.append(path)
    results = [(path, load_bench_result(path)) for path in paths]
    return sorted(results, key=_measurement_time)  # the oldest result first


def _measurement_time(path_and_result: tuple[Path, BenchResult]) -> str:
    """Return the time at which a result was measured, for sorting. The time is a text such as 2026-01-31T12:00:00."""
    _, result = path_and_result
    return str(result.made.get("time", ""))
