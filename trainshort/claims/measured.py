"""A cell of the paper as it was obtained here: from stored sums, over all seeds that were run. No torch."""

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainshort.claims.collection import SEEDS, Collection, Run
from trainshort.evaluate.results import LengthScore
from trainshort.recipes.experiments import Cell, EvalProtocol, moments, queries
from trainshort.recipes.scales import Scale, Variant

RATES = {"train speed": "train_seconds", "read speed": "read_seconds"}


@dataclass(frozen=True)
class Measured:
    """Values of one quantity, one per seed, and the files they come from."""

    values: tuple[float, ...]
    sources: tuple[Path, ...]
    status: str = "scored"
    """scored, or why there is no number."""

    @property
    def value(self) -> float:
        return statistics.fmean(self.values) if self.values else float("nan")

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None with one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class View:
    """A collection seen at one scale, asked in the paper's numbers."""

    collection: Collection
    scale: Scale

    def cell(self, cell: Cell) -> Measured | None:
        """What was obtained for a cell; None when it was not run."""
        if cell.variant is None:
            return None
        if cell.apart:
            return self.cost(cell.variant, cell.quantity)
        if cell.quantity == "learning curve" or cell.reading is None:
            return None
        return self.read(cell.variant, cell.reading, speed=cell.quantity == "read speed")

    def runs(self, variant: Variant) -> list[Run]:
        found = (self.collection.run(replace(variant, seed=seed), self.scale) for seed in SEEDS)
        return [run for run in found if run]

    def read(self, variant: Variant, reading: EvalProtocol, *, speed: bool = False) -> Measured | None:
        """Perplexity (or reading speed) at a length, over the seeds."""
        values, sources, status = [], [], "scored"
        for run in self.runs(variant):
            row, path = self.row(run, reading)
            if row is None or path is None:
                continue
            sources.append(path)
            if row.status != "scored":
                status = row.status
            elif (value := row.speed if speed else row.perplexity) is not None:
                values.append(value)
        return Measured(tuple(values), tuple(sources), "scored" if values else status) if sources else None

    def rows(self, run: Run, reading: EvalProtocol) -> dict[int, tuple[LengthScore, Path]]:
        """All rows of the evaluation that a reading wants, by length."""
        return run.rows(queries(self.scale, reading)[0])

    def row(self, run: Run, reading: EvalProtocol) -> tuple[LengthScore | None, Path | None]:
        """The row of a run at a reading."""
        return self.rows(run, reading).get(self.scale.length(reading.length), (None, None))

    def cost(self, variant: Variant, quantity: str) -> Measured | None:
        """Speed in tokens/s or memory in GB, as measured in rounds on this machine."""
        entry, path = self._costs_of(variant), self.collection.cost_path
        if entry is None or path is None:
            return None
        if quantity == "train memory":
            memory = entry["train_memory"]
            return None if memory is None else Measured((memory / 1e9,), (path,))
        return Measured((entry["tokens"] / statistics.median(entry[RATES[quantity]]),), (path,))

    def cost_noise(self, variant: Variant, quantity: str) -> float:
        """How far the median speed may be off by chance, as a share of it: its standard error over the rounds, from the
        distance of their quartiles."""
        entry = self._costs_of(variant)
        rounds: list[float] = entry[RATES[quantity]] if entry else []
        if len(rounds) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(rounds, n=4)
        return 0.93 * (high - low) / math.sqrt(len(rounds)) / middle

    def _costs_of(self, variant: Variant) -> dict[str, Any] | None:
        return self.collection.cost(variant, self.scale)

    def curve(self, variant: Variant, reading: EvalProtocol) -> list[tuple[int, float, Path]]:
        """Tokens trained on and perplexity at a reading, for each checkpoint that was kept and read."""
        points = []
        for run in self.runs(variant):
            settings, length = run.config.train, self.scale.length(reading.length)
            steps = {stored.evaluation.target.get("step") for stored in run.evaluations}
            for step in sorted(step for step in steps if step is not None):
                row, path = run.rows(replace(moments(self.scale, reading), step=step)).get(length, (None, None))
                if row and path and row.status == "scored":
                    points.append((step * settings.batch * settings.length, row.perplexity, path))
        return sorted(points)
