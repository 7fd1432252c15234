"""Test on the validation split of WikiText-103: all 217,646 targets are scored at every length and stride."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_target

from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.evaluate.sweep import Sweep, score_length

NUM_TARGETS = 217_646


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """The split as word tokens. The vocabulary has 1,000 words, which is enough to count targets."""
    data_folder = os.environ.get("TRAINSHORT_DATA")
    path = Path(data_folder or "") / "wikitext-103-eval" / "wiki.valid.tokens"
    if not data_folder or not path.exists():
        pytest.skip("needs TRAINSHORT_DATA with wikitext-103-eval/wiki.valid.tokens")
    text = path.read_text(encoding="utf-8")
    return WordTokenizer.build([text], 1000, None).encode(text)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "stride"), [(512, 512), (1012, 1012), (16_024, 16_024), (512, 300), (512, 31)])
def test_every_target_is_scored_exactly_once(tokens: np.ndarray, tmp_path, length: int, stride: int):
    assert len(tokens) == NUM_TARGETS
    target = tiny_target(vocab_size=1000, layers=1, width=8, heads=1)
    row = score_length(target, Sweep(tokens, [length], stride=stride), length, tmp_path / "losses")
    assert (row.status, row.tokens) == ("scored", NUM_TARGETS)
    assert sum(count for count, _ in row.blocks) == NUM_TARGETS
    assert sum(count for _, _, count, _ in row.positions) == NUM_TARGETS
    if stride == length == 512:
        assert row.passes == 426
