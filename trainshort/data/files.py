"""Text in files: `.txt` (and WikiText's `.tokens`, `.raw`), `.jsonl` and `.parquet` with a field or column "text".

Files are read forward in small pieces, whatever their size. A folder whose files are named train..., valid..., test...
keeps those splits; otherwise the text counts as unsplit (see splits.py).
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainshort.data.document import (
    HEADING,
    Document,
    Errors,
    Grouping,
    Row,
    articles,
    as_lines,
    each,
    stretches,
    whole,
)
from trainshort.errors import InputError

TEXT_SUFFIXES = (".txt", ".tokens", ".raw", ".py")
SUFFIXES = (".txt", ".tokens", ".raw", ".jsonl", ".parquet")
LONGEST_LINE = 1 << 20
"""Bytes after which a line without an end is cut."""
STRETCHES = 256
"""A plain text is cut into about this many documents, as long as they keep a sensible size."""

_SPLIT_NAME = re.compile(r"(?:wiki\.)?(?:(train|training)|(valid|validation|val|dev)|(test))(?:[-_.].*)?")

Kind = Literal["whole", "stretches", "articles", "rows", "lines"]


@dataclass(frozen=True)
class TextFile:
    """One file: its split, and how its rows become documents."""

    path: Path
    split: str
    kind: Kind
    size: int


@dataclass(frozen=True)
class FileCorpus:
    """Files read one after the other; the cursor is [file, position in it]."""

    name: str
    files: tuple[TextFile, ...]
    fingerprint: str
    streamed: bool = False

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.split for file in self.files))

    @property
    def stretch(self) -> int:
        """Size of a plain text's documents: small texts are cut finer, so that all three splits get some."""
        return min(max(self.size // STRETCHES, 256), 1 << 16)

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        first, position = cursor or (0, None)
        before = sum(file.size for file in self.files[:first])
        for index in range(first, len(self.files)):
            file = self.files[index]
            for row in self._group(file)(self._rows(file, position, errors)):
                if row.text:
                    yield Document(row.text, file.split, [index, row.after], before + row.done)
            before += file.size
            position = None

    def _group(self, file: TextFile) -> Grouping:
        if file.kind in ("stretches", "lines"):
            return stretches(self.stretch)
        return {"whole": whole, "articles": articles, "rows": each}[file.kind]

    def _rows(self, file: TextFile, position: Any, errors: Errors) -> Iterator[Row]:
        if file.path.suffix in TEXT_SUFFIXES:
            longest = min(2 * self.stretch, LONGEST_LINE) if file.kind == "stretches" else LONGEST_LINE
            return text_rows(file.path, position, errors, longest)
        read = jsonl_rows if file.path.suffix == ".jsonl" else parquet_rows
        rows = read(file.path, position, errors)
        if file.kind == "articles":
            return as_lines(rows, blank=" \n")
        return as_lines(rows) if file.kind == "lines" else rows


def text_rows(path: Path, position: int | None, errors: Errors, longest: int = LONGEST_LINE) -> Iterator[Row]:
    """Lines of a text file; one longer than `longest` bytes is cut after a space, or between two characters."""
    with _open(path) as file:
        at = position or 0
        file.seek(at)
        while line := file.readline(longest):
            if len(line) == longest and not line.endswith(b"\n"):
                line = line[: _last_good_end(line)]
                file.seek(at + len(line))
            text = _decode(line, errors, path, at)
            if at == 0:
                text = text.removeprefix("\ufeff")  # a byte order mark says nothing in UTF-8
            at += len(line)
            yield Row(text, at, at)


def _last_good_end(line: bytes) -> int:
    """Where to cut a line that is too long: after its last space, else before a character it holds in part only."""
    space = line.rfind(b" ", len(line) // 2)
    if space >= 0:
        return space + 1
    for back in range(1, 4):
        if line[-back] & 0xC0 == 0xC0:  # the first byte of a character of two to four bytes
            return len(line) - back
    return len(line)


def jsonl_rows(path: Path, position: int | None, errors: Errors) -> Iterator[Row]:
    """The "text" of every record; a position is a byte offset."""
    with _open(path) as file:
        at = position or 0
        file.seek(at)
        for line in file:
            if line.strip():
                yield Row(_record_text(line, errors, path, at), at + len(line), at + len(line))
            at += len(line)


def _record_text(line: bytes, errors: Errors, path: Path, at: int) -> str:
    try:
        record = json.loads(_decode(line, errors, path, at))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not JSON lines: the record at byte {at} does not parse ({error}). Write one object per line."
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        came = f"the fields {', '.join(record) or 'none'}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise InputError(f"{path}: the record at byte {at} should have a field 'text' with a string; it has {came}.")
    text = record["text"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
        if errors == "strict":
            raise InputError(
                f"{path}: the record at byte {at} holds half of a surrogate pair, which is not valid Unicode. "
                "Mend it, or use --errors replace."
            ) from None
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def parquet_rows(path: Path, position: int | None, errors: Errors) -> Iterator[Row]:
    """The "text" column, row by row; a position is a row number."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path} is a parquet file, which needs pyarrow: pip install 'trainshort[hf]'.") from None
    try:
        table = pyarrow.parquet.ParquetFile(path, memory_map=True, buffer_size=1 << 20)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path} is not a readable parquet file ({error}).") from None
    columns = table.schema_arrow.names
    if "text" not in columns:
        raise InputError(f"{path} should have a column 'text'; its columns are {', '.join(columns)}.")
    size, rows, start, number = path.stat().st_size, table.metadata.num_rows, position or 0, 0
    for group in range(table.num_row_groups):
        length = table.metadata.row_group(group).num_rows
        if number + length <= start:
            number += length
            continue
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=["text"]):
            for value in batch.column(0).cast(pyarrow.binary()).to_pylist():
                number += 1
                if number > start:
                    text = _decode(value or b"", errors, path, 0, row=number - 1)
                    yield Row(text, number, size * number // rows)


def _open(path: Path):
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from None


def _decode(data: bytes, errors: Errors, path: Path, at: int, row: int | None = None) -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        where = f"byte {at + error.start}" + ("" if row is None else f" of row {row}")
        raise InputError(
            f"{path} is not valid UTF-8 at {where} (0x{data[error.start]:02x}). "
            "Convert the file, or use --errors replace to put U+FFFD in such places."
        ) from None


def file_corpus(name: str, paths: list[Path], root: Path | None = None, kind: Kind | None = None) -> FileCorpus:
    """A corpus of these files; `root` is the folder that was named, if one was. Without a `kind`, looks for it."""
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} does not exist.")
    sizes = {path: path.stat().st_size for path in paths}
    names = {path: _split_name(path, root) for path in paths}
    # A single file's name says nothing, and one that fits no split means that the others fit by accident.
    published = len(paths) > 1 and all(names.values())
    for path in paths:
        if not sizes[path] and (published or len(paths) == 1):
            raise InputError(f"{path} is empty. Give a file with text in it.")
    filled = [path for path in paths if sizes[path]]
    if not filled:
        raise InputError(f"All {len(paths)} files of '{name}' are empty.")
    files = tuple(
        TextFile(path, (names[path] if published else None) or "train", kind or _kind(path), sizes[path])
        for path in filled
    )
    digest = hashlib.sha256()
    for file in files:
        shown = file.path.relative_to(root) if root else Path(file.path.name)
        digest.update(f"{shown.as_posix()}\0{file.size}\0{file.kind}\0{file.split}\n".encode())
    return FileCorpus(name, files, digest.hexdigest())


def folder_files(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """All text files below a folder, in the order of their names; hidden ones are left out."""
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix in suffixes
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise InputError(f"{folder} holds no {', '.join(suffixes)} file. Name a folder with text in it.")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _split_name(path: Path, root: Path | None) -> str | None:
    """The split that a file's name, or that of a folder it lies in below the named one, announces."""
    parents = path.relative_to(root).parts[:-1] if root else ()
    for part in (path.stem, *reversed(parents)):
        if match := _SPLIT_NAME.fullmatch(part):
            return ("train", "valid", "test")[match.lastindex - 1] if match.lastindex else None
    return None


def _kind(path: Path) -> Kind:
    """WikiText is known by its first title; other texts are cut into stretches, and records are documents."""
    if path.suffix == ".jsonl":
        return "rows"
    if path.suffix == ".parquet":
        rows = as_lines(parquet_rows(path, None, "replace"), blank=" \n")
    else:
        rows = text_rows(path, None, "replace")
    for _, row in zip(range(3), rows, strict=False):
        if HEADING.fullmatch(row.text):
            return "articles"
    return "rows" if path.suffix == ".parquet" else "stretches"
