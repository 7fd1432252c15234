"""Describe the machine that computed a result, choose a device, and limit and measure memory."""

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
from trainshort.utils.terminal import first_sentence_of

# The versions of these packages can influence results. They are stored with every result.
RECORDED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "grain")


def collect_provenance(*, threads: int | None = None) -> dict[str, Any]:
    """Return where a result comes from. The dictionary is stored with the result.

    Args:
        threads: The number of torch threads, or None if nothing was computed. Results are bit-identical only for the
            same number of threads.

    Returns:
        The time, the Git commit, the versions of packages, the machine and the number of threads.
    """
    package_versions = {name: package_version(name) for name in RECORDED_PACKAGES}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _find_commit(),
        "versions": {
            "trainshort": trainshort.__version__,
            "python": platform.python_version(),
            **package_versions,
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _read_cpu_info(),
            "cores": os.cpu_count(),
        },
        "threads": threads,
    }


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Run a Git command in a folder and return its output, or None if the command fails."""
    try:
        process = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if process.returncode != 0:
        return None
    return process.stdout.strip()


def _find_commit() -> str | None:
    """Return the Git commit of the source checkout that is running.

    Returns:
        The hash of the commit. "+changes" is added if files of the package differ from the commit. None if the package
        is not in a Git checkout.
    """
    package_folder = Path(trainshort.__file__).parent
    # An installed package can be inside the repository of another project. Git tracks the file only in our repository.
    is_tracked = _run_git(package_folder, "ls-files", "--error-unmatch", "__init__.py") is not None
    if not is_tracked:
        return None
    commit = _run_git(package_folder, "rev-parse", "HEAD")
    changed_files = _run_git(package_folder, "status", "--porcelain", "--untracked-files=no", ".")
    if commit and changed_files:
        return commit + "+changes"
    return commit


def _read_cpu_info(field: str = "model name") -> str:
    """Return a field of /proc/cpuinfo. The default field is the name of the processor."""
    for line in _read_lines(Path("/proc/cpuinfo")):
        if line.startswith(field):
            value = line.partition(":")[2].strip()
            return value or platform.processor()
    return platform.processor()


@functools.cache
def mkl_lacks_avx512() -> bool:
    """Return whether MKL does not use the AVX-512 instructions of this processor.

    MKL computes the matrix products of torch on CPUs. It uses AVX-512 only on processors from Intel.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return has_avx512 and "AuthenticAMD" in _read_cpu_info("vendor_id")


def pick_device(name: str | None) -> str:
    """Choose the device of a computation.

    Args:
        name: The name of a device, such as "cuda:1". None chooses a GPU if torch finds one, and the CPU otherwise.

    Returns:
        The name of the device.

    Raises:
        InputError: If the device is not available.
    """
    has_cuda = torch.cuda.is_available()
    if name is None:
        return "cuda" if has_cuda else "cpu"
    try:
        # The copy back to the CPU fails for the device "meta", which stores no values.
        torch.empty(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:
        if "device string" in str(error):
            reason = "unknown device type"
        else:
            reason = first_sentence_of(error)
        choices = "cpu, cuda or cuda:N" if has_cuda else "cpu"
        raise InputError(f"Device '{name}' is not available ({reason}). Choose {choices}.") from None
    return name


# ---- memory
#
# If an evaluation at some length needs too much memory, the result says so. The paper's tables also show OOM for T5
# biases. On a GPU, torch raises an error. On the CPU, Linux kills the process. Therefore evaluations run with a
# limit for the data segment of the process, and an allocation above the limit raises an error.

# The share of the free memory that an evaluation may use. The rest is left to the system.
USABLE_MEMORY_FRACTION = 0.95

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_PROCESS_STATUS = Path("/proc/self/status")
_PEAK_RESET = Path("/proc/self/clear_refs")

_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "cannot allocate memory",
    "could not create a memory",  # oneDNN, which computes matrix products
    "could not create a primitive",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that there is not enough memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(text in message for text in _OUT_OF_MEMORY_TEXTS)


@contextmanager
def limit_memory(device: torch.device, gigabytes: float | None) -> Iterator[None]:
    """Context manager: allocations above a limit raise an error inside the block.

    Without the limit, Linux kills a process that needs too much memory.

    Args:
        device: The device whose memory is limited.
        gigabytes: The limit. The default is 95 % of the free memory for the CPU, and no limit for a GPU.
    """
    if device.type == "cuda":
        if gigabytes is not None:
            device_memory = torch.cuda.get_device_properties(device).total_memory
            fraction = min(1.0, gigabytes * 1e9 / device_memory)
            torch.cuda.set_per_process_memory_fraction(fraction, device)
        yield
        return

    used_bytes = _read_status_bytes("VmData")
    free_bytes = free_memory()
    if used_bytes is None or free_bytes is None or device.type != "cpu":
        yield  # Only Linux reports these numbers. Other systems get no limit.
        return

    if gigabytes is None:
        additional_bytes = USABLE_MEMORY_FRACTION * free_bytes
    else:
        additional_bytes = gigabytes * 1e9
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    new_limit = used_bytes + int(additional_bytes)
    if hard_limit != resource.RLIM_INFINITY:
        new_limit = min(new_limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (new_limit, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))


def total_memory() -> int:
    """Return the memory that this process can use, in bytes.

    The result is the memory of the machine, or the limit of the container if the limit is lower.
    """
    machine_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container_limits = [limit for limit, _ in _read_cgroup_limits()]
    return min([machine_memory, *container_limits])


def free_memory() -> int | None:
    """Return the memory that is free without swapping, in bytes, or None if it is unknown.

    If a container limits the memory, the result is not larger than what is left of the limit.
    """
    candidates = []
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable"):
            candidates.append(int(line.split()[1]) * 1024)
    for limit, used in _read_cgroup_limits():
        candidates.append(max(0, limit - used))
    return min(candidates, default=None)


def _read_cgroup_limits() -> list[tuple[int, int]]:
    """Return the memory limits of the control groups (cgroups) that contain this process.

    Containers and batch systems limit memory with cgroups. A batch system sets the limit of a group far below the root.
    In a container, the path of the group may exist only outside the container. Therefore all folders from the path of
    the group up to the root are read. Version 1 and version 2 of cgroups are supported.

    Returns:
        Pairs of the limit and the used memory, in bytes.
    """
    limits = []
    for line in _read_lines(_CGROUPS_OF_PROCESS):
        # A line has the form "hierarchy-ID:controllers:path". The controllers are empty for version 2.
        _, controllers, group_path = line.split(":", 2)
        is_version_1 = controllers != ""
        if is_version_1 and "memory" not in controllers.split(","):
            continue
        if is_version_1:
            root = _CGROUP_ROOT / "memory"
            limit_file = "memory.limit_in_bytes"
            usage_file = "memory.usage_in_bytes"
        else:
            root = _CGROUP_ROOT
            limit_file = "memory.max"
            usage_file = "memory.current"

        folder = root / group_path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            limit_text = _read_first_line(group / limit_file)
            usage_text = _read_first_line(group / usage_file)
            # A group without a limit contains the word "max".
            if limit_text.isdigit() and usage_text.isdigit():
                used_bytes = int(usage_text) - _reclaimable_bytes(group)
                limits.append((int(limit_text), used_bytes))
    return limits


def _reclaimable_bytes(group: Path) -> int:
    """Return how many bytes of its file cache the system can free in a control group (cgroup) when memory is needed.

    Args:
        group: The folder of the control group. Containers use control groups to limit memory.
    """
    sizes = {}
    for line in _read_lines(group / "memory.stat"):
        name, size = line.split()
        sizes[name] = int(size)
    # Only version 1 of cgroups has the value "total_inactive_file", which includes the groups below this group.
    if "total_inactive_file" in sizes:
        return sizes["total_inactive_file"]
    return sizes.get("inactive_file", 0)


def resident_memory() -> int:
    """Return the memory that this process uses now, in bytes, or 0 if the system does not report it."""
    return _read_status_bytes("VmRSS") or 0


class PeakMemory:
    """Measure the peak memory of this process, or of a GPU, since the object was created."""

    def __init__(self, device: torch.device) -> None:
        """Reset the peak memory of a GPU, or of this process if the device is the CPU."""
        self.device = device
        self.is_known = True  # Whether the system can measure the peak memory.
        gc.collect()  # Memory that Python can free must not count.
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            # Linux resets the peak of a process when 5 is written to this file.
            _PEAK_RESET.write_text("5")
        except OSError:
            self.is_known = False

    def bytes(self) -> int | None:
        """Return the peak in bytes, or None if the system does not report it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _read_status_bytes("VmHWM") if self.is_known else None


def _read_status_bytes(name: str) -> int | None:
    """Return a memory size from /proc/self/status in bytes, or None if the file has no such line."""
    for line in _read_lines(_PROCESS_STATUS):
        if line.startswith(name + ":"):
            kilobytes = int(line.split()[1])
            return kilobytes * 1024
    return None


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a system file. The list is empty if the file cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_first_line(path: Path) -> str:
    """Return the first line of a system file, or an empty string if the file cannot be read."""
    lines = _read_lines(path)
    return lines[0] if lines else ""
