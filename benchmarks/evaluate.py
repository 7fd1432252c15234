"""Evaluation's speed and memory by length: how much of its speed at a short length a model keeps at a long one.

The same tokens are scored as many short blocks, fewer longer ones, one of the longest. Lengths take turns; shares are
medians over rounds of the ratio within a round. The paper's GPU kept 24 % with ALiBi (Table 3: 16,951 words per second
at 1,024 tokens, 4,153 at 16,024). Memory is each length's own process: one block of 16,384 should need less than twice
what four of 4,096 need.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.run import Benchmark, Progress, peaks
from benchmarks.suites import EvaluatePlan, wants_memory
from trainshort.config.presets import presets
from trainshort.data.passes import Passes
from trainshort.evaluate.sweep import score
from trainshort.evaluate.targets import ModelTarget
from trainshort.model.positions import positions
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import find_checkpoint, load_model
from trainshort.utils.bench_results import Case, Measurement, to_megabytes
from trainshort.utils.timing import measure_peak_memory, time_interleaved


def benchmarks(plan: EvaluatePlan) -> list[Benchmark]:
    """One per position method, or the one run."""
    if plan.run is not None:
        find_checkpoint(Path(plan.run))
        named = {"": plan.run}
    else:
        for name in plan.methods:
            positions.get(name)
        named = {name: f"{name}, preset {plan.preset}" for name in plan.methods}
    return [
        Benchmark(f"scoring {max(plan.lengths):,} tokens, {told}", partial(measure, plan, method))
        for method, told in named.items()
    ]


def make_target(method: str, preset: str, run: str | None, longest: int) -> ModelTarget:
    if run is not None:
        return ModelTarget(load_model(Path(run)), trained_at=1024, name=Path(run).resolve().name)
    torch.manual_seed(0)
    config = presets.get(preset)().replace(position=method).with_max_length(longest)
    return ModelTarget(TransformerLM(config), trained_at=1024, name=method)


def read(target: ModelTarget, length: int, tokens: int) -> None:
    """Score all tokens in blocks of `length`, as `trainshort evaluate` does."""
    text = np.random.default_rng(0).integers(target.vocab_size, size=tokens)
    for _ in score(target, text, Passes(tokens, length, length), batch_tokens=tokens):
        pass


def measure(plan: EvaluatePlan, method: str, progress: Progress) -> list[Measurement]:
    target = make_target(method, plan.preset, plan.run, max(plan.lengths))
    tokens, shortest = max(plan.lengths), min(plan.lengths)
    progress.note(f"{plan.rounds} rounds of blocks of {', '.join(f'{length:,}' for length in plan.lengths)}")
    work = {f"{length:,} tokens": partial(read, target, length, tokens) for length in plan.lengths}
    timings = time_interleaved(work, plan.rounds, 1, progress.round)
    asked = {"method": method, "preset": plan.preset, "run": plan.run, "tokens": tokens}
    tasks = {f"{one:,} tokens": asked | {"length": one} for one in plan.lengths if wants_memory(plan, one)}
    memory = peaks("evaluate", tasks, progress)
    rows = []
    for length in plan.lengths:
        name = f"{length:,} tokens"
        share = timings[name].speed_percent_of(timings[f"{shortest:,} tokens"])
        measured = {"speed": timings[name].rate(tokens, "tokens/s"), f"of {shortest:,}": share}
        if name in memory:
            measured["extra memory"] = to_megabytes(memory[name]["own"])
        case: Case = {"model": target.name, "tokens": length}
        if plan.run is None:
            case["preset"] = plan.preset
        rows.append(Measurement(case=case, measured=measured, seconds={"reading": timings[name].seconds}))
    return rows


def peak(method: str, preset: str, run: str | None, length: int, tokens: int) -> dict[str, int]:
    """Extra memory of one length, in this process alone."""
    target = make_target(method, preset, run, tokens)
    read(target, min(64, tokens), tokens)  # libraries and thread pools are loaded, whatever the length
    return measure_peak_memory(partial(read, target, length, tokens))
