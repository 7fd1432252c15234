"""Input that cannot be used: the sentence names the file, the place and the remedy."""

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


def refused(name: str, message: str, errors: str = "strict") -> None:
    with pytest.raises(InputError, match=message):
        list(find_corpus(name).documents(errors=errors))


def test_invalid_utf8_is_told_with_file_and_byte_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é line\n".encode() * 100 + b"bad \xff byte\n")
    refused(str(tmp_path / "a.txt"), r"a\.txt is not valid UTF-8 at byte 804 \(0xff\)\. Convert .* --errors replace")
    assert "bad \ufffd byte" in "".join(texts(find_corpus(str(tmp_path / "a.txt")), errors="replace"))
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    refused(str(tmp_path / "b.jsonl"), r"^\S*b\.jsonl is not valid UTF-8 at byte 25 \(0xe9\)\. Convert .* places\.$")
    assert texts(find_corpus(str(tmp_path / "b.jsonl")), errors="replace") == ["ok", "\ufffd"]
    column = pyarrow.array([b"ok", b"x\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "c.parquet")
    refused(str(tmp_path / "c.parquet"), r"c\.parquet is not valid UTF-8 at byte 1 of row 1 \(0xff\)")
    assert texts(find_corpus(str(tmp_path / "c.parquet")), errors="replace") == ["ok", "x\ufffd"]


def test_half_a_surrogate_pair_is_told_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud83d y"}\n')
    refused(str(tmp_path / "a.jsonl"), r"a\.jsonl, line 1, holds half of a surrogate pair")
    assert texts(find_corpus(str(tmp_path / "a.jsonl")), errors="replace") == ["x \ufffd y"]


def test_records_that_are_not_as_expected_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"title": "x", "body": "y"}\n')
    refused(
        str(tmp_path / "a.jsonl"),
        r"a\.jsonl, line 2: expected an object with a string in its field 'text', got the fields title, body\.",
    )
    (tmp_path / "b.jsonl").write_text("[1]\n")
    refused(str(tmp_path / "b.jsonl"), r"line 1: expected an object .*, got \[1\]\.")
    (tmp_path / "c.jsonl").write_text('{"text": \n')
    refused(str(tmp_path / "c.jsonl"), r"c\.jsonl, line 1, is not JSON \(.*\)\. Write one object per line")
    write_parquet(tmp_path / "d.parquet", ["x"], column="content")
    refused(str(tmp_path / "d.parquet"), r"d\.parquet should have a column 'text'; its columns are content")
    write_parquet(tmp_path / "e.parquet", [1, 2])
    refused(str(tmp_path / "e.parquet"), r"e\.parquet should hold text in its column 'text'; it holds int64\.")
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
    refused(str(tmp_path / "none"), r"none holds no \.txt, \.md, \.tokens, \.raw, \.jsonl, \.parquet file")
    refused(str(tmp_path / "*.jsonl"), r"No \.txt, .* file matches")
    (tmp_path / "a.pdf").write_text("x")
    refused(str(tmp_path / "a.pdf"), r"a\.pdf should end in one of \.txt")
    refused("sotuu", r"'sotuu' is neither .* Did you mean 'sotu'\? Known: sotu, stdlib, wikitext-2")
    with pytest.raises(InputError, match=r"gone\.txt does not exist"):
        file_corpus("x", [tmp_path / "gone.txt"])


def test_what_cannot_be_prepared_leaves_no_folder_above_its_own(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n" * 50)
    config = DataConfig(corpus=str(tmp_path / "blank.txt"), tokenizer="bytes", folder=tmp_path / "new" / "data")
    with pytest.raises(InputError, match="holds nothing but white space"):
        prepare(config, progress=False)
    assert not (tmp_path / "new").exists()


def test_two_documents_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds 2 different documents, too few to split into train, valid and test"):
        make_splitter(make_corpus(tmp_path, "a", 2), "strict")


def test_a_hub_that_does_not_answer_is_told_at_once_and_without_retries(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainshort", "prepare", "nobody/nothing"]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}  # where nobody listens
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "trainshort: 'nobody/nothing' is no file or folder here or in $TRAINSHORT_DATA, and the hub does not answer. "
        "Check the network, or download the files and give their folder."
    )
    assert "Retry" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "data").exists()


def test_a_stream_that_breaks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": f"record {n}"}) + "\n" for n in range(50)]
    (tmp_path / "train.jsonl").write_text("".join(lines) + "{not json\n")
    with pytest.raises(InputError, match=r"stopped coming from the hub \(.+\)\. The same command continues\."):
        list(find_corpus(f"hub:{tmp_path}").documents())


# Files that are not what their name says


IN_PLACE = {
    "pipe": (os.mkfifo, "it is not a regular file"),
    "folder": (Path.mkdir, "it is not a regular file"),
    "dangling": (lambda path: path.symlink_to("nothing"), "it is not a regular file"),
    "loop": (lambda path: path.symlink_to(path.name), "it is not a regular file"),
}
CONTENTS = {
    "null": "null",
    "list": "[]",
    "other fields": '{"a": 1}',
    "nothing": "",
    "nested": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "number": '{"format": ' + "9" * 1_000_000 + "}",
    "bytes": "\udcff",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder; a second one that was left unfinished lies beside it."""
    home = tmp_path_factory.mktemp("damaged")
    (home / "text.txt").write_text("".join(f"The house {n} said\n\n" for n in range(600)))
    config = DataConfig(corpus=str(home / "text.txt"), tokenizer="bytes", folder=home / "data")
    prepare(config, progress=False)
    (home / "unfinished").mkdir()
    note = PrepareState(request=open_dataset(home / "data").meta.request)
    write_prepare_state(home / "unfinished", note)
    return home


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.bin", "valid.documents.bin", "unfinished.json"])
def test_what_lies_in_place_of_a_file_is_told(kind: str, name: str, prepared: Path, tmp_path: Path) -> None:
    (replace, told), which = IN_PLACE[kind], "unfinished" if name == "unfinished.json" else "data"
    shutil.copytree(prepared / which, tmp_path / "data")
    (tmp_path / "data" / name).unlink()
    replace(tmp_path / "data" / name)
    config = DataConfig(corpus=str(prepared / "text.txt"), tokenizer="bytes", folder=tmp_path / "data")
    with pytest.raises(InputError, match=rf"Cannot read .*{name}: {told}"):
        prepare(config, progress=False)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "unfinished.json", "given.json"])
def test_json_that_is_none_is_told(content: str, name: str, prepared: Path, tmp_path: Path) -> None:
    which = "unfinished" if name == "unfinished.json" else "data"
    shutil.copytree(prepared / which, tmp_path / "data")
    (tmp_path / "data" / name).write_text(CONTENTS[content], errors="surrogateescape")
    tokenizer = str(tmp_path / "data" / name) if name == "given.json" else "bytes"
    out = tmp_path / ("new" if name == "given.json" else "data")
    config = DataConfig(corpus=str(prepared / "text.txt"), tokenizer=tokenizer, folder=out)
    with pytest.raises(InputError, match=name):
        prepare(config, progress=False)


@pytest.mark.parametrize("kind", ["pipe", "dangling", "loop"])
def test_what_is_given_as_a_corpus_and_is_no_file_is_told(kind: str, tmp_path: Path) -> None:
    replace, told = IN_PLACE[kind]
    replace(tmp_path / "text.txt")
    with pytest.raises(InputError, match=told):
        find_corpus(str(tmp_path / "text.txt"))


@pytest.mark.parametrize("name", ["", "x" * 5000])
def test_a_name_that_can_be_none_is_told(name: str) -> None:
    with pytest.raises(InputError, match=r"A corpus is a name, path, glob or hub dataset of 1 to"):
        find_corpus(name)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("null", r"got null\."),
        ("[]", r"got \[\]\."),
        ("5", r"got 5\."),
        ('{"text": 5}', r"expected an object with a string in its field 'text', got text = 5\."),
        ('{"text": null}', r"got text = null\."),
        ("{}", r"got an empty object\."),
        ('{"text": "a"', r"is not JSON \(Expecting ',' delimiter at its character \d+\)\. Write one object per line"),
        ("[" * 100_000, r"is not JSON \(nested too deeply\)"),
        ('{"text": ' + "9" * 1_000_000, r"is not JSON \(Exceeds the limit .*1000000 digits\)"),
    ],
)
def test_a_record_that_cannot_be_used_is_told_with_its_line(record: str, told: str, tmp_path: Path) -> None:
    good = '{"text": "a"}\n\n'
    (tmp_path / "a.jsonl").write_text(good * 100 + record + "\n" + good)
    with pytest.raises(InputError, match=rf"a\.jsonl, line 201[,:].*{told}"):
        list(find_corpus(str(tmp_path / "a.jsonl")).documents())
    with pytest.raises(InputError, match=r"a\.jsonl, line 201"):  # also when it was reached from a later place
        list(find_corpus(str(tmp_path / "a.jsonl")).documents([0, 50 * len(good)]))


@pytest.mark.parametrize("out", ["/proc/nowhere/x", "text.txt/x", "text.txt"])
def test_a_folder_that_cannot_be_made_is_told(out: str, prepared: Path) -> None:
    config = DataConfig(corpus=str(prepared / "text.txt"), folder=prepared / out)
    with pytest.raises(
        InputError, match=r"folder.* (cannot be (made|written to): |was expected there\.).*another --out\."
    ):
        prepare(config, progress=False)


def test_too_few_open_files_are_told(prepared: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = DataConfig(corpus=str(prepared / "text.txt"), tokenizer="bytes", folder=tmp_path / "out")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, limits[1]))
    try:
        with pytest.raises(InputError, match=r"out stopped at .*: too many files are open \(raise the limit: ulimit"):
            prepare(config, progress=False, workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    verify_all_files(prepare(config, progress=False))
