"""The figures of the paper's tables."""

import math

import pytest
from synthetic_results import LAPTOP, ORIGIN, make_run

from trainshort.experiments.claims.collection import COST_FORMAT, collect
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.experiments import Variant
from trainshort.report.plotly_figures import plotly_specification
from trainshort.report.tables import paper_figures
from trainshort.train.run_folder import run_name
from trainshort.utils.io import write_with_checksum


def test_table6_is_drawn_as_perplexity_against_training_speed(tmp_path):
    """Each row of Table 6 is one point. The error bar is the standard deviation over the seeds."""
    entries = {}
    for position, length, seconds, perplexities in (
        ("sinusoidal", 3072, 2.0, (60.0, 62.0)),
        ("rotary", 3072, 4.0, (50.0, 51.0)),
        ("alibi", 512, 1.0, (40.0, 43.0)),
    ):
        for seed, perplexity in enumerate(perplexities, start=1):
            make_run(tmp_path, position, {768: perplexity}, length=length, seed=seed)
        config = LAPTOP.make_config(Variant("wikitext103", position, length))
        entries[run_name(config)] = {
            "position": position,
            "length": length,
            "tokens": 3000,
            "train_seconds": [seconds] * 3,
            "read_seconds": [seconds] * 3,
            "train_memory": 10**6,
            "train_memories": [10**6],
            "session": "one session",
            "provenance": ORIGIN,
        }
    write_with_checksum(tmp_path / "cost.json", {"format": COST_FORMAT, "entries": entries})

    view = ScaleView(collect([tmp_path]), LAPTOP)
    figure = next(figure for figure in paper_figures(view) if figure.name == "table6-figure")
    series = {line.name: line for line in figure.series}
    assert series["Sinusoidal, L = 3072"].x == pytest.approx((1500.0,))
    assert series["Sinusoidal, L = 3072"].y == pytest.approx((61.0,))
    assert series["Rotary, L = 3072"].x == pytest.approx((750.0,))
    assert series["Rotary, L = 3072"].y == pytest.approx((50.5,))
    assert series["ALiBi, L = 512 evaluated at 3072"].low == pytest.approx((41.5 - 3 / math.sqrt(2),))

    first_trace = plotly_specification(figure)["data"][0]
    assert first_trace["error_y"]["array"] == pytest.approx([math.sqrt(2)])
    for phrase in ("divided by 4", "random weights and random tokens: train speed.", "standard deviation"):
        assert phrase in figure.note
