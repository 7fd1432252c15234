"""The real WikiText-103 validation set: the paper's 217,646 targets at every length and stride."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_target

from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.evaluate.sweep import Sweep, score_length

TARGETS = 217_646


@pytest.fixture(scope="module")
def words() -> np.ndarray:
    """The set as word tokens; the first 1,000 words have numbers of their own, which is enough to count."""
    root = os.environ.get("TRAINSHORT_DATA")
    path = Path(root or "") / "wikitext-103-eval" / "wiki.valid.tokens"
    if not root or not path.exists():
        pytest.skip("needs TRAINSHORT_DATA with wikitext-103-eval/wiki.valid.tokens")
    text = path.read_text(encoding="utf-8")
    return WordTokenizer.build([text], 1000, None).encode(text)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "stride"), [(512, 512), (1012, 1012), (16_024, 16_024), (512, 300), (512, 31)])
def test_every_target_is_scored_exactly_once(words: np.ndarray, tmp_path, length: int, stride: int):
    assert len(words) == TARGETS
    target = tiny_target(vocab_size=1000, layers=1, width=8, heads=1)
    row = score_length(target, Sweep(words, [length], stride=stride), length, tmp_path / "scores")
    assert (row.status, row.tokens) == ("scored", TARGETS)
    assert sum(count for count, _ in row.blocks) == TARGETS
    assert sum(count for _, _, count, _ in row.positions) == TARGETS
    if stride == length == 512:
        assert row.passes == 426
