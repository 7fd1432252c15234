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
    """Seconds of repeated turns."""

    seconds: tuple[float, ...]

    def per(self, count: int) -> Measure:
        """Milliseconds of one of `count` equal parts of a turn."""
        return median_of([1e3 * one / count for one in self.seconds], "ms", "lower")

    def rate(self, count: int, unit: str) -> Measure:
        """How many of something a second, with `count` of them in a turn."""
        return median_of([count / one for one in self.seconds], unit, "higher")

    def ratio_to(self, other: "Timing") -> Measure:
        """Time as a multiple of another's in the same rounds."""
        return median_of([a / b for a, b in zip(self.seconds, other.seconds, strict=True)], RATIO, "lower")

    def speed_to(self, other: "Timing") -> Measure:
        """Speed as a multiple of another's in the same rounds."""
        return median_of([b / a for a, b in zip(self.seconds, other.seconds, strict=True)], RATIO, "higher")

    def speed_of(self, other: "Timing") -> Measure:
        """Speed in percent of another's in the same rounds."""
        return median_of([100 * b / a for a, b in zip(self.seconds, other.seconds, strict=True)], "%", "higher")

    @property
    def best(self) -> float:
        return min(self.seconds)


def time_interleaved(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time every function once per round.

    Args:
        contestants: The functions by name.
        rounds: How often each function is timed.
        warmup: How often each function is called before the first round.
        on_round: Called before each round with the number of the round and the number of rounds.

    Returns:
        The times of each function, in the order of the rounds.
    """
    for contestant in contestants.values():
        for _ in range(warmup):
            contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(1, rounds + 1):
        if on_round is not None:
            on_round(number, rounds)
        for name, contestant in contestants.items():
            start = time.perf_counter()
            contestant()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def peak_during(work: Callable[[], object]) -> dict[str, int]:
    """The most memory this process held while `work` ran, and how much of it came on top of what it had before."""
    before, peak = resident_memory(), PeakMemory(torch.device("cpu"))
    work()
    most = peak.bytes()
    if most is None:
        raise RuntimeError("this system does not report a high-water mark of memory")
    return {"peak": most, "own": max(0, most - before)}


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
    command = [sys.executable, "-c", "from trainshort.utils.timing import answer; answer()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
    if done.returncode == -signal.SIGKILL:
        raise MemoryError(f"the process that runs {module} was killed")
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {module} {task} failed:\n{done.stderr}")
    # Libraries may print lines of their own. The result is the last line.
    result = json.loads(done.stdout.splitlines()[-1])
    if "refused" in result:
        raise InputError(result["refused"])
    return result


def subprocess_main() -> None:
    """Run one request of `alone`. The request is read from standard input, the result is printed as one JSON line."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    module = importlib.import_module(request["module"])
    try:
        result = module.peak(**request["task"])
    except InputError as error:
        result = {"refused": str(error)}
    print(json.dumps(result))
