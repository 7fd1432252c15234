"""Look up the measured value of a cell of the paper, and compare two measured values.

A comparison has an interval that shows how much of the difference can be due to chance. This module does not import
torch.
"""

import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
"""The key in an entry of `cost.json` that holds the seconds of each round, for each speed."""

T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredCell:
    """The measured values of one quantity.

    Attributes:
        values: One value for each seed.
        sources: The files that contain the values.
        status: "scored", or the reason why there is no value, such as "out of memory".
    """

    values: tuple[float, ...]
    sources: tuple[Path, ...]
    status: str = "scored"

    @property
    def value(self) -> float:
        """Return the mean over the seeds, or NaN if there is no value."""
        return statistics.fmean(self.values) if self.values else float("nan")

    @property
    def std(self) -> float | None:
        """Return the standard deviation over the seeds, or None if there are fewer than two seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class RatioWithInterval:
    """The relative difference between a value and a baseline, with its 95 % interval.

    Attributes:
        change: The relative difference. 0.1 means that the value is 10 % higher than the baseline.
        low: The lower end of the interval.
        high: The upper end of the interval.
        sources: The files that contain the values.
        values: The value and the baseline if they are perplexities, otherwise NaN.
    """

    change: float
    low: float
    high: float
    sources: tuple[Path, ...]
    values: tuple[float, float] = (math.nan, math.nan)

    @property
    def half_width(self) -> float:
        """Return half the width of the interval. A difference that is smaller cannot be detected."""
        return (self.high - self.low) / 2

    @property
    def is_significant(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def format_versus(self) -> str:
        """Return both values, such as "18.40 against 18.67". The baseline comes second."""
        value, baseline = self.values
        return f"{value:.2f} against {baseline:.2f}"

    def format_before_after(self) -> str:
        """Return both values, such as "20.05, then 43.54". The baseline comes first."""
        value, baseline = self.values
        return f"{baseline:.2f}, then {value:.2f}"

    def __str__(self) -> str:
        """Return the difference and its interval, such as "+1.7% (+1.0% to +2.5%)"."""
        return f"{self.change:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


class CurvePoint(NamedTuple):
    """One point of a learning curve.

    Attributes:
        tokens: The number of training tokens.
        perplexity: The perplexity of the checkpoint.
        source: The file of the evaluation.
    """

    tokens: int
    perplexity: float
    source: Path


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """Compute the median and its 95 % interval.

    The ends of the interval are two of the values. With 9 values, the interval goes from the second smallest to the
    second largest value. With fewer than 6 values, the interval goes from the smallest to the largest value.

    The interval is computed from the binomial distribution: each value is below the true median with probability 1/2.

    Args:
        values: The measured values.

    Returns:
        The median, the lower end and the upper end of the interval.
    """
    count = len(values)
    ordered = sorted(values)

    # The probability that the true median lies outside the interval from ordered[drop] to ordered[count - 1 - drop].
    outside_probability = 0.0
    # How many of the smallest and of the largest values the interval excludes.
    drop = 0
    for candidate in range(count // 2):
        # Exactly `candidate` of the values are below the true median, or exactly `candidate` are above it.
        outside_probability += 2 * math.comb(count, candidate) / 2**count
        if outside_probability > 0.05:
            break
        drop = candidate
    return statistics.median(ordered), ordered[drop], ordered[count - 1 - drop]


@dataclass(frozen=True)
class ScaleView:
    """The measured values of a collection at one scale, looked up by the models and lengths of the paper.

    Attributes:
        collection: The runs and measurements.
        scale: The scale that maps the lengths of the paper to the lengths of the runs.
        run_names: A cache of run names. Computing a name is slow, and tables need the same names often.
    """

    collection: Collection
    scale: Scale
    run_names: dict[Variant, str] = field(default_factory=dict)

    def find_cell(self, cell: Cell) -> MeasuredCell | None:
        """Return the measured values of a cell.

        Args:
            cell: One number of the paper, with the model and the evaluation that measure the number.

        Returns:
            The values, or None if the cell was not measured. A cell of a learning curve always gives None, because a
            learning curve has no single value. See `find_learning_curve`.
        """
        if cell.variant is None:
            return None  # The paper quotes the number from other work.
        if cell.is_cost:
            return self.find_cost(cell.variant, cell.quantity)
        if cell.quantity == "learning curve" or cell.protocol is None:
            return None
        is_speed = cell.quantity == "read speed"  # the evaluation speed
        return self.find_evaluation(cell.variant, cell.protocol, speed=is_speed)

    def _lookup(self, variant: Variant, stored: dict[str, T]) -> T | None:
        """Return the value that is stored under the run name of a model, or None if there is no such value."""
        if variant not in self.run_names:
            self.run_names[variant] = self.scale.run_name(variant)
        return stored.get(self.run_names[variant])

    # ---- evaluations

    def find_runs(self, variant: Variant) -> list[Run]:
        """Return the runs of a model, one for each seed that was trained. The seed of `variant` is ignored."""
        runs: list[Run] = []
        for seed in SEEDS:
            # `_lookup` returns None if the model was not trained with this seed.
            run = self._lookup(replace(variant, seed=seed), self.collection.runs)
            if run is not None:
                runs.append(run)
        return runs

    def find_rows(self, run: Run, protocol: EvalProtocol) -> dict[int, tuple[LengthScore, Path]]:
        """Return the results of a run that match an evaluation protocol, by sequence length.

        The length of the protocol is ignored. The results of all lengths are returned.

        Args:
            run: The run.
            protocol: The stride and the split of the evaluation.

        Returns:
            The result at each length, and the file that contains the result.
        """
        # For a sliding window, the second query is the same text without overlap. It is not needed here.
        query = build_queries(self.scale, protocol)[0]
        return run.rows(query)

    def find_rows_of_seeds(self, variant: Variant, protocol: EvalProtocol) -> list[tuple[LengthScore, Path]]:
        """Return the results of a model that was evaluated with a protocol, one for each seed, each with its file.

        Args:
            variant: The model. Its seed is ignored.
            protocol: The length, the stride and the split of the evaluation. The scale converts the length.
        """
        length = self.scale.scale_length(protocol.length)
        results: list[tuple[LengthScore, Path]] = []
        for run in self.find_runs(variant):
            result = self.find_rows(run, protocol).get(length)
            if result is not None:
                results.append(result)
        return results

    def find_evaluation(self, variant: Variant, protocol: EvalProtocol, *, speed: bool = False) -> MeasuredCell | None:
        """Return the perplexity of a model for each seed.

        Args:
            variant: The model. Its seed is ignored.
            protocol: The length, the stride and the split of the evaluation.
            speed: Whether to return the evaluation speed in tokens per second instead of the perplexity.

        Returns:
            The values, or None if the model was not evaluated with this protocol.
        """
        results = self.find_rows_of_seeds(variant, protocol)
        if not results:
            return None

        values: list[float] = []
        failure = None
        for row, _ in results:
            if row.status != "scored":
                failure = row.status
                continue
            value = row.speed if speed else row.perplexity
            if value is not None:
                values.append(value)

        status = "scored" if values or failure is None else failure
        sources = tuple(path for _, path in results)
        return MeasuredCell(tuple(values), sources, status)

    def find_learning_curve(self, variant: Variant, protocol: EvalProtocol) -> list[CurvePoint]:
        """Return the perplexity of all evaluated checkpoints of a model, sorted by the number of training tokens.

        The checkpoints of all seeds are points of the same curve.

        Args:
            variant: The model.
            protocol: The length and the split of the evaluation.
        """
        length = self.scale.scale_length(protocol.length)
        points: list[CurvePoint] = []
        for run in self.find_runs(variant):
            tokens_per_step = run.config.train.batch * run.config.train.length
            stored_steps = {stored.evaluation.target.get("step") for stored in run.evaluations}
            evaluated_steps = sorted(step for step in stored_steps if step is not None)
            for step in evaluated_steps:
                query = replace(build_learning_curve_query(self.scale, protocol), step=step)
                result = run.rows(query).get(length)
                if result is None:
                    continue
                row, path = result
                if row.status == "scored":
                    points.append(CurvePoint(tokens=step * tokens_per_step, perplexity=row.perplexity, source=path))
        return sorted(points)

    # ---- costs

    def find_cost(self, variant: Variant, quantity: str) -> MeasuredCell | None:
        """Return a measured cost of a model.

        Args:
            variant: The model.
            quantity: "train speed" or "read speed" (evaluation speed) in tokens per second, or "train memory" in GB.

        Returns:
            The value, or None if the cost was not measured.
        """
        entry = self._lookup(variant, self.collection.costs)
        if entry is None:
            return None
        sources = (entry["path"],)
        if quantity == "train memory":
            memory_bytes = entry["train_memory"]
            if memory_bytes is None:
                return None
            return MeasuredCell((memory_bytes / 1e9,), sources)
        seconds_per_round = entry[COST_ENTRY_KEYS[quantity]]
        if not seconds_per_round:
            return None
        # Each round processes `entry["tokens"]` tokens.
        tokens_per_second = entry["tokens"] / statistics.median(seconds_per_round)
        return MeasuredCell((tokens_per_second,), sources)

    # ---- comparisons

    def compare_speeds(self, variant: Variant, baseline: Variant) -> RatioWithInterval | None:
        """Compare the training speeds of two models round by round.

        In each round, both models did one step directly after each other. Other load on the machine therefore affects
        both times of a round.

        Args:
            variant: The model.
            baseline: The model that it is compared with.

        Returns:
            How much faster the model is than the baseline. None if the two models were not measured together.
        """
        entry = self._lookup(variant, self.collection.costs)
        baseline_entry = self._lookup(baseline, self.collection.costs)
        if entry is None or baseline_entry is None or entry["session"] != baseline_entry["session"]:
            return None

        seconds = _seconds_per_token(entry)
        baseline_seconds = _seconds_per_token(baseline_entry)
        if not seconds or not baseline_seconds:
            return None
        speedups = [baseline_time / time - 1 for time, baseline_time in zip(seconds, baseline_seconds, strict=True)]
        median, low, high = median_with_interval(speedups)
        return RatioWithInterval(change=median, low=low, high=high, sources=(entry["path"], baseline_entry["path"]))

    def compare_memories(self, variant: Variant, baseline: Variant) -> RatioWithInterval | None:
        """Compare the training memory of two models.

        The memory of each model was measured several times. The interval goes from the smallest to the largest
        difference between a measurement of the model and a measurement of the baseline.

        Args:
            variant: The model.
            baseline: The model that it is compared with.

        Returns:
            How much more memory the model needs than the baseline. None if the memory was not measured.
        """
        entry = self._lookup(variant, self.collection.costs)
        baseline_entry = self._lookup(baseline, self.collection.costs)
        if not entry or not baseline_entry:
            return None
        peaks = entry["train_memories"]
        baseline_peaks = baseline_entry["train_memories"]
        if not peaks or not baseline_peaks:
            return None
        change = statistics.median(peaks) / statistics.median(baseline_peaks) - 1
        low = min(peaks) / max(baseline_peaks) - 1
        high = max(peaks) / min(baseline_peaks) - 1
        return RatioWithInterval(change, low, high, sources=(entry["path"], baseline_entry["path"]))

    def compare_perplexities(
        self, evaluated: tuple[Variant, EvalProtocol], baseline: tuple[Variant, EvalProtocol]
    ) -> RatioWithInterval | None:
        """Compare the perplexities of two evaluations.

        The interval is the wider of two intervals. The first one is computed by resampling the text, if both models
        were evaluated on the same text. The second one is computed from the seeds, if both models have several seeds.

        Args:
            evaluated: The model and its evaluation protocol.
            baseline: The model and the protocol that they are compared with.

        Returns:
            How much higher the perplexity is than the perplexity of the baseline. None if one of them is missing.
        """
        cell = self.find_evaluation(*evaluated)
        baseline_cell = self.find_evaluation(*baseline)
        if cell is None or baseline_cell is None or not cell.values or not baseline_cell.values:
            return None

        # The noise is known for mean losses. A mean loss is a log-perplexity, so the interval is one of logarithms.
        log_ratio = math.log(cell.value / baseline_cell.value)
        noise = max(self._text_noise(evaluated, baseline), _seed_noise(cell, baseline_cell))
        return RatioWithInterval(
            change=math.exp(log_ratio) - 1,
            low=math.exp(log_ratio - noise) - 1,
            high=math.exp(log_ratio + noise) - 1,
            sources=cell.sources + baseline_cell.sources,
            values=(cell.value, baseline_cell.value),
        )

    def _text_noise(self, evaluated: tuple[Variant, EvalProtocol], baseline: tuple[Variant, EvalProtocol]) -> float:
        """Return how much the difference between two mean losses varies with the text.

        Args:
            evaluated: The model and its evaluation protocol.
            baseline: The model and the protocol that they are compared with.

        Returns:
            Half the width of the 95 % interval of the difference, computed by resampling the text. The first seed of
            each model is used. The result is 0 if the two models were evaluated on different texts.
        """
        row, _ = self.find_rows_of_seeds(*evaluated)[0]
        baseline_row, _ = self.find_rows_of_seeds(*baseline)[0]
        try:
            bounds = interval(row, baseline_row)
        except InputError:
            return 0.0  # The texts differ.
        if bounds is None:
            return 0.0
        low, high = bounds
        return (high - low) / 2


def _seconds_per_token(entry: dict[str, Any]) -> list[float]:
    """Return the training time per token of each round, from an entry of the cost file."""
    seconds_per_round = entry[COST_ENTRY_KEYS["train speed"]] or ()
    return [seconds / entry["tokens"] for seconds in seconds_per_round]


def _seed_noise(cell: MeasuredCell, baseline: MeasuredCell) -> float:
    """Return how much a difference of mean log-perplexities varies with the seeds.

    The result is twice the standard error of the difference. It is at least the standard deviation of the first
    model's log-perplexities. The result is 0 if one of the models has a single seed.

    Args:
        cell: The perplexity of the first model for each seed.
        baseline: The perplexity of the second model for each seed.
    """
    if len(cell.values) < 2 or len(baseline.values) < 2:
        return 0.0
    logs = [math.log(value) for value in cell.values]
    baseline_logs = [math.log(value) for value in baseline.values]
    standard_error = statistics.stdev(logs) / math.sqrt(len(logs))
    baseline_standard_error = statistics.stdev(baseline_logs) / math.sqrt(len(baseline_logs))
    return max(2 * math.hypot(standard_error, baseline_standard_error), statistics.stdev(logs))
