"""How things are measured here: in turns for time, alone in a process for memory, with a line of progress for each, on
a machine whose own rates are measured as well. `run` is one `trainshort bench`."""

import importlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.compare import print_rows
from benchmarks.suites import AttentionPlan, Plan
from trainshort.utils import bench_results
from trainshort.utils.bench_results import BenchResult, Measurement
from trainshort.utils.machine import collect_provenance, package_version, total_memory
from trainshort.utils.terminal import new_console
from trainshort.utils.timing import run_in_subprocess

PROGRESS_INTERVAL_SECONDS = 10.0
"""Seconds without a line after which the next round is told."""


class Progress:
    """Says on standard error what is being measured, and how far it is."""

    def __init__(self) -> None:
        self.console = new_console(stderr=True)
        self.told = time.monotonic()
        self.said: set[str] = set()

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.told = time.monotonic()

    def note(self, text: str) -> None:
        """One measurement of a step."""
        self.line(f"  {text}")

    def round(self, number: int, count: int) -> None:
        """Told only when nothing was for a while."""
        if time.monotonic() - self.told > PROGRESS_INTERVAL_SECONDS:
            self.note(f"round {number} of {count}")

    def once(self, text: str) -> None:
        """What is the same at every step, such as a peer that is not installed."""
        if text not in self.said:
            self.said.add(text)
            self.note(text)


@dataclass(frozen=True)
class Benchmark:
    """One measurement that is told, stored and shown by itself."""

    title: str
    run: Callable[[Progress], list[Measurement]]


def peaks(suite: str, tasks: Mapping[str, dict[str, Any]], progress: Progress) -> dict[str, dict[str, Any]]:
    """What a process of its own tells of the memory of each task; nothing where the system does not tell."""
    if tasks and not Path("/proc/self/clear_refs").exists():
        progress.once("without memory: this system does not tell a process's peak")
        return {}
    found = {}
    for number, (name, task) in enumerate(tasks.items(), start=1):
        progress.note(f"memory of {name}, {number} of {len(tasks)}")
        found[name] = run_in_subprocess(f"benchmarks.{suite}", **task)
    return found


# ---- the machine

PEERS = ("transformers", "x-transformers")
SIDE = 1024
NUMBERS = 64 * 2**20
"""Float32 numbers that are read for the memory's rate: more than any processor's cache holds."""


def describe() -> dict[str, Any]:
    """Origin as every result has it, with the peers' versions, the memory's size, and two measured rates."""
    made = collect_provenance(threads=torch.get_num_threads())
    made["versions"] |= {name: package_version(name) for name in PEERS}
    made["machine"] |= {"memory": total_memory(), "matmul_rate": matmul_rate(1.0), "read_rate": read_rate(1.0)}
    return made


def matmul_rate(seconds: float) -> float:
    """Floating-point operations per second of a large float32 matrix product: what this machine can do at best."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return 2 * SIDE**3 / _best(lambda: torch.mm(a, b), seconds)


def read_rate(seconds: float) -> float:
    """Bytes per second at which memory is read, by summing numbers with all threads."""
    numbers = torch.ones(NUMBERS)
    return 4 * NUMBERS / _best(numbers.sum, seconds)


def _best(work: Callable[[], object], seconds: float) -> float:
    """The quickest of all runs within some seconds, after one that warms up."""
    work()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


# ---- one `trainshort bench`


def run(plans: Mapping[str, Plan], quick: bool, out: Path, console: Console) -> BenchResult:
    """Measure what the plans ask for. The file is written after every benchmark, so that a kill loses one benchmark."""
    progress = Progress()
    settings: dict[str, Any] = {"dtype": "float32", "quick": quick}
    settings |= {name: asdict(plan) for name, plan in plans.items()}
    with tempfile.TemporaryDirectory() as scratch:
        suites = {
            name: _benchmarks(name, plan, Path(scratch), settings[name], progress) for name, plan in plans.items()
        }
        bench = BenchResult(made=describe(), settings=settings)
        bench_results.save_bench_result(bench, out)
        progress.line(f"measuring {', '.join(suites)}; results go to {out}")
        for name, benchmarks in suites.items():
            for number, benchmark in enumerate(benchmarks, start=1):
                progress.line(f"{name} {number}/{len(benchmarks)}: {benchmark.title}")
                rows = benchmark.run(progress)
                bench = bench.with_rows(name, rows)
                bench_results.save_bench_result(bench, out)
                print_rows(rows, benchmark.title[:1].upper() + benchmark.title[1:], console)
        bench = bench.replace(finished=True)
        bench_results.save_bench_result(bench, out)
    return bench


def _benchmarks(name: str, plan: Plan, scratch: Path, stored: dict[str, Any], progress: Progress) -> list[Benchmark]:
    """A suite's benchmarks; what is wrong with its inputs is told before the first of any suite."""
    module = importlib.import_module(f"benchmarks.{name}")
    if not isinstance(plan, AttentionPlan):
        return module.benchmarks(plan)
    source = plan.inputs
    if Path(source).is_dir():
        from benchmarks.inputs import record, recordable

        recorded = recordable(Path(source), plan.layer)  # what cannot be is told before the first line of progress
        progress.line(f"recording queries, keys and values of {source}, {max(plan.lengths):,} tokens")
        source = str(scratch / "recorded.safetensors")
        stored["recorded"] = record(*recorded, max(plan.lengths), Path(source))
    return module.benchmarks(plan, source)
