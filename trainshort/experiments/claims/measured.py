"""A cell of the paper as it was obtained here: from stored sums, over all seeds that were run. And two of them
compared, with how far chance alone may have moved their difference. No torch."""

import math
import statistics
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from trainshort.errors import InputError
from trainshort.evaluate.results import LengthScore, interval
from trainshort.experiments.claims.collection import SEEDS, Collection, Run
from trainshort.experiments.experiments import (
    Cell,
    EvalProtocol,
    Scale,
    Variant,
    build_learning_curve_query,
    build_queries,
)

COST_ENTRY_KEYS = {"train speed": "train_seconds", "read speed": "read_seconds"}
T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredCell:
    """Values of one quantity, one per seed, and the files they come from."""

    values: tuple[float, ...]
    sources: tuple[Path, ...]
    status: str = "scored"
    """scored, or why there is no number."""

    @property
    def value(self) -> float:
        return statistics.fmean(self.values) if self.values else float("nan")

    @property
    def std(self) -> float | None:
        """Standard deviation over the seeds; None with one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class RatioWithInterval:
    """How much more one is than another, as a share, and the 95 % interval of that."""

    change: float
    low: float
    high: float
    sources: tuple[Path, ...]
    values: tuple[float, float] = (math.nan, math.nan)
    """The one and the other, where they are perplexities."""

    @property
    def format_versus(self) -> str:
        return f"{self.values[0]:.2f} against {self.values[1]:.2f}"

    @property
    def format_before_after(self) -> str:
        """The other first: where the one is what became of it."""
        return f"{self.values[1]:.2f}, then {self.values[0]:.2f}"

    @property
    def half_width(self) -> float:
        """Half the interval: a difference smaller than this could not have been told from none."""
        return (self.high - self.low) / 2

    @property
    def is_significant(self) -> bool:
        """Whether chance alone would hardly have given a difference of this sign."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.change:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval, by counting alone: how often would so many of n rounds lie on one side of the
    true median by chance?

    9 rounds: from the second smallest to the second largest (96 %); fewer than 6 rounds: from the least to the most
    """
    ordered, count = sorted(values), len(values)
    outside = accumulate(2 * math.comb(count, fewer) / 2**count for fewer in range(count // 2))
    least = max(0, sum(share <= 0.05 for share in outside) - 1)
    return statistics.median(ordered), ordered[least], ordered[count - 1 - least]


@dataclass(frozen=True)
class ScaleView:
    """A collection seen at one scale, asked in the paper's numbers."""

    collection: Collection
    scale: Scale
    run_names: dict[Variant, str] = field(default_factory=dict)
    """The run names that were computed so far. Computing a name is slow, and tables ask for the same names often."""

    def find_cell(self, cell: Cell) -> MeasuredCell | None:
        """What was obtained for a cell; None when it was not run."""
        if cell.variant is None:
            return None
        if cell.is_cost:
            return self.find_cost(cell.variant, cell.quantity)
        if cell.quantity == "learning curve" or cell.protocol is None:
            return None
        return self.find_evaluation(cell.variant, cell.protocol, speed=cell.quantity == "read speed")

    def _own(self, variant: Variant, stored: dict[str, T]) -> T | None:
        """Return the value that is stored under the run name of a model, or None if there is no such value."""
        if variant not in self.run_names:
            self.run_names[variant] = self.scale.run_name(variant)
        return stored.get(self.run_names[variant])

    def find_runs(self, variant: Variant) -> list[Run]:
        found = (self._own(replace(variant, seed=seed), self.collection.runs) for seed in SEEDS)
        return [run for run in found if run]

    def find_evaluation(self, variant: Variant, reading: EvalProtocol, *, speed: bool = False) -> MeasuredCell | None:
        """Perplexity (or evaluation speed) at a length, over the seeds."""
        found = self.find_rows_of_seeds(variant, reading)
        scored = [row.speed if speed else row.perplexity for row, _ in found if row.status == "scored"]
        values = tuple(value for value in scored if value is not None)
        failed = [row.status for row, _ in found if row.status != "scored"]
        status = failed[-1] if failed and not values else "scored"
        return MeasuredCell(values, tuple(path for _, path in found), status) if found else None

    def find_rows(self, run: Run, reading: EvalProtocol) -> dict[int, tuple[LengthScore, Path]]:
        """All rows of the evaluation that a reading wants, by length."""
        return run.rows(build_queries(self.scale, reading)[0])

    def find_rows_of_seeds(self, variant: Variant, reading: EvalProtocol) -> list[tuple[LengthScore, Path]]:
        """The row at a reading, of each seed that has one."""
        found = (
            self.find_rows(run, reading).get(self.scale.scale_length(reading.length)) for run in self.find_runs(variant)
        )
        return [one for one in found if one]

    def find_cost(self, variant: Variant, quantity: str) -> MeasuredCell | None:
        """Speed in tokens/s or memory in GB, as measured in rounds on this machine."""
        entry = self._own(variant, self.collection.costs)
        if entry is None:
            return None
        if quantity == "train memory":
            memory = entry["train_memory"]
            return None if memory is None else MeasuredCell((memory / 1e9,), (entry["path"],))
        seconds = entry[COST_ENTRY_KEYS[quantity]]
        return MeasuredCell((entry["tokens"] / statistics.median(seconds),), (entry["path"],)) if seconds else None

    def compare_speeds(self, one: Variant, other: Variant) -> RatioWithInterval | None:
        """How much faster the first trains than the second, round by round: whatever else the machine did fell on both.
        None when they were not measured in turns."""
        ours, theirs = (self._own(model, self.collection.costs) for model in (one, other))
        if ours is None or theirs is None or ours["session"] != theirs["session"]:
            return None
        rounds = [
            [took / entry["tokens"] for took in entry[COST_ENTRY_KEYS["train speed"]] or ()] for entry in (ours, theirs)
        ]
        if not all(rounds):
            return None
        return RatioWithInterval(
            *median_with_interval([b / a - 1 for a, b in zip(*rounds, strict=True)]), (ours["path"], theirs["path"])
        )

    def compare_memories(self, one: Variant, other: Variant) -> RatioWithInterval | None:
        """How much more memory the first takes to train. The interval goes from the least difference of two weighings
        to the greatest."""
        entries = [entry for model in (one, other) if (entry := self._own(model, self.collection.costs))]
        peaks = [entry["train_memories"] for entry in entries]
        if len(peaks) < 2 or not all(peaks):
            return None
        low, high = min(peaks[0]) / max(peaks[1]) - 1, max(peaks[0]) / min(peaks[1]) - 1
        change = statistics.median(peaks[0]) / statistics.median(peaks[1]) - 1
        return RatioWithInterval(change, low, high, tuple(entry["path"] for entry in entries))

    def compare_perplexities(
        self, one: tuple[Variant, EvalProtocol], other: tuple[Variant, EvalProtocol]
    ) -> RatioWithInterval | None:
        """How much higher the first's perplexity is. The interval is the wider of two: over stretches of the text,
        where both were evaluated on the same one, and over the seeds, where there are some for both."""
        first, second = self.find_evaluation(*one), self.find_evaluation(*other)
        if first is None or second is None or not first.values or not second.values:
            return None
        change = math.log(first.value / second.value)
        noise = max(self._over_text(one, other), _over_seeds(first, second))
        change, low, high = (math.exp(moved) - 1 for moved in (change, change - noise, change + noise))
        return RatioWithInterval(change, low, high, first.sources + second.sources, (first.value, second.value))

    def _over_text(self, *both: tuple[Variant, EvalProtocol]) -> float:
        (first, _), (second, _) = (self.find_rows_of_seeds(*one)[0] for one in both)
        try:
            bounds = interval(first, second)
        except InputError:  # not the same text
            return 0.0
        return (bounds[1] - bounds[0]) / 2 if bounds else 0.0

    def find_learning_curve(self, variant: Variant, reading: EvalProtocol) -> list[tuple[int, float, Path]]:
        """Tokens trained on and perplexity at a reading, for each checkpoint that was kept and evaluated."""
        points = []
        for run in self.find_runs(variant):
            settings, length = run.config.train, self.scale.scale_length(reading.length)
            steps = {stored.evaluation.target.get("step") for stored in run.evaluations}
            for step in sorted(step for step in steps if step is not None):
                row, path = run.rows(replace(build_learning_curve_query(self.scale, reading), step=step)).get(
                    length, (None, None)
                )
                if row and path and row.status == "scored":
                    points.append((step * settings.batch * settings.length, row.perplexity, path))
        return sorted(points)


def _over_seeds(one: MeasuredCell, other: MeasuredCell) -> float:
    """Twice the standard error of the difference of two means of logarithms; 0 with a single seed."""
    if min(len(one.values), len(other.values)) < 2:
        return 0.0
    spreads = [statistics.stdev(map(math.log, found.values)) / math.sqrt(len(found.values)) for found in (one, other)]
    return max(2 * math.hypot(*spreads), statistics.stdev(map(math.log, one.values)))
