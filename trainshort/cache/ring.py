"""The compiled step of the bounded cache: structs that mirror kernel/ring.c, and the build of kernel/ on first use.

The structs are the cache's own memory of counts and norms, so that a step moves nothing between C and Python.
"""

import ctypes
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from trainshort.attention.kernel import unavailable as kernel_unavailable
from trainshort.attention.kernel.build import FLAGS, KernelBuildError, cache_folder
from trainshort.attention.kernel.build import SOURCES as HEADERS

SOURCES = Path(__file__).parent / "kernel"


class Ring(ctypes.Structure):
    """One key head's past: `count` keys at distances 1 to count, the oldest at `next` once the ring is full."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("capacity", "count", "next", "wanted")),
        *((name, ctypes.c_double) for name in ("far", "peak")),
    ]


class Head(ctypes.Structure):
    """One query head's slope, the reach of its queries so far, and the mass that it can have left out."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("slope", "excess", "mass")),
        ("above", ctypes.c_int64),
    ]


class Token(ctypes.Structure):
    """One call: a token's queries, key and value, and the rings they meet."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("rings", "heads")),
        *((name, ctypes.c_int64) for name in ("head_count", "ring_count", "dim", "length", "limit")),
        *((name, ctypes.c_double) for name in ("tolerance", "margin", "settled", "scale")),
        ("scratch", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
    ]


@cache
def unavailable() -> str | None:
    """Why the compiled step cannot be had on this machine; None when it can (it is built now if it was not)."""
    if not sys.platform.startswith("linux"):
        return "the compiled step wakes its helpers by Linux's futex"
    reason = kernel_unavailable(False)  # the same compiler, processor and header files
    if reason:
        return reason
    try:
        library()
    except KernelBuildError as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """The C files in kernel/, built once per user; see `unavailable` before."""
    loaded = ctypes.CDLL(str(_build()))
    loaded.trainshort_token_size.restype = loaded.trainshort_linear_size.restype = ctypes.c_size_t
    loaded.trainshort_token_scratch.restype = ctypes.c_int64
    loaded.trainshort_token.restype = loaded.trainshort_linear.restype = None
    assert loaded.trainshort_token_size() == ctypes.sizeof(Token), "ring.c and ring.py disagree"
    return loaded


def _build() -> Path:
    """Built beside its place and renamed: another process sees the whole library or none."""
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, f"-I{HEADERS}"]
    digest = hashlib.sha256(" ".join(command).encode())
    for file in (*sorted(SOURCES.iterdir()), *sorted(HEADERS.glob("*.h"))):
        if file.suffix in (".c", ".h"):
            digest.update(file.read_bytes())
    path = cache_folder() / f"token-{digest.hexdigest()[:24]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        sources = [str(file) for file in sorted(SOURCES.glob("*.c"))]
        done = subprocess.run([*command, *sources, "-o", str(fresh), "-lm"], capture_output=True, text=True)
        if done.returncode:
            raise KernelBuildError(f"'{command[0]}' failed: {done.stderr.strip()[-400:]}")
        fresh.replace(path)
    return path
