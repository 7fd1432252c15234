"""Whatever lies where a file of ours should be, reading it says so in one sentence, and never waits."""

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

MEND = "Do this."


def damaged(kind, path):
    """Put something in place of a JSON file."""
    made = {
        "fifo": lambda: os.mkfifo(path),
        "socket": lambda: socket.socket(socket.AF_UNIX).bind(str(path)),
        "folder": path.mkdir,
        "dangling link": lambda: path.symlink_to("nowhere"),
        "looping link": lambda: path.symlink_to(path.name),
        "device": lambda: path.symlink_to("/dev/zero"),
        "not text": lambda: path.write_bytes(b"\xff\xfe{}"),
        "empty": path.touch,
        "cut": lambda: path.write_text('{"a": [1, 2'),
        "deep": lambda: path.write_text("[" * 100_000 + "]" * 100_000),
        "long number": lambda: path.write_text("1" * 1_000_000),
        "half a character": lambda: path.write_text('{"a": "\\ud800"}'),
        "null": lambda: path.write_text("null"),
        "list": lambda: path.write_text("[]"),
    }
    made[kind]()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("fifo", "it is not a regular file"),
        ("socket", "it is not a regular file"),
        ("folder", "it is not a regular file"),
        ("dangling link", "it is not a regular file"),
        ("looping link", "it is not a regular file"),
        ("device", "it is not a regular file"),
        ("not text", "it is not UTF-8 text (byte 0)"),
        ("empty", "it is not readable JSON"),
        ("cut", "it is not readable JSON"),
        ("deep", "its JSON is nested too deeply"),
        ("long number", "it is not readable JSON"),
        ("half a character", "it is not readable JSON"),
        ("null", "it holds a JSON null, and an object was expected"),
        ("list", "it holds a JSON list, and an object was expected"),
    ],
)
def test_what_is_not_a_file_of_ours_is_named(tmp_path, kind, told):
    path = tmp_path / "x.json"
    damaged(kind, path)
    with pytest.raises(InputError) as caught:
        io.read_json_object(path, hint=MEND)
    assert str(caught.value).startswith(f"Cannot read {path}: {told}")
    assert str(caught.value).endswith(". " + MEND)
    assert not isinstance(caught.value, io.MissingFileError)


def test_a_missing_file_is_told_apart(tmp_path):
    with pytest.raises(io.MissingFileError, match=r"There is no file .*x\.json\. Do this\."):
        io.read_json(tmp_path / "x.json", hint=MEND)


def test_a_file_in_place_of_a_folder_and_a_zero_byte_are_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="There is no file"):
        io.read_json(tmp_path / "file" / "x.json")
    with pytest.raises(InputError, match="There is no file"):
        io.read_json(tmp_path / "x\0.json")


def test_a_file_larger_than_it_can_be_is_not_read(tmp_path):
    (tmp_path / "x.json").write_bytes(b" " * 101)
    with pytest.raises(InputError, match="more than the 100 bytes"):
        io.read_text(tmp_path / "x.json", limit=100)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_told(tmp_path):
    (tmp_path / "x.json").touch(mode=0)
    with pytest.raises(InputError, match=r"Cannot read .*: permission denied\."):
        io.read_json(tmp_path / "x.json")


def test_too_many_open_files_are_told(tmp_path):
    """In a process of its own, whose limit is lowered."""
    code = (
        "import resource, os; from pathlib import Path; from trainshort import files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)); held = []\n"
        "while len(held) < 5: held.append(os.dup(0))\n"
        "files.read_bytes(Path('/etc/hostname'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=True)
    assert "InputError: Cannot read /etc/hostname: too many files are open (raise the limit: ulimit -n)" in done.stderr


def test_writing_replaces_the_whole_file(tmp_path):
    path = tmp_path / "x.txt"
    io.write_atomic(path, "old")
    io.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    assert os.listdir(tmp_path) == ["x.txt"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    path = tmp_path / "x.txt"
    io.write_atomic(path, "old")

    def fail():
        with io.atomic_replace(path, hint=MEND) as partial:
            partial.write_text("ne")
            raise error

    with pytest.raises((InputError, KeyboardInterrupt)) as caught:
        fail()
    if isinstance(error, OSError):
        assert str(caught.value) == f"Cannot write {path}: the disk is full. Do this."
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_writing_where_nothing_can_be_written_is_told(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "missing" / "x", "/proc/x"):
        with pytest.raises(InputError, match="Cannot write"):
            io.write_atomic(tmp_path / path, "text")


def test_the_name_of_a_partial_file_may_be_taken_by_a_link_or_a_pipe(tmp_path):
    """Neither is written through."""
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "x.partial").symlink_to(other)
    io.write_atomic(tmp_path / "x", "text")
    os.mkfifo(tmp_path / "y.partial")
    io.write_atomic(tmp_path / "y", "text")
    assert other.read_text() == "mine"
    assert (tmp_path / "y").read_text() == "text"


@pytest.mark.parametrize("place", ["/proc/foo", "file", "file/inside", "link"])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"(cannot be (made|written to)|a folder was expected there).*\. Do this\.$"):
        io.make_folder(tmp_path / place, hint=MEND)


def test_a_locked_place_is_refused_or_waited_for(tmp_path):
    with io.file_lock(tmp_path / "lock", "Busy."):
        with pytest.raises(InputError, match=r"^Busy\.$"), io.file_lock(tmp_path / "lock", "Busy."):
            pass
        with io.file_lock(tmp_path / "other"), io.file_lock(tmp_path):
            pass
    with io.file_lock(tmp_path / "lock", "Busy."):
        pass


RESULT = {"loss": 1.25, "n": 3, "name": "é\u2028", "none": None, "deep": {"b": [1e-320, 0.1 + 0.2, -0.0], "a": True}}


def test_a_sealed_result_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "x.json"
    io.write_with_checksum(path, RESULT)
    assert io.read_with_checksum(path) == RESULT


def test_every_changed_digit_of_a_sealed_result_is_noticed(tmp_path):
    path = tmp_path / "x.json"
    io.write_with_checksum(path, RESULT)
    text = path.read_text()
    digits = [at for at, character in enumerate(text) if character.isdigit()]
    assert len(digits) > 40
    for at in digits:
        path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
        if json.loads(path.read_text()) == json.loads(text):  # a last digit that float64 does not hold
            continue
        with pytest.raises(InputError):
            io.read_with_checksum(path)


def test_every_changed_byte_of_a_sealed_result_is_noticed_also_in_the_names_of_its_fields(tmp_path):
    path = tmp_path / "x.json"
    io.write_with_checksum(path, RESULT)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with suppress(InputError):
            assert io.read_with_checksum(path) == RESULT, content[at - 5 : at + 5]  # space, or rounding


def test_a_result_without_its_checksum_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(RESULT))
    with pytest.raises(
        InputError, match=r"x\.json was changed after it was written: its checksum is another, or gone\."
    ):
        io.read_with_checksum(path)


def test_a_place_for_a_folder_or_file_is_tried_and_nothing_is_left(tmp_path):
    io.check_folder_writable(tmp_path / "a" / "b")
    io.check_file_writable(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "kept").mkdir()
    io.check_folder_writable(tmp_path / "kept")
    assert (tmp_path / "kept").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="a file is in the way"):
        io.check_folder_writable(tmp_path / "file" / "inside")
    with pytest.raises(InputError, match=r"Cannot write .*inside: a file is in the way .* Choose another --out.$"):
        io.check_file_writable(tmp_path / "file" / "inside")
    with pytest.raises(
        InputError, match=r"^The folder \S*folder cannot be made: a file is in the way .*\. Elsewhere\.$"
    ):
        io.check_file_writable(tmp_path / "file" / "folder" / "inside", hint="Elsewhere.")


@pytest.mark.parametrize(
    "words", ['I/O error: No space left on device (os error 28) at path "/x/.tmp"', "No space left on device (28)"]
)
def test_what_the_system_told_safetensors_is_told_in_our_words(words):
    assert io.describe_os_error(io.unwrap_os_error(Exception(words))) == "the disk is full"


@pytest.mark.parametrize("what", ["a file", "a folder"])
def test_content_then_name_then_folder_are_brought_to_the_disk(tmp_path, monkeypatch, what):
    """In that order: a name before its content, or one that only memory has, does not outlive a power cut."""
    place, done, fsync = tmp_path / "place", [], os.fsync

    def noted(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append((synced.name, place.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    if what == "a file":
        io.write_atomic(place, "content")
        assert done == [("place.partial", False), (tmp_path.name, True)]
        return
    with io.atomic_folder(place) as partial:
        (partial / "inside").write_text("content")
    assert done == [(".place.partial", False), ("inside", False), (tmp_path.name, True)]
