"""`prepare`: the same bytes whatever the workers and interruptions, nothing overwritten, damage noticed."""

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
from corpus_files import content, settings, verify, write_jsonl

from trainshort.cli.main import main
from trainshort.config.run_config import DataConfig, RunConfig, load_config
from trainshort.data import preparation as pipeline_module
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import CHECKSUM_CACHE_FILE as CHECKED_FILE
from trainshort.data.dataset import open_dataset, token_type
from trainshort.data.dataset_request import data_folder
from trainshort.data.documents import SPLITS
from trainshort.data.preparation import open_or_prepare, prepare
from trainshort.data.splits import make_splitter
from trainshort.data.tokenizers.base import load_tokenizer
from trainshort.errors import InputError
from trainshort.train.loop import train
from trainshort.utils import io

PARAGRAPH = "The people's house stands on a hill, said number {n}; 1,024 steps — é, 中, 🙂 — lead to it.\nSo be it.\n\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(PARAGRAPH.format(n=n) for n in range(600)))
    return path


@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe"])
def test_what_is_prepared_is_the_text(tokenizer: str, text: Path, tmp_path: Path) -> None:
    prepared = prepare(settings(text, tmp_path / "out", tokenizer=tokenizer), progress=False)
    found = prepared.tokenizer()
    corpus = find_corpus(str(text))
    rule = make_splitter(corpus, "strict")
    by_split: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for document in corpus.documents():
        by_split[rule.split(document)].append(document.text)
    for split, documents in by_split.items():
        tokens, starts, meta = prepared.split(split), prepared.documents(split), prepared.meta.splits[split]
        assert meta.tokens == len(tokens)
        assert meta.documents == len(starts) == len(documents) > 0
        assert meta.bytes == sum(len(document.encode()) for document in documents)
        assert meta.words == sum(len(document.split()) for document in documents)
        ends = [*starts[1:], len(tokens)]
        for document, start, end in zip(documents, starts, ends, strict=True):
            assert tokens[start:end].tolist() == found.encode_document(document).tolist()
    verify(prepared)
    assert prepared.meta.vocab_size == found.vocab_size
    assert prepared.meta.tokenizer == tokenizer
    assert prepared.meta.request.corpus == str(text)
    assert sorted(path.name for path in prepared.folder.iterdir()) == sorted(
        [f"{s}{kind}.bin" for s in by_split for kind in ("", ".documents")]
        + ["checked.json", "meta.json", "tokenizer.json"]
    )


def test_the_smallest_type_that_fits_is_used(text: Path, tmp_path: Path) -> None:
    assert [token_type(size) for size in (2, 256, 257, 65536, 65537)] == ["uint8", "uint8"] + ["uint16"] * 2 + [
        "uint32"
    ]
    small = prepare(settings(text, tmp_path / "bytes", tokenizer="bytes"), progress=False)
    assert small.split("train").dtype == np.uint8
    assert prepare(settings(text, tmp_path / "bpe"), progress=False).split("train").dtype == np.uint16


def test_the_number_of_workers_changes_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "PIECE_CHARACTERS", 1000)
    for workers in (1, 2, 3):
        prepare(settings(text, tmp_path / str(workers)), progress=False, workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "2") == content(tmp_path / "3")


def test_preparing_again_opens_what_is_there(text: Path, tmp_path: Path) -> None:
    config = settings(text, tmp_path / "out")
    first = prepare(config, progress=False)
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    assert prepare(config, progress=False).meta == first.meta
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == times
    text.unlink()  # prepared data outlives its source
    assert prepare(config, progress=False).meta == first.meta


def test_a_folder_made_from_something_else_is_refused(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(settings(text, out), progress=False)
    before = content(out)
    for changes, message in (
        (
            {"tokenizer": "bytes"},
            r"out was prepared from tokenizer 'bpe', not 'bytes'\. Choose another folder with --out",
        ),
        ({"vocab_size": 400}, r"was prepared from vocabulary 300, not 400\."),
        ({"corpus": "stdlib"}, r"was prepared from corpus '.*text\.txt', not 'stdlib'"),
        ({"corpus": "stdlib", "tokenizer": "words"}, r"corpus '.*', not 'stdlib'; tokenizer 'bpe', not 'words'"),
    ):
        with pytest.raises(InputError, match=message):
            prepare(settings(text, out).replace(**changes), progress=False)
    text.write_text(text.read_text() + "more")
    with pytest.raises(InputError, match=r"an earlier state of '.*text\.txt', whose files have changed"):
        prepare(settings(text, out), progress=False)
    assert content(out) == before


def test_a_folder_that_holds_other_things_is_left_alone(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.bin").write_text("precious")
    with pytest.raises(InputError, match=r"out exists and holds other files \(train\.bin\)\. Choose another"):
        prepare(settings(text, tmp_path / "out"), progress=False)
    assert (tmp_path / "out" / "train.bin").read_text() == "precious"
    with pytest.raises(
        InputError, match=r"text\.txt is a file, and a folder was expected there\. Choose another --out"
    ):
        prepare(settings(text, text), progress=False)


def test_a_named_folder_is_opened_as_it_is_for_training(text: Path, tmp_path: Path) -> None:
    made = prepare(settings(text, tmp_path / "out", tokenizer="bytes"), progress=False)
    assert open_or_prepare(DataConfig(folder=tmp_path / "out")).meta == made.meta
    for wrong, message in (
        ("outt", r"data\.folder .*outt is not a prepared data folder.*prepare sotu --out"),
        ("text.txt", r"data\.folder .*text\.txt is a file\. Turn it into tokens by `trainshort prepare "),
    ):
        with pytest.raises(InputError, match=message):
            open_or_prepare(DataConfig(folder=tmp_path / wrong), progress=False)
    assert not (tmp_path / "outt").exists()


def test_a_run_records_what_it_was_really_trained_on(text: Path, tmp_path: Path) -> None:
    config = settings(text, tmp_path / "out", tokenizer="bytes")
    prepare(config, progress=False)
    run = RunConfig.parse({"model": {"layers": 1, "width": 8, "heads": 1}, "train": {"steps": 1, "length": 8}})
    train(run.replace(data={"folder": tmp_path / "out"}), tmp_path / "run", quiet=True)
    stored = load_config(tmp_path / "run" / "config.json").data
    assert (stored.corpus, stored.tokenizer, stored.folder) == (str(text), "bytes", tmp_path / "out")
    train(run.replace(data={"folder": tmp_path / "out"}), tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize(
    ("given", "folder"),
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
def test_folders_are_named_after_what_they_hold(given: dict, folder: str) -> None:
    assert data_folder(DataConfig.parse(given)) == Path(folder)


def test_a_path_gives_the_folder_its_last_name(text: Path) -> None:
    assert data_folder(settings(text, None)) == Path("data/text-bpe300")
    assert data_folder(settings(text.parent, None)).name == f"{text.parent.name}-bpe300"


def test_the_tokenizer_of_other_data_can_be_used(text: Path, tmp_path: Path) -> None:
    prepare(settings(text, tmp_path / "first"), progress=False)
    saved = tmp_path / "first" / "tokenizer.json"
    again = prepare(settings(text, tmp_path / "second", tokenizer=str(saved)), progress=False)
    assert content(tmp_path / "first")["train.bin"] == content(tmp_path / "second")["train.bin"]
    assert again.meta.request.vocab_size is None
    assert again.meta.tokenizer == again.tokenizer().name == "first"
    copy = tmp_path / "copy.json"
    copy.write_bytes(saved.read_bytes())
    prepare(settings(text, tmp_path / "second", tokenizer=str(copy)), progress=False)
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(InputError, match=r"tokenizer '.*tokenizer\.json', not '.*copy\.json'"):
        prepare(settings(text, tmp_path / "second", tokenizer=str(copy)), progress=False)


def test_held_out_text_alone_needs_a_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    folder.mkdir()
    for split in ("valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(" \n = A = \n \n some words . \n")
    with pytest.raises(InputError, match=r"has no training text to build a words vocabulary from\. Give the tokenizer"):
        prepare(settings(folder, tmp_path / "out", tokenizer="words"), progress=False)
    prepared = prepare(settings(folder, tmp_path / "bytes", tokenizer="bytes"), progress=False)
    assert list(prepared.meta.splits) == ["valid", "test"]
    with pytest.raises(InputError, match=r"bytes has no split 'train'; it has valid, test"):
        prepared.split("train")


def test_a_hub_dataset_is_prepared(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split, count in (("train", 300), ("validation", 5), ("test", 5)):
        write_jsonl(source / f"{split}.jsonl", [f"{split} record {n}" for n in range(count)])
    prepared = prepare(settings(Path(f"hub:{source}"), tmp_path / "out"), progress=False)
    assert [prepared.meta.splits[split].documents for split in ("train", "valid", "test")] == [300, 5, 5]
    tokens, starts = prepared.split("valid"), prepared.documents("valid")
    assert prepared.tokenizer().decode(tokens[: starts[1] - 1]) == "validation record 0"


def test_a_hub_dataset_too_small_to_split_by_chance_is_told(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match=r"has 2 documents, and none for valid and test\. Give more text"):
        prepare(settings(Path(f"hub:{tmp_path / 'source'}"), tmp_path / "out", tokenizer="bytes"), progress=False)


# Damage

DAMAGED = r"is damaged or belongs to another preparation: its checksum is not the one in meta\.json"


def test_files_that_do_not_match_their_meta_are_refused(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokens = prepare(settings(text, out), progress=False).meta.splits["valid"].tokens
    data = (out / "valid.bin").read_bytes()
    (out / "valid.bin").write_bytes(data[:-2])
    message = rf"valid\.bin should hold {tokens:,} tokens in {2 * tokens:,} bytes .* but has {2 * tokens - 2:,} bytes"
    with pytest.raises(InputError, match=message):
        open_dataset(out)
    (out / "valid.bin").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InputError, match=r"valid\.bin " + DAMAGED):
        open_dataset(out)
    (out / "valid.bin").unlink()
    with pytest.raises(InputError, match=r"There is no file .*valid\.bin"):
        open_dataset(out)


@pytest.mark.parametrize("name", ["train.bin", "train.documents.bin", "test.bin", "tokenizer.json"])
def test_every_changed_bit_is_noticed_whatever_the_times_say(name: str, text: Path, tmp_path: Path) -> None:
    out = prepare(settings(text, tmp_path / "out"), progress=False).folder
    open_dataset(out)
    path = out / name
    whole, times = path.read_bytes(), path.stat()
    for at in range(0, len(whole), 1 + len(whole) // 10):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(InputError, match=f"{name} {DAMAGED}"):
            open_dataset(out)
    path.write_bytes(whole)
    open_dataset(out)


def test_what_was_found_whole_is_not_read_again(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(text, tmp_path / "out")
    prepare(config, progress=False)
    prepare(config, progress=False)  # the corpus is compared too
    read: list[str] = []
    original = io.sha256
    monkeypatch.setattr(io, "sha256", lambda path: read.append(path.name) or original(path))
    prepare(config, progress=False)
    assert read == []
    (tmp_path / "out" / CHECKED_FILE).write_text('{"train.bin": 3')  # a memory that is damaged is none
    prepare(config, progress=False)
    assert sorted(read) == sorted(
        ["text.txt", "tokenizer.json"] + [f"{s}{kind}.bin" for s in SPLITS for kind in ("", ".documents")]
    )


def test_a_folder_that_cannot_be_written_is_checked_every_time(text: Path, tmp_path: Path) -> None:
    out = prepare(settings(text, tmp_path / "out"), progress=False).folder
    (out / CHECKED_FILE).unlink()
    (out / CHECKED_FILE).mkdir()  # stands for a folder without write permission, which root would pass
    open_dataset(out)
    (out / "train.bin").write_bytes(bytes((out / "train.bin").stat().st_size))
    with pytest.raises(InputError, match=r"train\.bin is damaged"):
        open_dataset(out)


def test_a_corpus_edited_without_changing_its_size_is_noticed(text: Path, tmp_path: Path) -> None:
    config, times = settings(text, tmp_path / "out"), text.stat()
    prepare(config, progress=False)
    prepare(config, progress=False)
    whole = text.read_text()
    text.write_text(whole.replace("house", "mouse"))
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(InputError, match=r"an earlier state of '.*text\.txt', whose files have changed"):
        prepare(config, progress=False)
    text.write_text(whole)
    prepare(config, progress=False)


def test_a_meta_that_cannot_be_used_is_told(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere is not a prepared data folder \(it has no meta\.json\)"):
        open_dataset(tmp_path / "nowhere")
    out = tmp_path / "out"
    prepare(settings(text, out, tokenizer="bytes"), progress=False)
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps(meta | {"vocab_size": 255}))
    with pytest.raises(InputError, match=r"meta\.json was changed after it was written: its checksum is another"):
        open_dataset(out)
    io.write_with_checksum(out / "meta.json", meta | {"format": 7})
    with pytest.raises(InputError, match=r"meta\.json has format 7, and this version of trainshort reads format 2"):
        open_dataset(out)
    io.write_with_checksum(out / "meta.json", meta | {"splitz": 1})
    with pytest.raises(InputError, match=r"In .*meta\.json: Unknown setting 'splitz'\. Did you mean 'splits'\?"):
        open_dataset(out)
    (out / "meta.json").write_text("{")
    with pytest.raises(InputError, match=r"meta\.json: it is not readable JSON"):
        open_dataset(out)


# The command


def run_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "trainshort", "prepare", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_command_prepares_and_reports_one_line(text: Path, tmp_path: Path) -> None:
    done = run_command("text.txt", "--vocab-size", "300", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("data/text-bpe300: tokens train ")
    assert re.search(r"vocabulary 300\. Read 1 file, \d+ documents, 0\.1 MB in \d", lines[0])
    assert " MB/s by 1 process." in lines[0]
    assert load_tokenizer(tmp_path / "data" / "text-bpe300").vocab_size == 300
    again = run_command("text.txt", "--vocab-size", "300", folder=tmp_path)
    assert again.returncode == 0
    assert again.stderr.startswith("Already prepared. data/text-bpe300: tokens train ")


def test_a_folder_tells_what_was_read_and_what_was_not(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / "deep").mkdir()
    for name in ("a.TXT", "b.md", "deep/c.txt", ".hidden.txt", ".git/objects/x.txt", ".git/y", "old.zip", "p.png"):
        (folder / name).write_text(text.read_text() + name)
    (folder / "empty.txt").touch()
    (folder / "gone.txt").symlink_to("nowhere")
    done = run_command("texts", "--tokenizer", "bytes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.strip().splitlines()
    assert re.search(r"Read 3 files, \d+ documents, 0\.2 MB in ", first)
    formats = ".txt, .md, .tokens, .raw, .jsonl, .parquet"
    assert second == (
        "Passed over 6: .git, .hidden.txt (hidden); gone.txt (no file, or a link to none); "
        f"old.zip (an archive, unpack it first); p.png (not one of {formats}); empty.txt (empty)."
    )


def test_a_readme_beside_published_splits_is_not_text(tmp_path: Path) -> None:
    for name in ("train.txt", "valid.txt", "test.txt", "README.md"):
        (tmp_path / name).write_text(f"{name} is a text.\n" * 20)
    corpus = find_corpus(str(tmp_path))
    assert corpus.splits == ("test", "train", "valid")
    assert corpus.skipped_files == (("README.md", "lies beside files that are named train, valid or test"),)


def test_a_terminal_shows_a_bar(text: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "trainshort", "prepare", str(text), "--tokenizer", "words", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is gone when the command ends
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert child.returncode == 0
    assert b"checksums" in shown
    assert b"MB/s by 1 process." in shown


def test_the_command_tells_mistakes_in_a_sentence(text: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"".join(b"line %04d\n" % n for n in range(60)) + b"\xff\n")

    def exits_with_two(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["prepare", *arguments])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    assert "trainshort: bad.txt is not valid UTF-8 at byte 600 (0xff)" in exits_with_two("bad.txt")
    assert "'bpee' is no tokenizer: use bpe, bytes, words" in exits_with_two("text.txt", "--tokenizer", "bpee")
    assert "Did you mean 'bpe'?" in exits_with_two("text.txt", "--tokenizer", "bpee")
    assert "workers must be at least 1, not 0" in exits_with_two("text.txt", "--workers", "0")
    assert not (tmp_path / "data" / "text-bpee").exists()
    assert "bpe needs a vocabulary of at least 257" in exits_with_two(
        "text.txt", "--vocab-size", "100", "--out", "small"
    )
    # A preparation that failed before it had any tokens is no obstacle.
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "text.txt", "--vocab-size", "300", "--out", "small"])
    assert stopped.value.code == 0
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "bad.txt", "--errors", "replace", "--tokenizer", "bytes"])
    assert stopped.value.code == 0
    assert open_dataset("data/bad-bytes").meta.errors == "replace"


# The demo's data


def test_the_default_data_is_fixed_for_good(tmp_path: Path) -> None:
    """Golden: other tokens would change every published number. Also covers the embedded corpus end to end."""
    prepared = prepare(DataConfig(folder=tmp_path / "sotu"), progress=False)
    assert {name: split.tokens for name, split in prepared.meta.splits.items()} == SOTU_TOKENS
    assert prepared.meta.splits["valid"].sha256[:16] == SOTU_VALID


SOTU_TOKENS = {"train": 2_979_399, "valid": 163_627, "test": 171_644}
SOTU_VALID = "9fd498c990491fd2"
