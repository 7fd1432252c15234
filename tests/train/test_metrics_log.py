"""Tests of files with one record per line: changed, removed and inserted lines are detected."""

import json
import os
import resource
from contextlib import suppress

import pytest

from trainshort.errors import InputError
from trainshort.train import metrics_log

RECORDS = [{"step": step, "loss": step / 7} for step in (1, 2, 3, 4)]


@pytest.fixture
def path(tmp_path):
    """Return a file that contains `RECORDS`."""
    path = tmp_path / "metrics.jsonl"
    for record in RECORDS:
        metrics_log.append_line(path, record)
    return path


def test_records_are_read_as_they_were_written(path):
    assert metrics_log.read_lines(path) == RECORDS
    _, last_checksum = metrics_log.read_verified_lines(path)[-1]
    assert metrics_log.read_last_checksum(path) == last_checksum


def test_missing_file_has_no_records(tmp_path):
    assert metrics_log.read_lines(tmp_path / "none.jsonl") == []
    assert metrics_log.read_last_checksum(tmp_path / "none.jsonl") is None


def test_changed_digit_is_detected(path):
    text = path.read_text()
    original_records = [json.loads(line) for line in text.splitlines()]
    digit_positions = [position for position, character in enumerate(text) if character.isdigit()]
    assert len(digit_positions) > 50
    for position in digit_positions:
        changed_digit = str((int(text[position]) + 1) % 10)
        changed_text = text[:position] + changed_digit + text[position + 1 :]
        changed_records = [json.loads(line) for line in changed_text.splitlines()]
        if changed_records == original_records:
            continue  # The last digits of a number can exceed the precision of float64.
        path.write_text(changed_text)
        with pytest.raises(InputError, match="Checksum mismatch"):
            metrics_log.read_lines(path)


@pytest.mark.parametrize("line_order", [[0, 2, 3], [1, 2, 3], [0, 2, 1, 3], [0, 0, 1, 2, 3]])
def test_removed_swapped_and_repeated_lines_are_detected(path, line_order):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[index] for index in line_order))
    with pytest.raises(InputError, match="Checksum mismatch"):
        metrics_log.read_lines(path)


def test_line_without_checksum_is_rejected(path):
    with path.open("a") as file:
        file.write('{"step": 5}\n')
    with pytest.raises(InputError, match=r"Missing checksum in .*line 5"):
        metrics_log.read_lines(path)


# A file with one line has no later line whose checksum covers the line, too.
@pytest.mark.parametrize("line_count", [1, 4])
def test_changed_byte_is_detected(path, line_count):
    metrics_log.truncate_lines(path, line_count)
    content = path.read_bytes()
    records = metrics_log.read_lines(path)
    # Without the last newline, the last line counts as incomplete. Therefore the newline is not changed.
    for position in range(len(content) - 1):
        changed_byte = bytes([content[position] ^ 1])
        path.write_bytes(content[:position] + changed_byte + content[position + 1 :])
        with suppress(InputError):
            # No error is accepted only if the changed digit exceeds the precision of float64.
            assert metrics_log.read_lines(path) == records, content[position - 5 : position + 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"st', "line 2: invalid JSON"),
        ("null", "expected a JSON object in .*line 2"),
        ("[]", "expected a JSON object in .*line 2"),
        ("[" * 100_000, "line 2: the JSON is nested too deeply"),
    ],
    ids=["incomplete", "null", "list", "deeply nested"],
)
def test_line_that_is_not_an_object_is_rejected(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    metrics_log.append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write(line + '\n{"step": 3}\n')
    with pytest.raises(InputError, match=message):
        metrics_log.read_lines(path)


def test_incomplete_last_line_is_ignored_and_removed(path):
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert metrics_log.read_lines(path) == RECORDS
    metrics_log.truncate_lines(path, 3)
    metrics_log.append_line(path, {"step": 9})
    assert metrics_log.read_lines(path) == [*RECORDS[:3], {"step": 9}]


def test_named_pipe_is_rejected(tmp_path):
    """Opening a named pipe would wait forever."""
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        metrics_log.read_lines(path)
    with pytest.raises(InputError, match="not a regular file"):
        metrics_log.append_line(path, {"step": 1})


def test_full_disk_is_reported(path):
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard_limit))
    try:
        with pytest.raises(InputError, match=r"Cannot write .*metrics\.jsonl: file too large\. .*--resume"):
            metrics_log.append_line(path, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
