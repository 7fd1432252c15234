"""Builds a C library with the system's compiler, once per user, source, flags and compiler; later processes load it.

Nothing here is built for one particular machine: the flags name what the code is written for (AVX2, FMA, F16C), and
whether this processor has it is asked of torch before anything is loaded.

What is loaded runs as the user, so it is looked at first. A library ends in the SHA-256 of what stands before it (the
loader ignores what follows an ELF file), and it must belong to this user, in a folder that nobody else can write to.
One that was cut short or changed is built anew; a folder that cannot be trusted or written to is left alone.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

HERE = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-mavx2", "-mfma", "-mf16c", "-fPIC", "-shared", "-pthread")
BUILD_TIMEOUT_SECONDS = 120
"""A build takes a few seconds; a compiler that hangs must not hang the program."""
log = logging.getLogger("trainshort.attention.kernels")
"""Its warnings reach standard error unless somebody listens: whoever waits for a build wants to know what for."""


class KernelBuildError(Exception):
    """Why there is no compiled code here, in words a user can act on."""


def load(name: str, folder: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library made from the C files of one folder beside this file and those in `common`; built if need be."""
    _check_machine()
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
    except ValueError as error:
        raise KernelBuildError(f"the variable CC names no compiler: {os.environ['CC']!r} ({error})") from None
    if not compiler:
        raise KernelBuildError("the variable CC is blank; name a C compiler, or unset it")
    try:
        user_flags = shlex.split(os.environ.get("TRAINSHORT_CFLAGS", ""))
    except ValueError as error:
        raise KernelBuildError(f"the variable TRAINSHORT_CFLAGS cannot be split into flags ({error})") from None
    folders = [HERE / folder, HERE / "common"]
    sources = [str(path) for place in folders for path in sorted(place.glob("*.c"))]
    # All flags are part of the name of the library, so a build with other flags is never loaded in its place.
    command = [*compiler, *FLAGS, *flags, *user_flags]
    digest = hashlib.sha256()
    read = [path for place in folders for path in sorted(place.glob("*.[ch]"))]
    for part in (*(path.read_bytes() for path in read), " ".join(command).encode(), _run([*compiler, "--version"])):
        digest.update(len(part).to_bytes(8, "little") + part)
    library = cache_folder() / f"{name}-{digest.hexdigest()[:24]}.so"
    command += [*(f"-I{place}" for place in folders), *sources]
    if loaded := _open_verified(library):
        return loaded
    log.warning(f"building the kernel '{name}' in {library.parent}, about 10 s")
    _compile(command, library)
    if loaded := _open_verified(library):
        return loaded
    raise KernelBuildError(f"the kernel was built, but {library} does not stay whole; is the disk full?")


def _check_machine() -> None:
    machine = f"{platform.machine()} under {platform.system()}"
    if platform.machine().lower() not in ("x86_64", "amd64") or not sys.platform.startswith("linux"):
        raise KernelBuildError(f"the kernel is written for x86-64 under Linux, and this is {machine}")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        raise KernelBuildError("the kernel needs a processor with AVX2")


def cache_folder() -> Path:
    """Where built libraries are kept: in TRAINSHORT_CACHE, or the user's cache folder; and where that cannot be, in a
    private temporary folder, which is said once."""
    reason = _insecure_folder_reason(chosen := _chosen_folder())
    if reason is None and chosen is not None:
        return chosen
    private = _private_folder()
    _say_once(
        f"compiled kernels cannot be kept in {chosen or 'a home folder'} ({reason}); {private} is used. "
        "Set TRAINSHORT_CACHE to a folder that only you can write to."
    )
    return private


def _chosen_folder() -> Path | None:
    if chosen := os.environ.get("TRAINSHORT_CACHE"):
        return Path(chosen) / "kernels"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainshort" / "kernels"
    except RuntimeError:  # no home, and no entry in the table of users
        return None


@cache
def _private_folder() -> Path:
    """One that later processes find again, unless somebody else was there first."""
    lasting = Path(tempfile.gettempdir()) / f"trainshort-{os.getuid()}"
    if _insecure_folder_reason(lasting) is None:
        return lasting
    try:
        folder = Path(tempfile.mkdtemp(prefix="trainshort-"))
    except OSError as error:
        raise KernelBuildError(f"there is no folder to keep the kernel in ({error})") from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _insecure_folder_reason(folder: Path | None) -> str | None:
    """Why a folder is no place for code that will be run; None when it is. It is made if it is not there."""
    if folder is None:
        return "there is none"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if found.st_mode & 0o022:
        return "others can write to it"
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def _open_verified(library: Path) -> ctypes.CDLL | None:
    """The library, loaded from the very file that was looked at; None when there is none, or none that is whole."""
    try:
        descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    whole, found = False, os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        log.warning(f"{library} is not a file that only you can write to")
    else:
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
        whole = hashlib.sha256(content[:-32]).digest() == content[-32:]
        if not whole:
            log.warning(f"{library} is damaged")
    if not whole:
        os.close(descriptor)
        return None
    try:  # the descriptor stays open: the loader tells libraries apart by their paths, and this one must stay its own
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise KernelBuildError(f"the built kernel {library} does not load ({error})") from None


def _compile(command: list[str], library: Path) -> None:
    """Build beside the target, sign, bring to disk, and rename: another process sees the whole library or none."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            _run([*command, "-o", str(fresh), "-lm"])
            with open(fresh, "ab") as file:
                file.write(hashlib.sha256(fresh.read_bytes()).digest())
                file.flush()
                os.fchmod(file.fileno(), 0o700)
                os.fsync(file.fileno())
            fresh.replace(library)
    except OSError as error:
        raise KernelBuildError(
            f"the kernel cannot be kept in {library.parent} ({error}); set TRAINSHORT_CACHE to a writable folder"
        ) from error


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=BUILD_TIMEOUT_SECONDS, check=True)
    except (FileNotFoundError, NotADirectoryError):
        raise KernelBuildError(
            f"there is no C compiler called '{command[0]}'; install one, or name it in the variable CC"
        ) from None
    except (OSError, ValueError) as error:
        raise KernelBuildError(f"the C compiler '{command[0]}' cannot be run ({error})") from None
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"'{command[0]}' did not finish within {BUILD_TIMEOUT_SECONDS} seconds") from None
    except subprocess.CalledProcessError as error:
        last_words = error.stderr.decode(errors="replace").strip()[-400:]
        raise KernelBuildError(f"'{command[0]}' failed: {last_words}") from None
    return done.stdout


@cache
def _say_once(message: str) -> None:
    log.warning(message)


@cache
def find_gomp_parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime this process already runs; None where it is not to be found."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "omp" in line and ".so" in line}
    own = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda path: (not path.startswith(own), path)):  # others may have brought theirs
        if any(name in Path(path).name for name in ("libgomp", "libiomp", "libomp")):
            entry = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if entry is not None:
                return ctypes.cast(entry, ctypes.c_void_p).value
    return None
