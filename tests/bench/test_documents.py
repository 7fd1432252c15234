"""Tables of measurements in the documents are those of the stored results."""

from pathlib import Path

import pytest

from trainshort.bench import documents
from trainshort.bench.measurements import RATIO, Measure, Measurement


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_the_tables_agree_with_the_stored_results(name: str):
    text = (documents.ROOT / name).read_text(encoding="utf-8")
    assert documents.REGION.search(text), f"{name} has no measured table"
    assert documents.written(text) == text, f"run: python -m trainshort.bench.documents {name}"


def test_a_changed_number_is_noticed():
    text = (documents.ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert documents.written(text.replace("tokens/s", "tokens/h")) == text
    text = (documents.ROOT / "README.md").read_text(encoding="utf-8")
    assert text != text.replace("-->0.12", "-->0.11")
    assert documents.written(text.replace("-->0.12", "-->0.11")) == text


def test_an_unfinished_run_is_told():
    bench = documents.load(documents.RESULTS / "evaluate.json")
    assert ("stopped before its end" in documents.origin(bench, "evaluate")) == (not bench.finished)


def test_a_result_that_is_not_stored_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "RESULTS", tmp_path)
    text = documents.written("<!-- measured: clocks -->\n| old | 3 |\n<!-- end of measured -->\n")
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
    bench = documents.load(documents.RESULTS / "training.json").model_copy(update={"suites": {"training": rows}})
    written = documents.field_training(bench).splitlines()
    assert written[2:] == [f"| FoX, gates start at ALiBi's slopes | 64 | 1.250 {RATIO} | 1.031 {RATIO} |"]


def test_a_clock_to_its_slopes():
    def row(engine: str, both: float) -> Measurement:
        units = {"forward + backward": "ms", "to plain": RATIO, "both to plain": RATIO}
        measured = {name: Measure(value=both, unit=unit, better="lower") for name, unit in units.items()}
        return Measurement(case={"engine": engine, "tokens": 64}, measured=measured)

    bench = documents.load(documents.RESULTS / "attention.json")
    even = bench.model_copy(update={"suites": {"attention": (row("windowed", 2.0), row("clock", 2.1))}})
    fox = bench.model_copy(update={"suites": {"attention": (row("plain", 9.0), row("windowed", 0.25))}})
    lines = [line.split(" | ") for line in documents.clocks(even, fox, fox).splitlines()[2:]]
    assert [line[2:] for line in lines] == [
        [f"2.10 {RATIO}", f"2.10 {RATIO}", f"1.05 {RATIO} |"],
        *[[f"0.25 {RATIO}", f"0.25 {RATIO}", " |"]] * 2,
    ]
