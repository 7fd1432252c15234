"""How things are measured here: in turns for time, alone in a process for memory, with a line of progress for each."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainshort.bench.results import RATIO, Measure, Row, median_of
from trainshort.evaluate.memory import Peak

MEGABYTE = 2**20
PATIENCE = 10.0
"""Seconds without a line after which the next round is told."""


class Progress:
    """Says on standard error what is being measured, and how far it is."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.told = time.monotonic()
        self.said: set[str] = set()

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.told = time.monotonic()

    def begin(self, suite: str, number: int, count: int, title: str) -> None:
        self.line(f"{suite} {number}/{count}: {title}")

    def note(self, text: str) -> None:
        """One measurement of a step."""
        self.line(f"  {text}")

    def round(self, number: int, count: int) -> None:
        """Told only when nothing was for a while."""
        if time.monotonic() - self.told > PATIENCE:
            self.note(f"round {number} of {count}")

    def once(self, text: str) -> None:
        """What is the same at every step, such as a peer that is not installed."""
        if text not in self.said:
            self.said.add(text)
            self.note(text)


@dataclass(frozen=True)
class Step:
    """One measurement that is told, stored and shown by itself."""

    title: str
    run: Callable[[Progress], list[Row]]


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated turns."""

    seconds: list[float]

    def per(self, count: int, unit: str = "ms") -> Measure:
        """Milliseconds of one of `count` equal parts of a turn."""
        return median_of([1e3 * one / count for one in self.seconds], unit, "lower")

    def rate(self, count: int, unit: str) -> Measure:
        """How many of something a second, with `count` of them in a turn."""
        return median_of([count / one for one in self.seconds], unit, "higher")

    def to(self, other: "Timing") -> Measure:
        """Time as a multiple of another's in the same rounds."""
        return median_of([a / b for a, b in zip(self.seconds, other.seconds, strict=True)], RATIO, "lower")

    def speed_to(self, other: "Timing") -> Measure:
        """Speed as a multiple of another's in the same rounds."""
        return median_of([b / a for a, b in zip(self.seconds, other.seconds, strict=True)], RATIO, "higher")

    @property
    def best(self) -> float:
        return min(self.seconds)


def in_turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    progress: Progress | None = None,
) -> dict[str, Timing]:
    """Time each contestant `rounds` times, one after the other in every round, so that noise hits all alike."""
    for contestant in contestants.values():
        for _ in range(warmup):
            contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(1, rounds + 1):
        if progress:
            progress.round(number, rounds)
        for name, contestant in contestants.items():
            start = time.perf_counter()
            contestant()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(values) for name, values in seconds.items()}


def peak_during(work: Callable[[], object]) -> int:
    """The most memory this process held while `work` ran."""
    peak = Peak(torch.device("cpu"))
    work()
    most = peak.bytes()
    if most is None:
        raise RuntimeError("this system does not report a high-water mark of memory")
    return most


def can_measure_memory(progress: Progress) -> bool:
    known = Path("/proc/self/clear_refs").exists()
    if not known:
        progress.once("without memory: this system does not tell a process's peak")
    return known


def alone(suite: str, **task: Any) -> dict[str, Any]:
    """`peak(**task)` of a suite's module in a fresh process with as many threads as this one; a MemoryError when that
    was killed, which nobody but the kernel's memory watch does."""
    asked = json.dumps({"suite": suite, "task": task, "threads": torch.get_num_threads()})
    command = [sys.executable, "-m", "trainshort.bench.alone"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        raise MemoryError(f"{suite} was killed")
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {suite} {task} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def megabytes(count: float) -> Measure:
    return Measure(value=count / MEGABYTE, unit="MB", better="lower")


def installed(package: str) -> bool:
    return util.find_spec(package) is not None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
