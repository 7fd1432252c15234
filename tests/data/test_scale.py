"""Slow tests of the data package: the published sizes of WikiText, and memory that does not grow with the text."""

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
def wikitext_folder() -> Path:
    """Return the folder with the WikiText corpora, or skip the test."""
    folder = os.environ.get("TRAINSHORT_DATA")
    if not folder:
        pytest.skip("set TRAINSHORT_DATA to a folder that contains wikitext-2 and wikitext-103-eval")
    return Path(folder)


@pytest.mark.slow
def test_sizes_of_wikitext_equal_the_published_sizes(wikitext_folder: Path, tmp_path: Path) -> None:
    small = prepare(
        DataConfig(corpus="wikitext-2", tokenizer="words", vocab_size=40_000, folder=tmp_path / "2"), progress=False
    )
    # 33,278 words including <unk> and </s>, and the two tokens <s> and <pad> of fairseq.
    assert small.meta.vocab_size == 33_280
    counts = {name: split.tokens for name, split in small.meta.splits.items()}
    assert counts == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert small.meta.splits["valid"].documents == small.meta.splits["test"].documents == 60

    # The evaluation sets of WikiText-103 have the same articles and fewer unknown words.
    large = prepare(
        DataConfig(
            corpus=str(wikitext_folder / "wikitext-103-eval"),
            tokenizer=str(small.folder / "tokenizer.json"),
            folder=tmp_path / "103",
        ),
        progress=False,
    )
    assert {name: split.tokens for name, split in large.meta.splits.items()} == {"valid": 217_646, "test": 245_569}
    assert large.meta.splits["valid"].documents == large.meta.splits["test"].documents == 60


def write_text(path: Path, megabytes: int) -> None:
    """Write a text with many different words. Caches and word counts then need the most memory."""
    rng = random.Random(7)
    letters = "etaoinshrdlucmfw"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(200_000)]
    with path.open("w") as file:
        while file.tell() < megabytes * 10**6:
            paragraph = rng.choices(words, k=200)
            paragraph[0] += str(rng.getrandbits(40))  # This word occurs only once.
            file.write(" ".join(paragraph) + "\n\n")


def peak_memory(*arguments: str) -> int:
    """Run a command, and return the peak memory of its process and its workers together, in bytes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-m", "trainshort", *arguments], env=environment)
    process = psutil.Process(child.pid)
    peak = 0
    while child.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [process, *process.children(recursive=True)]
            peak = max(peak, sum(running.memory_info().rss for running in processes))
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
