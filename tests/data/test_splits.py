"""Splits: published ones are kept, missing ones are held out by a hash of the text, and never come out empty."""

from collections import Counter
from pathlib import Path

import pytest
from corpus_files import part, write_jsonl

from trainshort.data.corpora import find_corpus
from trainshort.data.documents import Document
from trainshort.data.splits import Splitter, make_splitter, text_hash


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
def test_files_named_after_splits_keep_them(tmp_path: Path, names: tuple, splits: tuple) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "text"}\n')
    corpus = find_corpus(str(tmp_path))
    found = {file.path.relative_to(tmp_path).as_posix(): file.split for file in corpus.files}
    assert found == dict(zip(names, splits, strict=True))


def test_small_corpora_are_split_exactly(tmp_path: Path) -> None:
    corpus = part(tmp_path, "a", 200)
    rule = make_splitter(corpus, "strict")
    counted = Counter(rule.split(document) for document in corpus.documents())
    assert counted == {"train": 180, "valid": 10, "test": 10}
    tiny = part(tmp_path, "b", 3)
    assert Counter(make_splitter(tiny, "strict").split(d) for d in tiny.documents()) == {
        "train": 1,
        "valid": 1,
        "test": 1,
    }


def test_a_missing_split_is_taken_from_train_and_the_others_stay(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [f"train {n}" for n in range(100)])
    write_jsonl(tmp_path / "test.jsonl", [f"test {n}" for n in range(10)])
    corpus = find_corpus(str(tmp_path))
    rule = make_splitter(corpus, "strict")
    assert rule.missing == ("valid",)
    counted = Counter((document.text.split()[0], rule.split(document)) for document in corpus.documents())
    assert counted == {("train", "train"): 95, ("train", "valid"): 5, ("test", "test"): 10}


def test_large_corpora_hold_out_a_share_by_the_hash_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = part(tmp_path, "a", 1000)
    monkeypatch.setattr("trainshort.data.splits.EXACT_SPLIT_MAX_BYTES", 10)
    rule = make_splitter(corpus, "strict")
    assert rule == Splitter(("valid", "test"), int(0.05 * 2**64), int(0.1 * 2**64))
    counted = Counter(rule.split(document) for document in corpus.documents())
    assert 25 < counted["valid"] < 80
    assert 25 < counted["test"] < 80
    monkeypatch.setattr("trainshort.data.splits.HELD_OUT_BYTES", 170)
    assert make_splitter(corpus, "strict").test == int(170 / corpus.size * 2**64)


def test_copies_of_a_text_fall_into_the_same_split() -> None:
    rule = Splitter(("valid", "test"), 2**63, 2**63 + 2**62)
    one, two = Document("same", "train", 0, 0), Document("same", "train", 99, 99)
    assert rule.split(one) == rule.split(two)
    assert text_hash("same") != text_hash("other")
