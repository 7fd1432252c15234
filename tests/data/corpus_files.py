"""Small corpora on disk, and what is prepared of them, shared by the tests of this folder."""

import hashlib
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from trainshort.config.run_config import DataConfig
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import CHECKSUM_CACHE_FILE as CHECKED_FILE
from trainshort.data.dataset import PreparedDataset
from trainshort.data.documents import Corpus


def write_parquet(path: Path, texts: list, group: int = 3, column: str = "text") -> None:
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), path, row_group_size=group)


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def texts(corpus: Corpus, **options) -> list[str]:
    return [document.text for document in corpus.documents(**options)]


def part(folder: Path, name: str, count: int) -> Corpus:
    path = folder / f"{name}.jsonl"
    write_jsonl(path, [f"{name}{n:03d}" for n in range(count)])
    return find_corpus(str(path))


def settings(text: Path, folder: Path | None, **changes) -> DataConfig:
    return DataConfig.parse({"corpus": str(text), "folder": folder, "vocab_size": 300} | changes)


def verify(prepared: PreparedDataset) -> None:
    """Read everything once more, whatever is remembered, and compare it with the checksums."""
    (prepared.folder / CHECKED_FILE).unlink()
    prepared.verify()


def content(folder: Path) -> dict[str, str]:
    """All files but the note of when they were checked, which names inodes and times."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKED_FILE)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
