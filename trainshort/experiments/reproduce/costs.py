"""Measure the training speed, the evaluation speed and the training memory of models with random weights.

Speeds are interleaved: in each round, every model does one step. Other load on the machine then affects all models, and
two models can be compared round by round.

Memory is measured in a new process for each model, because a process does not return all of its memory.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainshort.config.run_config import RunConfig
from trainshort.evaluate.step_cost import StepBenchmark
from trainshort.experiments.claims.collection import COST_FORMAT, read_costs
from trainshort.experiments.reproduce.local import available_cores
from trainshort.utils.io import write_with_checksum
from trainshort.utils.machine import collect_provenance, pick_device
from trainshort.utils.timing import Timing, run_in_subprocess, time_interleaved

# Models with at most this sequence length are interleaved with each other. Models with a longer sequence length are
# only interleaved with models of the same length, because one step of a long sequence would take most of a round.
INTERLEAVE_MAX_LENGTH = 1024

# The number of rounds is chosen so that all rounds together take about this time.
TIMING_BUDGET_SECONDS = 12.0

# With 9 rounds, the true median lies between the second smallest and the second largest value in 96 % of cases.
MIN_ROUNDS = 9
MAX_ROUNDS = 41

# The memory of each model is measured this many times, because the peak memory differs slightly between processes.
MEMORY_MEASUREMENTS = 2


def measure_costs(
    configs: dict[str, RunConfig],
    path: Path,
    memory_measured: Collection[str] | None = None,
    eval_speed_measured: Collection[str] | None = None,
) -> None:
    """Measure the speed and the memory of models, and store the results in one file.

    If one model is not measured yet, all models are measured again, because only models that were measured together
    can be compared. If all models are measured, nothing happens.

    Args:
        configs: The configs of the models, by run name.
        path: The file with the results.
        memory_measured: The names of the models whose training memory is measured. None means all models.
        eval_speed_measured: The names of the models whose evaluation speed is measured. None means all models.
    """
    entries = read_costs(path.parent)
    if configs.keys() <= entries.keys():
        return
    if memory_measured is None:
        memory_measured = configs.keys()
    if eval_speed_measured is None:
        eval_speed_measured = configs.keys()

    provenance = collect_provenance(threads=torch.get_num_threads())
    device = pick_device(None)
    memory_configs = {name: config for name, config in configs.items() if name in memory_measured}
    peak_memories = _measure_peak_memories(memory_configs, device)

    for max_length, group in sorted(_group_by_length(configs).items()):
        timings = _time_interleaved(group, device, eval_speed_measured)
        session = f"{provenance['time']}, up to {max_length}"
        for name, config in group.items():
            entries[name] = {
                **_make_cost_entry(name, config, timings, peak_memories.get(name)),
                "session": session,
                "provenance": provenance,
            }
    write_with_checksum(path, {"format": COST_FORMAT, "entries": entries})


def _group_by_length(configs: dict[str, RunConfig]) -> dict[int, dict[str, RunConfig]]:
    """Group models by training length. The models of one group are later timed in turns, one step of each model.

    Args:
        configs: The configs of the models, by run name.

    Returns:
        The groups, by the largest training length that belongs to the group. Each group contains configs by run name.
        All models with a training length up to `INTERLEAVE_MAX_LENGTH` are in one group. Longer models are grouped by
        their own training length.
    """
    groups: dict[int, dict[str, RunConfig]] = {}
    for name, config in configs.items():
        # All models up to this length have the same key, so they are in one group.
        max_length = max(config.train.length, INTERLEAVE_MAX_LENGTH)
        groups.setdefault(max_length, {})[name] = config
    return groups


def _make_cost_entry(
    name: str, config: RunConfig, timings: dict[str, Timing], peak_memories: list[int] | None
) -> dict[str, Any]:
    """Return the entry of one model in the cost file, which stores the speed and the memory of models.

    In the entry, "read" means evaluation. "train_seconds" and "read_seconds" are lists with the time of each round of
    the measurement. In a round, every model does one step. "tokens" is the number of tokens of one step.

    Args:
        name: The run name.
        config: The config of the model.
        timings: The measured times. The keys are "train NAME" and "read NAME", where NAME is the run name.
        peak_memories: The peak training memory in bytes of each measurement. None if the memory was not measured.
    """
    eval_timing = timings.get(f"read {name}")
    return {
        "position": config.model.position,
        "length": config.train.length,
        "batch": config.train.batch,
        "vocab_size": config.data.vocab_size,
        "train_seconds": timings[f"train {name}"].seconds,
        "read_seconds": eval_timing.seconds if eval_timing is not None else None,
        "tokens": config.train.batch * config.train.length,
        "train_memory": max(peak_memories) if peak_memories else None,
        "train_memories": peak_memories,
    }


def _time_interleaved(
    configs: dict[str, RunConfig], device: str, eval_speed_measured: Collection[str]
) -> dict[str, Timing]:
    """Time training steps and evaluation steps of several models. In each round, every model does one step.

    Args:
        configs: The configs of the models, by run name.
        device: The device, such as "cpu".
        eval_speed_measured: The names of the models whose evaluation is timed.

    Returns:
        The times of each round. The keys are "train NAME" and "read NAME" (evaluation).
    """
    benchmarks = {name: StepBenchmark(config, device) for name, config in configs.items()}
    # Each function does one training step or one evaluation step of a model.
    functions = {f"train {name}": benchmark.step for name, benchmark in benchmarks.items()}
    for name, benchmark in benchmarks.items():
        if name in eval_speed_measured:
            functions[f"read {name}"] = benchmark.infer

    # The first round is a warm-up. It also shows how many rounds fit into the time budget.
    warmup_timings = time_interleaved(functions, rounds=1)
    seconds_per_round = sum(timing.best for timing in warmup_timings.values())
    affordable_rounds = round(TIMING_BUDGET_SECONDS / seconds_per_round)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, affordable_rounds))
    return time_interleaved(functions, rounds, warmup=0)  # The warm-up was done above.


def _measure_peak_memories(configs: dict[str, RunConfig], device: str) -> dict[str, list[int]]:
    """Measure the peak memory of training. Each measurement runs in a new process.

    Args:
        configs: The configs of the models, by run name.
        device: The device, such as "cpu".

    Returns:
        The peak memory in bytes of each measurement, by run name. The list is empty if the device does not report its
        memory.
    """

    def measure_once(config: RunConfig) -> int | None:
        """Measure the peak memory of training one model in a new process.

        Returns:
            The memory in bytes, or None if the device does not report its memory.
        """
        result = run_in_subprocess(
            "trainshort.evaluate.step_cost", config=config.model_dump(mode="json"), device=device
        )
        return result["training"].get("above")  # The peak memory above the memory of the idle process.

    # Each process has its own memory, so several processes can be measured at the same time on a CPU.
    max_processes = available_cores() if device == "cpu" else 1
    with ThreadPoolExecutor(max_processes) as executor:
        # All measurements are submitted before the first result is awaited.
        running = {name: executor.map(measure_once, [config] * MEMORY_MEASUREMENTS) for name, config in configs.items()}
        peak_memories: dict[str, list[int]] = {}
        for name, results in running.items():
            peak_memories[name] = [peak for peak in results if peak is not None]
    return peak_memories
