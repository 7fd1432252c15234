"""Hugging Face's MPT before and after `patch`: the same weights, the same tokens, in turns.

Reading a text once, one training step, the peak memory of each in a process of its own, and greedy text. Beside them
the patched model without attention between its projections, which no attention can be quicker than.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainshort.bench import training
from trainshort.bench.measure import (
    Benchmark,
    Progress,
    Timing,
    alone,
    can_measure_memory,
    in_turns,
    megabytes,
    peak_during,
)
from trainshort.bench.measurements import RATIO, Measure, Measurement
from trainshort.bench.peers import GREEDY
from trainshort.bench.suites import PatchPlan, wants_memory
from trainshort.interop.patch import patch, put_in
from trainshort.presets import presets
from trainshort.vocabulary import product

MODELS = ("mpt", "patched")
BARE = "without attention"
WORK = ("forward", "step")


def benchmarks(plan: PatchPlan) -> list[Benchmark]:
    return [
        Benchmark(
            f"patch at {length:,} tokens, preset {plan.preset}", lambda progress, n=length: measure(plan, n, progress)
        )
        for length in plan.lengths
    ]


def measure(plan: PatchPlan, length: int, progress: Progress) -> list[Measurement]:
    if not training.mpt_takes_part(presets.get(plan.preset)(), length, length, progress):
        return []
    models = dict(zip((*MODELS, BARE), made(plan.preset, length), strict=True))
    same = same_greedy_tokens(models["mpt"], models["patched"], length)
    timings: dict[str, dict[str, Timing]] = {}
    for work in WORK:
        progress.note(f"{plan.rounds} rounds of {work}")
        asked = {name: work_of(work, model, length) for name, model in models.items()}
        timings[work] = in_turns(asked, plan.rounds, 1, progress)
    memory = {}
    if wants_memory(plan, length) and can_measure_memory(progress):
        for work in WORK:
            for name in MODELS:
                progress.note(f"memory of {name}, {work}")
                asked = {"name": name, "work": work, "preset": plan.preset, "length": length}
                memory[work, name] = alone("patch", **asked)["peak"]
    return [_row(name, plan, length, timings, memory, same) for name in models]


def _row(
    name: str,
    plan: PatchPlan,
    length: int,
    timings: dict[str, dict[str, Timing]],
    memory: dict[tuple[str, str], float],
    same: int,
) -> Measurement:
    measured = {}
    for work in WORK:
        measured[work] = timings[work][name].per(1)
        measured[f"{work} speed to mpt"] = timings[work][name].speed_to(timings[work]["mpt"])
        if (work, name) in memory:
            measured[f"{work} peak"] = megabytes(memory[work, name])
            share = memory[work, name] / memory[work, "mpt"]
            measured[f"{work} peak to mpt"] = Measure(value=share, unit=RATIO, better="lower")
    if name == "patched":
        measured["same greedy tokens"] = Measure(value=same, better="higher")
    seconds = {work: tuple(timings[work][name].seconds) for work in WORK}
    return Measurement(
        case={"model": name, "preset": plan.preset, "tokens": length},
        measured=measured,
        seconds=seconds,
        note="random weights" if name == "patched" else "",
    )


def made(preset: str, length: int) -> tuple[Any, Any, Any]:
    """MPT with random weights as it is, a patched copy, and one whose attention hands on the values."""
    torch.manual_seed(0)
    theirs = training.mpt(presets.get(preset)(), length + GREEDY).eval()
    copied, bare = copy.deepcopy(theirs), copy.deepcopy(theirs)
    patch(copied)
    put_in(bare)  # builds no mask and no biases
    for block in bare.transformer.blocks:
        block.attn.forward = partial(_values, block.attn)
    return theirs, copied, bare


def _values(attention: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return product(attention.out_proj, product(attention.Wqkv, hidden_states).chunk(3, dim=2)[2]), None


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


def same_greedy_tokens(theirs: Any, patched: Any, prompt: int) -> int:
    """How many of the first greedy tokens after a random text are the same."""
    tokens = torch.randint(theirs.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(prompt))
    asked = {"max_new_tokens": GREEDY, "min_new_tokens": GREEDY, "do_sample": False, "pad_token_id": 0}
    asked |= {"use_cache": True, "attention_mask": torch.ones_like(tokens)}
    with torch.inference_mode():
        made = [model.generate(tokens, **asked)[0, prompt:] for model in (theirs, patched)]
    differ = (made[0] != made[1]).nonzero()
    return int(differ[0]) if len(differ) else GREEDY


def peak(name: str, work: str, preset: str, length: int) -> dict[str, float]:
    """The most memory of a process that does it twice."""
    torch.manual_seed(0)
    model = training.mpt(presets.get(preset)(), length).eval()
    if name == "patched":
        patch(model)
    run = work_of(work, model, length)
    return {"peak": peak_during(lambda: [run() for _ in range(2)])}
