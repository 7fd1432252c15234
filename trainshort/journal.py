"""Records that are added line by line (metrics.jsonl, sessions.jsonl), each with a checksum over itself and the line
before it. No torch.

    {"step": 10, "loss": 5.1, "sealed": true, "checksum": "9f2c..."}    sha256 of "" and this record
    {"step": 20, "loss": 4.7, "sealed": true, "checksum": "03ab..."}    sha256 of the line above and this record

So a changed number, a line taken out and a line put in are noticed wherever they are; lines missing at the end are
noticed by whoever noted the last checksum (a checkpoint's state.json). A last line without its newline was torn by a
kill, and its writer never finished it. Lines of 0.1.0 have no checksum; the first line that has one covers the last
that has none.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trainshort.errors import InputError
from trainshort.files import (
    CHECKSUM,
    SEALED,
    MissingFileError,
    open_file,
    parse_json,
    read_bytes,
    reason,
    sync,
    write_whole,
)

DIGITS = 16
"""Hexadecimal digits of a line's checksum: enough against chance."""
TAIL = 2**16
"""Bytes in which the last line is looked for."""
MEND = "Make room there, then go on by --resume."
RESTORE = "Restore the file from a copy."


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records, verified, without their checksums; none when there is no file."""
    return [record for record, _ in read_checked(path)]


def read_checked(path: Path) -> list[tuple[dict[str, Any], str | None]]:
    """The records with their checksums; None for a line of 0.1.0, about whose numbers nothing can be said."""
    records: list[tuple[dict[str, Any], str | None]] = []
    before = b""
    for number, line in enumerate(_whole_lines(path), start=1):
        name = f"{path}, line {number}"
        record = parse_json(line, name, mend=RESTORE)
        if not isinstance(record, dict):
            raise InputError(f"{name}, holds no JSON object. {RESTORE}")
        found = record.pop(CHECKSUM, None)
        if found is None and (SEALED in record or (records and records[-1][1])):
            raise InputError(f"{name}, has no checksum, though it or the line before it had one. {RESTORE}")
        if found is not None and found != _checksum(before, record):
            raise InputError(f"{name}, or the line before it was changed after it was written. {RESTORE}")
        record.pop(SEALED, None)
        records.append((record, found))
        before = line
    return records


def _whole_lines(path: Path) -> list[bytes]:
    try:
        return read_bytes(path, mend=RESTORE).split(b"\n")[:-1]  # what follows the last newline is empty, or torn
    except MissingFileError:
        return []


def _checksum(before: bytes, record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True).encode()
    return hashlib.sha256(before + b"\n" + text).hexdigest()[:DIGITS]


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line; the file ends with a whole one (`keep_lines`)."""
    # Through JSON, so that what is written and what is read back have the same checksum.
    record = json.loads(json.dumps({**record, SEALED: True}, allow_nan=False))
    try:
        line = json.dumps({**record, CHECKSUM: _checksum(_last_line(path), record)})
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise InputError(f"Cannot write {path}: {reason(error)}. {MEND}") from None


def _last_line(path: Path) -> bytes:
    try:
        with open_file(path, mend=RESTORE) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read().removesuffix(b"\n").rpartition(b"\n")[2]
    except MissingFileError:
        return b""


def last_checksum(path: Path) -> str | None:
    """The checksum of the last line, by which lines that go missing at the end are noticed."""
    line = _last_line(path)
    return parse_json(line, str(path), mend=RESTORE).get(CHECKSUM) if line else None


def keep_lines(path: Path, count: int) -> None:
    """Cut the file after its first `count` lines, and with them a torn last one."""
    content = b"".join(line + b"\n" for line in _whole_lines(path)[:count])
    try:
        if content == read_bytes(path, mend=RESTORE):
            return
    except MissingFileError:
        return
    write_whole(path, content, mend=MEND)


def sync_lines(path: Path) -> None:
    """Bring the lines appended so far to the disk."""
    try:
        if path.exists():
            sync(path)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {reason(error)}. {MEND}") from None
