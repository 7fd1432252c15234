"""Tests that the tables of benchmark results in the documents equal the stored results."""

from pathlib import Path

import pytest

from benchmarks import update_docs
from trainshort.utils.bench_results import RATIO, Measure, Measurement


@pytest.mark.parametrize("name", update_docs.DOCUMENTS)
def test_documents_agree_with_the_stored_results(name: str):
    text = (update_docs.ROOT / name).read_text(encoding="utf-8")
    assert update_docs.REGION.search(text), f"{name} has no table of results"
    assert update_docs.update_regions(text) == text, "run: python -m benchmarks.update_docs"


@pytest.mark.parametrize(
    ("document", "stored_text", "changed_text"),
    [("docs/training.md", "tokens/s", "tokens/h"), ("README.md", "-->0.12", "-->0.11")],
)
def test_changed_value_in_a_document_is_restored(document: str, stored_text: str, changed_text: str):
    text = (update_docs.ROOT / document).read_text(encoding="utf-8")
    changed_document = text.replace(stored_text, changed_text)
    assert changed_document != text
    assert update_docs.update_regions(changed_document) == text


@pytest.mark.parametrize("finished", [True, False])
def test_origin_mentions_an_unfinished_run(finished: bool):
    result = update_docs.load_stored_result("evaluate").model_copy(update={"finished": finished})
    origin = update_docs.describe_origin(result, "evaluate")
    assert ("stopped before its end" in origin) == (not finished)


def test_missing_result_is_named_in_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(update_docs, "RESULTS", tmp_path)
    text = update_docs.update_regions("<!-- measured: clocks -->\n| old | 3 |\n<!-- end of measured -->\n")
    assert "| old" not in text
    assert "No such result is stored: `benchmarks/results/attention-clock.json`, " in text


def test_field_training_table_shows_times_relative_to_alibi():
    speed = Measure(value=0.8, unit=RATIO, better="higher")
    peak = Measure(value=1.0312, unit=RATIO, better="lower")
    rows = (
        Measurement(case={"model": "alibi", "tokens": 64}, measured={}),
        Measurement(
            case={"model": "fox-alibi", "tokens": 64}, measured={"speed to alibi": speed, "peak to alibi": peak}
        ),
    )
    result = update_docs.load_stored_result("training").model_copy(update={"suites": {"training": rows}})
    lines = update_docs.field_training_table(result).splitlines()
    # A speed of 0.8 times ALiBi's means that a step takes 1.25 times as long.
    assert lines[2:] == [f"| FoX, gates start at ALiBi's slopes | 64 | 1.250 {RATIO} | 1.031 {RATIO} |"]


def test_decay_bias_table_compares_with_the_same_slopes():
    def make_row(implementation: str, value: float) -> Measurement:
        units = {"forward + backward": "ms", "to plain": RATIO, "both to plain": RATIO}
        measured = {name: Measure(value=value, unit=unit, better="lower") for name, unit in units.items()}
        return Measurement(case={"engine": implementation, "tokens": 64}, measured=measured)

    stored_result = update_docs.load_stored_result("attention")
    slopes_rows = (make_row("windowed", 2.0), make_row("clock", 2.1))
    slopes_result = stored_result.model_copy(update={"suites": {"attention": slopes_rows}})
    fox_rows = (make_row("plain", 9.0), make_row("windowed", 0.25))
    fox_result = stored_result.model_copy(update={"suites": {"attention": fox_rows}})

    table_lines = update_docs.decay_bias_table(slopes_result, fox_result, fox_result).splitlines()
    slopes_line, first_fox_line, second_fox_line = (line.split(" | ")[2:] for line in table_lines[2:])
    assert slopes_line == [f"2.10 {RATIO}", f"2.10 {RATIO}", f"1.05 {RATIO} |"]
    assert first_fox_line == [f"0.25 {RATIO}", f"0.25 {RATIO}", " |"]
    assert second_fox_line == first_fox_line
