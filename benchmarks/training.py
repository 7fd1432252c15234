"""Training speed and memory of the position methods, and of Hugging Face's MPT of the same shape, by length.

At least 2,048 tokens a step, the same fused AdamW for all, random tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.run import Benchmark, Progress, matmul_rate, peaks
from benchmarks.suites import TrainingPlan, wants_memory
from trainshort.config.presets import presets
from trainshort.config.run_config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainshort.evaluate.step_cost import StepBenchmark
from trainshort.model.positions import positions
from trainshort.model.transformer import TransformerLM
from trainshort.utils.bench_results import Case, Measurement, to_megabytes, to_percent, to_ratio
from trainshort.utils.machine import free_memory, package_version
from trainshort.utils.timing import measure_peak_memory, time_interleaved

MPT = "mpt"
VARIANTS: dict[str, dict[str, Any]] = {
    "alibi-learned": {"position": "alibi", "position_settings": {"learned_slopes": True}},
    "alibi-ssmax": {"position": "alibi", "length_scaling": "ssmax"},
    "fox-alibi": {"position": "fox", "position_settings": {"init": "alibi"}},
}
"""Models that take more than a position method to name: trained slopes, scores that grow with length, and gates that
begin at ALiBi's slopes (those of `fox` begin at a half, and forget so quickly that first steps have little to do)."""
COMPARED = ("none", "alibi", MPT)
"""Models that the others are compared with, where they took part."""
MPT_SCORE_COPIES = 2.5 / 0.8
"""Scores of all heads that MPT keeps per layer for its backward pass (measured at 2,048 tokens: 2.2), which may take
0.8 of the memory that is free."""


def benchmarks(plan: TrainingPlan) -> list[Benchmark]:
    for name in plan.methods:
        if name not in VARIANTS:
            positions.get(name)
    return [
        Benchmark(f"training at {length:,} tokens, preset {plan.preset}", partial(measure, plan, length))
        for length in plan.lengths
    ]


def measure(plan: TrainingPlan, length: int, progress: Progress) -> list[Measurement]:
    config, batch = presets.get(plan.preset)(), max(1, plan.batch_tokens // length)
    takes_part = mpt_takes_part(config, MPT_SCORE_COPIES * config.layers * batch, length, progress)
    names = [MPT, *plan.methods] if takes_part else list(plan.methods)
    progress.note(f"{plan.rounds} rounds of {', '.join(names)}, {batch * length:,} tokens a step")
    asked = {name: {"name": name, "preset": plan.preset, "batch": batch, "length": length} for name in names}
    timings = time_interleaved({name: step_of(**asked[name]) for name in names}, plan.rounds, 1, progress.round)
    rate = matmul_rate(0.5)
    found = peaks("training", asked if wants_memory(plan, length) else {}, progress)
    memory = {name: one["peak"] for name, one in found.items()}
    others, rows = [name for name in COMPARED if name in names], []
    for name in names:
        measured = {"speed": timings[name].rate(batch * length, "tokens/s")}
        measured |= {f"speed to {one}": timings[name].speed_ratio_to(timings[one]) for one in others}
        if name in memory:
            measured["peak"] = to_megabytes(memory[name])
            measured |= {f"peak to {one}": to_ratio(memory[name], memory[one], "lower") for one in others}
        measured["of matmul rate"] = to_percent(flops(config, length) * measured["speed"].value, rate, "higher")
        case: Case = {"model": name, "preset": plan.preset, "tokens": length}
        rows.append(Measurement(case=case, measured=measured, seconds={"step": timings[name].seconds}))
    return rows


def mpt_takes_part(config: ModelConfig, copies: float, length: int, progress: Progress) -> bool:
    """Whether there is an MPT of this shape here, and room for so many scores of all heads, which it writes out."""
    room, reason = free_memory(), None
    if package_version("transformers") is None:
        reason = "transformers is not installed"
    elif config.adaptive is not None or config.key_heads != config.heads:
        reason = "it has no model of this shape"
    elif room is not None and copies * 4 * config.heads * length**2 > room:
        reason = f"its scores at {length:,} tokens do not fit into the memory that is free"
    if reason:
        progress.once(f"without mpt: {reason}")
    return reason is None


def step_of(name: str, preset: str, batch: int, length: int) -> Callable[[], object]:
    """One training step on random tokens, as a function without arguments."""
    config = presets.get(preset)()
    if name != MPT:
        model = config.replace(**VARIANTS.get(name, {"position": name})).with_max_length(length)
        train = TrainConfig(length=length, batch=batch)
        return StepBenchmark(RunConfig(model=model, train=train, optim=OptimConfig(lr=1e-4, max_grad_norm=0))).step
    torch.manual_seed(0)
    tokens, targets = torch.randint(config.vocab_size, (2, batch, length))
    return mpt_step(mpt(config, length), tokens, targets)


def mpt_step(theirs: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Callable[[], object]:
    """One training step of a Hugging Face model."""
    optimizer = torch.optim.AdamW(theirs.train().parameters(), lr=1e-4, fused=True)

    def step() -> None:
        theirs(input_ids=tokens, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def mpt(config: ModelConfig, longest: int) -> Any:
    """Hugging Face's model of the same shape, with random weights."""
    from transformers import MptConfig, MptForCausalLM

    shape = MptConfig(
        d_model=config.width,
        n_heads=config.heads,
        n_layers=config.layers,
        expansion_ratio=config.ffn_width // config.width,
        vocab_size=config.vocab_size,
        max_seq_len=longest,
    )
    return MptForCausalLM(shape)


def flops(config: ModelConfig, length: int) -> float:
    """Of a token, forward and backward: six per weight, and the causal half of the attention."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in TransformerLM(config).parameters())  # a tied matrix works as the output layer
    return 6 * weights + 12 * config.layers * config.width * length / 2


def peak(**task: Any) -> dict[str, int]:
    """The most memory of a process that makes three training steps."""
    step = step_of(**task)
    return measure_peak_memory(lambda: [step() for _ in range(3)])
