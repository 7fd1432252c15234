"""Every file of ours is read, written, locked and checked here, so that whatever lies in its place is told in words.

    read_json(path)            a regular file, of a sensible size, UTF-8, JSON
    read_sealed(path)          the same, and its numbers are the ones that were written (a checksum of its own)
    write_whole(path, text)    the old content or the new, never a part, whatever stops it
    with replacing(path) as p  the same, for what writes its file itself (a picture, safetensors)
    with locked(path, busy)    one process at a time; a killed one holds nothing
    with new_folder(path)      a folder that is whole or not there
    make_folder(path)          an output folder that can be written to; try_folder, try_file: refused before the work

`mend` is the second sentence of a message: what the user can do about this file. A file that is not there is told
apart (`MissingFileError`), since some may be. No torch.
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

PARTIAL = ".partial"
"""Suffix of a file that is still being written; a leftover of it means nothing."""

CHECKSUM = "checksum"
"""Fields of a stored result: the sha256 of all others, and that there is one, so that a damaged name is noticed too."""

MAX_FILE_BYTES = 256 * 2**20
"""Bytes of the largest file that is read whole: twenty times the largest tokenizer.json of the hub."""

RESTORE_HINT = "Restore it from a copy, or remove it."
OTHER_PATH_HINT = "Choose another --out."
CHOOSE_PATH_HINT = "Make room there, or choose another --out."

_JSON = {list: "list", str: "string", bool: "boolean", type(None): "null"}
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EROFS: "the file system is read-only",
    errno.EMFILE: "too many files are open (raise the limit: ulimit -n)",
    errno.ENOTDIR: "a file is in the way where a folder was expected",
    errno.EACCES: "permission denied",
}


class MissingFileError(InputError):
    """There is nothing of that name, not even a broken link."""


def describe_os_error(error: OSError | ValueError) -> str:
    """Why the system refused, in words."""
    if isinstance(error, OSError) and error.errno:
        return _REASONS.get(error.errno) or os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def unwrap_os_error(error: Exception) -> OSError:
    """What safetensors was told by the system, which it wraps in an error of its own: "… (os error 28)"."""
    number = re.search(r"\((?:os error )?(\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def _raise_file_error(verb: str, path: Path, error: OSError | ValueError, mend: str) -> NoReturn:
    if mend == CHOOSE_PATH_HINT and getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        mend = OTHER_PATH_HINT  # room would not help
    raise InputError(f"Cannot {verb} {path}: {describe_os_error(error)}. {mend}".rstrip()) from None


@contextmanager
def translate_os_errors(verb: str, path: Path, mend: str) -> Iterator[None]:
    """Around, or as a decorator of, what the system may refuse: that is told in words."""
    try:
        yield
    except OSError as error:
        _raise_file_error(verb, path, error, mend)


# ---- reading


def open_file(path: Path, *, mend: str = RESTORE_HINT) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: The file. A folder, a named pipe, a socket or a device is refused.
        mend: The end of the error message: what the user can do.

    Raises:
        MissingFileError: If nothing exists at `path`.
        InputError: If `path` is not a regular file, or cannot be opened.
    """
    try:
        # The check comes first, because opening a named pipe waits until another process writes to the pipe.
        if path.is_file():
            return path.open("rb")
        exists = os.path.lexists(path)
    except FileNotFoundError:
        exists = False  # The file was removed after the check.
    except (OSError, ValueError) as error:
        _raise_file_error("read", path, error, mend)
    if exists:
        raise InputError(f"Cannot read {path}: it is not a regular file. {mend}")
    raise MissingFileError(f"There is no file {path}. {mend.replace(', or remove it.', '.')}")


def read_bytes(path: Path, *, mend: str = RESTORE_HINT, limit: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file that is not larger than `limit`."""
    with open_file(path, mend=mend) as file, translate_os_errors("read", path, mend):
        if os.fstat(file.fileno()).st_size > limit:
            raise InputError(f"Cannot read {path}: it has more than the {limit:,} bytes such a file can have. {mend}")
        return file.read()


def read_text(path: Path, *, mend: str = RESTORE_HINT, limit: int = MAX_FILE_BYTES) -> str:
    try:
        return read_bytes(path, mend=mend, limit=limit).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"Cannot read {path}: it is not UTF-8 text (byte {error.start:,}). {mend}") from None


def read_json(path: Path, *, mend: str = RESTORE_HINT) -> Any:
    return parse_json(read_text(path, mend=mend), str(path), mend=mend)


def read_json_object(path: Path, *, mend: str = RESTORE_HINT) -> dict[str, Any]:
    """What a JSON file holds that must hold an object."""
    values = read_json(path, mend=mend)
    if not isinstance(values, dict):
        kind = _JSON.get(type(values), "number")
        raise InputError(f"Cannot read {path}: it holds a JSON {kind}, and an object was expected. {mend}")
    return values


def parse_json(text: str | bytes, name: str, *, mend: str = RESTORE_HINT) -> Any:
    """The values of JSON text; `name` says where it comes from ("runs/x/metrics.jsonl, line 3")."""
    try:
        values = json.loads(text)
        if "\\u" in (text if isinstance(text, str) else text.decode()):
            json.dumps(values, ensure_ascii=False).encode()  # half of a character, as \ud800, cannot be written again
    except RecursionError:
        raise InputError(f"Cannot read {name}: its JSON is nested too deeply. {mend}") from None
    except ValueError as error:  # of the JSON, of a number, of UTF-8
        raise InputError(f"Cannot read {name}: it is not readable JSON ({error}). {mend}") from None
    return values


def sha256(path: Path, *, mend: str = RESTORE_HINT) -> str:
    with open_file(path, mend=mend) as file, translate_os_errors("read", path, mend):
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- writing


@contextmanager
def atomic_replace(path: Path, *, mend: str = CHOOSE_PATH_HINT) -> Iterator[Path]:
    """Where to write what will replace `path`: on leaving it is brought to the disk, then takes the name.

    A reader, or a power cut, finds the old content or the new, never a part; what fails leaves the old.
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
            _raise_file_error("write", path, error, mend)
        raise


def write_atomic(path: Path, content: str | bytes, *, mend: str = CHOOSE_PATH_HINT) -> None:
    with atomic_replace(path, mend=mend) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def fsync(path: Path) -> None:
    """Ask the kernel to bring a file's content, or a folder's entries, to the disk; only then is a rename durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path, *, mend: str = OTHER_PATH_HINT) -> Path:
    """A folder that can be written to, made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise OSError(errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES, "")
    except FileExistsError as error:
        what = "a link that leads nowhere" if path.is_symlink() and not path.exists() else "a file"
        where = path if error.filename in (None, str(path)) else error.filename
        raise InputError(f"{where} is {what}, and a folder was expected there. {mend}") from None
    except (OSError, ValueError) as error:
        raise _raise_not_writable(path, error, mend) from None
    return path


@contextmanager
def remove_empty_folders(path: Path) -> Iterator[None]:
    """Folders that were made for `path` inside, and hold nothing at the end, go again."""
    missing = [one for one in (path, *path.parents) if not os.path.lexists(one)]
    try:
        yield
    finally:
        for one in missing:
            with suppress(OSError, ValueError):
                one.rmdir()


def check_folder_writable(path: Path, *, mend: str = OTHER_PATH_HINT) -> None:
    """Stop if no folder can be made there, before any work is done for it; nothing is left behind."""
    with remove_empty_folders(path):
        make_folder(path, mend=mend)


def check_file_writable(path: Path, *, mend: str = OTHER_PATH_HINT) -> None:
    """Stop if no file can be written there; nothing is left behind."""
    if not os.path.exists(path.parent):
        return check_folder_writable(path.parent, mend=mend)
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.write_bytes(b"")
        partial.unlink()
    except (OSError, ValueError) as error:
        _raise_file_error("write", path, error, mend)


def _raise_not_writable(path: Path, error: OSError | ValueError, mend: str) -> InputError:
    can = "written to" if os.path.isdir(path) else "made"
    return InputError(f"The folder {path} cannot be {can}: {describe_os_error(error)}. {mend}")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Where to write a folder that appears under its name when it is whole; what fails leaves nothing of it.

    A place that is taken is refused, an empty folder is not.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        what = "link" if path.is_symlink() else "file"
        raise InputError(f"{path} is a {what}, and a new folder was expected there. {OTHER_PATH_HINT}")
    if path.exists() and any(path.iterdir()):
        raise InputError(f"{path} already exists and is not empty. {OTHER_PATH_HINT}")
    partial = path.with_name(f".{path.name}{PARTIAL}")
    make_folder(path.parent)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
    except OSError as error:
        raise _raise_not_writable(path, error, OTHER_PATH_HINT) from None
    try:
        yield partial
        for inside in (partial, *partial.rglob("*")):
            fsync(inside)
        partial.rename(path)
        fsync(path.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            _raise_file_error("write", path, error, CHOOSE_PATH_HINT)
        raise


@contextmanager
def file_lock(path: Path, busy: str | None = None) -> Iterator[None]:
    """Hold `path` (a folder, or a file that is made) against other processes; the kernel lets go when this one ends.

    With `busy`, a place that another process holds is refused in these words; without, it is waited for.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:
        _raise_file_error("lock", path, error, CHOOSE_PATH_HINT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise InputError(busy or f"{path} is in use.") from None
        yield
    finally:
        os.close(descriptor)


# ---- results that carry their own checksum


def _checksum(values: dict[str, Any]) -> str:  # in the one form in which JSON gives them back
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_with_checksum(path: Path, values: dict[str, Any], *, mend: str = CHOOSE_PATH_HINT) -> None:
    """Store a result: whole, and with its checksum."""
    kept = {name: value for name, value in values.items() if name != CHECKSUM}
    write_atomic(path, json.dumps(kept | {CHECKSUM: _checksum(kept)}, indent=1) + "\n", mend=mend)


def read_with_checksum(path: Path, *, mend: str = RESTORE_HINT) -> dict[str, Any]:
    """Read a JSON file that was written by `write_sealed`, and verify its checksum.

    Args:
        path: The file.
        mend: A sentence for error messages that says what the user can do.

    Returns:
        The content of the file without the checksum.

    Raises:
        InputError: If the file is missing, is not a JSON object, or its checksum is missing or wrong.
    """
    values = read_json_object(path, mend=mend)
    found = values.pop(CHECKSUM, None)
    if found != _checksum(values):
        raise InputError(f"{path} was changed after it was written: its checksum is another, or gone. {mend}")
    return values
