"""Tests of splits: published splits are kept, and missing splits are chosen by a hash of the text."""

from collections import Counter
from pathlib import Path

import pytest
from corpus_files import make_corpus, write_jsonl

from trainshort.data.corpora import find_corpus
from trainshort.data.documents import Document
from trainshort.data.splits import Splitter, hash_text, make_splitter


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train.txt", "valid.txt", "test.txt"), ("train", "valid", "test")),
        (("train-00000-of-2.jsonl", "train-00001-of-2.jsonl", "validation.jsonl"), ("train", "train", "valid")),
        (("train/a.txt", "train/b.txt", "dev/a.txt"), ("train", "train", "valid")),
        (("wiki.valid.tokens", "wiki.test.tokens"), ("valid", "test")),
        (("test.txt", "testament.txt", "training_day.txt"), ("train", "train", "train")),
        (("test.txt",), ("train",)),
    ],
)
def test_file_names_determine_the_splits(tmp_path: Path, names: tuple, splits: tuple) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "text"}\n')
    corpus = find_corpus(str(tmp_path))
    file_splits = {file.path.relative_to(tmp_path).as_posix(): file.split for file in corpus.files}
    assert file_splits == dict(zip(names, splits, strict=True))


def test_small_corpus_is_split_exactly(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, "a", 200)
    splitter = make_splitter(corpus, "strict")
    counts = Counter(splitter.split(document) for document in corpus.documents())
    assert counts == {"train": 180, "valid": 10, "test": 10}
    tiny = make_corpus(tmp_path, "b", 3)
    assert Counter(make_splitter(tiny, "strict").split(document) for document in tiny.documents()) == {
        "train": 1,
        "valid": 1,
        "test": 1,
    }


def test_missing_split_is_taken_from_train(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [f"train {n}" for n in range(100)])
    write_jsonl(tmp_path / "test.jsonl", [f"test {n}" for n in range(10)])
    corpus = find_corpus(str(tmp_path))
    splitter = make_splitter(corpus, "strict")
    assert splitter.missing == ("valid",)
    counts = Counter((document.text.split()[0], splitter.split(document)) for document in corpus.documents())
    assert counts == {("train", "train"): 95, ("train", "valid"): 5, ("test", "test"): 10}


def test_large_corpus_is_split_without_reading_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path, "a", 1000)
    monkeypatch.setattr("trainshort.data.splits.EXACT_SPLIT_MAX_BYTES", 10)
    splitter = make_splitter(corpus, "strict")
    assert splitter == Splitter(("valid", "test"), int(0.05 * 2**64), int(0.1 * 2**64))
    counts = Counter(splitter.split(document) for document in corpus.documents())
    assert 25 < counts["valid"] < 80
    assert 25 < counts["test"] < 80
    monkeypatch.setattr("trainshort.data.splits.HELD_OUT_BYTES", 170)
    assert make_splitter(corpus, "strict").test_below == int(170 / corpus.size * 2**64)


def test_identical_documents_are_in_the_same_split() -> None:
    splitter = Splitter(("valid", "test"), 2**63, 2**63 + 2**62)
    document = Document("same", "train", 0, 0)
    copy = Document("same", "train", 99, 99)
    assert splitter.split(document) == splitter.split(copy)
    assert hash_text("same") != hash_text("different")
