"""Tests of utils.io: reading any kind of path either works or raises one clear error, and writing is atomic."""

import json
import os
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from trainshort.errors import InputError
from trainshort.utils import io

HINT = "Do this."


def bind_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


# Functions that create something at a path that is not a readable JSON object, and a part of the error message.
INVALID_FILES = {
    "fifo": (os.mkfifo, "regular file"),
    "socket": (bind_socket, "regular file"),
    "folder": (Path.mkdir, "regular file"),
    "broken link": (lambda path: path.symlink_to("nowhere"), "regular file"),
    "link to itself": (lambda path: path.symlink_to(path.name), "regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "regular file"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff\xfe{}"), "UTF-8"),
    "empty": (Path.touch, "JSON"),
    "incomplete": (lambda path: path.write_text('{"a": [1, 2'), "JSON"),
    "nested too deeply": (lambda path: path.write_text("[" * 100_000 + "]" * 100_000), "nested"),
    "long number": (lambda path: path.write_text("1" * 1_000_000), "JSON"),
    "half of a surrogate pair": (lambda path: path.write_text('{"a": "\\ud800"}'), "JSON"),
    "null": (lambda path: path.write_text("null"), "null"),
    "list": (lambda path: path.write_text("[]"), "list"),
}


# Reading


@pytest.mark.parametrize("case", INVALID_FILES)
def test_reading_an_invalid_file_raises_error(tmp_path, case):
    create, reason = INVALID_FILES[case]
    path = tmp_path / "x.json"
    create(path)
    with pytest.raises(InputError) as raised:
        io.read_json_object(path, hint=HINT)
    message = str(raised.value)
    assert str(path) in message
    assert reason in message
    assert message.endswith(f". {HINT}")
    assert not isinstance(raised.value, io.MissingFileError)


@pytest.mark.parametrize("name", ["x.json", "file/x.json", "x\0.json"])
def test_missing_file_raises_missing_file_error(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(io.MissingFileError) as raised:
        io.read_json(tmp_path / name, hint=HINT)
    assert str(tmp_path / name) in str(raised.value)
    assert str(raised.value).endswith(f". {HINT}")


def test_too_large_file_is_not_read(tmp_path):
    (tmp_path / "x.json").write_bytes(b" " * 101)
    with pytest.raises(InputError, match=r"x\.json.* 100 bytes.* 101"):
        io.read_text(tmp_path / "x.json", limit=100)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_read_permission_raises_error(tmp_path):
    (tmp_path / "x.json").touch(mode=0)
    with pytest.raises(InputError, match=r"x\.json: permission denied\."):
        io.read_json(tmp_path / "x.json")


def test_too_many_open_files_raise_error(tmp_path):
    # The limit is lowered in a new process.
    code = """
import os, resource
from pathlib import Path
from trainshort.utils import io
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
open_files = [os.dup(0) for _ in range(5)]
io.read_bytes(Path("/etc/hostname"))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=True)
    last_line = process.stderr.splitlines()[-1]
    assert "InputError" in last_line
    assert "/etc/hostname: too many files are open" in last_line


@pytest.mark.parametrize(
    "message", ['I/O error: No space left on device (os error 28) at path "/x/.tmp"', "No space left on device (28)"]
)
def test_os_error_of_safetensors_is_recognized(message):
    assert io.describe_os_error(io.unwrap_os_error(Exception(message))) == "the disk is full"


# Writing


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_writing_replaces_a_file(tmp_path):
    path = tmp_path / "x.txt"
    io.write_atomic(path, "old")
    io.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()
    assert os.listdir(tmp_path) == ["x.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_failed_writing_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "x.txt"
    io.write_atomic(path, "old")

    def write_and_fail() -> None:
        with io.atomic_replace(path, hint=HINT) as partial:
            partial.write_text("ne")
            raise error

    with pytest.raises((InputError, KeyboardInterrupt)) as raised:
        write_and_fail()
    if isinstance(error, OSError):
        assert f"{path}: the disk is full" in str(raised.value)
        assert str(raised.value).endswith(HINT)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_writing_to_an_impossible_path_raises_error(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "missing" / "x", Path("/proc/x")):
        with pytest.raises(InputError) as raised:
            io.write_atomic(path, "text")
        assert str(path) in str(raised.value)


def test_links_and_pipes_at_the_temporary_path_are_replaced(tmp_path):
    """The content is not written through the link or the pipe."""
    linked_file = tmp_path / "linked_file"
    linked_file.write_text("mine")
    (tmp_path / "x.partial").symlink_to(linked_file)
    io.write_atomic(tmp_path / "x", "text")
    os.mkfifo(tmp_path / "y.partial")
    io.write_atomic(tmp_path / "y", "text")
    assert linked_file.read_text() == "mine"
    assert (tmp_path / "y").read_text() == "text"


@pytest.mark.parametrize("path", ["/proc/foo", "file", "file/inside", "link"])
def test_impossible_folder_raises_error(tmp_path, path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError) as raised:
        io.make_folder(tmp_path / path, hint=HINT)
    message = str(raised.value)
    assert "folder" in message
    assert str(tmp_path / Path(path).parts[0]) in message or path in message
    assert message.endswith(f". {HINT}")


def test_writable_checks_leave_nothing_behind(tmp_path):
    io.check_folder_writable(tmp_path / "a" / "b")
    io.check_file_writable(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "existing").mkdir()
    io.check_folder_writable(tmp_path / "existing")
    assert (tmp_path / "existing").is_dir()


def test_writable_checks_raise_errors(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/inside.* is a file"):
        io.check_folder_writable(tmp_path / "file" / "inside")
    with pytest.raises(InputError, match=r"file/inside.* is a file.* Choose another --out\.$"):
        io.check_file_writable(tmp_path / "file" / "inside")
    with pytest.raises(InputError, match=r"file/folder.* is a file.*\. Do this\.$"):
        io.check_file_writable(tmp_path / "file" / "folder" / "inside", hint=HINT)


def record_fsync(monkeypatch: pytest.MonkeyPatch, target: Path) -> list[tuple[str, bool]]:
    """Record the calls of `os.fsync`: the name of the file or folder, and whether `target` existed at that time."""
    calls = []
    original_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append((path.name, target.exists()))
        original_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


# The content must be on the disk before the name, and the name must be flushed too. Otherwise a power failure could
# leave an incomplete file.


def test_content_of_a_file_is_flushed_before_its_name(tmp_path, monkeypatch):
    path = tmp_path / "target"
    calls = record_fsync(monkeypatch, path)
    io.write_atomic(path, "content")
    assert calls == [("target.partial", False), (tmp_path.name, True)]


def test_content_of_a_folder_is_flushed_before_its_name(tmp_path, monkeypatch):
    path = tmp_path / "target"
    calls = record_fsync(monkeypatch, path)
    with io.atomic_folder(path) as partial:
        (partial / "inside").write_text("content")
    assert calls == [(".target.partial", False), ("inside", False), (tmp_path.name, True)]


def test_lock_of_a_busy_path_raises_error(tmp_path):
    with io.file_lock(tmp_path / "lock", "Busy."):
        with pytest.raises(InputError, match=r"^Busy\.$"), io.file_lock(tmp_path / "lock", "Busy."):
            pass
        with io.file_lock(tmp_path / "another_lock"), io.file_lock(tmp_path):
            pass
    with io.file_lock(tmp_path / "lock", "Busy."):
        pass


# JSON files with a checksum

VALUES = {"loss": 1.25, "n": 3, "name": "é\u2028", "none": None, "deep": {"b": [1e-320, 0.1 + 0.2, -0.0], "a": True}}


def test_values_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "x.json"
    io.write_with_checksum(path, VALUES)
    assert io.read_with_checksum(path) == VALUES


def test_every_changed_digit_is_noticed(tmp_path):
    path = tmp_path / "x.json"
    io.write_with_checksum(path, VALUES)
    text = path.read_text()
    digit_positions = [position for position, character in enumerate(text) if character.isdigit()]
    assert len(digit_positions) > 40
    for position in digit_positions:
        changed_digit = str((int(text[position]) + 1) % 10)
        path.write_text(text[:position] + changed_digit + text[position + 1 :])
        if json.loads(path.read_text()) == json.loads(text):
            continue  # The digit does not change the number, because a float has no such precision.
        with pytest.raises(InputError):
            io.read_with_checksum(path)


def test_changed_byte_never_changes_the_values(tmp_path):
    path = tmp_path / "x.json"
    io.write_with_checksum(path, VALUES)
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        # Changed white space and changed digits beyond the precision of a float are not errors.
        with suppress(InputError):
            assert io.read_with_checksum(path) == VALUES, content[position - 5 : position + 5]


def test_missing_checksum_raises_error(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(VALUES))
    with pytest.raises(InputError, match=r"(?i)checksum .*x\.json"):
        io.read_with_checksum(path)
