"""Evaluation's speed and memory by length: how much of its speed at a short length a model keeps at a long one.

The same tokens are scored as many short blocks, fewer longer ones, one of the longest. Lengths take turns; shares are
medians over rounds of the ratio within a round. The paper's GPU kept 24 % with ALiBi (Table 3: 16,951 words per second
at 1,024 tokens, 4,153 at 16,024). Memory is each length's own process: one block of 16,384 should need less than twice
what four of 4,096 need.
"""

from pathlib import Path

import numpy as np
import torch

from trainshort.bench.measure import (
    Benchmark,
    Progress,
    alone,
    can_measure_memory,
    in_turns,
    megabytes,
    peak_during,
)
from trainshort.bench.measurements import Measurement, median_of
from trainshort.bench.suites import EvaluatePlan, wants_memory
from trainshort.checkpoint import find, load_model
from trainshort.evaluate.sweep import score
from trainshort.evaluate.target import ModelTarget
from trainshort.machine import resident_memory
from trainshort.model import TransformerLM
from trainshort.passes import Passes
from trainshort.positions import positions
from trainshort.presets import presets


def benchmarks(plan: EvaluatePlan) -> list[Benchmark]:
    """One per position method, or the one run."""
    if plan.run is not None:
        find(Path(plan.run))
        methods: tuple[str, ...] = ("",)
    else:
        methods = plan.methods
        for name in methods:
            positions.get(name)
    return [
        Benchmark(
            f"scoring {max(plan.lengths):,} tokens, {plan.run or f'{method}, preset {plan.preset}'}",
            lambda progress, method=method: measure(plan, method, progress),
        )
        for method in methods
    ]


def make_target(method: str, preset: str, run: str | None, longest: int) -> ModelTarget:
    if run is not None:
        return ModelTarget(load_model(Path(run)), trained_at=1024, name=Path(run).resolve().name)
    torch.manual_seed(0)
    config = presets.get(preset)().replace(position=method).reaching(longest)
    return ModelTarget(TransformerLM(config), trained_at=1024, name=method)


def read(target: ModelTarget, length: int, tokens: int) -> None:
    """Score all tokens in blocks of `length`, as `trainshort evaluate` does."""
    text = np.random.default_rng(0).integers(target.vocabulary, size=tokens)
    for _ in score(target, text, Passes(tokens, length, length), batch_tokens=tokens):
        pass


def measure(plan: EvaluatePlan, method: str, progress: Progress) -> list[Measurement]:
    target = make_target(method, plan.preset, plan.run, max(plan.lengths))
    tokens, shortest = max(plan.lengths), min(plan.lengths)
    progress.note(f"{plan.rounds} rounds of blocks of {', '.join(f'{length:,}' for length in plan.lengths)}")
    work = {str(length): lambda n=length: read(target, n, tokens) for length in plan.lengths}
    timings = in_turns(work, plan.rounds, 1, progress)
    first = timings[str(shortest)]
    rows = []
    for number, length in enumerate(plan.lengths, start=1):
        timing = timings[str(length)]
        shares = [100 * a / b for a, b in zip(first.seconds, timing.seconds, strict=True)]
        measured = {"speed": timing.rate(tokens, "tokens/s"), f"of {shortest:,}": median_of(shares, "%", "higher")}
        if wants_memory(plan, length) and can_measure_memory(progress):
            progress.note(f"memory at {length:,} tokens, {number} of {len(plan.lengths)}")
            asked = {"method": method, "preset": plan.preset, "run": plan.run, "length": length, "tokens": tokens}
            measured["extra memory"] = megabytes(alone("evaluate", **asked)["extra"])
        case: dict[str, str | int] = {"model": target.name, "tokens": length}
        if plan.run is None:
            case["preset"] = plan.preset
        rows.append(Measurement(case=case, measured=measured, seconds={"reading": tuple(timing.seconds)}))
    return rows


def peak(method: str, preset: str, run: str | None, length: int, tokens: int) -> dict[str, float]:
    """Extra memory of one length, in this process alone."""
    target = make_target(method, preset, run, tokens)
    read(target, min(64, tokens), tokens)  # libraries and thread pools are loaded, whatever the length
    before = resident_memory()
    most = peak_during(lambda: read(target, length, tokens))
    return {"peak": most, "extra": max(0, most - before)}
