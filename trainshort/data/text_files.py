"""Text in files: one file, a folder or a glob of `.txt`, `.md`, WikiText's `.tokens`, `.raw`, or `.jsonl`, `.parquet`.

A folder whose files are named train..., valid..., test... keeps those splits; otherwise the text counts as unsplit (see
document.py).
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainshort.data.documents import HEADING, SPLITS, Document, Errors, Kind, Record, articles, group_into_documents
from trainshort.data.readers import file_rows, jsonl_rows, paragraph_rows, parquet_rows, text_rows
from trainshort.errors import InputError

TEXT_SUFFIXES = (".txt", ".md", ".tokens", ".raw", ".py")
SUFFIXES = (".txt", ".md", ".tokens", ".raw", ".jsonl", ".parquet")
ARCHIVES = (".zip", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".tar", ".7z", ".rar")
TARGET_DOCUMENTS = 256
"""A plain text is cut into about this many documents, as long as they keep a sensible size."""

_SPLIT_NAME = re.compile(r"(?:wiki\.)?(?:(train|training)|(valid|validation|val|dev)|(test))(?:[-_.].*)?")

SkippedFiles = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class TextFile:
    """One file: its split, and how its rows become documents."""

    path: Path
    split: str
    kind: Kind
    size: int


@dataclass(frozen=True)
class FileCorpus:
    """Files read one after the other; the cursor is [file, cursor in it]."""

    name: str
    files: tuple[TextFile, ...]
    fingerprint: str
    skipped_files: tuple[tuple[str, str], ...] = ()
    streamed: bool = False

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.split for file in self.files))

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    @property
    def stretch(self) -> int:
        """Size of a plain text's documents: small texts are cut finer, so that all three splits get some."""
        return min(max(self.size // TARGET_DOCUMENTS, 64), 1 << 16)

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        first, cursor = cursor or (0, None)
        before = sum(file.size for file in self.files[:first])
        for index, file in enumerate(self.files[first:], first):
            for row in self._rows(file, cursor, errors):
                if row.text:
                    yield Document(row.text, file.split, [index, row.cursor], before + row.done)
            before += file.size
            cursor = None

    def _rows(self, file: TextFile, cursor: Any, errors: Errors) -> Iterator[Record]:
        """The file's documents from a cursor on."""
        if suffix(file.path) in TEXT_SUFFIXES:
            if file.kind == "whole":
                return file_rows(file.path, cursor, errors)
            if file.kind == "articles":
                return articles(text_rows(file.path, cursor, errors))
            return paragraph_rows(file.path, cursor, errors, self.stretch)
        read = jsonl_rows if suffix(file.path) == ".jsonl" else parquet_rows
        return group_into_documents(read(file.path, cursor, errors), file.kind, self.stretch)


def file_corpus(
    name: str, paths: list[Path], root: Path | None = None, kind: Kind | None = None, skipped_files: SkippedFiles = ()
) -> FileCorpus:
    """A corpus of these files; `root` is the folder that was named, if one was. Without a `kind`, looks for it."""
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} does not exist.")
    sizes = {path: path.stat().st_size for path in paths}
    names = {path: _split_name(path, root) for path in paths}
    # A single file's name says nothing, and one that fits no split means that the others fit by accident.
    published = len(paths) > 1 and all(names.values())
    empty = [path for path in paths if not sizes[path]]
    if empty and (published or len(paths) == 1):
        raise InputError(f"{empty[0]} is empty. Give a file with text in it.")
    if len(empty) == len(paths):
        raise InputError(f"All {len(paths)} files of '{name}' are empty.")
    files = tuple(
        TextFile(path, (names[path] if published else None) or "train", kind or _kind(path), sizes[path])
        for path in paths
        if sizes[path]
    )
    parts = "".join(f"{_relative_name(file.path, root)}\0{file.size}\0{file.kind}\0{file.split}\n" for file in files)
    skipped_files = (*skipped_files, *((_relative_name(path, root), "empty") for path in empty))
    return FileCorpus(name, files, hashlib.sha256(parts.encode()).hexdigest(), skipped_files)


def folder_corpus(name: str, folder: Path, kind: Kind | None = None) -> FileCorpus:
    """All text files below a folder, in the order of their names; what is not read is named with the reason."""
    paths, skipped_files = select(
        sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()), folder
    )
    if not paths:
        raise InputError(f"{folder} holds no {', '.join(SUFFIXES)} file. Name a folder with text in it.")
    return file_corpus(name, paths, folder, kind, skipped_files)


def select(paths: list[Path], root: Path | None = None) -> tuple[list[Path], list[tuple[str, str]]]:
    """Those of the files that are read, and the others with the reason; a hidden folder is named once."""
    found: list[Path] = []
    others: dict[str, str] = {}
    for path in paths:
        parts = path.relative_to(root).parts if root else (path.name,)
        hidden = next((index for index, part in enumerate(parts) if part.startswith(".")), None)
        if hidden is not None:
            others["/".join(parts[: hidden + 1])] = "hidden"
        elif not path.is_dir():
            if reason := _skip_reason(path):
                others[_relative_name(path, root)] = reason
            else:
                found.append(path)
    # The README.md of a corpus with train, valid and test is about the text, and not of it.
    texts = [path for path in found if suffix(path) != ".md"]
    if len(texts) > 1 and all(_split_name(path, root) for path in texts):
        notes = [path for path in found if path not in texts and not _split_name(path, root)]
        others |= {
            _relative_name(path, root): "lies beside files that are named train, valid or test" for path in notes
        }
        found = [path for path in found if path not in notes]
    return found, list(others.items())


def suffix(path: Path) -> str:
    """How a file's name ends, in small letters: NOTES.TXT is a .txt."""
    return path.suffix.lower()


def _skip_reason(path: Path) -> str | None:
    """Why a file is not read, or None when it is."""
    if suffix(path) in ARCHIVES:
        return "an archive, unpack it first"
    if suffix(path) not in SUFFIXES:
        return f"not one of {', '.join(SUFFIXES)}"
    return None if path.is_file() else "no file, or a link to none"


def _relative_name(path: Path, root: Path | None) -> str:
    return path.relative_to(root).as_posix() if root else path.name


def _split_name(path: Path, root: Path | None) -> str | None:
    """The split that a file's name, or that of a folder it lies in below the named one, announces."""
    parents = path.relative_to(root).parts[:-1] if root else ()
    for part in (path.stem, *reversed(parents)):
        if match := _SPLIT_NAME.fullmatch(part):
            return SPLITS[match.lastindex - 1] if match.lastindex else None
    return None


def _kind(path: Path) -> Kind:
    """WikiText is known by its first title; other texts are cut into stretches, and records are documents."""
    if suffix(path) == ".jsonl":
        return "rows"
    read, otherwise = (parquet_rows, "rows") if suffix(path) == ".parquet" else (text_rows, "stretches")
    titled = any(HEADING.fullmatch(row.text) for row in islice(read(path, None, "replace"), 3))
    return "articles" if titled else otherwise
