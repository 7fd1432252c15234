"""Input that cannot be used: the sentence names the file, the place and the remedy."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from corpus_files import part, texts, write_parquet

from trainshort.data.corpus import find_corpus
from trainshort.data.files import file_corpus
from trainshort.data.splits import splitter
from trainshort.errors import InputError


def refused(name: str, message: str, errors: str = "strict") -> None:
    with pytest.raises(InputError, match=message):
        list(find_corpus(name).documents(errors=errors))


def test_invalid_utf8_is_told_with_file_and_byte_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é line\n".encode() * 100 + b"bad \xff byte\n")
    refused(str(tmp_path / "a.txt"), r"a\.txt is not valid UTF-8 at byte 804 \(0xff\)\. Convert .* --errors replace")
    assert "bad \ufffd byte" in "".join(texts(find_corpus(str(tmp_path / "a.txt")), errors="replace"))
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    refused(str(tmp_path / "b.jsonl"), r"b\.jsonl is not valid UTF-8 at byte 25")
    assert texts(find_corpus(str(tmp_path / "b.jsonl")), errors="replace") == ["ok", "\ufffd"]
    column = pyarrow.array([b"ok", b"x\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "c.parquet")
    refused(str(tmp_path / "c.parquet"), r"c\.parquet is not valid UTF-8 at byte 1 of row 1 \(0xff\)")
    assert texts(find_corpus(str(tmp_path / "c.parquet")), errors="replace") == ["ok", "x\ufffd"]


def test_half_a_surrogate_pair_is_told_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud83d y"}\n')
    refused(str(tmp_path / "a.jsonl"), r"a\.jsonl: the record at byte 0 holds half of a surrogate pair")
    assert texts(find_corpus(str(tmp_path / "a.jsonl")), errors="replace") == ["x \ufffd y"]


def test_records_that_are_not_as_expected_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"title": "x", "body": "y"}\n')
    refused(
        str(tmp_path / "a.jsonl"), r"the record at byte 15 should have a field 'text' .* it has the fields title, body"
    )
    (tmp_path / "b.jsonl").write_text("[1]\n")
    refused(str(tmp_path / "b.jsonl"), r"should have a field 'text' with a string; it has a list")
    (tmp_path / "c.jsonl").write_text('{"text": \n')
    refused(str(tmp_path / "c.jsonl"), r"c\.jsonl is not JSON lines: the record at byte 0 does not parse")
    write_parquet(tmp_path / "d.parquet", ["x"], column="content")
    refused(str(tmp_path / "d.parquet"), r"d\.parquet should have a column 'text'; its columns are content")
    (tmp_path / "e.parquet").write_text("no parquet")
    refused(str(tmp_path / "e.parquet"), r"e\.parquet is not a readable parquet file")
    (tmp_path / "hub").mkdir()
    write_parquet(tmp_path / "hub" / "train.parquet", ["x"], column="content")
    refused(f"hub:{tmp_path / 'hub'}", r"should have a column 'text' with strings; its columns are content")


def test_missing_and_empty_inputs_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(str(tmp_path / "empty.txt"), r"empty\.txt is empty\. Give a file with text in it")
    refused(str(tmp_path / "no.txt"), r"no\.txt' is neither a known corpus nor a file or folder")
    refused(str(tmp_path), r"All 1 files of '.*' are empty|empty\.txt is empty")
    (tmp_path / "none").mkdir()
    refused(str(tmp_path / "none"), r"none holds no \.txt, \.tokens, \.raw, \.jsonl, \.parquet file")
    refused(str(tmp_path / "*.jsonl"), r"No \.txt, .* file matches")
    (tmp_path / "a.pdf").write_text("x")
    refused(str(tmp_path / "a.pdf"), r"a\.pdf should end in one of \.txt")
    refused("sotuu", r"'sotuu' is neither .* Did you mean 'sotu'\? Known: sotu, stdlib, wikitext-2")
    with pytest.raises(InputError, match=r"gone\.txt does not exist"):
        file_corpus("x", [tmp_path / "gone.txt"])


def test_two_documents_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds 2 different documents, too few to split into train, valid and test"):
        splitter(part(tmp_path, "a", 2), "strict")


def test_a_hub_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(
        "nobody/nothing", r"'nobody/nothing' is no file or folder here or in \$TRAINSHORT_DATA, and the hub could not"
    )
