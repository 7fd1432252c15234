"""Checksums of content, computed once and remembered as long as nobody touches the file.

`checked.json` in a data folder says which files had the expected sha256, and in which state of the file system (size,
times, inode). A file in that state is not read again; any other is. The memory is a convenience: where it is missing,
damaged or cannot be written, everything is read.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainshort import files
from trainshort.errors import InputError

FILE = "checked.json"
SETTLED = 0.02
"""Seconds after which a file system gives a further change another time."""


class Checked:
    """What is known of the files that belong to a data folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.known: dict[str, list[str]] = {}
        """Name to the state and the checksum that were found together."""
        with suppress(InputError):
            self.known = files.read_object(self._path)
        self._read = dict(self.known)

    def same(self, name: str, paths: Sequence[Path], expected: str) -> bool:
        """Whether these files' content has the expected checksum, read only where that is not known yet."""
        state = _state(paths)
        if self.known.get(name) == [state, expected]:
            return True
        _settle(paths)
        state, found = _state(paths), content_sha256(paths)
        if found == expected and state == _state(paths):
            self.known[name] = [state, expected]
        return found == expected

    def save(self) -> None:
        """Remember for the next time, where the folder can be written."""
        if self.known != self._read:
            with suppress(InputError):
                files.write_whole(self._path, json.dumps(self.known, indent=1) + "\n")


def content_sha256(paths: Sequence[Path]) -> str:
    """Of a file's content; of several, of their checksums in order."""
    digests = [files.sha256(path) for path in paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def file_size(path: Path) -> int:
    """Of a regular file."""
    return _stat(path).st_size


def _state(paths: Sequence[Path]) -> str:
    """Changes whenever a file is written to, replaced, or given other times."""
    lines = [f"{at.st_size} {at.st_mtime_ns} {at.st_ctime_ns} {at.st_ino}" for at in map(_stat, paths)]
    return lines[0] if len(lines) == 1 else hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _settle(paths: Sequence[Path]) -> None:
    """Wait until a change after this moment cannot have the time of one before it."""
    newest = max((_stat(path).st_ctime_ns for path in paths), default=0) / 1e9
    if 0 <= time.time() - newest < SETTLED:
        time.sleep(SETTLED)


def _stat(path: Path) -> os.stat_result:
    with files.open_file(path) as file:
        return os.fstat(file.fileno())
