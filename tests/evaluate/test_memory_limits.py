"""How much memory there is: the machine's, or what a container or a batch system allows."""

import os
from pathlib import Path

import pytest

from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.train.setup import check_model_fits_memory
from trainshort.utils import machine

MIB = 2**20
SMALL = ModelConfig(layers=2, width=512, heads=4, feedforward_width=2048, vocab_size=256)


def group(place: Path, limit: str, used: int, names: tuple[str, str], old_files: int = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / names[0]).write_text(f"{limit}\n")
    (place / names[1]).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"cache 5\ninactive_file {old_files}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path / "sys")
    monkeypatch.setattr(machine, "_CGROUPS_OF_PROCESS", tmp_path / "cgroup")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "names", "under"),
    [("0::/job/step", V2, ""), ("7:memory,hugetlb:/job/step", V1, "memory")],
    ids=["version 2", "version 1"],
)
@pytest.mark.parametrize("place", ["job/step", "job", ""], ids=["own group", "group above", "root of a container"])
def test_the_least_limit_around_a_process_counts(system, line, names, under, place):
    (system / "cgroup").write_text(f"3:cpu:/elsewhere\n{line}\n")
    unlimited = "max" if names is V2 else "9223372036854771712"
    group(system / "sys" / under / "job", unlimited, 5 * MIB, names)
    group(system / "sys" / under / place, str(40 * MIB), 30 * MIB, names, old_files=6 * MIB)
    assert machine.total_memory() == 40 * MIB
    assert machine.free_memory() == 16 * MIB  # files read long ago are given back
    with pytest.raises(
        InputError, match=r"has at least 13,[0-9,]+ weights and needs 0\.1 GB of memory, but only 0\.0 GB exist"
    ):
        check_model_fits_memory(SMALL.replace(vocab_size=16384))


def test_without_limits_the_machine_counts(system):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.total_memory() == whole  # no such files at all
    (system / "cgroup").write_text("0::/\n")
    group(system / "sys", "max", 5 * MIB, V2)
    assert machine.total_memory() == whole
    assert 0 < (machine.free_memory() or 0) < whole
    check_model_fits_memory(SMALL)
