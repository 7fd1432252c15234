"""Tests of the available memory: the memory of the machine, or the limit of a container (a cgroup)."""

import os
from pathlib import Path

import pytest

from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.train.setup import check_model_fits_memory
from trainshort.utils import machine

MIB = 2**20
SMALL = ModelConfig(layers=2, width=512, heads=4, feedforward_width=2048, vocab_size=256)

# The names of the files with the memory limit and the used memory, in both versions of cgroups.
FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
FILES_V2 = ("memory.max", "memory.current")


def write_cgroup(
    folder: Path, limit: str, used_bytes: int, file_names: tuple[str, str], inactive_bytes: int = 0
) -> None:
    """Write the files of a cgroup.

    Args:
        folder: The folder of the cgroup.
        limit: The memory limit, as the kernel writes it.
        used_bytes: The used memory.
        file_names: `FILES_V1` or `FILES_V2`.
        inactive_bytes: The part of the used memory that caches files, and that the kernel frees if necessary.
    """
    limit_name, usage_name = file_names
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(f"cache 5\ninactive_file {inactive_bytes}\n")


@pytest.fixture
def system(tmp_path, monkeypatch) -> Path:
    """A folder that contains the cgroup files in place of /sys and /proc."""
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path / "sys")
    monkeypatch.setattr(machine, "_CGROUPS_OF_PROCESS", tmp_path / "cgroup")
    return tmp_path


@pytest.mark.parametrize(
    ("cgroup_line", "file_names", "subfolder"),
    [("0::/job/step", FILES_V2, ""), ("7:memory,hugetlb:/job/step", FILES_V1, "memory")],
    ids=["version 2", "version 1"],
)
@pytest.mark.parametrize("place", ["job/step", "job", ""], ids=["own group", "parent group", "root of a container"])
def test_smallest_limit_of_all_parent_groups_counts(system: Path, cgroup_line, file_names, subfolder, place):
    (system / "cgroup").write_text(f"3:cpu:/elsewhere\n{cgroup_line}\n")
    unlimited = "max" if file_names is FILES_V2 else "9223372036854771712"
    write_cgroup(system / "sys" / subfolder / "job", unlimited, 5 * MIB, file_names)
    write_cgroup(system / "sys" / subfolder / place, str(40 * MIB), 30 * MIB, file_names, inactive_bytes=6 * MIB)
    assert machine.total_memory() == 40 * MIB
    assert machine.free_memory() == 16 * MIB, "cached files count as free memory"
    with pytest.raises(InputError, match=r"13,[0-9,]+ weights.*0\.1 GB.*0\.0 GB"):
        check_model_fits_memory(SMALL.replace(vocab_size=16384))


def test_memory_of_the_machine_counts_without_limits(system: Path):
    machine_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.total_memory() == machine_memory, "there are no cgroup files"
    (system / "cgroup").write_text("0::/\n")
    write_cgroup(system / "sys", "max", 5 * MIB, FILES_V2)
    assert machine.total_memory() == machine_memory
    assert 0 < (machine.free_memory() or 0) < machine_memory
    check_model_fits_memory(SMALL)
