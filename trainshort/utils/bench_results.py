"""What a benchmark run stores: measured values with their spread, and where they come from. No torch.

    {"format": 2,
     "made": {time, commit, versions, machine, threads},
     "settings": {"dtype": "float32", "quick": false, "attention": {"lengths": [...], "tolerance": 1e-6, ...}, ...},
     "finished": true,
     "suites": {"attention": [{"case": {"engine": "windowed", "tokens": 1024},
                               "measured": {"forward": {"value": 2.1, "unit": "ms", "spread": 0.03, ...}, ...},
                               "seconds": {"forward": [...]}}, ...]}}

A case says what was measured, and two files are compared case by case; `seconds` are the turns behind the medians.
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
RATIO = "×"  # noqa: RUF001  (the sign that readers know)
"""Unit of a multiple of something else."""


Case = dict[str, str | int]
"""What was measured: {"engine": "windowed", "tokens": 1024}."""


class Measure(StrictConfig):
    """One number."""

    value: FiniteFloat
    unit: str = ""
    """ms, tokens/s, MB, %, RATIO, or nothing."""
    spread: FiniteFloat | None = None
    """Half the distance between the quartiles of its turns, as a share of the value; None when measured once."""
    better: Literal["lower", "higher"] | None = None


class Measurement(StrictConfig):
    """One case: an engine at a length, a model at a length, a cache at a context."""

    case: Case
    measured: dict[str, Measure]
    seconds: dict[str, tuple[FiniteFloat, ...]] = Field(default_factory=dict)
    """The turns behind the medians, in their order, so that other summaries can be made of them."""
    note: str = ""
    """What a number cannot say."""

    @property
    def name(self) -> str:
        """`windowed, 1,024 tokens`"""
        return ", ".join(f"{value:,} {key}" if isinstance(value, int) else value for key, value in self.case.items())

    @property
    def key(self) -> str:
        return json.dumps(self.case, sort_keys=True)


class BenchResult(StrictConfig):
    """One run of the suite."""

    format: int = BENCH_FORMAT
    made: dict[str, Any]
    """Time, commit, versions, machine with its rates, threads."""
    settings: dict[str, Any]
    finished: bool = False
    """Whether everything that was asked for is in it."""
    suites: dict[str, tuple[Measurement, ...]] = Field(default_factory=dict)

    def with_rows(self, suite: str, rows: Sequence[Measurement]) -> "BenchResult":
        return self.model_copy(update={"suites": {**self.suites, suite: (*self.suites.get(suite, ()), *rows)}})

    @property
    def machine(self) -> str:
        """`AMD EPYC, 2 cores, 2 threads`"""
        machine = self.made.get("machine") or {}
        threads = self.made.get("threads")
        parts = [machine.get("cpu"), f"{machine.get('cores')} cores", f"{threads} thread{'' if threads == 1 else 's'}"]
        return ", ".join(str(part) for part in parts if part)


def median_of(values: Sequence[float], unit: str, better: Literal["lower", "higher"]) -> Measure:
    """The median of some turns with its spread; of fewer than four turns the spread is half their range.

    1 2 3 4 100   →   3, spread (52 - 1.5) / 2 / 3
    """
    middle = statistics.median(values)
    if len(values) < 2 or not middle:
        return Measure(value=middle, unit=unit, better=better)
    if len(values) < 4:
        low, high = min(values), max(values)
    else:
        low, _, high = statistics.quantiles(values, n=4)
    return Measure(value=middle, unit=unit, better=better, spread=(high - low) / 2 / abs(middle))


def to_megabytes(count: float) -> Measure:
    return Measure(value=count / 2**20, unit="MB", better="lower")


def to_percent(part: float, whole: float, better: Literal["lower", "higher"]) -> Measure:
    return Measure(value=100 * part / whole, unit="%", better=better)


def to_ratio(one: float, other: float, better: Literal["lower", "higher"]) -> Measure:
    return Measure(value=one / other, unit=RATIO, better=better)


def format_number(value: float) -> str:
    """Format a number for a table: `1,234`, `0.57` or `4.3e-08`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_measure(measure: Measure) -> str:
    """Format a measured value with its spread: `2.1 ±3%`."""
    if measure.spread is None:
        return format_number(measure.value)
    return f"{format_number(measure.value)} ±{100 * measure.spread:.0f}%"


def group_by_case_keys(rows: Sequence[Measurement]) -> list[tuple[list[Measurement], dict[str, str]]]:
    """Rows whose cases have the same parts, for a table of their own, and its columns: each measure with its unit."""
    kinds: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        kinds.setdefault(tuple(row.case), []).append(row)
    return [(kind, {name: one.unit for row in kind for name, one in row.measured.items()}) for kind in kinds.values()]


def save_bench_result(bench: BenchResult, path: Path) -> None:
    make_folder(path.parent)
    write_with_checksum(path, json.loads(bench.model_dump_json()))


def load_bench_result(path: Path) -> BenchResult:
    """Read a stored result; anything else is told in words."""
    try:
        values = read_with_checksum(path, hint="Measure again.")
    except MissingFileError:
        raise InputError(
            f"There is no benchmark result at {path}. Make one by: trainshort bench --out {path}."
        ) from None
    if not is_bench_result(values):
        raise InputError(f"{path} is not a result of `trainshort bench`.")
    if values["format"] != BENCH_FORMAT:
        raise InputError(
            f"{path} is a benchmark result of format {values['format']!r}; "
            f"this version reads {BENCH_FORMAT}. Measure again."
        )
    try:
        return BenchResult.parse(values)
    except InputError as error:
        raise InputError(f"{path} is a damaged benchmark result: {error} Measure again.") from None


def is_bench_result(values: Any) -> bool:
    """Whether some JSON is meant as a benchmark result."""
    return isinstance(values, dict) and {"format", "made", "suites"} <= values.keys()


def find_bench_results(folder: Path) -> list[tuple[Path, BenchResult]]:
    """Results in a folder and in its `bench`, the newest last. Other JSON may lie beside them in the folder itself."""
    paths = sorted((folder / "bench").glob("*.json"))
    for path in sorted(folder.glob("*.json")):
        try:
            if is_bench_result(read_json(path)):
                paths.append(path)
        except InputError:
            continue  # not ours to judge
    found = [(path, load_bench_result(path)) for path in paths]
    return sorted(found, key=lambda one: str(one[1].made.get("time", "")))
