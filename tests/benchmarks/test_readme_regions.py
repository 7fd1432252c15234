"""What README and docs say of the demo and the search is what is stored."""

import json
import math

import pytest
from made_up import LAPTOP, ORIGIN, make_demo, make_run

from benchmarks import readme
from trainshort.claims.collection import COST_FORMAT, collect
from trainshort.claims.measured import View
from trainshort.files import write_sealed
from trainshort.recipes.experiments import Variant
from trainshort.report.plotly_figures import specification
from trainshort.report.tables import paper_figures
from trainshort.report.write import write_report
from trainshort.runs import run_name


@pytest.mark.parametrize("name", readme.DOCUMENTS)
def test_the_documents_agree_with_the_stored_results(name):
    text = (readme.ROOT / name).read_text(encoding="utf-8")
    assert readme.REGION.search(text)
    assert readme.written(text) == text, "run: python -m benchmarks.readme"


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
    assert "- Evaluated 16 times as far, at 2,048 tokens, ALiBi (-4.0%) is no worse." in text
    assert "sinusoidal trained at 768 on as many tokens 47.0" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert (stored / "docs" / "headline.png").stat().st_size > 10_000


def test_tables_are_stored_only_with_several_seeds(stored):
    region = "<!-- obtained: table5 -->\n<!-- end of obtained -->\n"
    assert not (stored / "tables.json").exists()
    assert readme.written(region) == region
    make_run(stored / "runs", "alibi", {128: 52.0, 256: 50.0, 512: 49.0}, seed=2)
    make_run(stored / "runs", "sinusoidal", {128: 80.0}, seed=2)
    readme.store(write_report(collect([stored / "runs"]), stored / "report").parent)
    written = readme.written(region)
    assert "| ALiBi, L = 512 | 51.00 ± 1.41 (19.73) |" in written
    assert "2 seeds." in written
    differences = [line for line in written.splitlines() if line.startswith("| ALiBi, L = 512 | 512 |")]
    assert any("Sinusoidal, L = L_valid | cannot tell, " in line for line in differences)
    assert (stored / "docs" / "table5-figure.png").stat().st_size > 10_000


def test_a_stored_table_keeps_the_number_of_each_seed(stored):
    make_run(stored / "runs", "alibi", {128: 52.0}, seed=2)
    readme.store(write_report(collect([stored / "runs"]), stored / "report").parent)
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
    write_sealed(stored / "tune.json", values)
    text = readme.written("<!-- obtained: tune -->\n<!-- end of obtained -->\n")
    assert "| a | 50.0 | **45.0** |" in text
    assert "| b | **40.0** | not run |" in text
    assert "3 of 4 trials were run." in text


def test_perplexity_is_drawn_against_training_speed_with_the_seeds_spread(tmp_path):
    """Table 6: a row is one point, as far right as its model trains fast."""
    entries = {}
    for position, length, seconds, values in (
        ("sinusoidal", 3072, 2.0, (60.0, 62.0)),
        ("rotary", 3072, 4.0, (50.0, 51.0)),
        ("alibi", 512, 1.0, (40.0, 43.0)),
    ):
        for seed, value in enumerate(values, 1):
            make_run(tmp_path, position, {768: value}, length=length, seed=seed)
        config = LAPTOP.config(Variant("wikitext103", position, length))
        common = {"position": position, "length": length, "tokens": 3000, "provenance": ORIGIN}
        common |= {"train_memory": 10**6, "train_memories": [10**6], "session": "one session"}
        entries[run_name(config)] = {**common, "train_seconds": [seconds] * 3, "read_seconds": [seconds] * 3}
    write_sealed(tmp_path / "cost.json", {"format": COST_FORMAT, "entries": entries})
    view = View(collect([tmp_path]), LAPTOP)
    figure = next(one for one in paper_figures(view) if one.name == "table6-figure")
    points = {one.name: (one.x, one.y, one.low) for one in figure.series}
    assert points["Sinusoidal, L = 3072"][:2] == (pytest.approx((1500.0,)), pytest.approx((61.0,)))
    assert points["Rotary, L = 3072"][:2] == (pytest.approx((750.0,)), pytest.approx((50.5,)))
    assert points["ALiBi, L = 512 read at 3072"][2] == pytest.approx((41.5 - 3 / math.sqrt(2),))
    assert specification(figure)["data"][0]["error_y"]["array"] == pytest.approx([math.sqrt(2)])
    assert figure.note == (
        "Lengths in titles and names are the paper's; here they are divided by 4. Of random weights and tokens here: "
        "train speed. Bands and bars: one standard deviation over the seeds."
    )
