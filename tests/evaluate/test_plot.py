"""The picture: what it shows, as far as its SVG says so in words."""

from pathlib import Path

import numpy as np

from trainshort.data.passes import Passes
from trainshort.evaluate.plot import draw
from trainshort.evaluate.results import Evaluation, LengthScore, summarize


def test_the_picture_says_what_it_shows(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = [summarize(Passes(6400, n, n), rng.exponential(2, 6400).astype(np.float32)) for n in (64, 128, 1024)]
    rows.append(LengthScore(length=4096, stride=4096, status="out of memory", reason="memory ran out"))
    one = Evaluation(
        target={"name": "my-model", "trained_at": 128},
        corpus={"name": "book", "split": None, "tokens": 6400, "tokenizer": "bytes"},
        protocol={"stride": None, "slopes": None},
        provenance={},
        rows=tuple(rows),
    )
    written = draw([one], tmp_path / "valid-1f2e3d4c")
    assert [path.name for path in written] == ["valid-1f2e3d4c.png", "valid-1f2e3d4c.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    svg = written[1].read_text()
    for words in ("my-model", "trained at 128", "1,024", "book, 6,400 tokens", "OOM", "read at 64", "(log scale)"):
        assert words in svg, words
