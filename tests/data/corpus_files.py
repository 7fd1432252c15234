"""Helpers for tests of the data package: write small corpora, prepare them, and compare the results."""

import hashlib
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from trainshort.config.run_config import DataConfig
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import CHECKSUM_CACHE_FILE, PreparedDataset
from trainshort.data.documents import Corpus


def write_parquet(path: Path, texts: list, group: int = 3, column: str = "text") -> None:
    """Write a Parquet file with one column. A row group has `group` rows."""
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), path, row_group_size=group)


def write_jsonl(path: Path, texts: list[str]) -> None:
    """Write a JSON Lines file with the texts in the field "text"."""
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    path.write_text("".join(lines))


def texts(corpus: Corpus, **options) -> list[str]:
    """Return the texts of all documents of a corpus. The options are those of `Corpus.documents`."""
    return [document.text for document in corpus.documents(**options)]


def make_corpus(folder: Path, name: str, count: int) -> Corpus:
    """Return a corpus of `count` short documents, in a file NAME.jsonl. The texts are name000, name001, ..."""
    path = folder / f"{name}.jsonl"
    write_jsonl(path, [f"{name}{number:03d}" for number in range(count)])
    return find_corpus(str(path))


def data_config(corpus: Path, folder: Path | None, **changes) -> DataConfig:
    """Return settings for a dataset with a small vocabulary."""
    return DataConfig.parse({"corpus": str(corpus), "folder": folder, "vocab_size": 300} | changes)


def verify_all_files(prepared: PreparedDataset) -> None:
    """Verify all files of a dataset, also the files that were verified before."""
    (prepared.folder / CHECKSUM_CACHE_FILE).unlink()
    prepared.verify()


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name, without checked.json, which contains inodes and times."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUM_CACHE_FILE)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
