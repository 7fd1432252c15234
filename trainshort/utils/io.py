"""Read, write, verify and lock files.

All functions raise `InputError` with the path and the cause if the operating system reports an error. The argument
`hint` of the functions is the last sentence of the error message. It tells the user what to do.

This module does not import torch.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from trainshort.errors import InputError

# Suffix of the temporary name of a file or a folder that is being written.
PARTIAL = ".partial"

# The key in a JSON file that holds the SHA-256 of all other keys.
CHECKSUM = "checksum"

# Files that are read as a whole must not be larger. The largest tokenizer files have about 13 MB.
MAX_FILE_BYTES = 256 * 2**20

RESTORE_HINT = "Restore it from a copy, or remove it."
OTHER_PATH_HINT = "Choose another --out."
CHOOSE_PATH_HINT = "Free some disk space, or choose another --out."

_JSON_TYPE_NAMES = {list: "list", str: "string", bool: "boolean", type(None): "null"}

_OS_ERROR_TEXTS = {
    errno.ENOSPC: "the disk is full",
    errno.EROFS: "the file system is read-only",
    errno.EMFILE: "too many files are open (raise the limit with ulimit -n)",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EACCES: "permission denied",
}


class MissingFileError(InputError):
    """A file does not exist. Callers catch this error for files that are optional."""


def describe_os_error(error: OSError | ValueError) -> str:
    """Return the cause of an operating system error in words, such as "the disk is full"."""
    if isinstance(error, OSError) and error.errno:
        text = _OS_ERROR_TEXTS.get(error.errno)
        return text or os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def unwrap_os_error(error: Exception) -> OSError:
    """Return the operating system error inside an error of the safetensors library.

    The safetensors library puts the number of the operating system error into its message: "... (os error 28)".
    """
    match = re.search(r"\((?:os error )?(\d+)\)", str(error))
    if match is None:
        return OSError(str(error))
    error_number = int(match[1])
    return OSError(error_number, os.strerror(error_number))


def _raise_file_error(action: str, path: Path, error: OSError | ValueError, hint: str) -> NoReturn:
    """Raise an `InputError` such as "Cannot write model.bin: the disk is full."

    Args:
        action: What failed, as a verb: "read", "write" or "lock".
        path: The file or folder.
        error: The error of the operating system.
        hint: The last sentence of the message.
    """
    is_disk_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if hint == CHOOSE_PATH_HINT and not is_disk_full:
        hint = OTHER_PATH_HINT  # Free disk space would not help.
    message = f"Cannot {action} {path}: {describe_os_error(error)}. {hint}"
    raise InputError(message.rstrip()) from None


@contextmanager
def translate_os_errors(action: str, path: Path, hint: str) -> Iterator[None]:
    """Context manager: raise every `OSError` of the block as an `InputError`.

    Args:
        action: What the block does, as a verb: "read" or "write".
        path: The file that the message names.
        hint: The last sentence of the message.
    """
    try:
        yield
    except OSError as error:
        _raise_file_error(action, path, error, hint)


# ---- reading


def open_file(path: Path, *, hint: str = RESTORE_HINT) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: The file. Folders, named pipes, sockets and devices are rejected.
        hint: The last sentence of error messages.

    Raises:
        MissingFileError: If nothing exists at `path`.
        InputError: If `path` is not a regular file, or cannot be opened.
    """
    try:
        # Another process may create the file between the two checks. The file is then opened, or it counts as missing.
        exists = os.path.lexists(path)
        # A named pipe must not be opened, because opening it waits until another process writes to the pipe.
        if path.is_file():
            return path.open("rb")
    except FileNotFoundError:
        exists = False  # The file was removed after the check.
    except (OSError, ValueError) as error:
        _raise_file_error("read", path, error, hint)
    if exists:
        raise InputError(f"Cannot read {path}: not a regular file. {hint}")
    # "Restore it from a copy, or remove it." becomes "Restore it from a copy." for a file that does not exist.
    hint = hint.replace(", or remove it.", ".")
    raise MissingFileError(f"File not found: {path}. {hint}")


def read_bytes(path: Path, *, hint: str = RESTORE_HINT, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        hint: The last sentence of error messages.
        limit: The largest accepted size in bytes.

    Raises:
        MissingFileError: If the file does not exist.
        InputError: If the file cannot be read or is larger than `limit`.
    """
    with open_file(path, hint=hint) as file, translate_os_errors("read", path, hint):
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise InputError(f"Cannot read {path}: expected at most {limit:,} bytes, got {size:,}. {hint}")
        return file.read()


def read_text(path: Path, *, hint: str = RESTORE_HINT, limit: int = MAX_FILE_BYTES) -> str:
    """Return the content of a UTF-8 text file. The arguments and errors are those of `read_bytes`."""
    content = read_bytes(path, hint=hint, limit=limit)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"Cannot read {path}: invalid UTF-8 at byte {error.start:,}. {hint}") from None


def read_json(path: Path, *, hint: str = RESTORE_HINT) -> Any:
    """Return the value in a JSON file. `InputError` is raised if the file cannot be read or is not valid JSON."""
    return parse_json(read_text(path, hint=hint), str(path), hint=hint)


def read_json_object(path: Path, *, hint: str = RESTORE_HINT) -> dict[str, Any]:
    """Return the content of a JSON file that must hold an object.

    Raises:
        MissingFileError: If the file does not exist.
        InputError: If the file cannot be read, is not valid JSON, or holds another JSON type.
    """
    values = read_json(path, hint=hint)
    if not isinstance(values, dict):
        type_name = _JSON_TYPE_NAMES.get(type(values), "number")
        raise InputError(f"Invalid file {path}: expected a JSON object, got a JSON {type_name}. {hint}")
    return values


def parse_json(text: str | bytes, name: str, *, hint: str = RESTORE_HINT) -> Any:
    """Parse JSON text.

    Args:
        text: The JSON text.
        name: The source of the text for error messages, such as "runs/x/metrics.jsonl, line 3".
        hint: The last sentence of error messages.

    Returns:
        The parsed value.

    Raises:
        InputError: If the text is not valid JSON, is nested too deeply, or contains half of a surrogate pair.
    """
    try:
        values = json.loads(text)
        decoded_text = text if isinstance(text, str) else text.decode()
        if "\\u" in decoded_text:
            # Half of a surrogate pair, such as \ud800, can be parsed but not encoded. The encoding raises ValueError.
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise InputError(f"Cannot read {name}: the JSON is nested too deeply. {hint}") from None
    except ValueError as error:
        raise InputError(f"Cannot read {name}: invalid JSON ({error}). {hint}") from None
    return values


def sha256(path: Path, *, hint: str = RESTORE_HINT) -> str:
    """Return the SHA-256 of a file as a hexadecimal string."""
    with open_file(path, hint=hint) as file, translate_os_errors("read", path, hint):
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- writing


@contextmanager
def atomic_replace(path: Path, *, hint: str = CHOOSE_PATH_HINT) -> Iterator[Path]:
    """Context manager: write a file such that readers never see an incomplete file.

    The block writes to the yielded temporary path. When the block ends, the temporary file is flushed to the disk and
    renamed to `path`. If the block fails, the old file stays as it was.

    Args:
        path: The file that is created or replaced.
        hint: The last sentence of error messages.

    Yields:
        The temporary path, in the same folder.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)
        yield partial
        fsync(partial)
        partial.replace(path)
        fsync(path.parent)
    except BaseException as error:
        with suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            _raise_file_error("write", path, error, hint)
        raise


def write_atomic(path: Path, content: str | bytes, *, hint: str = CHOOSE_PATH_HINT) -> None:
    """Write a file such that readers see either the old content or the complete new content."""
    if isinstance(content, str):
        content = content.encode()
    with atomic_replace(path, hint=hint) as partial:
        partial.write_bytes(content)


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk. A rename is durable only after its folder is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, *, hint: str = OTHER_PATH_HINT) -> Path:
    """Create a folder and its parents if they do not exist, and check that the folder is writable.

    Args:
        path: The folder.
        hint: The last sentence of error messages.

    Returns:
        `path`.

    Raises:
        InputError: If the folder cannot be created, is not writable, or if `path` is a file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(path, os.W_OK | os.X_OK)
        if not is_writable:
            is_read_only_disk = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
            error_number = errno.EROFS if is_read_only_disk else errno.EACCES
            raise OSError(error_number, "")  # The last `except` clause below reports the error.
    except FileExistsError as error:
        is_broken_link = path.is_symlink() and not path.exists()
        kind = "broken symbolic link" if is_broken_link else "file"
        # The file may be at the path of a parent folder.
        file_path = error.filename or path
        raise InputError(f"Expected a folder at {file_path}, found a {kind}. {hint}") from None
    except (OSError, ValueError) as error:
        raise _folder_error(path, error, hint) from None
    return path


@contextmanager
def remove_empty_folders(path: Path) -> Iterator[None]:
    """Context manager: remove the folders that the block created at `path` or above, if they are still empty."""
    # Only folders that do not exist before the block may be removed. The list starts with the innermost folder, so that
    # each folder is empty when its turn comes.
    missing_folders = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        yield
    finally:
        for folder in missing_folders:
            # rmdir fails for a folder that is not empty. Such a folder stays.
            with suppress(OSError, ValueError):
                folder.rmdir()


def check_folder_writable(path: Path, *, hint: str = OTHER_PATH_HINT) -> None:
    """Raise `InputError` if a folder cannot be created or written to. The check leaves no new folder behind."""
    with remove_empty_folders(path):
        make_folder(path, hint=hint)


def check_file_writable(path: Path, *, hint: str = OTHER_PATH_HINT) -> None:
    """Raise `InputError` if a file cannot be written. The check leaves no new file behind.

    An existing file is not changed, because the check writes to a temporary path next to the file.
    """
    if not os.path.exists(path.parent):
        check_folder_writable(path.parent, hint=hint)
        return
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.write_bytes(b"")
        partial.unlink()
    except (OSError, ValueError) as error:
        _raise_file_error("write", path, error, hint)


def _folder_error(path: Path, error: OSError | ValueError, hint: str) -> InputError:
    """Return the error for a folder that cannot be created or written to."""
    action = "write to" if os.path.isdir(path) else "create"
    return InputError(f"Cannot {action} the folder {path}: {describe_os_error(error)}. {hint}")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Context manager: write a folder such that readers never see an incomplete folder.

    The block writes files into the yielded temporary folder. When the block ends, the files are flushed to the disk and
    the folder is renamed to `path`. If the block fails, the temporary folder is removed.

    Args:
        path: The new folder. The path must not exist, or must be an empty folder.

    Yields:
        The temporary folder.

    Raises:
        InputError: If `path` is a file, a link or a folder with content, or if the files cannot be written.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "link" if path.is_symlink() else "file"
        raise InputError(f"Expected no file or link at {path}, found a {kind}. {OTHER_PATH_HINT}")
    if path.exists() and any(path.iterdir()):
        raise InputError(f"{path} already exists and is not empty. {OTHER_PATH_HINT}")

    partial = path.with_name(f".{path.name}{PARTIAL}")
    make_folder(path.parent)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
    except OSError as error:
        raise _folder_error(path, error, OTHER_PATH_HINT) from None

    try:
        yield partial
        for written_path in (partial, *partial.rglob("*")):
            fsync(written_path)
        partial.rename(path)
        fsync(path.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            _raise_file_error("write", path, error, CHOOSE_PATH_HINT)
        raise


@contextmanager
def file_lock(path: Path, busy_message: str | None = None) -> Iterator[None]:
    """Context manager: hold an exclusive lock, so that only one process at a time runs the block.

    The operating system releases the lock when the process ends, also if the process is killed.

    Args:
        path: The file or folder that is locked. A file is created if `path` does not exist.
        busy_message: The error message if another process holds the lock. None waits for the other process.

    Raises:
        InputError: If another process holds the lock and `busy_message` is given.
    """
    if path.is_dir():
        flags = os.O_RDONLY
    else:
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:
        _raise_file_error("lock", path, error, CHOOSE_PATH_HINT)

    lock_mode = fcntl.LOCK_EX
    if busy_message is not None:
        lock_mode |= fcntl.LOCK_NB  # Raise BlockingIOError instead of waiting.
    try:
        try:
            fcntl.flock(descriptor, lock_mode)
        except BlockingIOError:
            raise InputError(busy_message or f"{path} is in use.") from None
        yield
    finally:
        os.close(descriptor)


# ---- JSON files with a checksum


def _compute_checksum(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a dictionary in the JSON form with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_with_checksum(path: Path, values: dict[str, Any], *, hint: str = CHOOSE_PATH_HINT) -> None:
    """Write a JSON file that also holds a checksum of its values. The file is replaced atomically."""
    values_without_checksum = {name: value for name, value in values.items() if name != CHECKSUM}
    checksum = _compute_checksum(values_without_checksum)
    stored_values = values_without_checksum | {CHECKSUM: checksum}
    write_atomic(path, json.dumps(stored_values, indent=1) + "\n", hint=hint)


def read_with_checksum(path: Path, *, hint: str = RESTORE_HINT) -> dict[str, Any]:
    """Read a JSON file that was written by `write_with_checksum`, and verify its checksum.

    Args:
        path: The file.
        hint: The last sentence of error messages.

    Returns:
        The content of the file without the checksum.

    Raises:
        InputError: If the file is missing, is not a JSON object, or its checksum is missing or wrong.
    """
    values = read_json_object(path, hint=hint)
    stored_checksum = values.pop(CHECKSUM, None)
    if stored_checksum is None:
        raise InputError(f"Missing checksum in {path}: the file was modified after it was written. {hint}")
    if stored_checksum != _compute_checksum(values):
        raise InputError(f"Checksum mismatch in {path}: the file was modified after it was written. {hint}")
    return values
