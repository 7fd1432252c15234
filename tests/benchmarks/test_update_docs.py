"""Tables of measurements in the documents are those of the stored results."""

from pathlib import Path

import pytest

from benchmarks import update_docs
from trainshort.utils.bench_results import RATIO, Measure, Measurement


@pytest.mark.parametrize("name", update_docs.DOCUMENTS)
def test_the_tables_agree_with_the_stored_results(name: str):
    text = (update_docs.ROOT / name).read_text(encoding="utf-8")
    assert update_docs.REGION.search(text), f"{name} has no table of results"
    assert update_docs.update_regions(text) == text, "run: python -m benchmarks.update_docs"


def test_a_changed_number_is_noticed():
    text = (update_docs.ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert update_docs.update_regions(text.replace("tokens/s", "tokens/h")) == text
    text = (update_docs.ROOT / "README.md").read_text(encoding="utf-8")
    assert text != text.replace("-->0.12", "-->0.11")
    assert update_docs.update_regions(text.replace("-->0.12", "-->0.11")) == text


def test_an_unfinished_run_is_told():
    bench = update_docs.load_bench_result(update_docs.RESULTS / "evaluate.json")
    assert ("stopped before its end" in update_docs.origin(bench, "evaluate")) == (not bench.finished)


def test_a_result_that_is_not_stored_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(update_docs, "RESULTS", tmp_path)
    text = update_docs.update_regions("<!-- measured: clocks -->\n| old | 3 |\n<!-- end of measured -->\n")
    assert "| old" not in text
    assert "No such result is stored: `benchmarks/results/attention-clock.json`, " in text


def test_the_field_to_alibi():
    """Of two steps of 2 s and 2.5 s the second takes 1.25 times as long; speeds are stored."""
    rows = (
        Measurement(case={"model": "alibi", "tokens": 64}, measured={}),
        Measurement(
            case={"model": "fox-alibi", "tokens": 64},
            measured={
                "speed to alibi": Measure(value=0.8, unit=RATIO, better="higher"),
                "peak to alibi": Measure(value=1.0312, unit=RATIO, better="lower"),
            },
        ),
    )
    bench = update_docs.load_bench_result(update_docs.RESULTS / "training.json").model_copy(
        update={"suites": {"training": rows}}
    )
    written = update_docs.field_training(bench).splitlines()
    assert written[2:] == [f"| FoX, gates start at ALiBi's slopes | 64 | 1.250 {RATIO} | 1.031 {RATIO} |"]


def test_a_clock_to_its_slopes():
    def row(engine: str, both: float) -> Measurement:
        units = {"forward + backward": "ms", "to plain": RATIO, "both to plain": RATIO}
        measured = {name: Measure(value=both, unit=unit, better="lower") for name, unit in units.items()}
        return Measurement(case={"engine": engine, "tokens": 64}, measured=measured)

    bench = update_docs.load_bench_result(update_docs.RESULTS / "attention.json")
    even = bench.model_copy(update={"suites": {"attention": (row("windowed", 2.0), row("clock", 2.1))}})
    fox = bench.model_copy(update={"suites": {"attention": (row("plain", 9.0), row("windowed", 0.25))}})
    lines = [line.split(" | ") for line in update_docs.clocks(even, fox, fox).splitlines()[2:]]
    assert [line[2:] for line in lines] == [
        [f"2.10 {RATIO}", f"2.10 {RATIO}", f"1.05 {RATIO} |"],
        *[[f"0.25 {RATIO}", f"0.25 {RATIO}", " |"]] * 2,
    ]
