"""How much memory a length needs, and what happens when there is not enough: a result, not a crash.

The paper's own tables say OOM where T5 biases did not fit. On a GPU torch raises an error by itself. On the CPU Linux
would rather kill the process, so scoring runs under a limit on its data segment, set to what is free when it starts:
an allocation past that fails, and is caught.
"""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MARGIN = 0.95
"""Share of the free memory that scoring may take; the rest is for the system and for what counts late."""

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
def limited(device: torch.device, gigabytes: float | None) -> Iterator[None]:
    """Inside, allocations beyond `gigabytes` (default: what is free now) fail with an error instead of a kill."""
    if device.type == "cuda":
        if gigabytes is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / whole), device)
        yield
        return
    used, free = _status_bytes("VmData"), available()
    if used is None or free is None or device.type != "cpu":
        yield  # not Linux: nothing to hold on to, so the system decides
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    room = MARGIN * free if gigabytes is None else gigabytes * 1e9
    wanted = used + int(room)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available() -> int | None:
    """Bytes that can be had without swapping, within the container's limit if there is one; None when unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    inside = int(limit) - used if limit.isdigit() else None
    return inside if free is None else free if inside is None else min(free, inside)


def resident() -> int:
    """Bytes of memory this process holds now; 0 where the system does not tell."""
    return _status_bytes("VmRSS") or 0


class Peak:
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
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
