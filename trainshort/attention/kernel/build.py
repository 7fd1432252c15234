"""Builds the kernel with the system's C compiler, once per user, source, flags and compiler; later processes load it.

Nothing here is built for one particular machine: the flags name what the kernel is written for (AVX2, FMA, F16C), and
whether this processor has it is asked of torch before anything is loaded.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-mavx2", "-mfma", "-mf16c", "-fPIC", "-shared", "-pthread")
SECONDS = 120
"""A build takes two or three seconds; a compiler that hangs must not hang the program."""


class KernelBuildError(Exception):
    """Why there is no compiled kernel here, in words a user can act on."""


def build(double: bool) -> Path:
    """The path of the library for float32 (or, for gradient checks, float64) arithmetic, built if need be."""
    return build_once("windowed", [SOURCES / "windowed.c"], ("-DREAL_IS_DOUBLE",) if double else ())


def build_once(name: str, sources: Sequence[Path], more_flags: Sequence[str] = ()) -> Path:
    """The path of a library made from C files, which may include the headers beside this file; built if need be."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise KernelBuildError(f"the kernel is written for x86-64, and this is {platform.machine()}")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        raise KernelBuildError("the kernel needs a processor with AVX2")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, *more_flags]
    folders = sorted({SOURCES, *(path.parent for path in sources)})
    read = [*sources, *(header for folder in folders for header in sorted(folder.glob("*.h")))]
    digest = hashlib.sha256()
    for part in (*(path.read_bytes() for path in read), " ".join(command).encode(), _run([*compiler, "--version"])):
        digest.update(len(part).to_bytes(8, "little") + part)
    library = cache_folder() / f"{name}-{digest.hexdigest()[:24]}.so"
    if not library.exists():
        _compile([*command, f"-I{SOURCES}", *map(str, sources)], library)
    return library


def cache_folder() -> Path:
    """Where built kernels are kept: TRAINSHORT_CACHE, or the user's cache folder."""
    chosen = os.environ.get("TRAINSHORT_CACHE")
    if chosen:
        return Path(chosen) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainshort" / "kernels"


def _compile(command: list[str], library: Path) -> None:
    """Build beside the target and rename: another process sees the whole library or none."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            _run([*command, "-o", str(fresh), "-lm"])
            fresh.replace(library)
    except OSError as error:
        raise KernelBuildError(
            f"the kernel cannot be kept in {library.parent} ({error}); set TRAINSHORT_CACHE to a writable folder"
        ) from error


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
    except FileNotFoundError:
        raise KernelBuildError(
            f"there is no C compiler called '{command[0]}'; install one, or name it in the variable CC"
        ) from None
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"'{command[0]}' did not finish within {SECONDS} seconds") from None
    except subprocess.CalledProcessError as error:
        last_words = error.stderr.decode(errors="replace").strip()[-400:]
        raise KernelBuildError(f"'{command[0]}' failed: {last_words}") from None
    return done.stdout
