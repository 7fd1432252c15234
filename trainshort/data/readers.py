"""Read text files, JSON Lines files and Parquet files as records, without loading a complete file into memory.

Each function takes a cursor, the position after the last record that was read before, and yields the records after it.
The cursor is a byte offset for text files and JSON Lines, and a row number for Parquet files.
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

# A line of a text file that is longer than this number of bytes is cut.
MAX_LINE_BYTES = 1 << 20

# The largest size of a JSON Lines record, because a record is held in memory.
MAX_RECORD_BYTES = 1 << 28

# How many bytes are read from a file at once.
READ_BYTES = 1 << 20

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


def file_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """Yield a complete text file as one record.

    Args:
        path: The text file.
        cursor: None, or the position where reading continues. It is only given if the file was read completely before,
            so nothing is yielded.
        errors: What happens to bytes that are not valid UTF-8.
    """
    if cursor is not None:
        return
    with _open_at(path) as file:
        content = file.read()
    text = _decode_utf8(content, errors, path, offset=0)
    yield Record(text, cursor=len(content), bytes_read=len(content))


def text_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """Yield the lines of a text file. Lines that are longer than `MAX_LINE_BYTES` are cut into several records.

    A record is a text, the byte offset after the text (the cursor), and the number of bytes that were read.

    Args:
        path: The text file.
        cursor: The byte offset of the first line, or None for the start of the file.
        errors: What happens to bytes that are not valid UTF-8.
    """
    offset = cursor or 0
    with _open_at(path, offset) as file:
        while True:
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            is_too_long = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
            if is_too_long:
                # The bytes after the cut are read again as the next line.
                line = line[: _find_cut(line)]
                file.seek(offset + len(line))
            text = _decode_utf8(line, errors, path, offset)
            offset += len(line)
            yield Record(text, cursor=offset, bytes_read=offset)


def paragraph_rows(path: Path, cursor: int | None, errors: Errors, min_bytes: int) -> Iterator[Record]:
    """Yield a text file in pieces of one to two times `min_bytes` bytes. A piece ends after a blank line if possible.

    Args:
        path: The text file.
        cursor: The byte offset of the first piece, or None for the start of the file.
        errors: What happens to bytes that are not valid UTF-8.
        min_bytes: The smallest size of a piece. The last piece can be smaller.

    Example:
        For `min_bytes=4`, the text "a\\nb\\n\\nc d e f" is yielded as "a\\nb\\n\\n" and "c d e f".
    """
    offset = cursor or 0
    with _open_at(path, offset) as file:
        buffer = b""
        start = 0  # the position in the buffer where the next piece starts
        while True:
            if len(buffer) - start <= 2 * min_bytes:
                buffer = buffer[start:] + file.read(READ_BYTES)
                start = 0
            if not buffer:
                return
            end = _find_paragraph_end(buffer, start, min_bytes)
            text = _decode_utf8(buffer[start:end], errors, path, offset)
            if offset == 0:
                text = text.removeprefix("\ufeff")  # the byte order mark, which some editors write
            offset += end - start
            start = end
            yield Record(text, cursor=offset, bytes_read=offset)


def _find_paragraph_end(buffer: bytes, start: int, min_bytes: int) -> int:
    """Return the position in the buffer where the piece that begins at `start` ends.

    The piece has between `min_bytes` and twice as many bytes. Within these limits, the piece ends at the first of these
    positions that exists:

    1. after the first blank line
    2. at the end of the buffer
    3. after the last line end
    4. at the position that `_find_cut` chooses, for example after a space
    """
    earliest = start + min_bytes
    latest = start + 2 * min_bytes
    blank_line = _BLANK_LINE.search(buffer, earliest, latest)
    if blank_line is not None:
        return blank_line.end()
    if len(buffer) <= latest:
        return len(buffer)
    # The buffer contains more than the longest possible piece, so the piece must end before the end of the buffer.
    last_newline = buffer.rfind(b"\n", earliest, latest)
    if last_newline >= 0:
        return last_newline + 1
    return start + _find_cut(buffer[start:latest])


def _find_cut(line: bytes) -> int:
    """Return the position where a line that is too long can be cut.

    Args:
        line: The first bytes of the line. The last UTF-8 character can be incomplete.

    Returns:
        The position after the last space in the second half of `line`. Without such a space, the start of the last
        UTF-8 character with several bytes if it starts in the last three bytes, and otherwise the end of `line`.
    """
    last_space = line.rfind(b" ", len(line) // 2)
    if last_space >= 0:
        return last_space + 1
    for distance in range(1, 4):
        # Only the first byte of a UTF-8 character with two to four bytes starts with the bits 11.
        is_first_byte = line[-distance] & 0xC0 == 0xC0
        if is_first_byte:
            return len(line) - distance
    return len(line)


def jsonl_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """Yield the field "text" of each object of a JSON Lines file. Blank lines are skipped.

    Args:
        path: The file. Each line holds a JSON object.
        cursor: The byte offset of the first line, or None for the start of the file.
        errors: What happens to bytes that are not valid UTF-8.

    Raises:
        InputError: If a line is too long, is not a JSON object or has no string in its field "text".
    """
    offset = cursor or 0
    with _open_at(path, offset) as file:
        while True:
            line = file.readline(MAX_RECORD_BYTES + 1)  # One more byte shows that a line is too long.
            if not line:
                return
            if len(line) > MAX_RECORD_BYTES:
                raise InputError(
                    f"{_describe_line(path, offset)}: the record has more than {MAX_RECORD_BYTES >> 20} MiB. "
                    "Write one object per line, and split longer records."
                )
            if line.strip():
                text = _parse_record_text(line, errors, path, offset)
                end = offset + len(line)
                yield Record(text, cursor=end, bytes_read=end)
            offset += len(line)


def _parse_record_text(line: bytes, errors: Errors, path: Path, offset: int) -> str:
    """Return the field "text" of one line of a JSON Lines file.

    Args:
        line: The line.
        errors: What happens to bytes that are not valid UTF-8.
        path: The file, for error messages.
        offset: The byte offset of the line, for error messages.
    """
    decoded_line = _decode_utf8(line, errors, path, offset)
    try:
        record = json.loads(decoded_line)
    except (ValueError, RecursionError) as error:
        reason = _describe_json_error(error)
        raise InputError(
            f"{_describe_line(path, offset)}: invalid JSON ({reason}). Write one object per line."
        ) from None

    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(
            f"{_describe_line(path, offset)}: expected an object with a string in its field 'text', "
            f"got {_describe_record(record)}."
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # The text contains half of a surrogate pair, which JSON writes as an escape sequence such as \ud800.
        if errors == "strict":
            raise InputError(
                f"{_describe_line(path, offset)}: half of a surrogate pair is not valid Unicode. "
                "Correct the line, or use --errors replace."
            ) from None
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _describe_json_error(error: ValueError | RecursionError) -> str:
    """Return why a line cannot be parsed as JSON, for an error message."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    # Python refuses to convert numbers with more than 4,300 digits, and explains at length how to raise the limit.
    return str(error).partition(";")[0]


def _describe_record(record: Any) -> str:
    """Describe a record without a text, for an error message: "text = 5" or "the fields id, title"."""
    if not isinstance(record, dict):
        return json.dumps(record)[:40]
    if not record:
        return "an empty object"
    if "text" in record:
        return f"text = {json.dumps(record['text'])[:40]}"
    return f"the fields {', '.join(record)[:80]}"


def _describe_line(path: Path, offset: int) -> str:
    """Return the name of a file and the number of the line at a byte offset, such as "a.jsonl, line 3".

    Args:
        path: The file.
        offset: The byte offset where the line begins.
    """
    line_number = 1
    remaining = offset
    with _open_at(path) as file:
        while remaining > 0:
            block = file.read(min(remaining, READ_BYTES))
            if not block:
                break  # The file was shortened by another process.
            line_number += block.count(b"\n")
            remaining -= len(block)
    return f"{path}, line {line_number}"


def parquet_rows(path: Path, cursor: int | None, errors: Errors) -> Iterator[Record]:
    """Yield the column "text" of a Parquet file, row by row.

    Args:
        path: The Parquet file.
        cursor: The number of rows that were read before, or None for the start of the file.
        errors: What happens to bytes that are not valid UTF-8.

    Raises:
        InputError: If the file cannot be read, or has no column "text" with strings.
    """
    require_package("pyarrow", f"Reading the Parquet file {path}", "trainshort[hf]")
    import pyarrow

    table = _open_parquet(path)
    file_size = path.stat().st_size
    num_rows = table.metadata.num_rows
    rows_done = cursor or 0

    rows_read = 0
    for group in range(table.num_row_groups):
        group_rows = table.metadata.row_group(group).num_rows
        if rows_read + group_rows <= rows_done:
            rows_read += group_rows  # All rows of this group were read before.
            continue
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=["text"]):
            # The bytes are decoded here, because pyarrow does not check that they are valid UTF-8.
            for value in batch.column(0).cast(pyarrow.binary()).to_pylist():
                rows_read += 1
                if rows_read <= rows_done:
                    continue
                text = _decode_utf8(value or b"", errors, path, offset=0, row=rows_read - 1)
                yield Record(text, cursor=rows_read, bytes_read=file_size * rows_read // num_rows)


def _open_parquet(path: Path) -> Any:
    """Open a Parquet file, and check that its column "text" holds strings."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path, memory_map=True, buffer_size=READ_BYTES)
    except FileNotFoundError:
        raise InputError(f"File not found: {path}.") from None
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"Cannot read {path} as a Parquet file ({error}).") from None

    column_names = table.schema_arrow.names
    if "text" not in column_names:
        raise InputError(f"{path}: expected a column 'text', got the columns {', '.join(column_names)}.")
    column_type = table.schema_arrow.field("text").type
    # There are several types of strings. The cast of an empty array fails if the values of the type are not strings.
    try:
        pyarrow.array([], column_type).cast(pyarrow.binary())
    except pyarrow.ArrowNotImplementedError:
        raise InputError(f"{path}: expected strings in the column 'text', got {column_type}.") from None
    return table


def _open_at(path: Path, offset: int = 0) -> BinaryIO:
    """Open a file for reading at a byte offset."""
    file = io.open_file(path, hint="Give a file with text in it.")
    file.seek(offset)
    return file


def _decode_utf8(content: bytes, errors: Errors, path: Path, offset: int, row: int | None = None) -> str:
    """Decode bytes of a file.

    Args:
        content: The bytes.
        errors: What happens to bytes that are not valid UTF-8.
        path: The file, for error messages.
        offset: The position of `content` in the file, or in its row of a table, for error messages.
        row: The number of the row in a table, for error messages. None for other files.
    """
    try:
        return content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        position = f"byte {offset + error.start}"
        if row is not None:
            position += f" of row {row}"
        raise InputError(
            f"{path} is not valid UTF-8 at {position} (0x{content[error.start]:02x}). "
            "Convert the file, or use --errors replace to replace invalid bytes by U+FFFD."
        ) from None
