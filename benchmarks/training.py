"""The training benchmark: speed and memory of training steps by position method and length.

Hugging Face's MPT of the same shape is measured as well. All models use the same fused AdamW and random tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from benchmarks.run import Benchmark, Progress, measure_matmul_rate, measure_peaks
from benchmarks.suites import TrainingPlan, is_memory_measured
from trainshort.config.presets import presets
from trainshort.config.run_config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainshort.evaluate.step_cost import StepBenchmark
from trainshort.model.positions import positions
from trainshort.model.transformer import TransformerLM
from trainshort.utils.bench_results import Case, Measurement, to_megabytes, to_percent, to_ratio
from trainshort.utils.machine import free_memory, package_version
from trainshort.utils.timing import measure_peak_memory, time_interleaved

# The name of Hugging Face's MPT in the results.
MPT = "mpt"

# Models that need more settings than the position method: learned slopes, scores that grow with the length, and forget
# gates that start at ALiBi's slopes. By default, the gates of FoX start at one half. The model then forgets so quickly
# that the first steps have little work.
VARIANTS: dict[str, dict[str, Any]] = {
    "alibi-learned": {"position": "alibi", "position_settings": {"learned_slopes": True}},
    "alibi-ssmax": {"position": "alibi", "length_scaling": "ssmax"},
    "fox-alibi": {"position": "fox", "position_settings": {"init": "alibi"}},
}

# All other models are compared with these models, if they are measured.
BASELINES = ("none", "alibi", MPT)

# How many copies of the scores of all heads MPT stores per layer for its backward pass. The measured number is 2.2 at
# 2,048 tokens. The scores may use 80 % of the free memory.
MPT_SCORE_COPIES = 2.5 / 0.8

# The number of training steps during which the peak memory is measured.
STEPS_FOR_PEAK = 3


def make_benchmarks(plan: TrainingPlan) -> list[Benchmark]:
    """Return one benchmark for each length.

    Raises:
        InputError: If a position method is unknown.
    """
    for name in plan.methods:
        if name not in VARIANTS:
            positions.get(name)
    benchmarks = []
    for length in plan.lengths:
        title = f"training at {length:,} tokens, preset {plan.preset}"
        benchmarks.append(Benchmark(title, partial(measure, plan, length)))
    return benchmarks


def measure(plan: TrainingPlan, length: int, progress: Progress) -> list[Measurement]:
    """Measure training steps of all models at one length.

    Returns:
        One measurement for each model.
    """
    config = presets.get(plan.preset)()
    batch_size = max(1, plan.batch_tokens // length)
    tokens_per_step = batch_size * length

    names = list(plan.methods)
    if can_run_mpt(config, MPT_SCORE_COPIES * config.layers * batch_size, length, progress):
        names.insert(0, MPT)
    tasks = {}
    for name in names:
        tasks[name] = {"name": name, "preset": plan.preset, "batch": batch_size, "length": length}

    progress.print_note(f"{plan.rounds} rounds of {', '.join(names)}, {tokens_per_step:,} tokens a step")
    steps = {name: make_step(**task) for name, task in tasks.items()}
    timings = time_interleaved(steps, plan.rounds, 1, progress.report_round)
    matmul_rate = measure_matmul_rate(seconds=0.5)
    memory_tasks = tasks if is_memory_measured(plan, length) else {}
    memory = measure_peaks("training", memory_tasks, progress)

    baselines = [name for name in BASELINES if name in names]
    rows = []
    for name in names:
        timing = timings[name]
        measured = {"speed": timing.rate(tokens_per_step, "tokens/s")}
        for baseline in baselines:
            measured[f"speed to {baseline}"] = timing.speed_ratio_to(timings[baseline])
        if name in memory:
            peak_bytes = memory[name]["peak"]
            measured["peak"] = to_megabytes(peak_bytes)
            for baseline in baselines:
                measured[f"peak to {baseline}"] = to_ratio(peak_bytes, memory[baseline]["peak"], "lower")
        operations_per_second = flops_per_token(config, length) * measured["speed"].value
        measured["of matmul rate"] = to_percent(operations_per_second, matmul_rate, "higher")
        case: Case = {"model": name, "preset": plan.preset, "tokens": length}
        rows.append(Measurement(case=case, measured=measured, seconds={"step": timing.seconds}))
    return rows


def can_run_mpt(config: ModelConfig, score_copies: float, length: int, progress: Progress) -> bool:
    """Return whether an MPT of the same shape can be measured. If not, print the reason.

    Args:
        config: The shape of the model.
        score_copies: How many copies of the scores of all heads must fit into memory. MPT stores its scores.
        length: The number of tokens in a sequence.
        progress: Where the reason is printed.
    """
    free_bytes = free_memory()
    score_bytes = score_copies * 4 * config.heads * length**2
    reason = None
    if package_version("transformers") is None:
        reason = "transformers is not installed"
    elif config.adaptive is not None or config.key_heads != config.heads:
        reason = "it has no model of this shape"
    elif free_bytes is not None and score_bytes > free_bytes:
        reason = f"its scores at {length:,} tokens do not fit into the free memory"
    if reason is not None:
        progress.print_once(f"without mpt: {reason}")
    return reason is None


def make_step(name: str, preset: str, batch: int, length: int) -> Callable[[], object]:
    """Return a function without arguments that runs one training step on random tokens.

    Args:
        name: A position method, a model of `VARIANTS`, or "mpt".
        preset: The preset with the shape of the model.
        batch: The number of sequences in a step.
        length: The number of tokens in a sequence.
    """
    config = presets.get(preset)()
    if name == MPT:
        torch.manual_seed(0)
        tokens, targets = torch.randint(config.vocab_size, (2, batch, length))
        return make_mpt_step(make_mpt(config, length), tokens, targets)

    model_settings = VARIANTS.get(name, {"position": name})
    run_config = RunConfig(
        model=config.replace(**model_settings).with_max_length(length),
        train=TrainConfig(length=length, batch=batch),
        optim=OptimConfig(lr=1e-4, max_grad_norm=0),
    )
    return StepBenchmark(run_config).step


def make_mpt_step(
    model: Any, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"]
) -> Callable[[], object]:
    """Return a function without arguments that runs one training step of a model of Hugging Face Transformers."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=tokens, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_mpt(config: ModelConfig, max_length: int) -> Any:
    """Return Hugging Face's MPT with random weights and the shape of a model of trainshort."""
    from transformers import MptConfig, MptForCausalLM

    mpt_config = MptConfig(
        d_model=config.width,
        n_heads=config.heads,
        n_layers=config.layers,
        expansion_ratio=config.ffn_width // config.width,
        vocab_size=config.vocab_size,
        max_seq_len=max_length,
    )
    return MptForCausalLM(mpt_config)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the floating-point operations of one token in a training step.

    Each weight needs 6 operations in the forward and backward pass. Attention is counted for the causal half of all
    pairs of tokens.
    """
    # The device "meta" allocates no memory. A tied embedding is counted once, for its use in the output layer.
    with torch.device("meta"):
        model = TransformerLM(config)
    weight_count = sum(parameter.numel() for parameter in model.parameters())
    return 6 * weight_count + 12 * config.layers * config.width * length / 2


def peak(**task: Any) -> dict[str, int]:
    """Measure the peak memory of some training steps. `measure_peaks` calls this function in a subprocess.

    Args:
        **task: The arguments of `make_step`.

    Returns:
        `peak` is the peak memory in bytes. `own` is the part above the memory before the first step.
    """
    step = make_step(**task)

    def run_steps() -> None:
        for _ in range(STEPS_FOR_PEAK):
            step()

    return measure_peak_memory(run_steps)
