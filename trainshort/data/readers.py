"""Reads files forward in small pieces, whatever their size; every row says where the next one begins.

Plain text gives lines or stretches, `.jsonl` and `.parquet` give the field or column "text" of each record. Bytes that
are not UTF-8 are told with their place, or become U+FFFD.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainshort.data.documents import Errors, Record
from trainshort.errors import InputError
from trainshort.utils import io
from trainshort.utils.optional import require_package

LONGEST_LINE = 1 << 20
"""Bytes after which a line without an end is cut."""
LONGEST_RECORD = 1 << 28
"""Bytes of the longest record, which is held in memory."""
READ_BYTES = 1 << 20
"""Bytes that are read at a time."""

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


def file_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """A file that is one document."""
    if cursor is None:
        with _open(path) as file:
            data = file.read()
        yield Record(_decode(data, errors, path, 0), len(data), len(data))


def text_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """Lines of a text file; a very long one is cut."""
    at = cursor or 0
    with _open(path, at) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = line[: _last_good_end(line)]
                file.seek(at + len(line))
            text = _decode(line, errors, path, at)
            at += len(line)
            yield Record(text, at, at)


def paragraph_rows(path: Path, cursor: int | None, errors: Errors, size: int) -> Iterator[Record]:
    """A plain text in documents of one to two times `size` bytes, cut after a blank line where there is one.

    size 4, "a\\nb\\n\\nc d e f":   "a\\nb\\n\\n", "c d e f"
    """
    at = cursor or 0
    with _open(path, at) as file:
        buffer, start = b"", 0
        while True:
            if len(buffer) - start <= 2 * size:
                buffer, start = buffer[start:] + file.read(READ_BYTES), 0
            if not buffer:
                return
            end = _stretch_end(buffer, start, size)
            text = _decode(buffer[start:end], errors, path, at)
            if at == 0:
                text = text.removeprefix("\ufeff")  # a byte order mark says nothing in UTF-8
            at, start = at + end - start, end
            yield Record(text, at, at)


def _stretch_end(buffer: bytes, start: int, size: int) -> int:
    """Where the document ends: after the first blank line, else the last line end, space or character within reach."""
    least, most = start + size, start + 2 * size
    if blank := _BLANK_LINE.search(buffer, least, most):
        return blank.end()
    if len(buffer) <= most:
        return len(buffer)
    line_end = buffer.rfind(b"\n", least, most)
    return line_end + 1 if line_end >= 0 else start + _last_good_end(buffer[start:most])


def _last_good_end(line: bytes) -> int:
    """Where to cut bytes without a line end: after the last space, else before a character they hold in part only."""
    space = line.rfind(b" ", len(line) // 2)
    if space >= 0:
        return space + 1
    for back in range(1, 4):
        if line[-back] & 0xC0 == 0xC0:  # the first byte of a character of two to four bytes
            return len(line) - back
    return len(line)


def jsonl_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """The "text" of every record; a cursor is a byte offset."""
    at = cursor or 0
    with _open(path, at) as file:
        while line := file.readline(LONGEST_RECORD + 1):
            if len(line) > LONGEST_RECORD:
                raise InputError(
                    f"{_line(path, at)}, has more than {LONGEST_RECORD >> 20} MiB. "
                    "Write one object per line, and cut what is longer."
                )
            if line.strip():
                yield Record(_record_text(line, errors, path, at), at + len(line), at + len(line))
            at += len(line)


def _record_text(line: bytes, errors: Errors, path: Path, at: int) -> str:
    decoded = _decode(line, errors, path, at)
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:  # of the syntax, of a number of 5,000 digits, of nesting
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        if isinstance(error, json.JSONDecodeError):  # which counts lines within the record
            why = f"{error.msg} at its character {error.pos + 1}"
        raise InputError(f"{_line(path, at)}, is not JSON ({why}). Write one object per line.") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        got = _describe_record(record)
        raise InputError(f"{_line(path, at)}: expected an object with a string in its field 'text', got {got}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
        if errors == "strict":
            raise InputError(
                f"{_line(path, at)}, holds half of a surrogate pair, which is not valid Unicode. "
                "Mend it, or use --errors replace."
            ) from None
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _describe_record(record: Any) -> str:
    """What came instead: {"text": 5} is shown as text = 5, other records by their fields."""
    if isinstance(record, dict):
        if "text" in record:
            return f"text = {json.dumps(record['text'])[:40]}"
        return f"the fields {', '.join(record)[:80]}" if record else "an empty object"
    return json.dumps(record)[:40]


def _line(path: Path, at: int) -> str:
    """The line of a file that begins at byte `at`, as messages name it; lines are counted from 1."""
    number = 1
    with _open(path) as file:
        while at > 0 and (block := file.read(min(at, READ_BYTES))):
            number += block.count(b"\n")
            at -= len(block)
    return f"{path}, line {number}"


def parquet_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """The "text" column, row by row; a cursor is a row number."""
    require_package("pyarrow", f"Reading the Parquet file {path}", "trainshort[hf]")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path, memory_map=True, buffer_size=1 << 20)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path} is not a readable parquet file ({error}).") from None
    columns = table.schema_arrow.names
    if "text" not in columns:
        raise InputError(f"{path} should have a column 'text'; its columns are {', '.join(columns)}.")
    kind = table.schema_arrow.field("text").type
    try:
        pyarrow.array([], kind).cast(pyarrow.binary())
    except pyarrow.ArrowNotImplementedError:
        raise InputError(f"{path} should hold text in its column 'text'; it holds {kind}.") from None
    size, rows, start, number = path.stat().st_size, table.metadata.num_rows, cursor or 0, 0
    for group in range(table.num_row_groups):
        length = table.metadata.row_group(group).num_rows
        if number + length <= start:
            number += length
            continue
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=["text"]):
            for value in batch.column(0).cast(pyarrow.binary()).to_pylist():
                number += 1
                if number > start:
                    text = _decode(value or b"", errors, path, 0, row=number - 1)
                    yield Record(text, number, size * number // rows)


def _open(path: Path, at: int = 0) -> BinaryIO:
    file = io.open_file(path, hint="Give a file with text in it.")
    file.seek(at)
    return file


def _decode(data: bytes, errors: Errors, path: Path, at: int, row: int | None = None) -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        where = f"byte {at + error.start}" + ("" if row is None else f" of row {row}")
        raise InputError(
            f"{path} is not valid UTF-8 at {where} (0x{data[error.start]:02x}). "
            "Convert the file, or use --errors replace to put U+FFFD in such places."
        ) from None
