"""Small corpora on disk, shared by the tests of this folder."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from trainshort.data.corpus import find_corpus
from trainshort.data.document import Corpus


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
