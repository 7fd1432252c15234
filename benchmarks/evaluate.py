"""The evaluate benchmark: speed and memory of evaluation by input length.

The same tokens are scored in many short blocks, in fewer longer blocks, and in one block of the largest length. The
benchmark reports which share of the speed at the shortest length remains at longer lengths. With the paper's GPU and
ALiBi, the share was 24 % (Table 3: 16,951 words per second at 1,024 tokens, 4,153 at 16,024).
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.run import Benchmark, Progress, measure_peaks
from benchmarks.suites import EvaluatePlan, is_memory_measured
from trainshort.config.presets import presets
from trainshort.data.passes import Passes
from trainshort.evaluate.sweep import score
from trainshort.evaluate.targets import ModelTarget
from trainshort.model.positions import positions
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import find_checkpoint, load_model
from trainshort.utils.bench_results import Case, Measurement, to_megabytes
from trainshort.utils.timing import measure_peak_memory, time_interleaved

# The training length that is stored with the models. It does not affect the measurements.
TRAINED_AT = 1024

# The block length with which a process warms up before its memory is measured.
WARMUP_LENGTH = 64


def make_benchmarks(plan: EvaluatePlan) -> list[Benchmark]:
    """Return one benchmark for each position method, or one benchmark for the run of the plan.

    Raises:
        InputError: If a position method is unknown, or the run has no checkpoint.
    """
    if plan.run is not None:
        find_checkpoint(Path(plan.run))
        model_names = {"": plan.run}  # A run determines its position method.
    else:
        model_names = {}
        for method in plan.methods:
            positions.get(method)
            model_names[method] = f"{method}, preset {plan.preset}"
    benchmarks = []
    for method, model_name in model_names.items():
        title = f"scoring {max(plan.lengths):,} tokens, {model_name}"
        benchmarks.append(Benchmark(title, partial(measure, plan, method)))
    return benchmarks


def make_target(method: str, preset: str, run: str | None, max_length: int) -> ModelTarget:
    """Return the model that is evaluated.

    Args:
        method: The position method of a model with random weights.
        preset: The preset with the shape of a model with random weights.
        run: A run folder with a trained model. It replaces `method` and `preset`.
        max_length: The number of tokens that the model must support.
    """
    if run is not None:
        model = load_model(Path(run))
        return ModelTarget(model, trained_at=TRAINED_AT, name=Path(run).resolve().name)
    torch.manual_seed(0)
    config = presets.get(preset)().replace(position=method).with_max_length(max_length)
    return ModelTarget(TransformerLM(config), trained_at=TRAINED_AT, name=method)


def score_random_tokens(target: ModelTarget, length: int, token_count: int) -> None:
    """Score random tokens in blocks of `length` tokens, as `trainshort evaluate` does."""
    tokens = np.random.default_rng(0).integers(target.vocab_size, size=token_count)
    passes = Passes(token_count, length, length)
    for _ in score(target, tokens, passes, batch_tokens=token_count):
        pass  # The scores are not needed.


def measure(plan: EvaluatePlan, method: str, progress: Progress) -> list[Measurement]:
    """Measure the speed and the memory of one model at all lengths.

    Returns:
        One measurement for each length.
    """
    token_count = max(plan.lengths)
    shortest = min(plan.lengths)
    target = make_target(method, plan.preset, plan.run, token_count)

    length_texts = [f"{length:,}" for length in plan.lengths]
    progress.print_note(f"{plan.rounds} rounds of blocks of {', '.join(length_texts)}")
    tasks = {_task_name(length): partial(score_random_tokens, target, length, token_count) for length in plan.lengths}
    timings = time_interleaved(tasks, plan.rounds, 1, progress.report_round)
    memory = _measure_memory(plan, method, token_count, progress)

    rows = []
    for length in plan.lengths:
        timing = timings[_task_name(length)]
        measured = {
            "speed": timing.rate(token_count, "tokens/s"),
            f"of {shortest:,}": timing.speed_percent_of(timings[_task_name(shortest)]),
        }
        if _task_name(length) in memory:
            measured["extra memory"] = to_megabytes(memory[_task_name(length)]["own"])
        case: Case = {"model": target.name, "tokens": length}
        if plan.run is None:
            case["preset"] = plan.preset
        rows.append(Measurement(case=case, measured=measured, seconds={"reading": timing.seconds}))
    return rows


def _task_name(length: int) -> str:
    """Return the name of the task for one length in progress messages, such as "4,096 tokens"."""
    return f"{length:,} tokens"


def _measure_memory(plan: EvaluatePlan, method: str, token_count: int, progress: Progress) -> dict[str, dict[str, int]]:
    """Measure the memory at each length in a subprocess. Lengths that the plan excludes are left out."""
    tasks = {}
    for length in plan.lengths:
        if is_memory_measured(plan, length):
            tasks[_task_name(length)] = {
                "method": method,
                "preset": plan.preset,
                "run": plan.run,
                "tokens": token_count,
                "length": length,
            }
    return measure_peaks("evaluate", tasks, progress)


def peak(method: str, preset: str, run: str | None, length: int, tokens: int) -> dict[str, int]:
    """Measure the peak memory of scoring at one length. `measure_peaks` calls this function in a subprocess.

    Args:
        method: The position method of a model with random weights.
        preset: The preset with the shape of a model with random weights.
        run: A run folder with a trained model, or None.
        length: The number of tokens in a block.
        tokens: The number of tokens that are scored.

    Returns:
        `peak` is the peak memory in bytes. `own` is the part above the memory of the model.
    """
    target = make_target(method, preset, run, tokens)
    # The first call loads libraries and starts threads. Their memory does not depend on the length.
    score_random_tokens(target, min(WARMUP_LENGTH, tokens), tokens)
    return measure_peak_memory(partial(score_random_tokens, target, length, tokens))
