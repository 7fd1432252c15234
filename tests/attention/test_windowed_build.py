"""The kernel's build: once per source and compiler, whole or not at all, and a plain answer where it cannot be had."""

import logging
import subprocess

import pytest
import torch
from compiled_code import needs_kernel

from trainshort import alibi
from trainshort.attention import LinearBias, attend, kernel, registered, windowed
from trainshort.attention.kernel import build, library
from trainshort.attention.kernel.library import Problem
from trainshort.errors import InputError


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache of kernels, and a process that has not looked for one yet."""
    monkeypatch.setenv("TRAINSHORT_CACHE", str(tmp_path))
    caches = (library.unavailable, library._library, registered._announce)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path / "kernels"
    for cache in caches:
        cache.cache_clear()


def attention(implementation="auto"):
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    ours, _, _ = windowed.attend_windowed(Problem(q, k, v, alibi.slopes(2), None, None), 1e-6, implementation)
    exact = attend(q, k, v, bias=LinearBias(alibi.slopes(2)), backend="reference")
    torch.testing.assert_close(ours, exact)


@needs_kernel
def test_built_once_then_loaded(fresh, monkeypatch):
    attention("compiled")
    built = [path.name for path in fresh.iterdir()]
    assert len(built) == 1  # and nothing temporary beside it
    runs = []
    monkeypatch.setattr(build, "_run", lambda command: journal.append(command) or real(command))
    library._library.cache_clear()
    attention("compiled")
    assert [command[1] for command in runs] == ["--version"]
    assert [path.name for path in fresh.iterdir()] == built


def real(command):
    return subprocess.run(command, capture_output=True, check=True).stdout


def test_no_compiler_falls_back_with_one_message(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger="trainshort.attention"):
        attention()
        attention()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "plain PyTorch" in said[0]
    assert "there is no C compiler called 'no-such-compiler'; install one, or name it in the variable CC" in said[0]
    with pytest.raises(InputError, match="The compiled kernel was asked for, but there is no C compiler"):
        attention("compiled")


@needs_kernel
def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fno-such-flag"))
    assert "no-such-flag" in (kernel.unavailable() or "")
    assert list(fresh.iterdir()) == []


@needs_kernel
def test_a_damaged_library_says_so(fresh):
    path = build.build(double=False)
    path.write_bytes(b"not a library")
    assert "does not load" in (kernel.unavailable() or "")
    assert "delete it to build it anew" in (kernel.unavailable() or "")


def test_a_processor_without_avx2_gets_plain_pytorch(fresh, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert kernel.unavailable() == "the kernel needs a processor with AVX2"
    attention()


@needs_kernel
def test_an_unwritable_cache_says_what_to_do(fresh, monkeypatch):
    fresh.parent.joinpath("kernels").write_text("a file where the folder should be")
    assert "set TRAINSHORT_CACHE to a writable folder" in (kernel.unavailable() or "")
