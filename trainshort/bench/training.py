"""Training speed and memory of the position methods, and of Hugging Face's MPT of the same shape, by length.

At least 2,048 tokens a step, the same fused AdamW for all, random tokens.
"""

from collections.abc import Callable
from typing import Any

import torch

from trainshort.bench.measure import (
    Benchmark,
    Progress,
    Timing,
    alone,
    can_measure_memory,
    in_turns,
    installed,
    matmul_rate,
    megabytes,
    peak_during,
)
from trainshort.bench.measurements import RATIO, Measure, Measurement
from trainshort.bench.rig import Rig
from trainshort.bench.suites import TrainingPlan, wants_memory
from trainshort.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainshort.machine import free_memory
from trainshort.model import TransformerLM
from trainshort.positions import positions
from trainshort.presets import presets

MPT = "mpt"
VARIANTS: dict[str, dict[str, Any]] = {
    "alibi-learned": {"position": "alibi", "position_settings": {"learned_slopes": True}},
    "alibi-ssmax": {"position": "alibi", "score_growth": "ssmax"},
    "fox-alibi": {"position": "fox", "position_settings": {"start": "alibi"}},
}
"""Models that take more than a position method to name: trained slopes, scores that grow with length, and gates that
begin at ALiBi's slopes (those of `fox` begin at a half, and forget so quickly that first steps have little to do)."""
COMPARED = ("none", "alibi", MPT)
"""Models that the others are compared with, where they took part."""
COPIES = 2.5
"""Scores of all heads that MPT keeps per layer for its backward pass (measured at 2,048 tokens: 2.2)."""


def benchmarks(plan: TrainingPlan) -> list[Benchmark]:
    for name in plan.methods:
        if name not in VARIANTS:
            positions.get(name)
    return [
        Benchmark(
            f"training at {length:,} tokens, preset {plan.preset}",
            lambda progress, length=length: measure(plan, length, progress),
        )
        for length in plan.lengths
    ]


def measure(plan: TrainingPlan, length: int, progress: Progress) -> list[Measurement]:
    config = presets.get(plan.preset)()
    names = ([MPT] if mpt_takes_part(config, length, plan.batch_tokens, progress) else []) + list(plan.methods)
    tokens = _tokens(length, plan.batch_tokens)
    progress.note(f"{plan.rounds} rounds of {', '.join(names)}, {tokens:,} tokens a step")
    work = {name: step_of(name, plan.preset, length, plan.batch_tokens) for name in names}
    timings = in_turns(work, plan.rounds, 1, progress)
    rate = matmul_rate(0.5)
    memory = {}
    if wants_memory(plan, length) and can_measure_memory(progress):
        for number, name in enumerate(names, start=1):
            progress.note(f"memory of {name}, {number} of {len(names)}")
            asked = {"name": name, "preset": plan.preset, "length": length, "batch_tokens": plan.batch_tokens}
            memory[name] = alone("training", **asked)["peak"]
    rows = []
    for name in names:
        measured = {"speed": timings[name].rate(tokens, "tokens/s")}
        measured |= _ratios(name, timings, memory)
        share = 100 * flops(config, length) * measured["speed"].value / rate
        measured["of matmul rate"] = Measure(value=share, unit="%", better="higher")
        case: dict[str, str | int] = {"model": name, "preset": plan.preset, "tokens": length}
        rows.append(Measurement(case=case, measured=measured, seconds={"step": tuple(timings[name].seconds)}))
    return rows


def _ratios(name: str, timings: dict[str, Timing], memory: dict[str, float]) -> dict[str, Measure]:
    found = {}
    for other in COMPARED:
        if other in timings:
            found[f"speed to {other}"] = timings[name].speed_to(timings[other])
    if name in memory:
        found["peak"] = megabytes(memory[name])
        for other in COMPARED:
            if other in memory:
                found[f"peak to {other}"] = Measure(value=memory[name] / memory[other], unit=RATIO, better="lower")
    return found


def mpt_takes_part(config: ModelConfig, length: int, batch_tokens: int, progress: Progress) -> bool:
    """Whether there is an MPT of this shape here, and room for the scores it writes out."""
    scores = COPIES * 4 * config.layers * config.heads * _tokens(length, batch_tokens) * length
    room = free_memory()
    reason = None
    if not installed("transformers"):
        reason = "transformers is not installed"
    elif config.adaptive is not None or config.key_heads != config.heads:
        reason = "it has no model of this shape"
    elif room is not None and scores > 0.8 * room:
        reason = f"its scores at {length:,} tokens do not fit into the memory that is free"
    if reason:
        progress.once(f"without mpt: {reason}")
    return reason is None


def step_of(name: str, preset: str, length: int, batch_tokens: int) -> Callable[[], object]:
    """One training step on random tokens, as a function without arguments."""
    config, batch = presets.get(preset)(), _tokens(length, batch_tokens) // length
    if name != MPT:
        model = config.replace(**VARIANTS.get(name, {"position": name})).reaching(length)
        train = TrainConfig(length=length, batch=batch)
        return Rig(RunConfig(model=model, train=train, optim=OptimConfig(lr=1e-4, clip=0))).step
    torch.manual_seed(0)
    tokens, targets = torch.randint(config.vocabulary, (2, batch, length))
    return mpt_step(mpt(config, length), tokens, targets)


def mpt_step(theirs: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Callable[[], object]:
    """One training step of a Hugging Face model."""
    optimizer = torch.optim.AdamW(theirs.train().parameters(), lr=1e-4, fused=True)

    def step() -> None:
        theirs(input_ids=tokens, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _tokens(length: int, batch_tokens: int) -> int:
    """Tokens of a step: as many whole sequences as fit, at least one."""
    return max(1, batch_tokens // length) * length


def mpt(config: ModelConfig, longest: int) -> Any:
    """Hugging Face's model of the same shape, with random weights."""
    from transformers import MptConfig, MptForCausalLM

    shape = MptConfig(
        d_model=config.width,
        n_heads=config.heads,
        n_layers=config.layers,
        expansion_ratio=config.ffn_width // config.width,
        vocab_size=config.vocabulary,
        max_seq_len=longest,
    )
    return MptForCausalLM(shape)


def flops(config: ModelConfig, length: int) -> float:
    """Of a token, forward and backward: six per weight, and the causal half of the attention."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in TransformerLM(config).parameters())  # a tied matrix works as the output layer
    return 6 * weights + 12 * config.layers * config.width * length / 2


def peak(name: str, preset: str, length: int, batch_tokens: int) -> dict[str, float]:
    """The most memory of a process that makes three training steps."""
    step = step_of(name, preset, length, batch_tokens)
    return {"peak": peak_during(lambda: [step() for _ in range(3)])}
