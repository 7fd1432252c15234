"""Tests of `prepare`: the result does not depend on the workers, nothing is overwritten, and damage is noticed."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpus_files import data_config, file_hashes, verify_all_files, write_jsonl

from trainshort.cli.main import main
from trainshort.config.run_config import DataConfig, RunConfig, load_config
from trainshort.data import preparation
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import CHECKSUM_CACHE_FILE, open_dataset, token_type
from trainshort.data.dataset_request import data_folder
from trainshort.data.documents import SPLITS
from trainshort.data.preparation import open_or_prepare, prepare
from trainshort.data.splits import make_splitter
from trainshort.data.tokenizers.base import load_tokenizer
from trainshort.errors import InputError
from trainshort.train.loop import train
from trainshort.utils import io

PARAGRAPH = "The people's house stands on a hill, said number {n}; 1,024 steps — é, 中, 🙂 — lead to it.\nSo be it.\n\n"

DATA_FILES = [f"{split}{suffix}" for split in SPLITS for suffix in (".bin", ".documents.bin")]

# The number of tokens of the default dataset, and the start of the SHA-256 of its validation split.
SOTU_TOKENS = {"train": 2_979_399, "valid": 163_627, "test": 171_644}
SOTU_VALID_SHA256 = "9fd498c990491fd2"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write a text of 600 paragraphs."""
    path = tmp_path / "text.txt"
    path.write_text("".join(PARAGRAPH.format(n=n) for n in range(600)))
    return path


# Results


@pytest.mark.parametrize("tokenizer_name", ["bytes", "words", "bpe"])
def test_dataset_contains_all_documents_of_the_text(tokenizer_name: str, text: Path, tmp_path: Path) -> None:
    prepared = prepare(data_config(text, tmp_path / "out", tokenizer=tokenizer_name), progress=False)
    tokenizer = prepared.tokenizer()
    corpus = find_corpus(str(text))
    splitter = make_splitter(corpus, "strict")
    texts_by_split: dict[str, list[str]] = {split: [] for split in SPLITS}
    for document in corpus.documents():
        texts_by_split[splitter.split(document)].append(document.text)

    for split, texts in texts_by_split.items():
        tokens = prepared.split(split)
        starts = prepared.documents(split)
        meta = prepared.meta.splits[split]
        assert meta.tokens == len(tokens)
        assert meta.documents == len(starts) == len(texts) > 0
        assert meta.bytes == sum(len(text.encode()) for text in texts)
        assert meta.words == sum(len(text.split()) for text in texts)
        ends = [*starts[1:], len(tokens)]
        for document_text, start, end in zip(texts, starts, ends, strict=True):
            assert tokens[start:end].tolist() == tokenizer.encode_document(document_text).tolist()

    verify_all_files(prepared)
    assert prepared.meta.vocab_size == tokenizer.vocab_size
    assert prepared.meta.tokenizer == tokenizer_name
    assert prepared.meta.request.corpus == str(text)
    file_names = {path.name for path in prepared.folder.iterdir()}
    assert file_names == {*DATA_FILES, "checked.json", "meta.json", "tokenizer.json"}


def test_tokens_are_stored_in_the_smallest_type(text: Path, tmp_path: Path) -> None:
    types = [token_type(vocab_size) for vocab_size in (2, 256, 257, 65536, 65537)]
    assert types == ["uint8", "uint8", "uint16", "uint16", "uint32"]
    bytes_dataset = prepare(data_config(text, tmp_path / "bytes", tokenizer="bytes"), progress=False)
    assert bytes_dataset.split("train").dtype == np.uint8
    bpe_dataset = prepare(data_config(text, tmp_path / "bpe"), progress=False)
    assert bpe_dataset.split("train").dtype == np.uint16


def test_number_of_workers_does_not_change_the_result(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1000)
    for workers in (1, 2, 3):
        prepare(data_config(text, tmp_path / str(workers)), progress=False, workers=workers)
    assert file_hashes(tmp_path / "1") == file_hashes(tmp_path / "2") == file_hashes(tmp_path / "3")


def test_default_dataset_never_changes(tmp_path: Path) -> None:
    """Other tokens would change all published numbers."""
    prepared = prepare(DataConfig(folder=tmp_path / "sotu"), progress=False)
    assert {name: split.tokens for name, split in prepared.meta.splits.items()} == SOTU_TOKENS
    assert prepared.meta.splits["valid"].sha256[:16] == SOTU_VALID_SHA256


# Existing folders


def test_preparing_again_opens_the_existing_dataset(text: Path, tmp_path: Path) -> None:
    config = data_config(text, tmp_path / "out")
    first = prepare(config, progress=False)
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    assert prepare(config, progress=False).meta == first.meta
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == times
    text.unlink()  # A dataset can be used without its corpus.
    assert prepare(config, progress=False).meta == first.meta


def test_dataset_of_other_settings_is_not_used(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    prepare(data_config(text, folder), progress=False)
    hashes = file_hashes(folder)
    for changes, message in (
        ({"tokenizer": "bytes"}, r"out .*tokenizer 'bpe', not 'bytes'.*--out"),
        ({"vocab_size": 400}, r"vocabulary 300, not 400"),
        ({"corpus": "stdlib"}, r"corpus '.*text\.txt', not 'stdlib'"),
        ({"corpus": "stdlib", "tokenizer": "words"}, r"corpus '.*', not 'stdlib'; tokenizer 'bpe', not 'words'"),
    ):
        with pytest.raises(InputError, match=message):
            prepare(data_config(text, folder).replace(**changes), progress=False)
    text.write_text(text.read_text() + "more")
    with pytest.raises(InputError, match=r"text\.txt'.*changed"):
        prepare(data_config(text, folder), progress=False)
    assert file_hashes(folder) == hashes


def test_folder_with_other_files_is_not_changed(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.bin").write_text("precious")
    with pytest.raises(InputError, match=r"out .*train\.bin.*--out"):
        prepare(data_config(text, tmp_path / "out"), progress=False)
    assert (tmp_path / "out" / "train.bin").read_text() == "precious"
    with pytest.raises(InputError, match=r"text\.txt.*file.*--out"):
        prepare(data_config(text, text), progress=False)


def test_training_opens_the_folder_that_the_user_named(text: Path, tmp_path: Path) -> None:
    prepared = prepare(data_config(text, tmp_path / "out", tokenizer="bytes"), progress=False)
    assert open_or_prepare(DataConfig(folder=tmp_path / "out")).meta == prepared.meta
    for name, message in (
        ("outt", r"data\.folder .*outt .*trainshort prepare sotu --out"),
        ("text.txt", r"data\.folder .*text\.txt is a file.*trainshort prepare "),
    ):
        with pytest.raises(InputError, match=message):
            open_or_prepare(DataConfig(folder=tmp_path / name), progress=False)
    assert not (tmp_path / "outt").exists()


def test_run_stores_the_settings_of_the_dataset(text: Path, tmp_path: Path) -> None:
    prepare(data_config(text, tmp_path / "out", tokenizer="bytes"), progress=False)
    config = RunConfig.parse({"model": {"layers": 1, "width": 8, "heads": 1}, "train": {"steps": 1, "length": 8}})
    config = config.replace(data={"folder": tmp_path / "out"})
    train(config, tmp_path / "run", quiet=True)
    stored = load_config(tmp_path / "run" / "config.json").data
    assert (stored.corpus, stored.tokenizer, stored.folder) == (str(text), "bytes", tmp_path / "out")
    train(config, tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({}, "data/sotu-bpe2048"),
        ({"tokenizer": "words", "corpus": "wikitext-103", "vocab_size": 267744}, "data/wikitext-103-words267744"),
        ({"tokenizer": "bytes"}, "data/sotu-bytes"),
        ({"tokenizer": "models/gpt2/tokenizer.json"}, "data/sotu-gpt2"),
        ({"tokenizer": "mine.json"}, "data/sotu-mine"),
        ({"corpus": "owner/name:config"}, "data/owner-name-config-bpe2048"),
        ({"corpus": "logs/*.jsonl"}, "data/logs-.jsonl-bpe2048"),
        ({"folder": "here"}, "here"),
    ],
)
def test_folder_is_named_after_corpus_and_tokenizer(settings: dict, folder: str) -> None:
    assert data_folder(DataConfig.parse(settings)) == Path(folder)


def test_folder_of_a_path_is_named_after_its_last_part(text: Path) -> None:
    assert data_folder(data_config(text, None)) == Path("data/text-bpe300")
    assert data_folder(data_config(text.parent, None)).name == f"{text.parent.name}-bpe300"


# Tokenizers and corpora


def test_tokenizer_of_another_dataset_can_be_used(text: Path, tmp_path: Path) -> None:
    prepare(data_config(text, tmp_path / "first"), progress=False)
    tokenizer_path = tmp_path / "first" / "tokenizer.json"
    second = prepare(data_config(text, tmp_path / "second", tokenizer=str(tokenizer_path)), progress=False)
    assert file_hashes(tmp_path / "first")["train.bin"] == file_hashes(tmp_path / "second")["train.bin"]
    assert second.meta.request.vocab_size is None
    assert second.meta.tokenizer == second.tokenizer().name == "first"

    # A copy of the tokenizer file is the same tokenizer, until its content changes.
    copy = tmp_path / "copy.json"
    copy.write_bytes(tokenizer_path.read_bytes())
    prepare(data_config(text, tmp_path / "second", tokenizer=str(copy)), progress=False)
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(InputError, match=r"tokenizer '.*tokenizer\.json', not '.*copy\.json'"):
        prepare(data_config(text, tmp_path / "second", tokenizer=str(copy)), progress=False)


def test_corpus_without_training_text_requires_a_tokenizer(tmp_path: Path) -> None:
    corpus = tmp_path / "eval"
    corpus.mkdir()
    for split in ("valid", "test"):
        (corpus / f"wiki.{split}.tokens").write_text(" \n = A = \n \n some words . \n")
    with pytest.raises(InputError, match=r"no training text .*words.*tokenizer\.json"):
        prepare(data_config(corpus, tmp_path / "out", tokenizer="words"), progress=False)
    prepared = prepare(data_config(corpus, tmp_path / "bytes", tokenizer="bytes"), progress=False)
    assert list(prepared.meta.splits) == ["valid", "test"]
    with pytest.raises(InputError, match=r"bytes has no split 'train'.*valid, test"):
        prepared.split("train")


def test_hub_dataset_is_prepared(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split, count in (("train", 300), ("validation", 5), ("test", 5)):
        write_jsonl(source / f"{split}.jsonl", [f"{split} record {number}" for number in range(count)])
    prepared = prepare(data_config(Path(f"hub:{source}"), tmp_path / "out"), progress=False)
    assert [prepared.meta.splits[split].documents for split in SPLITS] == [300, 5, 5]
    tokens = prepared.split("valid")
    second_document = prepared.documents("valid")[1]
    # The token before the second document is the end token of the first document.
    assert prepared.tokenizer().decode(tokens[: second_document - 1]) == "validation record 0"


def test_hub_dataset_with_too_few_documents_raises_error(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match=r"2 documents.* valid and test"):
        prepare(data_config(Path(f"hub:{tmp_path / 'source'}"), tmp_path / "out", tokenizer="bytes"), progress=False)


# Damage


def test_files_that_do_not_match_meta_json_raise_errors(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tokens = prepare(data_config(text, folder), progress=False).meta.splits["valid"].tokens
    content = (folder / "valid.bin").read_bytes()
    (folder / "valid.bin").write_bytes(content[:-2])
    with pytest.raises(
        InputError, match=rf"valid\.bin.* {tokens:,} .* {2 * tokens:,} bytes.* {2 * tokens - 2:,} bytes"
    ):
        open_dataset(folder)
    (folder / "valid.bin").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"valid\.bin .*checksum"):
        open_dataset(folder)
    (folder / "valid.bin").unlink()
    with pytest.raises(io.MissingFileError, match=r"valid\.bin"):
        open_dataset(folder)


@pytest.mark.parametrize("name", ["train.bin", "train.documents.bin", "test.bin", "tokenizer.json"])
def test_changed_bit_is_noticed_although_the_time_is_unchanged(name: str, text: Path, tmp_path: Path) -> None:
    folder = prepare(data_config(text, tmp_path / "out"), progress=False).folder
    open_dataset(folder)
    path = folder / name
    content = path.read_bytes()
    status = path.stat()
    for position in range(0, len(content), 1 + len(content) // 10):
        changed_byte = content[position] ^ 1 << position % 8
        path.write_bytes(content[:position] + bytes([changed_byte]) + content[position + 1 :])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(InputError, match=f"{name} .*checksum"):
            open_dataset(folder)
    path.write_bytes(content)
    open_dataset(folder)


def test_verified_files_are_not_read_again(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = data_config(text, tmp_path / "out")
    prepare(config, progress=False)
    prepare(config, progress=False)  # This call also compares the corpus.
    read_files: list[str] = []
    original_sha256 = io.sha256

    def record_sha256(path: Path) -> str:
        read_files.append(path.name)
        return original_sha256(path)

    monkeypatch.setattr(io, "sha256", record_sha256)
    prepare(config, progress=False)
    assert read_files == []
    # If checked.json is damaged, all files are read.
    (tmp_path / "out" / CHECKSUM_CACHE_FILE).write_text('{"train.bin": 3')
    prepare(config, progress=False)
    assert sorted(read_files) == sorted(["text.txt", "tokenizer.json", *DATA_FILES])


def test_files_are_always_read_if_checked_json_cannot_be_written(text: Path, tmp_path: Path) -> None:
    folder = prepare(data_config(text, tmp_path / "out"), progress=False).folder
    # Nobody can write a file where a folder is, not even root.
    (folder / CHECKSUM_CACHE_FILE).unlink()
    (folder / CHECKSUM_CACHE_FILE).mkdir()
    open_dataset(folder)
    (folder / "train.bin").write_bytes(bytes((folder / "train.bin").stat().st_size))
    with pytest.raises(InputError, match=r"train\.bin .*checksum"):
        open_dataset(folder)


def test_corpus_that_changed_without_changing_size_or_time_is_noticed(text: Path, tmp_path: Path) -> None:
    config = data_config(text, tmp_path / "out")
    status = text.stat()
    prepare(config, progress=False)
    prepare(config, progress=False)
    original_text = text.read_text()
    text.write_text(original_text.replace("house", "mouse"))
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match=r"text\.txt'.*changed"):
        prepare(config, progress=False)
    text.write_text(original_text)
    prepare(config, progress=False)


def test_invalid_meta_json_raises_error(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere .*no meta\.json"):
        open_dataset(tmp_path / "nowhere")
    folder = tmp_path / "out"
    prepare(data_config(text, folder, tokenizer="bytes"), progress=False)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"vocab_size": 255}))
    with pytest.raises(InputError, match=r"(?i)checksum .*meta\.json"):
        open_dataset(folder)
    io.write_with_checksum(folder / "meta.json", meta | {"format": 7})
    with pytest.raises(InputError, match=r"meta\.json.* format 2, got 7"):
        open_dataset(folder)
    io.write_with_checksum(folder / "meta.json", meta | {"splitz": 1})
    with pytest.raises(InputError, match=r"meta\.json.* 'splitz'.* 'splits'"):
        open_dataset(folder)
    (folder / "meta.json").write_text("{")
    with pytest.raises(InputError, match=r"meta\.json.* JSON"):
        open_dataset(folder)


# The command


def run_prepare(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `trainshort prepare` in a folder, in a new process."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "trainshort", "prepare", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_command_reports_the_result_in_one_line(text: Path, tmp_path: Path) -> None:
    process = run_prepare("text.txt", "--vocab-size", "300", folder=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("data/text-bpe300: tokens train ")
    assert re.search(r"vocabulary 300\..* 1 file, \d+ documents, 0\.1 MB .* MB/s .*1 process", lines[0])
    assert load_tokenizer(tmp_path / "data" / "text-bpe300").vocab_size == 300

    second_process = run_prepare("text.txt", "--vocab-size", "300", folder=tmp_path)
    assert second_process.returncode == 0
    assert "data/text-bpe300: tokens train " in second_process.stderr


def test_command_names_skipped_files(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / "deep").mkdir()
    for name in ("a.TXT", "b.md", "deep/c.txt", ".hidden.txt", ".git/objects/x.txt", ".git/y", "old.zip", "p.png"):
        (folder / name).write_text(text.read_text() + name)
    (folder / "empty.txt").touch()
    (folder / "gone.txt").symlink_to("nowhere")
    process = run_prepare("texts", "--tokenizer", "bytes", folder=tmp_path)
    assert process.returncode == 0, process.stderr
    result_line, skipped_line = process.stderr.strip().splitlines()
    assert re.search(r" 3 files, \d+ documents, 0\.2 MB ", result_line)
    assert " 6: .git, .hidden.txt (hidden); gone.txt (" in skipped_line
    for name in ("old.zip", "p.png", "empty.txt"):
        assert f"; {name} (" in skipped_line


def test_readme_in_a_folder_with_splits_is_skipped(tmp_path: Path) -> None:
    for name in ("train.txt", "valid.txt", "test.txt", "README.md"):
        (tmp_path / name).write_text(f"{name} is a text.\n" * 20)
    corpus = find_corpus(str(tmp_path))
    assert corpus.splits == ("test", "train", "valid")
    assert [name for name, _ in corpus.skipped_files] == ["README.md"]


def test_command_shows_a_progress_bar_on_a_terminal(text: Path, tmp_path: Path) -> None:
    terminal, child_terminal = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "trainshort", "prepare", str(text), "--tokenizer", "words", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=child_terminal) as process:
        os.close(child_terminal)
        output = b""
        with contextlib.suppress(OSError):  # Reading fails when the process has closed the terminal.
            while block := os.read(terminal, 4096):
                output += block
    os.close(terminal)
    assert process.returncode == 0
    assert b"checksums" in output
    assert b" MB/s " in output


def run_main(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str]:
    """Run `trainshort prepare` in this process, and return the exit code and the output on standard error."""
    with pytest.raises(SystemExit) as exit_info:
        main(["prepare", *arguments])
    return exit_info.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bad.txt", r"bad\.txt .*UTF-8.* byte 600 \(0xff\)"),
        ("text.txt --tokenizer bpee", r"'bpee'.*Did you mean 'bpe'\?"),
        ("text.txt --workers 0", r"workers .*0"),
        ("text.txt --vocab-size 100", r"bpe .*257"),
    ],
)
def test_command_exits_with_2_for_invalid_input(
    arguments: str, message: str, text: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"".join(b"line %04d\n" % number for number in range(60)) + b"\xff\n")
    code, stderr = run_main(capsys, *arguments.split())
    assert code == 2
    assert len(stderr.splitlines()) == 1
    assert re.search(message, stderr)
    assert not (tmp_path / "data").exists()


def test_folder_of_a_failed_preparation_can_be_used(text: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _ = run_main(capsys, "text.txt", "--vocab-size", "100", "--out", "small")
    assert code == 2
    code, _ = run_main(capsys, "text.txt", "--vocab-size", "300", "--out", "small")
    assert code == 0


def test_invalid_utf8_can_be_replaced(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"".join(b"line %04d\n" % number for number in range(60)) + b"\xff\n")
    code, _ = run_main(capsys, "bad.txt", "--errors", "replace", "--tokenizer", "bytes")
    assert code == 0
    assert open_dataset("data/bad-bytes").meta.errors == "replace"
