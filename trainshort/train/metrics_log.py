"""Read and write metrics.jsonl and sessions.jsonl: files with one JSON record per line.

Each line holds a checksum of its own record and of the line before:

    {"step": 10, "loss": 5.1, "checksum": "9f2c..."}    hash of the first record
    {"step": 20, "loss": 4.7, "checksum": "03ab..."}    hash of the line above and of this record

The checksums reveal changed, inserted and removed lines. Removed lines at the end are found because every checkpoint
stores the checksum of the last line. This module does not import torch.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trainshort.errors import InputError
from trainshort.train.run_folder import RunFolder, read_checkpoint_states
from trainshort.utils import io

# The numbers that every record of metrics.jsonl must have.
METRIC_FIELDS = ("step", "tokens", "seconds")

# A record and its checksum.
VerifiedLine = tuple[dict[str, Any], str]

# Number of hexadecimal digits of a checksum. 64 bits are enough to detect accidental changes.
CHECKSUM_DIGITS = 16

# The last line of a file is searched in this many bytes at the end of the file.
TAIL_BYTES = 2**16

DISK_FULL_HINT = "Free some disk space, then continue with --resume."
RESTORE_HINT = "Restore the file from a copy."


# ---- the metrics of a run


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """Return all records of metrics.jsonl.

    Args:
        folder: The run folder.

    Returns:
        The records in the order of the file, without their checksums.

    Raises:
        InputError: If a line was changed, a number is missing in a record, or lines that were logged before the last
            checkpoint are missing.
    """
    # Read the checkpoints first. Another process may log more lines and save a checkpoint in the meantime.
    checkpoint_states = read_checkpoint_states(folder.path)
    lines = read_verified_lines(folder.metrics)
    for record, _ in lines:
        for name in METRIC_FIELDS:
            _require_number(folder, record, name)
    # A checkpoint stores the checksum of the last line that was logged before it. So missing lines can be detected.
    if checkpoint_states:
        last_state = checkpoint_states[-1]
        step = last_state.get("step")
        last_checksum = last_state.get("metrics")
        if isinstance(step, int):
            # Only the check is needed here. The function raises InputError if lines are missing.
            _lines_up_to_step(folder, lines, step, last_checksum)
    return [record for record, _ in lines]


def truncate_metrics(folder: RunFolder, step: int, last_checksum: str | None = None) -> None:
    """Remove the records that were logged after a step. An incomplete last line is removed, too.

    Args:
        folder: The run folder.
        step: The step of the checkpoint from which training continues.
        last_checksum: The checksum of the last line that was logged before the checkpoint.

    Raises:
        InputError: If lines that were logged up to `step` are missing. A metrics.jsonl that was deleted, or that
            contains only later steps, is accepted.
    """
    lines = read_verified_lines(folder.metrics)
    lines_to_keep = _lines_up_to_step(folder, lines, step, last_checksum)
    truncate_lines(folder.metrics, len(lines_to_keep))


def _lines_up_to_step(
    folder: RunFolder, lines: list[VerifiedLine], step: int, last_checksum: str | None
) -> list[VerifiedLine]:
    """Return the lines up to a step, and check that no line is missing at their end.

    Args:
        folder: The run folder, for error messages.
        lines: All lines of metrics.jsonl.
        step: The last step to include. A checkpoint was saved at this step.
        last_checksum: The checksum of the last line when the checkpoint was saved. None if nothing was logged.

    Raises:
        InputError: If the last of the returned lines does not have the checksum `last_checksum`. A file that was
            deleted, or that was started again after `step`, is accepted.
    """
    lines_up_to_step = []
    for record, checksum in lines:
        if _require_number(folder, record, "step") <= step:
            lines_up_to_step.append((record, checksum))

    if lines_up_to_step:
        _, checksum_of_last_line = lines_up_to_step[-1]
        is_complete = checksum_of_last_line == last_checksum
    else:
        was_started_again = bool(lines)
        was_deleted = not folder.metrics.exists()
        is_complete = was_started_again or was_deleted
    if last_checksum and not is_complete:
        raise InputError(
            f"Lines are missing in {folder.metrics}: a checkpoint was saved at step {step}, but the file ends before "
            "that step. Restore the file from a copy, or delete the file to continue without the earlier metrics."
        )
    return lines_up_to_step


def _require_number(folder: RunFolder, record: dict[str, Any], name: str) -> float:
    """Return a number of a record in metrics.jsonl. The number "step" must be an integer.

    Args:
        folder: The run folder, for the error message.
        record: The values of one line.
        name: The name of the number, such as "loss".

    Raises:
        InputError: If the record has no such number.
    """
    value = record.get(name)
    # `isinstance(True, int)` is true, so the exact type is compared.
    if type(value) is int or (type(value) is float and name != "step"):
        return value
    raise InputError(f"A line in {folder.metrics} has no valid number '{name}'. {RESTORE_HINT}")


# ---- files with one record per line


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all records of a file without their checksums, or an empty list if the file does not exist.

    Raises:
        InputError: If a line was changed, inserted or removed.
    """
    return [record for record, _ in read_verified_lines(path)]


def read_verified_lines(path: Path) -> list[VerifiedLine]:
    """Return all records of a file with their checksums, or an empty list if the file does not exist.

    Raises:
        InputError: If a line was changed, inserted or removed.
    """
    lines: list[VerifiedLine] = []
    previous_line = b""
    for line_number, line in enumerate(_read_complete_lines(path), start=1):
        line_name = f"{path}, line {line_number}"
        record = io.parse_json(line, line_name, hint=RESTORE_HINT)
        if not isinstance(record, dict):
            raise InputError(f"Invalid line: expected a JSON object in {line_name}. {RESTORE_HINT}")
        stored_checksum = record.pop(io.CHECKSUM, None)
        if stored_checksum is None:
            raise InputError(f"Missing checksum in {line_name}. {RESTORE_HINT}")
        if stored_checksum != _compute_checksum(previous_line, record):
            raise InputError(
                f"Checksum mismatch in {line_name}: this line or the line before was modified after it was written. "
                f"{RESTORE_HINT}"
            )
        lines.append((record, stored_checksum))
        previous_line = line
    return lines


def _read_complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that end with a newline, without the newlines.

    A last line without a newline is left out, because the process was killed while it wrote that line. The list is
    empty if the file does not exist.
    """
    try:
        content = io.read_bytes(path, hint=RESTORE_HINT)
    except io.MissingFileError:
        return []
    parts = content.split(b"\n")
    return parts[:-1]  # The last part is what follows the last newline: nothing, or an incomplete line.


def _compute_checksum(previous_line: bytes, record: dict[str, Any]) -> str:
    """Return the checksum of a record. It includes the previous line, so removed or inserted lines are detected.

    Args:
        previous_line: The line before the record, without its newline. Empty for the first record.
        record: The record without a checksum.
    """
    record_json = json.dumps(record, sort_keys=True).encode()
    return hashlib.sha256(previous_line + b"\n" + record_json).hexdigest()[:CHECKSUM_DIGITS]


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file. The file is created if it does not exist.

    Args:
        path: The file. Its last line must be complete, see `truncate_lines`.
        record: The values to store. They must not be NaN or infinite.

    Raises:
        InputError: If the file cannot be written.
    """
    # Convert the record to JSON and back. Then the checksum is computed from the values that will be read.
    record = json.loads(json.dumps(record, allow_nan=False))
    with io.translate_os_errors("write", path, DISK_FULL_HINT):
        checksum = _compute_checksum(_read_last_line(path), record)
        line = json.dumps({**record, io.CHECKSUM: checksum})
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _read_last_line(path: Path) -> bytes:
    """Return the last line of a file without its newline, or an empty value if there is no line or no file."""
    try:
        with io.open_file(path, hint=RESTORE_HINT) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()  # The end of the file, which contains the complete last line.
    except io.MissingFileError:
        return b""
    return tail.removesuffix(b"\n").rpartition(b"\n")[2]


def read_last_checksum(path: Path) -> str | None:
    """Return the checksum of the last line of a file, or None if there is no line or no file.

    A checkpoint stores this checksum, so that lines that are removed from the end of the file can be detected.
    """
    line = _read_last_line(path)
    if not line:
        return None
    record = io.parse_json(line, str(path), hint=RESTORE_HINT)
    return record.get(io.CHECKSUM)


def truncate_lines(path: Path, count: int) -> None:
    """Keep only the first lines of a file. An incomplete last line is removed, too.

    Args:
        path: The file, which may be missing.
        count: The number of lines to keep.
    """
    if not path.exists():
        return
    lines_to_keep = _read_complete_lines(path)[:count]
    new_content = b"".join(line + b"\n" for line in lines_to_keep)
    if new_content != io.read_bytes(path, hint=RESTORE_HINT):
        io.write_atomic(path, new_content, hint=DISK_FULL_HINT)


def sync_lines(path: Path) -> None:
    """Flush the lines that were appended to a file to the disk."""
    with io.translate_os_errors("write", path, DISK_FULL_HINT):
        if path.exists():
            io.fsync(path)
