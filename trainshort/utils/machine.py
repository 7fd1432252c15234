"""The machine: what a result was made with, its devices, how much memory there is, and what happens when there is not
enough."""

import functools
import gc
import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import trainshort
from trainshort.errors import InputError
from trainshort.utils.terminal import first_sentence

RECORDED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "grain")
"""Packages whose versions can move a result."""


def provenance(*, threads: int | None = None) -> dict[str, Any]:
    """Where a result comes from: time, commit, versions, machine, threads. Goes beside every number that is stored.

    `threads` is torch's thread count, where something was computed: sums are grouped by it, so results are
    bit-identical only for the same count.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"trainshort": trainshort.__version__, "python": platform.python_version()}
        | {name: version(name) for name in RECORDED_PACKAGES},
        "machine": {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "cores": os.cpu_count()},
        "threads": threads,
    }


def version(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout this package runs from, "+changes" when files differ from it; None when installed."""
    here = Path(trainshort.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package can lie inside somebody else's repository; only a tracked file makes the commit ours.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", ".")
    return commit if not commit or not changed else commit + "+changes"


def _cpu(field: str = "model name") -> str:
    """The processor's name, where the system tells it, or another thing about it."""
    names = (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith(field))
    return next(names, "") or platform.processor()


@functools.cache
def mkl_lacks_avx512() -> bool:
    """Whether MKL, torch's matrix products on a processor, leaves the widest vectors unused: AVX-512's, which it
    knows of Intel's processors only."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return wide and "AuthenticAMD" in _cpu("vendor_id")


def pick_device(name: str | None) -> str:
    """The device that was asked for, if it is there; else a GPU where there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).cpu()  # back from it, too: meta takes everything and gives nothing
    except (RuntimeError, AssertionError) as error:
        why = "torch knows no such kind" if "device string" in str(error) else first_sentence(error)
        others = "cpu, cuda or cuda:N" if torch.cuda.is_available() else "cpu"
        raise InputError(f"the device '{name}' is not available here ({why}). Choose {others}.") from None
    return name


# ---- memory: where a length needs more than there is, that is a result, not a crash
#
# The paper's own tables say OOM where T5 biases did not fit. On a GPU torch raises an error by itself. On the CPU Linux
# would rather kill the process, so scoring runs under a limit on its data segment, set to what is free when it starts:
# an allocation past that fails, and is caught.

USABLE_MEMORY_FRACTION = 0.95
"""Share of the free memory that scoring may take; the rest is for the system and for what counts late."""

_GROUPS = Path("/sys/fs/cgroup")
_GROUPS_OF_THIS = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")
_PEAK_RESET = Path("/proc/self/clear_refs")
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "cannot allocate memory",
    "could not create a memory",  # oneDNN, which computes the matrix products
    "could not create a primitive",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of the ways torch says it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


@contextmanager
def limit_memory(device: torch.device, gigabytes: float | None) -> Iterator[None]:
    """Inside, allocations beyond `gigabytes` (default: what is free now) fail with an error instead of a kill."""
    if device.type == "cuda":
        if gigabytes is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / whole), device)
        yield
        return
    used, free = _status_bytes("VmData"), free_memory()
    if used is None or free is None or device.type != "cpu":
        yield  # not Linux: nothing to hold on to, so the system decides
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    room = USABLE_MEMORY_FRACTION * free if gigabytes is None else gigabytes * 1e9
    wanted = used + int(room)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def total_memory() -> int:
    """Bytes of memory this process can ever have: the machine's, or its container's where that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(limit for limit, _ in _limits())])


def free_memory() -> int | None:
    """Bytes that can be had without swapping, within the container's limit if there is one; None when unknown."""
    lines = _lines(Path("/proc/meminfo"))
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return min((*free, *(max(0, limit - used) for limit, used in _limits())), default=None)


def _limits() -> list[tuple[int, int]]:
    """Limit and use of memory of each group of processes that this one is in, by version 2 of cgroups or by 1.

    A batch system limits a group far below the root; a container sees its own group as the root, perhaps under a path
    that only its host knows. So every folder between the path and the root is asked.
    """
    found = []
    for line in _lines(_GROUPS_OF_THIS):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = _GROUPS / "memory" if kinds else _GROUPS
        most, now = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        place = root / path.lstrip("/")
        for group in (one for one in (place, *place.parents) if one.is_relative_to(root)):
            limit, used = (next(iter(_lines(group / name)), "") for name in (most, now))
            if limit.isdigit() and used.isdigit():
                found.append((int(limit), int(used) - _reclaimable_bytes(group)))
    return found


def _reclaimable_bytes(group: Path) -> int:
    """Bytes of files read long ago, which count as used and are dropped when memory is asked for."""
    pairs = (line.split() for line in _lines(group / "memory.stat"))
    counts = {name: int(count) for name, count in pairs}
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))


def resident_memory() -> int:
    """Bytes of memory this process holds now; 0 where the system does not tell."""
    return _status_bytes("VmRSS") or 0


class PeakMemory:
    """The most memory in use since it was made: resident memory of this process, or the GPU's allocations.

    None where the system does not tell (only Linux lets a process forget its last peak).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = True
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _PEAK_RESET.write_text("5")
        except OSError:
            self.known = False

    def bytes(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _status_bytes("VmHWM") if self.known else None


def _status_bytes(name: str) -> int | None:
    return next((int(line.split()[1]) * 1024 for line in _lines(_STATUS) if line.startswith(name + ":")), None)


def _lines(path: Path) -> list[str]:
    """Lines of a file of the kernel's; none where the system has no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
