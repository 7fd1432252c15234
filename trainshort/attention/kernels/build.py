"""Build C libraries with the system's C compiler, and load them.

A library is built once per user. Its file name contains a hash of the sources, the flags and the version of the
compiler, and later processes load the same file. The libraries are built for processors with AVX2, FMA and F16C.

A loaded library runs with the rights of the user, so it is verified first. The file must belong to the user, and
nobody else may be able to write to it or to its folder. The file ends with the SHA-256 of its content. If the hash is
wrong, the library is built again.
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
"""The longest time that a call of the compiler may take. A build takes about 10 seconds."""

SHA256_BYTES = 32

# Python writes warnings to standard error even if logging is not configured. Users thus see why the first call is slow.
log: logging.Logger = logging.getLogger("trainshort.attention.kernels")


class KernelBuildError(Exception):
    """A compiled kernel is not available. The message tells the user why, and what to do."""


def load(name: str, folder: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load a C library, and build it if no valid file exists.

    The environment variable `CC` names the compiler. `TRAINSHORT_CFLAGS` contains further compiler flags.

    Args:
        name: The name of the library. It is part of the file name and of messages.
        folder: The folder of the C files, next to this file. The C files in `common` are added.
        flags: Further compiler flags.

    Returns:
        The loaded library.

    Raises:
        KernelBuildError: If the library cannot be built or loaded on this machine.
    """
    _check_machine()
    compiler = _compiler_command()
    # All flags are part of the hash. A library that was built with other flags is therefore not loaded.
    command = [*compiler, *FLAGS, *flags, *_user_flags()]
    source_folders = [HERE / folder, HERE / "common"]
    digest = _hash_build(source_folders, command, compiler_version=_run([*compiler, "--version"]))
    library_path = cache_folder() / f"{name}-{digest[:24]}.so"

    library = _open_verified(library_path)
    if library is not None:
        return library

    log.warning(f"building the kernel '{name}' in {library_path.parent}, which takes about 10 seconds")
    include_flags = [f"-I{source_folder}" for source_folder in source_folders]
    sources = []
    for source_folder in source_folders:
        for source_path in sorted(source_folder.glob("*.c")):
            sources.append(str(source_path))
    _compile([*command, *include_flags, *sources], library_path)
    library = _open_verified(library_path)
    if library is None:
        raise KernelBuildError(f"the new kernel {library_path} is corrupted; check whether the disk is full")
    return library


def _check_machine() -> None:
    """Raise `KernelBuildError` if the kernels do not support this machine."""
    is_x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    if not is_x86_64 or not sys.platform.startswith("linux"):
        machine = f"{platform.machine()} with {platform.system()}"
        raise KernelBuildError(f"the kernel requires x86-64 with Linux, got {machine}")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        raise KernelBuildError("the kernel requires a processor with AVX2")


def _compiler_command() -> list[str]:
    """Return the words of the compiler command: the environment variable `CC`, or `cc`."""
    command_text = os.environ.get("CC", "cc")
    try:
        command = shlex.split(command_text)
    except ValueError as error:
        raise KernelBuildError(f"the variable CC is not a valid command: {command_text!r} ({error})") from None
    if not command:
        raise KernelBuildError("the variable CC is blank; set it to a C compiler, or unset it")
    return command


def _user_flags() -> list[str]:
    """Return the compiler flags of the environment variable `TRAINSHORT_CFLAGS`."""
    try:
        return shlex.split(os.environ.get("TRAINSHORT_CFLAGS", ""))
    except ValueError as error:
        raise KernelBuildError(f"the variable TRAINSHORT_CFLAGS cannot be split into flags ({error})") from None


def _hash_build(source_folders: list[Path], command: list[str], compiler_version: bytes) -> str:
    """Return a hash of everything that a library is built from.

    Args:
        source_folders: The folders of the C files and headers.
        command: The compiler with its flags.
        compiler_version: What the compiler prints about its version.
    """
    parts = []
    for folder in source_folders:
        for source_path in sorted(folder.glob("*.[ch]")):
            parts.append(source_path.read_bytes())
    parts.append(" ".join(command).encode())
    parts.append(compiler_version)

    digest = hashlib.sha256()
    for part in parts:
        # The length separates the parts. Otherwise "ab" + "c" and "a" + "bc" would have the same hash.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder of the built libraries.

    The environment variable `TRAINSHORT_CACHE` can select another cache folder than the cache folder of the user. The
    libraries are stored in the subfolder `kernels`. If other users could write to this folder, a private temporary
    folder is used instead, and a warning is logged once.

    Raises:
        KernelBuildError: If no folder can be created.
    """
    configured_folder = _configured_folder()
    if configured_folder is None:
        reason = "it does not exist"  # The user has no home folder.
    else:
        reason = _insecure_folder_reason(configured_folder)
        if reason is None:
            return configured_folder

    private_folder = _private_folder()
    _warn_once(
        f"compiled kernels cannot be stored in {configured_folder or 'a home folder'} ({reason}); "
        f"{private_folder} is used instead. Set TRAINSHORT_CACHE to a folder that only you can write to."
    )
    return private_folder


def _configured_folder() -> Path | None:
    """Return the folder that should store the built libraries. The folder may not exist yet.

    The folder is below `$TRAINSHORT_CACHE` if this environment variable is set. Otherwise, the folder is below
    `$XDG_CACHE_HOME` or `~/.cache`, the user's cache folder. Return None if the user has no home folder.
    """
    trainshort_cache = os.environ.get("TRAINSHORT_CACHE")
    if trainshort_cache:
        return Path(trainshort_cache) / "kernels"
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if user_cache:
        return Path(user_cache) / "trainshort" / "kernels"
    try:
        home_folder = Path.home()
    except RuntimeError:
        return None
    return home_folder / ".cache" / "trainshort" / "kernels"


@cache
def _private_folder() -> Path:
    """Return a temporary folder that only this user can write to.

    The name of the folder contains the user id, so that later processes find the folder again. If this folder is not
    secure, for example because another user has created it, a new folder is created. The new folder is removed at the
    end of the process.
    """
    user_folder = Path(tempfile.gettempdir()) / f"trainshort-{os.getuid()}"
    if _insecure_folder_reason(user_folder) is None:
        return user_folder
    try:
        new_folder = Path(tempfile.mkdtemp(prefix="trainshort-"))
    except OSError as error:
        raise KernelBuildError(f"no folder for the kernel can be created ({error})") from None
    atexit.register(shutil.rmtree, new_folder, ignore_errors=True)
    return new_folder


def _insecure_folder_reason(folder: Path) -> str | None:
    """Return why executable code must not be stored in a folder, or None if the folder is secure.

    The folder is created if it does not exist.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    if _is_writable_by_others(status):
        return "other users can write to it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it is not writable"
    return None


def _is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether the group or other users can write to a file or folder."""
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _open_verified(library_path: Path) -> ctypes.CDLL | None:
    """Verify a library and load it.

    The library is loaded through the file descriptor that was verified. Nobody can therefore replace the file between
    the verification and the loading.

    Returns:
        The loaded library, or None if the file does not exist or is not valid.
    """
    try:
        descriptor = os.open(library_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if not _is_valid_library(descriptor, library_path):
        os.close(descriptor)
        return None
    try:
        # The descriptor stays open on purpose. The loader identifies a library by its path. If the descriptor was
        # closed, another library could get the same number and thus the same path.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise KernelBuildError(f"the built kernel {library_path} cannot be loaded ({error})") from None


def _is_valid_library(descriptor: int, library_path: Path) -> bool:
    """Return whether an open file is a complete library that only this user can write to.

    The file ends with the SHA-256 of its content. The hash is wrong if the file is incomplete or corrupted.

    Args:
        descriptor: The file descriptor of the open file.
        library_path: The path of the file, for messages.
    """
    status = os.fstat(descriptor)
    is_own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    if not is_own_file or _is_writable_by_others(status):
        log.warning(f"{library_path} is not a file that only you can write to")
        return False
    with open(descriptor, "rb", closefd=False) as file:
        content = file.read()
    expected_hash = content[-SHA256_BYTES:]
    actual_hash = hashlib.sha256(content[:-SHA256_BYTES]).digest()
    if actual_hash != expected_hash:
        log.warning(f"{library_path} is corrupted")
        return False
    return True


def _compile(command: list[str], library_path: Path) -> None:
    """Build a library and append the hash of its content.

    The library is written to a temporary folder and then renamed, so other processes never see an incomplete file.

    Args:
        command: The compiler with its flags and source files.
        library_path: The file that is created or replaced.

    Raises:
        KernelBuildError: If the compiler fails, or if the file cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=library_path.parent) as folder:
            temporary_path = Path(folder) / library_path.name
            _run([*command, "-o", str(temporary_path), "-lm"])
            # The loader of the operating system ignores bytes after the end of the library, such as this hash.
            content_hash = hashlib.sha256(temporary_path.read_bytes()).digest()
            with open(temporary_path, "ab") as file:
                file.write(content_hash)
                file.flush()
                os.fchmod(file.fileno(), 0o700)
                os.fsync(file.fileno())
            temporary_path.replace(library_path)
    except OSError as error:
        raise KernelBuildError(
            f"the kernel cannot be stored in {library_path.parent} ({error}); set TRAINSHORT_CACHE to a writable folder"
        ) from error


def _run(command: list[str]) -> bytes:
    """Run the compiler and return its standard output.

    Raises:
        KernelBuildError: If the compiler cannot be started, fails or takes too long.
    """
    compiler = command[0]
    try:
        result = subprocess.run(command, capture_output=True, timeout=BUILD_TIMEOUT_SECONDS, check=True)
    except (FileNotFoundError, NotADirectoryError):
        raise KernelBuildError(
            f"the C compiler '{compiler}' was not found; install a C compiler, or set the variable CC"
        ) from None
    except (OSError, ValueError) as error:
        raise KernelBuildError(f"the C compiler '{compiler}' cannot be run ({error})") from None
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"'{compiler}' did not finish within {BUILD_TIMEOUT_SECONDS} seconds") from None
    except subprocess.CalledProcessError as error:
        end_of_output = error.stderr.decode(errors="replace").strip()[-400:]
        raise KernelBuildError(f"'{compiler}' failed: {end_of_output}") from None
    return result.stdout


@cache
def _warn_once(message: str) -> None:
    """Log a warning. Later calls with the same message have no effect."""
    log.warning(message)


@cache
def find_gomp_parallel() -> int | None:
    """Return the address of the function GOMP_parallel, which runs a function in all threads of OpenMP.

    The function is taken from the OpenMP library that PyTorch has loaded, so that the kernels use PyTorch's threads.

    Returns:
        The address, or None if no OpenMP library with this function is loaded.
    """
    for path in _loaded_openmp_libraries():
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _loaded_openmp_libraries() -> list[str]:
    """Return the paths of the OpenMP libraries in this process. Libraries in PyTorch's folder come first."""
    try:
        memory_maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = set()
    for line in memory_maps.splitlines():
        if "omp" in line and ".so" in line:
            # The path is the sixth column and may contain spaces.
            paths.add(line.split(maxsplit=5)[5])
    openmp_names = ("libgomp", "libiomp", "libomp")
    openmp_paths = [path for path in paths if any(name in Path(path).name for name in openmp_names)]

    torch_folder = str(Path(torch.__file__).parent)
    torch_paths = sorted(path for path in openmp_paths if path.startswith(torch_folder))
    other_paths = sorted(path for path in openmp_paths if not path.startswith(torch_folder))
    return torch_paths + other_paths
