"""The section "Speed": its numbers are the JSON's, and without results the page is as before."""

import re

import pytest
from synthetic_results import make_demo

from trainshort.errors import InputError
from trainshort.experiments.claims.collection import collect
from trainshort.report.write import write_report
from trainshort.utils.bench_results import BenchResult, Measure, Measurement, load_bench_result, save_bench_result

HOSTILE = "<img src=x onerror=alert(1)>|`"


def result(time: str, forward: float, engine: str = "windowed") -> BenchResult:
    def row(case, **values):
        measured = {
            name.replace("_", " "): Measure(value=value, unit="ms", spread=0.1) for name, value in values.items()
        }
        return Measurement(case=case, measured=measured)

    return BenchResult(
        made={"time": time, "commit": "0123abc+changes", "machine": {"cpu": HOSTILE, "cores": 2}, "threads": 2},
        settings={"quick": True, "attention": {"tolerance": 1e-6}},
        finished=True,
        suites={
            "attention": tuple(
                row({"inputs": "normal", "engine": name, "tokens": at}, forward=forward * at, to_plain=0.5, peak=300.0)
                for name in ("plain", engine)
                for at in (1024, 4096)
            ),
            "training": (row({"model": "alibi", "tokens": 512}, speed=1234.5),),
            "evaluate": (row({"model": "alibi", "tokens": 512}, speed=2345.5),),
            "decode": (
                *(
                    row({"part": "context", "cache": kind, "context": at}, time_per_token=at / 1000)
                    for kind in ("full", "bounded")
                    for at in (1024, 65_536)
                ),
                row({"part": "trained", "run": "demo", "split": "test", "context": 1024}, keys_kept=12.5),
            ),
            "patch": (row({"model": "patched", "tokens": 512}, forward=3.5),),
        },
    )


def test_numbers_are_those_of_the_newest_result(tmp_path):
    runs = tmp_path / "runs"
    make_demo(runs)
    save_bench_result(result("2030-01-02", 0.125, HOSTILE), runs / "bench" / "b.json")
    save_bench_result(result("2030-01-01", 99.0), runs / "bench" / "c.json")
    out = write_report(collect([runs]), tmp_path / "report").parent
    text, markdown = (out / "index.html").read_text(), (out / "report.md").read_text()
    section = text[text.index('id="speed"') : text.index('id="positions"')]
    cells = re.findall(r'<a href="(data/[^"]+)" title="([-0-9.e]+)">', section)
    stored = load_bench_result(out / cells[0][0])
    assert stored == load_bench_result(runs / "bench" / "b.json")
    values = [measure.value for rows in stored.suites.values() for row in rows for measure in row.measured.values()]
    assert [float(exact) for _, exact in cells] == values
    for name in ("time", "ratio", "memory", "decode", "training", "evaluate"):
        assert (out / f"speed-{name}.png").stat().st_size > 500
        assert f"(speed-{name}.png)" in markdown
        assert f'id="plot-speed-{name}"' in section
    assert "plain 128 at 1,024, 512 at 4,096" in section
    assert "commit 0123abc+changes, tolerance 1e-06. A quick run: not numbers to quote." in section
    assert "<img src=x" not in text
    assert not re.search(r"(?<!\\)<img", markdown)


def test_without_results_there_is_no_section(tmp_path):
    make_demo(tmp_path / "runs")
    out = write_report(collect([tmp_path / "runs"]), tmp_path / "report").parent
    assert (
        "speed" not in (out / "report.md").read_text().lower().replace("tokens/s", "").split("## the paper's claims")[0]
    )
    assert 'id="speed"' not in (out / "index.html").read_text()
    assert not list(out.glob("speed-*"))


def test_results_alone_make_a_page(tmp_path):
    save_bench_result(result("2030-01-01", 1.0), tmp_path / "results" / "one.json")
    (tmp_path / "results" / "else.json").write_text("{}")
    out = write_report(collect([tmp_path / "results"]), tmp_path / "report").parent
    assert 'id="speed"' in (out / "index.html").read_text()
    (tmp_path / "results" / "bench").mkdir()
    (tmp_path / "results" / "bench" / "cut.json").write_text('{"format": 2,')
    with pytest.raises(InputError, match=r"cut\.json: it is not readable JSON"):
        collect([tmp_path / "results"])
