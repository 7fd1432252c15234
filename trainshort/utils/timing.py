"""Measure the time and the peak memory of functions.

Times are interleaved: every function runs once per round, so that other load on the machine affects all functions.
Peak memory is measured in a new process, because a process does not return all of its memory.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainshort.errors import InputError
from trainshort.utils.bench_results import RATIO, Measure, median_of
from trainshort.utils.machine import PeakMemory, resident_memory


@dataclass(frozen=True)
class Timing:
    """The times of a function that was measured in several rounds.

    Attributes:
        seconds: The time of each round in seconds.
    """

    seconds: tuple[float, ...]

    def milliseconds_per(self, count: int) -> Measure:
        """Return the median time of one item in milliseconds, if each round processed `count` items."""
        return median_of([1e3 * seconds / count for seconds in self.seconds], "ms", "lower")

    def rate(self, count: int, unit: str) -> Measure:
        """Return the median number of items per second, if each round processed `count` items."""
        return median_of([count / seconds for seconds in self.seconds], unit, "higher")

    def ratio_to(self, baseline: "Timing") -> Measure:
        """Return the median ratio of this time to the time of a baseline in the same round."""
        ratios = [seconds / baseline_seconds for seconds, baseline_seconds in self._pair_with(baseline)]
        return median_of(ratios, RATIO, "lower")

    def speed_ratio_to(self, baseline: "Timing") -> Measure:
        """Return the median ratio of this speed to the speed of a baseline in the same round."""
        ratios = [baseline_seconds / seconds for seconds, baseline_seconds in self._pair_with(baseline)]
        return median_of(ratios, RATIO, "higher")

    def speed_percent_of(self, baseline: "Timing") -> Measure:
        """Return this speed in percent of the speed of a baseline in the same round (median over the rounds)."""
        percentages = [100 * baseline_seconds / seconds for seconds, baseline_seconds in self._pair_with(baseline)]
        return median_of(percentages, "%", "higher")

    @property
    def best(self) -> float:
        """The shortest time in seconds."""
        return min(self.seconds)

    def _pair_with(self, baseline: "Timing") -> list[tuple[float, float]]:
        """Return pairs of this time and the time of the baseline, one pair for each round."""
        return list(zip(self.seconds, baseline.seconds, strict=True))


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time several functions in turn. Every function runs once per round.

    Args:
        functions: The functions by name.
        rounds: How often each function is timed.
        warmup: How often each function is called before the first round.
        on_round: Called before each round with the number of the round and the number of rounds.

    Returns:
        The times of each function, in the order of the rounds.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(1, rounds + 1):
        if on_round is not None:
            on_round(number, rounds)
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def measure_peak_memory(work: Callable[[], object]) -> dict[str, int]:
    """Measure the peak memory of this process while a function runs.

    Args:
        work: The function.

    Returns:
        `peak` is the peak memory in bytes. `own` is the part of the peak above the memory that was used
        before the call.

    Raises:
        RuntimeError: If the operating system does not report the peak memory of a process.
    """
    memory_before = resident_memory()
    peak_memory = PeakMemory(torch.device("cpu"))
    work()
    peak = peak_memory.bytes()
    if peak is None:
        raise RuntimeError("The operating system does not report the peak memory of a process.")
    return {"peak": peak, "own": max(0, peak - memory_before)}


def run_in_subprocess(module: str, **task: Any) -> dict[str, Any]:
    """Call the function `peak` of a module in a new process.

    The new process uses the same number of torch threads and the same import path.

    Args:
        module: The full name of the module, for example "trainshort.evaluate.step_cost".
        **task: The arguments of `peak`. They must be JSON values.

    Returns:
        The dictionary that `peak` returned.

    Raises:
        MemoryError: If the process was killed. The system kills a process that needs too much memory.
        InputError: If `peak` raised an InputError.
        RuntimeError: If `peak` raised any other error. The message contains the traceback.
    """
    request = json.dumps({"module": module, "task": task, "threads": torch.get_num_threads()})
    command = [sys.executable, "-c", "from trainshort.utils.timing import subprocess_main; subprocess_main()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
    if process.returncode == -signal.SIGKILL:
        raise MemoryError(f"The process that runs {module} was killed.")
    if process.returncode:
        raise RuntimeError(f"Measuring the memory of {module} {task} failed:\n{process.stderr}")
    # Libraries may print lines of their own. The result is the last line.
    result = json.loads(process.stdout.splitlines()[-1])
    if "input_error" in result:
        raise InputError(result["input_error"])
    return result


def subprocess_main() -> None:
    """Run one request of `run_in_subprocess`.

    The request is read from standard input. The result is printed as one line of JSON.
    """
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    module = importlib.import_module(request["module"])
    try:
        result = module.peak(**request["task"])
    except InputError as error:
        result = {"input_error": str(error)}
    print(json.dumps(result))
