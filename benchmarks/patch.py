"""The patch benchmark: compare Hugging Face's MPT before and after `trainshort.patch`.

Both models have the same weights and read the same tokens. The benchmark measures the forward pass, a training step,
the peak memory and the generated text. A third model without attention shows the highest speed that any attention
could reach.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import training
from benchmarks.peers import GREEDY_TOKENS, count_same_greedy_tokens, generate_greedy
from benchmarks.run import Benchmark, Progress, measure_peaks
from benchmarks.suites import PatchPlan, is_memory_measured
from trainshort.config.presets import presets
from trainshort.interop.patch import apply_patch, patch
from trainshort.model.linear import apply_linear
from trainshort.utils.bench_results import Case, Measure, Measurement, to_megabytes, to_ratio
from trainshort.utils.timing import Timing, measure_peak_memory, time_interleaved

# The kinds of work that are measured: a forward pass without gradients, and a training step.
WORK_KINDS = ("forward", "step")


def make_benchmarks(plan: PatchPlan) -> list[Benchmark]:
    """Return one benchmark for each length."""
    benchmarks = []
    for length in plan.lengths:
        title = f"patch at {length:,} tokens, preset {plan.preset}"
        benchmarks.append(Benchmark(title, partial(measure, plan, length)))
    return benchmarks


def measure(plan: PatchPlan, length: int, progress: Progress) -> list[Measurement]:
    """Measure the original MPT, the patched MPT and an MPT without attention at one length.

    Returns:
        One measurement for each model. The list is empty if MPT cannot run on this machine.
    """
    config = presets.get(plan.preset)()
    if not training.can_run_mpt(config, training.MPT_SCORE_COPIES * config.layers, length, progress):
        return []
    models = make_models(plan.preset, length)
    generate_patched = partial(generate_greedy, models["patched"])
    same_token_count = count_same_greedy_tokens(models["mpt"], generate_patched, length)

    timings = {}
    for work_kind in WORK_KINDS:
        progress.print_note(f"{plan.rounds} rounds of {work_kind}")
        tasks = {name: make_task(work_kind, model, length) for name, model in models.items()}
        timings[work_kind] = time_interleaved(tasks, plan.rounds, 1, progress.report_round)
    peaks = _measure_peak_bytes(plan, length, progress)

    rows = []
    for name in models:
        measured = _measures_of(name, timings, peaks)
        note = ""
        if name == "patched":
            measured["same greedy tokens"] = Measure(value=same_token_count, better="higher")
            note = "random weights"
        case: Case = {"model": name, "preset": plan.preset, "tokens": length}
        seconds = {work_kind: timings[work_kind][name].seconds for work_kind in WORK_KINDS}
        rows.append(Measurement(case=case, measured=measured, seconds=seconds, note=note))
    return rows


def _measure_peak_bytes(plan: PatchPlan, length: int, progress: Progress) -> dict[str, int]:
    """Measure the peak memory of the original and the patched MPT, each in a subprocess.

    Returns:
        The peak in bytes by model and work, for example under the key "patched, step". The dictionary is empty if
        the plan excludes the memory at this length.
    """
    if not is_memory_measured(plan, length):
        return {}
    tasks = {}
    for work_kind in WORK_KINDS:
        for name in ("mpt", "patched"):
            tasks[f"{name}, {work_kind}"] = {
                "name": name,
                "work": work_kind,
                "preset": plan.preset,
                "length": length,
            }
    results = measure_peaks("patch", tasks, progress)
    return {task_name: result["peak"] for task_name, result in results.items()}


def _measures_of(name: str, timings: dict[str, dict[str, Timing]], peaks: dict[str, int]) -> dict[str, Measure]:
    """Return the times and the peak memory of one model, and their ratios to the original MPT.

    Args:
        name: The model.
        timings: The timings by the kind of work, and then by model.
        peaks: The peak memory in bytes, under keys such as "patched, step".
    """
    measured = {}
    for work_kind in WORK_KINDS:
        timing = timings[work_kind][name]
        measured[work_kind] = timing.milliseconds_per(1)
        measured[f"{work_kind} speed to mpt"] = timing.speed_ratio_to(timings[work_kind]["mpt"])
        peak_bytes = peaks.get(f"{name}, {work_kind}")
        if peak_bytes:
            measured[f"{work_kind} peak"] = to_megabytes(peak_bytes)
            measured[f"{work_kind} peak to mpt"] = to_ratio(peak_bytes, peaks[f"mpt, {work_kind}"], "lower")
    return measured


def make_models(preset: str, length: int) -> dict[str, Any]:
    """Return an MPT with random weights, a patched copy, and a copy without attention.

    Args:
        preset: The preset with the shape of the model.
        length: The number of tokens that the models read before they generate `GREEDY_TOKENS` tokens.
    """
    torch.manual_seed(0)
    mpt = training.make_mpt(presets.get(preset)(), length + GREEDY_TOKENS).eval()
    patched = copy.deepcopy(mpt)
    patch(patched)

    # `apply_patch` also removes the computation of the mask and the biases, which no attention needs here.
    without_attention = copy.deepcopy(mpt)
    apply_patch(without_attention)
    for block in without_attention.transformer.blocks:
        block.attn.forward = partial(_skip_attention, block.attn)
    return {"mpt": mpt, "patched": patched, "without attention": without_attention}


def _skip_attention(attention: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Replace the forward method of an MPT attention layer: return the projected values of each token itself."""
    qkv = apply_linear(attention.Wqkv, hidden_states)
    _q, _k, values = qkv.chunk(3, dim=2)
    return apply_linear(attention.out_proj, values), None


def make_task(work_kind: str, model: Any, length: int) -> Callable[[], object]:
    """Return a function without arguments that runs a forward pass or a training step on random tokens.

    Args:
        work_kind: "forward" or "step".
        model: A model of Hugging Face Transformers.
        length: The number of tokens.
    """
    generator = torch.Generator().manual_seed(length)
    tokens, targets = torch.randint(model.config.vocab_size, (2, 1, length), generator=generator)
    if work_kind == "step":
        return training.make_mpt_step(model, tokens, targets)

    @torch.inference_mode()
    def forward() -> None:
        model.eval()(tokens)

    return forward


def peak(name: str, work: str, preset: str, length: int) -> dict[str, int]:
    """Measure the peak memory of one kind of work. `measure_peaks` calls this function in a subprocess.

    Args:
        name: "mpt" for the original model, "patched" for the patched model.
        work: "forward" or "step".
        preset: The preset with the shape of the model.
        length: The number of tokens.

    Returns:
        `peak` is the peak memory in bytes. `own` is the part above the memory of the model.
    """
    torch.manual_seed(0)
    model = training.make_mpt(presets.get(preset)(), length).eval()
    if name == "patched":
        patch(model)
    task = make_task(work, model, length)

    def run_twice() -> None:
        task()
        task()

    return measure_peak_memory(run_twice)
