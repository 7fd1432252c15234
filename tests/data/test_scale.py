"""What takes minutes or needs the real corpora: WikiText's published counts, memory that does not grow with text."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainshort.config.run_config import DataConfig
from trainshort.data.dataset import open_dataset
from trainshort.data.preparation import prepare

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shared() -> Path:
    folder = os.environ.get("TRAINSHORT_DATA")
    if not folder:
        pytest.skip("set TRAINSHORT_DATA to a folder that holds wikitext-2 and wikitext-103-eval")
    return Path(folder)


@pytest.mark.slow
def test_wikitext_counts_are_the_published_ones(shared: Path, tmp_path: Path) -> None:
    small = prepare(
        DataConfig(corpus="wikitext-2", tokenizer="words", vocab_size=40_000, folder=tmp_path / "2"), progress=False
    )
    # 33,278 types with <unk> and </s>, and fairseq's <s> and <pad>.
    assert small.meta.vocab_size == 33_280
    counts = {name: split.tokens for name, split in small.meta.splits.items()}
    assert counts == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert small.meta.splits["valid"].documents == small.meta.splits["test"].documents == 60

    # The real WikiText-103 evaluation sets, which have the same articles and fewer unknown words.
    large = prepare(
        DataConfig(
            corpus=str(shared / "wikitext-103-eval"),
            tokenizer=str(small.folder / "tokenizer.json"),
            folder=tmp_path / "103",
        ),
        progress=False,
    )
    assert {name: split.tokens for name, split in large.meta.splits.items()} == {"valid": 217_646, "test": 245_569}
    assert large.meta.splits["valid"].documents == large.meta.splits["test"].documents == 60


def write_text(path: Path, megabytes: int) -> None:
    """Text of many different words, the hard case for caches and counters."""
    chance = random.Random(7)
    letters = "etaoinshrdlucmfw"
    words = ["".join(chance.choices(letters, k=chance.randint(1, 9))) for _ in range(200_000)]
    with path.open("w") as file:
        while file.tell() < megabytes * 10**6:
            paragraph = chance.choices(words, k=200)
            paragraph[0] += str(chance.getrandbits(40))  # never seen before
            file.write(" ".join(paragraph) + "\n\n")


def peak_memory(*arguments: str) -> int:
    """Largest sum of the memory of a command and its workers, in bytes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-m", "trainshort", *arguments], env=environment)
    process, peak = psutil.Process(child.pid), 0
    while child.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            peak = max(peak, sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))
        time.sleep(0.05)
    assert child.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bpe", "words"])
def test_memory_does_not_grow_with_the_text(tokenizer: str, tmp_path: Path) -> None:
    peaks = {}
    for megabytes in (50, 200):
        path = tmp_path / f"{megabytes}.txt"
        write_text(path, megabytes)
        out = tmp_path / f"{tokenizer}-{megabytes}"
        options = ("--tokenizer", tokenizer, "--vocab-size", "32000", "--workers", "2", "--out", str(out))
        peaks[megabytes] = peak_memory("prepare", str(path), *options)
        assert open_dataset(out).meta.splits["train"].bytes > 0.8e6 * megabytes
    print(
        f"\n{tokenizer}: peak memory {peaks[50] / 1e6:.0f} MB for 50 MB of text, {peaks[200] / 1e6:.0f} MB for 200 MB"
    )
    assert peaks[200] < 1e9
    assert peaks[200] < peaks[50] + 150e6
