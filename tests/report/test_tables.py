"""The figures of the paper's tables."""

import json
import math

import pytest
from synthetic_results import LAPTOP, ORIGIN, make_run

from trainshort.experiments.claims.collection import collect
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.experiments import Variant
from trainshort.report.plotly_figures import specification
from trainshort.report.tables import paper_figures
from trainshort.train.run_folder import run_name


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
        config = LAPTOP.make_config(Variant("wikitext103", position, length))
        common = {"position": position, "length": length, "tokens": 3000, "train_memory": 10**6, "provenance": ORIGIN}
        entries[run_name(config)] = {**common, "train_seconds": [seconds] * 3, "read_seconds": [seconds] * 3}
    (tmp_path / "cost.json").write_text(json.dumps({"format": 1, "entries": entries}))
    view = ScaleView(collect([tmp_path]), LAPTOP)
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
