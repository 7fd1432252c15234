"""The compiled step of the bounded cache: structs that mirror ring.c, its build on first use, and the call.

The structs are the cache's own memory of counts and norms, so that a step moves nothing between C and Python.
"""

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from trainshort.attention.kernel import unavailable as kernel_unavailable
from trainshort.attention.kernel.build import FLAGS, SOURCES, KernelBuildError, cache_folder

SOURCE = Path(__file__).with_name("ring.c")


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
        ("parallel", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
    ]


@cache
def unavailable() -> str | None:
    """Why the compiled step cannot be had on this machine; None when it can (it is built now if it was not)."""
    reason = kernel_unavailable(False)  # the same compiler, processor and header files
    if reason:
        return reason
    try:
        _library()
    except KernelBuildError as error:
        return str(error)
    return None


def run(token: Token) -> None:
    """Fill `out`, bring the rings and heads up to date; rings that must grow first have `wanted` set."""
    if _library().trainshort_token(ctypes.byref(token)):
        raise MemoryError("the bounded cache ran out of memory for its scratch space")


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_beside(SOURCE)))
    library.trainshort_token_size.restype = ctypes.c_size_t
    assert library.trainshort_token_size() == ctypes.sizeof(Token), "ring.c and ring.py disagree"
    return library


def build_beside(source: Path) -> Path:
    """The library of one more C file that uses the attention kernel's headers. Built beside its place and renamed:
    another process sees it whole or not at all."""
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, f"-I{SOURCES}"]
    digest = hashlib.sha256(" ".join(command).encode())
    for file in (source, *sorted(SOURCES.glob("*.h"))):
        digest.update(file.read_bytes())
    library = cache_folder() / f"{source.stem}-{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        done = subprocess.run([*command, str(source), "-o", str(fresh), "-lm"], capture_output=True, text=True)
        if done.returncode:
            raise KernelBuildError(f"'{command[0]}' failed: {done.stderr.strip()[-400:]}")
        fresh.replace(library)
    return library
