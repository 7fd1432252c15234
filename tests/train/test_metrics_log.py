"""Lines that are added one by one: whatever was changed, taken out or put in is noticed."""

import json
import os
import resource
from contextlib import suppress

import pytest

from trainshort.errors import InputError
from trainshort.train import run_folder

RECORDS = [{"step": step, "loss": step / 7} for step in (1, 2, 3, 4)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for record in RECORDS:
        run_folder.append_line(path, record)
    return path


def test_records_come_back_as_they_were_and_none_from_a_file_that_is_not_there(path):
    assert run_folder.read_lines(path) == RECORDS
    assert run_folder.last_checksum(path) == run_folder.read_verified_lines(path)[-1][1]
    assert run_folder.read_lines(path.with_name("none.jsonl")) == []
    assert run_folder.last_checksum(path.with_name("none.jsonl")) is None


def test_every_changed_digit_is_noticed(path):
    text = path.read_text()
    digits = [at for at, character in enumerate(text) if character.isdigit()]
    assert len(digits) > 50
    for at in digits:
        changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        if [json.loads(line) for line in changed.splitlines()] == [json.loads(line) for line in text.splitlines()]:
            continue  # a last digit that float64 does not hold
        path.write_text(changed)
        with pytest.raises(InputError, match="changed after it was written"):
            run_folder.read_lines(path)


@pytest.mark.parametrize("lines", [[0, 2, 3], [1, 2, 3], [0, 2, 1, 3], [0, 0, 1, 2, 3]])
def test_lines_taken_out_swapped_or_doubled_are_noticed(path, lines):
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[number] for number in lines))
    with pytest.raises(InputError, match="changed after it was written"):
        run_folder.read_lines(path)


def test_a_line_without_its_checksum_is_refused(path):
    with path.open("a") as file:
        file.write('{"step": 5}\n')
    with pytest.raises(InputError, match="line 5, has no checksum"):
        run_folder.read_lines(path)


@pytest.mark.parametrize("lines", [1, 4])
def test_every_changed_byte_is_noticed_also_in_the_names_of_the_fields(path, lines):
    """Also in a file with one line, which no later line covers."""
    run_folder.truncate_lines(path, lines)
    content, whole = path.read_bytes(), run_folder.read_lines(path)
    for at in range(len(content) - 1):  # without the last newline, the last line counts as torn by a kill
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with suppress(InputError):
            assert run_folder.read_lines(path) == whole, content[at - 5 : at + 5]  # a digit that float64 does not hold


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"st', "line 2: it is not readable JSON"),
        ("null", "line 2, holds no JSON object"),
        ("[]", "line 2, holds no JSON object"),
        ("[" * 100_000, "line 2: its JSON is nested too deeply"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, told):
    path = tmp_path / "metrics.jsonl"
    run_folder.append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write(line + '\n{"step": 3}\n')
    with pytest.raises(InputError, match=told):
        run_folder.read_lines(path)


def test_a_torn_last_line_goes_and_the_chain_goes_on(path):
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert run_folder.read_lines(path) == RECORDS
    run_folder.truncate_lines(path, 3)
    run_folder.append_line(path, {"step": 9})
    assert run_folder.read_lines(path) == [*RECORDS[:3], {"step": 9}]


def test_a_pipe_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    for call in (run_folder.read_lines, lambda path: run_folder.append_line(path, {"step": 1})):
        with pytest.raises(InputError, match="it is not a regular file"):
            call(tmp_path / "metrics.jsonl")


def test_a_full_disk_is_named(path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        with pytest.raises(InputError, match=r"Cannot write .*metrics\.jsonl: file too large\. Make room there"):
            run_folder.append_line(path, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
