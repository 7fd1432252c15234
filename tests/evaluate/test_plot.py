"""Tests of the figures of an evaluation."""

from pathlib import Path

import numpy as np

from trainshort.data.passes import Passes
from trainshort.evaluate.plot import draw
from trainshort.evaluate.results import Evaluation, LengthScore, summarize


def test_figures_contain_expected_labels(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = []
    for length in (64, 128, 1024):
        losses = rng.exponential(2, 6400).astype(np.float32)
        rows.append(summarize(Passes(6400, length, length), losses))
    rows.append(LengthScore(length=4096, stride=4096, status="out of memory", reason="not enough memory"))
    evaluation = Evaluation(
        target={"name": "my-model", "trained_at": 128},
        corpus={"name": "book", "split": None, "tokens": 6400, "tokenizer": "bytes"},
        protocol={"stride": None, "slopes": None},
        provenance={},
        rows=tuple(rows),
    )
    png_path, svg_path = draw([evaluation], tmp_path / "valid-1f2e3d4c")
    assert (png_path.name, svg_path.name) == ("valid-1f2e3d4c.png", "valid-1f2e3d4c.svg")
    assert png_path.read_bytes().startswith(b"\x89PNG")
    svg = svg_path.read_text()
    for label in ("my-model", "trained at 128", "1,024", "book, 6,400 tokens", "OOM", "read at 64", "(log scale)"):
        assert label in svg, label
