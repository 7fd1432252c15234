"""Building the C kernels: one build per source and compiler, verified files, and a fallback without a compiler."""

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

CACHED_FUNCTIONS = (
    ctypes_call.kernel_unavailable_reason,
    ctypes_call.has_kernel,
    ctypes_call.load_library,
    ring_buffer.kernel_unavailable_reason,
    ring_buffer.load_library,
    build._private_folder,
    build._warn_once,
)

# Functions that load a library, by the name of the library.
LOADERS = {"attention": lambda: ctypes_call.load_library(False), "decode": ring_buffer.load_library}


@pytest.fixture
def library_folder(monkeypatch, tmp_path):
    """The folder of the libraries. It does not exist yet, and no library is loaded yet."""
    monkeypatch.setenv("TRAINSHORT_CACHE", str(tmp_path))
    clear_caches()
    yield tmp_path / "kernels"
    clear_caches()


@pytest.fixture
def fast_build(monkeypatch):
    """Build without optimization, because the build is then faster."""
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))


def clear_caches():
    """Let the next call look for the libraries again."""
    for function in CACHED_FUNCTIONS:
        function.cache_clear()
    functional._logged_messages.clear()


def check_attention():
    """Check that attention works, with or without a kernel."""
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    bias = LinearBias(alibi.slopes(2))
    out = attend(q, k, v, bias=bias, backend="windowed")
    expected = attend(q, k, v, bias=bias, backend="reference")
    torch.testing.assert_close(out, expected)


@needs_kernel
def test_library_is_built_once_and_then_loaded(library_folder, monkeypatch, caplog):
    check_attention()
    library_names = [path.name for path in library_folder.iterdir()]
    assert len(library_names) == 1  # There are no temporary files.
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"building the kernel 'attention' in {library_folder}")

    compiler_arguments = []

    def record_command(command):
        compiler_arguments.append(command[1:])
        return subprocess.run(command, capture_output=True, check=True).stdout

    monkeypatch.setattr(build, "_run", record_command)
    ctypes_call.load_library.cache_clear()
    check_attention()
    assert compiler_arguments == [["--version"]]
    assert [path.name for path in library_folder.iterdir()] == library_names


@needs_kernel
def test_other_flags_build_another_library(library_folder, fast_build, monkeypatch):
    ring_buffer.load_library()
    monkeypatch.setenv("TRAINSHORT_CFLAGS", "-g -DNAME='a b'")
    clear_caches()
    ring_buffer.load_library()
    assert len(list(library_folder.iterdir())) == 2


def test_invalid_user_flags_are_reported(library_folder, monkeypatch):
    monkeypatch.setenv("TRAINSHORT_CFLAGS", "'-g")
    reason = ctypes_call.kernel_unavailable_reason() or ""
    assert "TRAINSHORT_CFLAGS" in reason
    assert "No closing quotation" in reason
    check_attention()


def flip_one_bit(content):
    return content[:5000] + bytes([content[5000] ^ 4]) + content[5001:]


# Functions that damage the content of a library.
DAMAGES = {
    "empty": lambda content: b"",
    "garbage": lambda content: b"not a library",
    "truncated": lambda content: content[: len(content) // 2],
    "one bit flipped": flip_one_bit,
    "wrong hash": lambda content: content[:-32] + bytes(32),
}


@needs_kernel
@pytest.mark.parametrize("name", LOADERS)
def test_corrupted_library_is_built_again(library_folder, fast_build, caplog, name):
    """Loading a corrupted library would end the process."""
    load = LOADERS[name]
    load()
    (library,) = library_folder.iterdir()
    content = library.read_bytes()
    for damage in DAMAGES.values():
        library.unlink()  # The file is mapped into this process and must not be changed in place.
        library.write_bytes(damage(content))
        library.chmod(0o700)
        caplog.clear()
        clear_caches()
        load()
        assert library.read_bytes() == content
        messages = [record.getMessage() for record in caplog.records]
        assert messages[0] == f"{library} is corrupted"
        assert messages[1].startswith(f"building the kernel '{name}'")


@needs_kernel
def test_library_that_others_can_write_to_is_not_loaded(library_folder, fast_build, caplog):
    ring_buffer.load_library()
    (library,) = library_folder.iterdir()
    library.chmod(0o722)
    caplog.clear()
    clear_caches()
    ring_buffer.load_library()
    assert caplog.records[0].getMessage() == f"{library} is not a file that only you can write to"
    assert library.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """The folder in which temporary folders are created during the test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


# Functions that make a folder insecure. They return the expected reason in the warning.


def make_writable_for_others(folder, monkeypatch):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return "other users can write to it"


def give_to_another_user(folder, monkeypatch):
    folder.mkdir(parents=True)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    return "it belongs to another user"


def replace_by_link(folder, monkeypatch):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(folder.parent)
    return "it is not a folder"


def replace_by_file(folder, monkeypatch):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("a file instead of the folder")
    return "File exists"


def remove_home(folder, monkeypatch):
    def find_no_user(user_id):
        raise KeyError(user_id)

    monkeypatch.delenv("TRAINSHORT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", find_no_user)
    return "it does not exist"


def choose_read_only_folder(folder, monkeypatch):
    monkeypatch.setenv("TRAINSHORT_CACHE", "/proc/1")
    return "No such file or directory"


@pytest.mark.parametrize(
    "make_insecure",
    [
        make_writable_for_others,
        give_to_another_user,
        replace_by_link,
        replace_by_file,
        remove_home,
        choose_read_only_folder,
    ],
)
def test_temporary_folder_replaces_an_insecure_folder(
    library_folder, temporary_folder, monkeypatch, caplog, make_insecure
):
    reason = make_insecure(library_folder, monkeypatch)
    folder = build.cache_folder()
    assert folder.parent == temporary_folder
    assert build.cache_folder() == folder
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"({reason})" in message
    assert str(folder) in message
    assert "TRAINSHORT_CACHE" in message
    # With a wrong user id, no existing folder belongs to the user, so a new folder is created each time.
    if make_insecure is not give_to_another_user:
        assert folder == temporary_folder / f"trainshort-{os.getuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700


@needs_kernel
def test_process_without_a_home_folder_builds_the_kernel(tmp_path):
    code = """
import os, pwd, torch
pwd.getpwuid = lambda uid: {}[uid]
from trainshort import alibi_attention
from trainshort.attention.kernels import build
build.FLAGS = ("-O0", *build.FLAGS[1:])
q = torch.ones(1, 2, 40, 8)
assert torch.equal(alibi_attention(q, q, q), q)
"""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "CC") if name in os.environ}
    environment["TMPDIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    folder_message, build_message = result.stderr.splitlines()
    assert "a home folder" in folder_message
    assert build_message.startswith("building the kernel 'attention' in ")


def test_missing_compiler_is_reported_once(library_folder, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="trainshort.attention"):
        check_attention()
        check_attention()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "PyTorch" in message
    assert "the C compiler 'no-such-compiler' was not found" in message
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    with pytest.raises(InputError, match="'compiled' does not support this call"):
        attend(q, k, v, backend="compiled")


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("'x", "the variable CC is not a valid command"),
        (" ", "the variable CC is blank"),
        ("/", "the C compiler '/' cannot be run"),
        ("false", "'false' failed"),
        ("/dev/null/cc", "the C compiler '/dev/null/cc' was not found"),
    ],
)
def test_invalid_compiler_is_reported(library_folder, monkeypatch, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    assert (ctypes_call.kernel_unavailable_reason() or "").startswith(reason)
    assert (ring_buffer.kernel_unavailable_reason() or "").startswith(reason)
    check_attention()


@needs_kernel
def test_output_of_a_failed_compiler_is_reported(library_folder, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fno-such-flag"))
    assert "no-such-flag" in (ctypes_call.kernel_unavailable_reason() or "")
    assert list(library_folder.iterdir()) == []


def test_processor_without_avx2_uses_pytorch(library_folder, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "AVX2" in (ctypes_call.kernel_unavailable_reason() or "")
    check_attention()


FORK_TEST = r"""
#include "thread_pool.c"
#include <stdio.h>
#include <sys/wait.h>

static int is_child;

static void fork_in_first_item(void *context, int64_t item, void *scratch) {
    (void)context, (void)scratch;
    if (item == 0 && fork() == 0) is_child = 1;
}

/* Returns 0 if the thread pool of the child process is closed and empty. */
int trainshort_fork_during_work(void) {
    Queue queue = {fork_in_first_item, NULL, 1000, 64, 0};
    start_helpers(1);
    pool.queue = &queue;
    atomic_store(&pool.is_open, 1);
    fork_in_first_item(NULL, 0, NULL);
    if (is_child) _exit(atomic_load(&pool.is_open) || pool.num_helpers || pool.queue);
    atomic_store(&pool.is_open, 0);
    int status = -1;
    wait(&status);
    return status;
}
"""


@needs_kernel
def test_forked_process_does_not_continue_the_work_of_its_parent(tmp_path):
    """The process forks while its thread pool works on a queue. The queue is closed in the child process."""
    source = tmp_path / "fork.c"
    library = tmp_path / "fork.so"
    source.write_text(FORK_TEST)
    include_folder = Path(build.__file__).parent / "common"
    command = ["cc", "-shared", "-fPIC", "-mavx2", "-pthread", f"-I{include_folder}", source, "-o", library]
    subprocess.run(command, check=True, timeout=60)
    assert ctypes.CDLL(str(library)).trainshort_fork_during_work() == 0
