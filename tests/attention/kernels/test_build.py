"""Compiled code: built once per source and compiler, whole or not at all, trusted only when it is the user's own, and a
plain answer where it cannot be had."""

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_helpers import needs_kernel

from trainshort import alibi
from trainshort.attention import LinearBias, attend, functional
from trainshort.attention.backends import ctypes_call
from trainshort.attention.kernels import build
from trainshort.errors import InputError
from trainshort.model.cache import ring_buffer

CACHES = (
    *(ctypes_call.kernel_unavailable_reason, ctypes_call.has_kernel, ctypes_call.load_library),
    *(ring_buffer.kernel_unavailable_reason, ring_buffer.library, build._private_folder, build._say_once),
)
LOADERS = {"attention": lambda: ctypes_call.load_library(False), "decode": ring_buffer.library}


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache of libraries, and a process that has not looked for one yet."""
    monkeypatch.setenv("TRAINSHORT_CACHE", str(tmp_path))
    forget()
    yield tmp_path / "kernels"
    forget()


def forget():
    for cache in CACHES:
        cache.cache_clear()
    functional._logged_messages.clear()


def attention():
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    ours = attend(q, k, v, bias=LinearBias(alibi.slopes(2)), backend="windowed")
    exact = attend(q, k, v, bias=LinearBias(alibi.slopes(2)), backend="reference")
    torch.testing.assert_close(ours, exact)


@needs_kernel
def test_built_once_then_loaded(fresh, monkeypatch, caplog):
    attention()
    built = [path.name for path in fresh.iterdir()]
    assert len(built) == 1  # and nothing temporary beside it
    assert [record.getMessage() for record in caplog.records] == [
        f"building the kernel 'attention' in {fresh}, about 10 s"
    ]
    runs = []
    monkeypatch.setattr(build, "_run", lambda command: runs.append(command) or real(command))
    ctypes_call.load_library.cache_clear()
    attention()
    assert [command[1] for command in runs] == ["--version"]
    assert [path.name for path in fresh.iterdir()] == built


def real(command):
    return subprocess.run(command, capture_output=True, check=True).stdout


@needs_kernel
def test_other_flags_make_another_library(fresh, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))
    ring_buffer.library()
    monkeypatch.setenv("TRAINSHORT_CFLAGS", "-g -DNAME='a b'")
    forget()
    ring_buffer.library()
    assert len(list(fresh.iterdir())) == 2


def test_flags_that_cannot_be_split_are_one_sentence(fresh, monkeypatch):
    monkeypatch.setenv("TRAINSHORT_CFLAGS", "'-g")
    reason = "the variable TRAINSHORT_CFLAGS cannot be split into flags (No closing quotation)"
    assert ctypes_call.kernel_unavailable_reason() == reason
    attention()


DAMAGE = {
    "empty": lambda whole: b"",
    "garbage": lambda whole: b"not a library",
    "cut short": lambda whole: whole[: len(whole) // 2],
    "one bit": lambda whole: whole[:5000] + bytes([whole[5000] ^ 4]) + whole[5001:],
    "another library's end": lambda whole: whole[:-32] + bytes(32),
}


@needs_kernel
@pytest.mark.parametrize("name", LOADERS)
def test_a_damaged_library_is_built_anew(fresh, monkeypatch, caplog, name):
    """Loading such a library would end the process."""
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))
    LOADERS[name]()
    (library,) = fresh.iterdir()
    whole = library.read_bytes()
    for damage in DAMAGE.values():
        library.unlink()  # this process has it mapped
        library.write_bytes(damage(whole))
        library.chmod(0o700)
        caplog.clear()
        forget()
        LOADERS[name]()
        assert library.read_bytes() == whole
        said = [record.getMessage() for record in caplog.records]
        assert said[0] == f"{library} is damaged"
        assert said[1].startswith(f"building the kernel '{name}'")


@needs_kernel
def test_a_library_that_others_can_write_is_not_loaded(fresh, monkeypatch, caplog):
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))
    ring_buffer.library()
    (library,) = fresh.iterdir()
    library.chmod(0o722)
    caplog.clear()
    forget()
    ring_buffer.library()
    assert caplog.records[0].getMessage() == f"{library} is not a file that only you can write to"
    assert library.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made, for this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def others_can_write(folder, monkeypatch):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return "others can write to it"


def another_users(folder, monkeypatch):
    folder.mkdir(parents=True)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    return "it belongs to another user"


def a_link(folder, monkeypatch):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(folder.parent)
    return "it is not a folder"


def a_file(folder, monkeypatch):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("a file where the folder should be")
    return "File exists"


def no_home(folder, monkeypatch):
    monkeypatch.delenv("TRAINSHORT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    return "there is none"


def read_only(folder, monkeypatch):
    monkeypatch.setenv("TRAINSHORT_CACHE", "/proc/1")  # nobody can make a folder there
    return "No such file or directory"


@pytest.mark.parametrize("unfit", [others_can_write, another_users, a_link, a_file, no_home, read_only])
def test_a_folder_that_cannot_be_trusted_or_written_is_left_alone(fresh, temporary, monkeypatch, caplog, unfit):
    reason = unfit(fresh, monkeypatch)
    folder = build.cache_folder()
    assert folder.parent == temporary
    assert build.cache_folder() == folder
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"({reason}); {folder} is used. Set TRAINSHORT_CACHE to a folder that only you can write to." in said
    if unfit is not another_users:  # there nothing belongs to the one we pretend to be
        assert folder == temporary / f"trainshort-{os.getuid()}"  # which later processes find again
        assert folder.stat().st_mode & 0o777 == 0o700


@needs_kernel
def test_a_process_without_a_home_builds_and_works(tmp_path):
    """As its own process: no variable, no folder, one message, the right numbers."""
    code = """
import os, pwd, torch
pwd.getpwuid = lambda uid: {}[uid]
from trainshort import alibi_attention
from trainshort.kernels import build
build.FLAGS = ("-O0", *build.FLAGS[1:])
q = torch.ones(1, 2, 40, 8)
assert torch.equal(alibi_attention(q, q, q), q)
"""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "CC") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("compiled kernels cannot be kept in a home folder (there is none);")
    assert second.startswith("building the kernel 'attention' in ")


def test_no_compiler_falls_back_with_one_message(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="trainshort.attention"):
        attention()
        attention()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "plain PyTorch" in said[0]
    assert "there is no C compiler called 'no-such-compiler'; install one, or name it in the variable CC" in said[0]
    with pytest.raises(InputError, match="'compiled' does not support this call: it needs the compiled kernel"):
        attend(*(torch.randn(1, 2, 30, 8) for _ in range(3)), backend="compiled")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("'x", 'the variable CC names no compiler: "\'x" (No closing quotation)'),
        (" ", "the variable CC is blank; name a C compiler, or unset it"),
        ("/", "the C compiler '/' cannot be run ([Errno 13] Permission denied: '/')"),
        ("false", "'false' failed: "),
        ("/dev/null/cc", "there is no C compiler called '/dev/null/cc'; install one, or name it in the variable CC"),
    ],
)
def test_a_strange_compiler_is_one_sentence(fresh, monkeypatch, value, reason):
    monkeypatch.setenv("CC", value)
    assert ctypes_call.kernel_unavailable_reason() == reason
    assert ring_buffer.kernel_unavailable_reason() == reason
    attention()


@needs_kernel
def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fno-such-flag"))
    assert "no-such-flag" in (ctypes_call.kernel_unavailable_reason() or "")
    assert list(fresh.iterdir()) == []


def test_a_processor_without_avx2_gets_plain_pytorch(fresh, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert ctypes_call.kernel_unavailable_reason() == "the kernel needs a processor with AVX2"
    attention()


FORK = r"""
#include "pool.c"
#include <stdio.h>
#include <sys/wait.h>

static int in_child;

static void fork_once(void *context, int64_t item, void *scratch) {
    (void)context, (void)scratch;
    if (item == 0 && fork() == 0) in_child = 1;
}

int trainshort_fork_during_work(void) {
    Queue queue = {fork_once, NULL, 1000, 64, 0};
    start_helpers(1);
    pool.queue = &queue, atomic_store(&pool.open, 1);
    fork_once(NULL, 0, NULL);
    if (in_child) _exit(atomic_load(&pool.open) || pool.started || pool.queue);
    atomic_store(&pool.open, 0);
    int status = -1;
    wait(&status);
    return status;
}
"""


@needs_kernel
def test_a_child_does_not_reach_for_its_parents_work(tmp_path):
    """A process that forks while a queue is open: in the child the door is closed."""
    source, library = tmp_path / "fork.c", tmp_path / "fork.so"
    source.write_text(FORK)
    shared = Path(build.__file__).parent / "common"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-mavx2", "-pthread", f"-I{shared}", source, "-o", library], check=True, timeout=60
    )
    assert ctypes.CDLL(str(library)).trainshort_fork_during_work() == 0
