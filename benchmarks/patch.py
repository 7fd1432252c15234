"""Hugging Face's MPT before and after `patch`: the same weights, the same tokens, in turns.

Reading a text once, one training step, the peak memory of each in a process of its own, and greedy text. Beside them
the patched model without attention between its projections, which no attention can be quicker than.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import training
from benchmarks.peers import GREEDY, greedy, same_greedy_tokens
from benchmarks.run import Benchmark, Progress, peaks
from benchmarks.suites import PatchPlan, wants_memory
from trainshort.config.presets import presets
from trainshort.interop.patch import apply_patch, patch
from trainshort.model.linear import apply_linear
from trainshort.utils.bench_results import Case, Measure, Measurement, to_megabytes, to_ratio
from trainshort.utils.timing import measure_peak_memory, time_interleaved

WORK = ("forward", "step")


def benchmarks(plan: PatchPlan) -> list[Benchmark]:
    return [
        Benchmark(f"patch at {length:,} tokens, preset {plan.preset}", partial(measure, plan, length))
        for length in plan.lengths
    ]


def measure(plan: PatchPlan, length: int, progress: Progress) -> list[Measurement]:
    config = presets.get(plan.preset)()
    if not training.mpt_takes_part(config, training.MPT_SCORE_COPIES * config.layers, length, progress):
        return []
    models = made(plan.preset, length)
    same = same_greedy_tokens(models["mpt"], partial(greedy, models["patched"]), length)
    timings = {}
    for work in WORK:
        progress.note(f"{plan.rounds} rounds of {work}")
        asked = {name: work_of(work, model, length) for name, model in models.items()}
        timings[work] = time_interleaved(asked, plan.rounds, 1, progress.round)
    tasks = {
        f"{name}, {work}": {"name": name, "work": work, "preset": plan.preset, "length": length}
        for work in WORK
        for name in ("mpt", "patched")
        if wants_memory(plan, length)
    }
    memory = {told: one["peak"] for told, one in peaks("patch", tasks, progress).items()}
    rows = []
    for name in models:
        measured = {}
        for work in WORK:
            measured[work] = timings[work][name].milliseconds_per(1)
            measured[f"{work} speed to mpt"] = timings[work][name].speed_to(timings[work]["mpt"])
            if most := memory.get(f"{name}, {work}"):
                measured[f"{work} peak"] = to_megabytes(most)
                measured[f"{work} peak to mpt"] = to_ratio(most, memory[f"mpt, {work}"], "lower")
        if name == "patched":
            measured["same greedy tokens"] = Measure(value=same, better="higher")
        case: Case = {"model": name, "preset": plan.preset, "tokens": length}
        seconds = {work: timings[work][name].seconds for work in WORK}
        note = "random weights" if name == "patched" else ""
        rows.append(Measurement(case=case, measured=measured, seconds=seconds, note=note))
    return rows


def made(preset: str, length: int) -> dict[str, Any]:
    """MPT with random weights as it is, a patched copy, and one whose attention hands on the values."""
    torch.manual_seed(0)
    theirs = training.mpt(presets.get(preset)(), length + GREEDY).eval()
    copied, bare = copy.deepcopy(theirs), copy.deepcopy(theirs)
    patch(copied)
    apply_patch(bare)  # builds no mask and no biases
    for block in bare.transformer.blocks:
        block.attn.forward = partial(_values, block.attn)
    return {"mpt": theirs, "patched": copied, "without attention": bare}


def _values(attention: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return apply_linear(attention.out_proj, apply_linear(attention.Wqkv, hidden_states).chunk(3, dim=2)[2]), None


def work_of(work: str, model: Any, length: int) -> Callable[[], object]:
    """Reading a text, or a training step on it."""
    generator = torch.Generator().manual_seed(length)
    tokens, targets = torch.randint(model.config.vocab_size, (2, 1, length), generator=generator)
    if work == "step":
        return training.mpt_step(model, tokens, targets)

    @torch.inference_mode()
    def forward() -> None:
        model.eval()(tokens)

    return forward


def peak(name: str, work: str, preset: str, length: int) -> dict[str, int]:
    """The most memory of a process that does it twice."""
    torch.manual_seed(0)
    model = training.mpt(presets.get(preset)(), length).eval()
    if name == "patched":
        patch(model)
    run = work_of(work, model, length)
    return measure_peak_memory(lambda: [run() for _ in range(2)])
