"""Analysis `cost`: how fast are the position methods, and how much memory do they need? (Table 1 of the paper)

Training speed, inference speed and peak memory are measured for each method at each length, with the model shape of the
run. The weights are random, because the cost does not depend on them. The only exception is the run's own position
method: ALiBi skips keys depending on the norms of queries and keys, so its cost is measured with the trained weights.

Every measurement runs in a new process, because a process does not return all of its memory.
"""

from typing import Any

from rich.console import Group

from trainshort.config.position_config import PAPER_METHODS
from trainshort.config.run_config import ModelConfig, RunConfig, TrainConfig
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, new_table, with_title
from trainshort.evaluate.step_cost import OUT_OF_MEMORY, Mode
from trainshort.evaluate.targets import RunTarget
from trainshort.utils.timing import Timing, run_in_subprocess

# The number of timed steps, after one step of warm-up. The median time counts.
ROUNDS = 5

# The number of tokens in one step. It is the same at all lengths, but a step has at least one sequence.
BATCH_TOKENS = 4096

COST_MODES: tuple[Mode, ...] = ("training", "inference")

# The module whose function `peak` measures one configuration in a new process.
MEASUREMENT_MODULE = "trainshort.evaluate.step_cost"

MEGABYTE = 1e6


def choose_configurations(context: AnalysisContext) -> tuple[ModelConfig, list[int], list[str]]:
    """Return what the analysis "cost" measures: the model config of the run, the input lengths and position methods.

    A position method, such as "alibi" or "sinusoidal", gives the model its information about positions. By default, the
    methods of the ALiBi paper and the method of the run (the trained model) are measured.

    Raises:
        InputError: If the model is a Hugging Face model, or if a method does not support the model config.
    """
    config = context.require_model("cost").config
    default_lengths = (context.trained_at, 4 * context.trained_at, 16 * context.trained_at)
    lengths = sorted(context.lengths or default_lengths)
    requested_methods = context.methods or (*PAPER_METHODS, config.position)
    methods = list(dict.fromkeys(requested_methods))  # removes duplicates and keeps the order
    for method in methods:
        config.replace(position=method).with_max_length(lengths[-1])  # Raises InputError if it is not possible.
    return config, lengths, methods


def run(context: AnalysisContext) -> dict[str, Any]:
    """Measure the speed and the memory of a model with each position method at each input length."""
    config, lengths, methods = choose_configurations(context)
    context.meter.start(len(methods) * sum(_tokens_per_step(length) for length in lengths))
    rows = []
    for length in lengths:
        for method in methods:
            rows.append(_measure_row(context, config, method, length))
    return {"summary": summary(rows), "batch_tokens": BATCH_TOKENS, "rows": rows}


def _sequences_per_step(length: int) -> int:
    """Return the number of sequences in one step."""
    return max(1, BATCH_TOKENS // length)


def _tokens_per_step(length: int) -> int:
    """Return the number of tokens in one step. The progress meter counts these tokens."""
    return _sequences_per_step(length) * length


def _measure_row(context: AnalysisContext, config: ModelConfig, method: str, length: int) -> dict[str, Any]:
    """Measure the cost of one method at one length, or return the stored measurement of an interrupted analysis.

    Args:
        context: The run and the settings.
        config: The model config of the run.
        method: The position method.
        length: The input length.
    """
    checkpoint = _find_usable_checkpoint(context, config, method, length)
    model_config = config.replace(position=method).with_max_length(length)
    device = str(context.target.device)
    cache_key = f"{method} {length}"
    measurement = context.cached(cache_key, lambda: measure(model_config, length, device, checkpoint))
    context.meter.advance(_tokens_per_step(length), f"{method} at {length:,} tokens")
    return {
        "position": method,
        "length": length,
        "weights": "random" if checkpoint is None else "run",  # "run": the trained weights of the run
        **measurement,
    }


def _find_usable_checkpoint(context: AnalysisContext, config: ModelConfig, method: str, length: int) -> str | None:
    """Return the checkpoint folder of the trained run if its weights can be used for a measurement, or None.

    The weights can be used only if the run was trained with this position method and its model supports this length.
    """
    if not isinstance(context.target, RunTarget) or method != config.position:
        return None
    max_length = context.target.model.position.max_length
    if max_length is not None and length > max_length:
        return None
    return str(context.target.checkpoint)


def measure(model: ModelConfig, length: int, device: str = "cpu", checkpoint: str | None = None) -> dict[str, Any]:
    """Measure the speed and the peak memory of training and inference in new processes.

    Args:
        model: The model config.
        length: The input length.
        device: The device of the model.
        checkpoint: The folder of the checkpoint whose weights are used. None initializes the weights at random.

    Returns:
        The measurements, with the keys "training" and "inference". The `status` of a measurement is "measured" or
        "out of memory".
    """
    train = TrainConfig(length=length, batch=_sequences_per_step(length))
    config = RunConfig(model=model, train=train).model_dump(mode="json")
    arguments: dict[str, Any] = {"config": config, "device": device, "weights": checkpoint, "rounds": ROUNDS}
    try:
        results = run_in_subprocess(MEASUREMENT_MODULE, **arguments)
    except MemoryError:
        # The system killed the process. Inference alone needs less memory than training.
        results = _measure_inference_only(arguments)
    return {mode: _to_rates(results[mode]) for mode in COST_MODES}


def _measure_inference_only(arguments: dict[str, Any]) -> dict[str, Any]:
    """Measure inference after training has run out of memory.

    Args:
        arguments: The arguments of `trainshort.evaluate.step_cost.peak`.

    Returns:
        The results of both modes. Training is out of memory, and inference may be out of memory, too.
    """
    try:
        inference_results = run_in_subprocess(MEASUREMENT_MODULE, train=False, **arguments)
    except MemoryError:
        return dict.fromkeys(COST_MODES, OUT_OF_MEMORY)
    return {"training": OUT_OF_MEMORY, **inference_results}


def _to_rates(result: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement with the speed in tokens per second instead of the seconds of each timed round.

    The spread says how much the speeds of the rounds differ, relative to the speed.

    Args:
        result: The measurement of one mode, as `trainshort.evaluate.step_cost.peak` returns it. A measurement that ran
            out of memory is returned unchanged.
    """
    if result["status"] != "measured":
        return result
    speed = Timing(result["seconds"]).rate(result["tokens"], "tokens/s")
    return {
        "status": result["status"],
        "memory": result["memory"],
        "tokens": result["tokens"],
        "tokens_per_second": speed.value,
        "spread": speed.spread,
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Compare the inference speed of all methods at the longest length.

    The baseline is the first method of the paper (sinusoidal), or the first measured method if that method was not
    measured.

    Args:
        rows: The measurements of `run`.
    """
    longest = max(row["length"] for row in rows)
    results = {row["position"]: row["inference"] for row in rows if row["length"] == longest}
    baseline = _choose_baseline(results)
    if baseline is None or len(results) == 1:
        return f"Not tested: no two methods were measured at {longest:,} tokens"
    comparisons = []
    for method, result in results.items():
        if method != baseline:
            comparisons.append(f"{method} {_compare_to_baseline(result, results[baseline])}")
    return f"Inference speed at {longest:,} tokens, compared with {baseline}: {'; '.join(comparisons)}"


def _choose_baseline(results: dict[str, dict[str, Any]]) -> str | None:
    """Return the method to which others are compared, or None if no method was measured.

    Args:
        results: The measurement of each method.
    """
    for method in (PAPER_METHODS[0], *results):
        if method in results and results[method]["status"] == "measured":
            return method
    return None


def _compare_to_baseline(result: dict[str, Any], baseline_result: dict[str, Any]) -> str:
    """Return the speed of a method relative to the speed of the baseline, for example "50% (±4%)".

    The number after "±" is the margin. The margin is the sum of the spreads of both measurements. The spread of a
    measurement says how much its repetitions differ, relative to the measured speed.

    Args:
        result: The inference measurement of the method.
        baseline_result: The inference measurement of the baseline.
    """
    if result["status"] != "measured":
        return result["status"]  # "out of memory"
    ratio = result["tokens_per_second"] / baseline_result["tokens_per_second"]
    margin = (result["spread"] or 0.0) + (baseline_result["spread"] or 0.0)
    speed = f"{ratio:.0%} (±{margin:.0%})"
    if abs(ratio - 1) <= margin:
        return f"{speed}, no significant difference"
    return speed


def table(result: dict[str, Any]) -> Group:
    """Return the table of speeds and peak memories."""
    title = f"Tokens per second and peak memory, with {result['batch_tokens']:,} tokens per step"
    rows_table = new_table("position", "length", "train tok/s", "infer tok/s", "train MB", "infer MB")
    for row in result["rows"]:
        # Both lists have one cell for training and one cell for inference.
        speed_cells = [_format_cell(row[mode], key="tokens_per_second", unit=1) for mode in COST_MODES]
        memory_cells = [_format_cell(row[mode], key="memory", unit=MEGABYTE) for mode in COST_MODES]
        rows_table.add_row(row["position"], f"{row['length']:,}", *speed_cells, *memory_cells)
    return with_title(title, rows_table)


def _format_cell(result: dict[str, Any], key: str, unit: float) -> str:
    """Return one cell of the table.

    Args:
        result: The measurement of training or inference. If memory was missing, the cell is "OOM".
        key: The value to show, "tokens_per_second" or "memory". If the value is unknown, the cell is empty.
        unit: The number by which the value is divided, for example 1,000,000 to convert bytes to megabytes.
    """
    if result["status"] != "measured":
        return "OOM"
    value = result[key]
    return "" if value is None else f"{value / unit:,.0f}"


COST = Analysis(
    "how fast are the position methods, and how much memory do they need?",
    run,
    table,
    slow=True,
    check=choose_configurations,
)
