"""Run the benchmarks of one `trainshort bench` command, show their progress and store the results.

The file also measures the machine: how fast it multiplies matrices and how fast it reads memory.
"""

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

# The number of a round is printed only if nothing was printed for this time.
PROGRESS_INTERVAL_SECONDS = 10.0

# Packages that are measured next to trainshort. Their versions are stored with the results.
PEER_PACKAGES = ("transformers", "x-transformers")

# The number of rows and columns of the matrices that are multiplied to measure the machine.
MATRIX_SIZE = 1024

# The number of float32 values that are summed to measure the memory. No processor cache holds 256 MB.
MEMORY_TEST_NUMBERS = 64 * 2**20


class Progress:
    """Print to standard error what is being measured.

    Attributes:
        console: The console of standard error.
        last_print_time: When the last line was printed.
        printed_once: The messages that `print_once` has printed.
    """

    def __init__(self) -> None:
        self.console = new_console(stderr=True)
        self.last_print_time = time.monotonic()
        self.printed_once: set[str] = set()

    def print_line(self, text: str) -> None:
        """Print the title of a benchmark or another message."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.last_print_time = time.monotonic()

    def print_note(self, text: str) -> None:
        """Print an indented message about one part of a benchmark."""
        self.print_line(f"  {text}")

    def report_round(self, number: int, count: int) -> None:
        """Print the number of the current round if nothing was printed for some seconds."""
        if time.monotonic() - self.last_print_time > PROGRESS_INTERVAL_SECONDS:
            self.print_note(f"round {number} of {count}")

    def print_once(self, text: str) -> None:
        """Print a message that several benchmarks would repeat, such as a package that is not installed."""
        if text not in self.printed_once:
            self.printed_once.add(text)
            self.print_note(text)


@dataclass(frozen=True)
class Benchmark:
    """One part of a suite, for example one length. Its results are stored and printed as soon as it has finished.

    Attributes:
        title: The title for progress messages and tables.
        run: Measures everything and returns the results.
    """

    title: str
    run: Callable[[Progress], list[Measurement]]


def measure_peaks(suite: str, tasks: Mapping[str, dict[str, Any]], progress: Progress) -> dict[str, dict[str, Any]]:
    """Measure the peak memory of several tasks, each in its own subprocess.

    Args:
        suite: The name of the suite. The function `peak` of the module with this name runs in the subprocess.
        tasks: The arguments of `peak`, by the name of the task.
        progress: Where messages are printed.

    Returns:
        The results of `peak` by the name of the task. The dictionary is empty if the operating system does not report
        the peak memory of a process.
    """
    if tasks and not Path("/proc/self/clear_refs").exists():
        progress.print_once("without memory: this system does not report the peak memory of a process")
        return {}
    results = {}
    for number, (name, arguments) in enumerate(tasks.items(), start=1):
        progress.print_note(f"memory of {name}, {number} of {len(tasks)}")
        results[name] = run_in_subprocess(f"benchmarks.{suite}", **arguments)
    return results


# ---- the machine


def collect_bench_provenance() -> dict[str, Any]:
    """Return where a benchmark result comes from: time, commit, package versions and the machine with its speed."""
    provenance = collect_provenance(threads=torch.get_num_threads())
    for package in PEER_PACKAGES:
        provenance["versions"][package] = package_version(package)
    provenance["machine"] |= {
        "memory": total_memory(),
        "matmul_rate": measure_matmul_rate(seconds=1.0),
        "read_rate": measure_read_rate(seconds=1.0),
    }
    return provenance


def measure_matmul_rate(seconds: float) -> float:
    """Return the floating-point operations per second of a large float32 matrix product.

    Args:
        seconds: How long the product is repeated. The fastest repetition counts.
    """
    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE)
    b = torch.randn(MATRIX_SIZE, MATRIX_SIZE)
    operations = 2 * MATRIX_SIZE**3
    return operations / _shortest_time(lambda: torch.mm(a, b), seconds)


def measure_read_rate(seconds: float) -> float:
    """Return the bytes per second at which all threads together read memory.

    Args:
        seconds: How long the measurement is repeated. The fastest repetition counts.
    """
    numbers = torch.ones(MEMORY_TEST_NUMBERS)
    byte_count = 4 * MEMORY_TEST_NUMBERS
    return byte_count / _shortest_time(numbers.sum, seconds)


def _shortest_time(work: Callable[[], object], seconds: float) -> float:
    """Call a function repeatedly for some seconds and return its shortest time. The first call does not count."""
    work()
    shortest = float("inf")
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        call_start = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - call_start)
    return shortest


# ---- one `trainshort bench` command


def run_benchmarks(plans: Mapping[str, Plan], quick: bool, out: Path, console: Console) -> BenchResult:
    """Run the benchmarks of several suites, print their results as tables and store them.

    The result file is written after every benchmark, so an interrupted command keeps the finished benchmarks.

    Args:
        plans: The settings of each suite.
        quick: Whether the settings are those of `--quick`. The value is stored in the file.
        out: The result file.
        console: Where the tables are printed.

    Returns:
        The result that was stored.

    Raises:
        InputError: If the inputs of a suite are invalid. Nothing has been measured then.
    """
    progress = Progress()
    settings: dict[str, Any] = {"dtype": "float32", "quick": quick}
    for suite, plan in plans.items():
        settings[suite] = asdict(plan)

    with tempfile.TemporaryDirectory() as temporary_folder:
        benchmarks_by_suite = {}
        for suite, plan in plans.items():
            benchmarks_by_suite[suite] = _make_suite(suite, plan, Path(temporary_folder), settings[suite], progress)

        result = BenchResult(made=collect_bench_provenance(), settings=settings)
        bench_results.save_bench_result(result, out)
        progress.print_line(f"measuring {', '.join(plans)}; results go to {out}")
        for suite, benchmarks in benchmarks_by_suite.items():
            for number, benchmark in enumerate(benchmarks, start=1):
                progress.print_line(f"{suite} {number}/{len(benchmarks)}: {benchmark.title}")
                rows = benchmark.run(progress)
                result = result.with_rows(suite, rows)
                bench_results.save_bench_result(result, out)
                title = benchmark.title[:1].upper() + benchmark.title[1:]
                print_rows(rows, title, console)

        result = result.replace(finished=True)
        bench_results.save_bench_result(result, out)
    return result


def _make_suite(
    suite: str, plan: Plan, temporary_folder: Path, settings: dict[str, Any], progress: Progress
) -> list[Benchmark]:
    """Return the benchmarks of one suite. If the plan names a run, the inputs of attention are recorded from the run.

    Args:
        suite: The name of the suite, which is also the name of its module.
        plan: The settings of the suite.
        temporary_folder: Where recorded inputs are stored.
        settings: The stored settings of the suite. A description of recorded inputs is added to this dictionary.
        progress: Where messages are printed.
    """
    module = importlib.import_module(f"benchmarks.{suite}")
    if not isinstance(plan, AttentionPlan):
        return module.make_benchmarks(plan)

    source = plan.inputs
    if Path(source).is_dir():
        from benchmarks.inputs import record_inputs, select_layer

        # `select_layer` raises an error for an unsuitable run, so it is called before the message.
        target, layer_index = select_layer(Path(source), plan.layer)
        length = max(plan.lengths)
        progress.print_line(f"recording queries, keys and values of {source}, {length:,} tokens")
        recorded_path = temporary_folder / "recorded.safetensors"
        settings["recorded"] = record_inputs(target, layer_index, length, recorded_path)
        source = str(recorded_path)
    return module.make_benchmarks(plan, source)
