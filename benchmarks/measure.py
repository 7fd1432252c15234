"""How things are measured here: in turns for time, alone in a process for memory."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 2**20


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def in_turns(contestants: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, Timing]:
    """Time each contestant `repeats` times, one after the other in every round, so that noise hits all alike."""
    for contestant in contestants.values():
        for _ in range(warmup):
            contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            start = time.perf_counter()
            contestant()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(values) for name, values in seconds.items()}


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_during(work: Callable[[], object]) -> int:
    """The most memory this process held while `work` ran. Linux only: the high-water mark is reset first."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not report a high-water mark of memory")


def alone(module: str, *arguments: str) -> dict:
    """Run `python -m module arguments` in a fresh process, which prints one line of JSON last."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def matmul_rate(seconds: float = 1.0) -> float:
    """Floating-point operations per second of a large float32 matrix product: what this machine can do at best."""
    import torch

    side = 1024
    a, b = torch.randn(side, side), torch.randn(side, side)
    torch.mm(a, b)
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best


def table(rows: list[dict], title: str) -> None:
    """Print rows of equal keys as a table."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    for key in rows[0]:
        shown.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        shown.add_row(
            *(f"{x:,.3g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row.values())
        )
    Console(width=None if sys.stdout.isatty() else 140).print(shown)
