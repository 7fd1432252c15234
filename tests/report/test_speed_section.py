"""The section "Speed" of the report shows the stored benchmark results, and is left out without results."""

import re

import pytest
from synthetic_results import make_demo

from trainshort.errors import InputError
from trainshort.experiments.claims.collection import collect
from trainshort.report.write import write_report
from trainshort.utils.bench_results import (
    BenchResult,
    Case,
    Measure,
    Measurement,
    load_bench_result,
    save_bench_result,
)

# Text that would run a script if it were not escaped.
HOSTILE = "<img src=x onerror=alert(1)>|`"


def make_measurement(case: Case, **values: float) -> Measurement:
    """Return one benchmark row. The names of the values are written with underscores in place of spaces."""
    measured = {name.replace("_", " "): Measure(value=value, unit="ms", spread=0.1) for name, value in values.items()}
    return Measurement(case=case, measured=measured)


def make_bench_result(time: str, milliseconds_per_token: float, backend: str = "windowed") -> BenchResult:
    """Return a benchmark result of all suites.

    Args:
        time: The time at which the result was measured.
        milliseconds_per_token: The time of attention per token.
        backend: The name of the second attention backend.
    """
    attention = [
        make_measurement(
            {"inputs": "normal", "engine": name, "tokens": tokens},
            forward=milliseconds_per_token * tokens,
            to_plain=0.5,
            peak=300.0,
        )
        for name in ("plain", backend)
        for tokens in (1024, 4096)
    ]
    decode = [
        make_measurement({"part": "context", "cache": cache, "context": context}, time_per_token=context / 1000)
        for cache in ("full", "bounded")
        for context in (1024, 65_536)
    ]
    decode.append(
        make_measurement({"part": "trained", "run": "demo", "split": "test", "context": 1024}, keys_kept=12.5)
    )
    return BenchResult(
        made={"time": time, "commit": "0123abc+changes", "machine": {"cpu": HOSTILE, "cores": 2}, "threads": 2},
        settings={"quick": True, "attention": {"tolerance": 1e-6}},
        finished=True,
        suites={
            "attention": tuple(attention),
            "training": (make_measurement({"model": "alibi", "tokens": 512}, speed=1234.5),),
            "evaluate": (make_measurement({"model": "alibi", "tokens": 512}, speed=2345.5),),
            "decode": tuple(decode),
            "patch": (make_measurement({"model": "patched", "tokens": 512}, forward=3.5),),
        },
    )


def test_section_shows_the_numbers_of_the_newest_result(tmp_path):
    runs = tmp_path / "runs"
    make_demo(runs)
    save_bench_result(make_bench_result("2030-01-02", 0.125, HOSTILE), runs / "bench" / "b.json")
    save_bench_result(make_bench_result("2030-01-01", 99.0), runs / "bench" / "c.json")
    out = write_report(collect([runs]), tmp_path / "report").parent
    page = (out / "index.html").read_text()
    markdown = (out / "report.md").read_text()
    section = page[page.index('id="speed"') : page.index('id="positions"')]

    cells = re.findall(r'<a href="(data/[^"]+)" title="([-0-9.e]+)">', section)
    stored = load_bench_result(out / cells[0][0])
    assert stored == load_bench_result(runs / "bench" / "b.json")
    expected = [measure.value for rows in stored.suites.values() for row in rows for measure in row.measured.values()]
    assert [float(exact) for _, exact in cells] == expected

    for name in ("time", "ratio", "memory", "decode", "training", "evaluate"):
        assert (out / f"speed-{name}.png").stat().st_size > 500
        assert f"(speed-{name}.png)" in markdown
        assert f'id="plot-speed-{name}"' in section
    assert "plain 128 at 1,024, 512 at 4,096" in section
    assert "commit 0123abc+changes, tolerance 1e-06." in section
    assert "quick run" in section


def test_names_in_results_are_escaped(tmp_path):
    save_bench_result(make_bench_result("2030-01-02", 0.125, HOSTILE), tmp_path / "results" / "one.json")
    out = write_report(collect([tmp_path / "results"]), tmp_path / "report").parent
    assert "<img src=x" not in (out / "index.html").read_text()
    assert not re.search(r"(?<!\\)<img", (out / "report.md").read_text())


def test_no_section_without_results(tmp_path):
    make_demo(tmp_path / "runs")
    out = write_report(collect([tmp_path / "runs"]), tmp_path / "report").parent
    assert 'id="speed"' not in (out / "index.html").read_text()
    assert "## Speed" not in (out / "report.md").read_text()
    assert not list(out.glob("speed-*"))


def test_benchmark_results_without_runs_make_a_report(tmp_path):
    save_bench_result(make_bench_result("2030-01-01", 1.0), tmp_path / "results" / "one.json")
    (tmp_path / "results" / "other.json").write_text("{}")  # JSON files of other kinds are ignored.
    out = write_report(collect([tmp_path / "results"]), tmp_path / "report").parent
    assert 'id="speed"' in (out / "index.html").read_text()


def test_damaged_result_in_the_bench_folder_is_an_error(tmp_path):
    (tmp_path / "results" / "bench").mkdir(parents=True)
    (tmp_path / "results" / "bench" / "cut.json").write_text('{"format": 2,')
    with pytest.raises(InputError, match=r"cut\.json"):
        collect([tmp_path / "results"])
