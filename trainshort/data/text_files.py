"""Corpora that consist of files: one file, all files of a folder, or the files that match a glob pattern.

If the names of the files begin with train, valid and test, each file belongs to the split in its name. Otherwise the
corpus counts as published without splits (see splits.py).
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainshort.data.documents import (
    HEADING,
    Document,
    DocumentKind,
    Errors,
    Record,
    group_into_articles,
    group_into_documents,
)
from trainshort.data.readers import file_rows, jsonl_rows, paragraph_rows, parquet_rows, text_rows
from trainshort.errors import InputError

# Suffixes of plain text. Python files are read only for the corpus "stdlib", which names its files itself.
TEXT_SUFFIXES = (".txt", ".md", ".tokens", ".raw", ".py")

# Suffixes of the files that a user can give. Other files in a folder are skipped.
SUFFIXES = (".txt", ".md", ".tokens", ".raw", ".jsonl", ".parquet")

ARCHIVE_SUFFIXES = (".zip", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".tar", ".7z", ".rar")

# A plain text is cut into about this many documents, if the documents then have a size within these limits.
TARGET_DOCUMENTS = 256
MIN_DOCUMENT_BYTES = 64
MAX_DOCUMENT_BYTES = 1 << 16

# Names of files and folders that tell the split, such as "wiki.valid.raw" or "train-00001".
_SPLIT_NAME = re.compile(
    r"(?:wiki\.)?(?:(?P<train>train|training)|(?P<valid>valid|validation|val|dev)|(?P<test>test))(?:[-_.].*)?"
)

# Pairs of the name of a file that is not read, and the reason.
SkippedFiles = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class TextFile:
    """One file of a corpus.

    Attributes:
        path: The file.
        split: The split that the file belongs to.
        kind: What becomes a document.
        size: The size in bytes.
    """

    path: Path
    split: str
    kind: DocumentKind
    size: int


@dataclass(frozen=True)
class FileCorpus:
    """A `Corpus` of files, which are read one after another.

    The cursor of a document is a list of two values: the index of the file, and the position in the file.
    """

    name: str
    files: tuple[TextFile, ...]
    fingerprint: str
    skipped_files: tuple[tuple[str, str], ...] = ()
    streamed: bool = False

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the files, each once, in the order of the files."""
        unique_splits = dict.fromkeys(file.split for file in self.files)
        return tuple(unique_splits)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all files."""
        return tuple(file.path for file in self.files)

    @property
    def document_size(self) -> int:
        """The smallest size, in bytes, of the documents into which a plain text is cut.

        Small texts are cut into smaller documents, so that there are enough documents for three splits.
        """
        size = max(self.size // TARGET_DOCUMENTS, MIN_DOCUMENT_BYTES)
        return min(size, MAX_DOCUMENT_BYTES)

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        """Yield all documents after a position.

        Args:
            cursor: The position after the last document that was read before: the index of its file and the position in
                the file. None starts at the first file.
            errors: What happens to bytes that are not valid UTF-8.
        """
        first_index, cursor_in_file = cursor or (0, None)
        bytes_of_earlier_files = sum(file.size for file in self.files[:first_index])
        for index, file in enumerate(self.files[first_index:], first_index):
            for record in self._read_file(file, cursor_in_file, errors):
                if record.text:
                    bytes_read = bytes_of_earlier_files + record.bytes_read
                    yield Document(record.text, file.split, [index, record.cursor], bytes_read)
            bytes_of_earlier_files += file.size
            cursor_in_file = None  # All later files are read from the start.

    def _read_file(self, file: TextFile, cursor: Any, errors: Errors) -> Iterator[Record]:
        """Return one record (the text and its position in the file) for each document of a file.

        Args:
            file: The file. Its kind says what becomes a document, for example the whole file or each WikiText article.
            cursor: The position in the file after the last document that was read before, or None for the start.
            errors: What happens to bytes that are not valid UTF-8.
        """
        file_suffix = suffix(file.path)
        if file_suffix in TEXT_SUFFIXES:
            if file.kind == "whole":
                return file_rows(file.path, cursor, errors)
            if file.kind == "articles":
                return group_into_articles(text_rows(file.path, cursor, errors))
            return paragraph_rows(file.path, cursor, errors, self.document_size)
        if file_suffix == ".jsonl":
            records = jsonl_rows(file.path, cursor, errors)
        else:
            records = parquet_rows(file.path, cursor, errors)
        return group_into_documents(records, file.kind, self.document_size)


def file_corpus(
    name: str,
    paths: list[Path],
    root: Path | None = None,
    kind: DocumentKind | None = None,
    skipped_files: SkippedFiles = (),
) -> FileCorpus:
    """Create a corpus from files.

    Args:
        name: The name of the corpus.
        paths: The files, in the order in which they are read.
        root: The folder that the user named. Names of subfolders can then also tell the split of a file.
        kind: What becomes a document. By default, the kind is chosen for each file from its suffix and its first lines.
        skipped_files: Names of files that are not read, each with the reason.

    Raises:
        InputError: If a file does not exist, or if all files, the only file or a file of a split are empty.
    """
    for path in paths:
        if not path.exists():
            raise InputError(f"File not found: {path}.")
    sizes = {path: path.stat().st_size for path in paths}
    split_names = {path: _split_from_name(path, root) for path in paths}

    # The names tell the splits only if all names do. The name of a single file does not count.
    has_published_splits = len(paths) > 1 and all(split_names.values())

    empty_paths = [path for path in paths if sizes[path] == 0]
    if empty_paths and (has_published_splits or len(paths) == 1):
        raise InputError(f"The file {empty_paths[0]} is empty. Give a file with text in it.")
    if len(empty_paths) == len(paths):
        raise InputError(f"All {len(paths)} files of '{name}' are empty.")

    files = []
    for path in paths:
        if sizes[path] == 0:
            continue
        split = "train"
        if has_published_splits:
            split = split_names[path] or "train"
        files.append(TextFile(path, split, kind or _detect_kind(path), sizes[path]))

    fingerprint = hashlib.sha256()
    for file in files:
        line = f"{_relative_name(file.path, root)}\0{file.size}\0{file.kind}\0{file.split}\n"
        fingerprint.update(line.encode())
    skipped_empty_files = [(_relative_name(path, root), "empty") for path in empty_paths]
    return FileCorpus(name, tuple(files), fingerprint.hexdigest(), (*skipped_files, *skipped_empty_files))


def folder_corpus(name: str, folder: Path, kind: DocumentKind | None = None) -> FileCorpus:
    """Create a corpus from all text files of a folder and its subfolders, in the order of their names.

    Args:
        name: The name of the corpus.
        folder: The folder.
        kind: What becomes a document, for example "whole" (each file) or "rows" (each row of a table). By default, the
            kind is chosen for each file.

    Raises:
        InputError: If the folder contains no text file, or if the files are empty.
    """
    all_paths = sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix())
    paths, skipped_files = select_text_files(all_paths, folder)
    if not paths:
        raise InputError(f"{folder} contains no {', '.join(SUFFIXES)} file. Give a folder with text files.")
    return file_corpus(name, paths, folder, kind, skipped_files)


def select_text_files(paths: list[Path], root: Path | None = None) -> tuple[list[Path], list[tuple[str, str]]]:
    """Select the files that are read as text.

    Args:
        paths: Files and folders. Folders are ignored.
        root: The folder that the user named, if any. Files in hidden folders below it are skipped.

    Returns:
        Two lists. The first list contains the files to read. The second list contains the name of each skipped file
        and the reason. All files of a hidden folder are one entry.
    """
    text_files: list[Path] = []
    skipped: dict[str, str] = {}
    for path in paths:
        hidden_name = _hidden_part(path, root)
        if hidden_name is not None:
            skipped[hidden_name] = "hidden"
        elif not path.is_dir():
            reason = _skip_reason(path)
            if reason is None:
                text_files.append(path)
            else:
                skipped[_relative_name(path, root)] = reason

    # A README next to files that are named train, valid or test describes the corpus, and is not part of it.
    for path in _find_readme_files(text_files, root):
        skipped[_relative_name(path, root)] = "in a folder of files that are named train, valid or test"
        text_files.remove(path)
    return text_files, list(skipped.items())


def _hidden_part(path: Path, root: Path | None) -> str | None:
    """Return the first hidden folder of a path, or the file itself if only the file is hidden. Otherwise return None.

    Names of hidden files and folders start with a period.

    Args:
        path: The path of a file or a folder.
        root: The folder that the user named. Only names below `root` count. None checks only the last name of the path.

    Example:
        For the path "/texts/.git/logs/HEAD" and the root "/texts", the result is ".git".
    """
    parts = path.relative_to(root).parts if root else (path.name,)
    for index, part in enumerate(parts):
        if part.startswith("."):
            return "/".join(parts[: index + 1])
    return None


def _find_readme_files(text_files: list[Path], root: Path | None) -> list[Path]:
    """Return the Markdown files that describe a corpus with splits, such as its README.md.

    The result is empty unless there are at least two other files, and all of them are named train, valid or test.

    Args:
        text_files: All text files of the corpus.
        root: The folder that the user named, if any. Only the names of folders below `root` count.
    """
    other_files = [path for path in text_files if suffix(path) != ".md"]
    has_splits = len(other_files) > 1 and all(_split_from_name(path, root) for path in other_files)
    if not has_splits:
        return []
    markdown_files = [path for path in text_files if suffix(path) == ".md"]
    return [path for path in markdown_files if _split_from_name(path, root) is None]


def suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case: ".txt" for NOTES.TXT."""
    return path.suffix.lower()


def _skip_reason(path: Path) -> str | None:
    """Return why a file is not read, or None if it is read."""
    if suffix(path) in ARCHIVE_SUFFIXES:
        return "an archive, unpack it first"
    if suffix(path) not in SUFFIXES:
        return f"not one of {', '.join(SUFFIXES)}"
    if not path.is_file():
        return "not a regular file, or a broken link"
    return None


def _relative_name(path: Path, root: Path | None) -> str:
    """Return the path below the folder `root`, or the name of the file if there is no such folder."""
    return path.relative_to(root).as_posix() if root else path.name


def _split_from_name(path: Path, root: Path | None) -> str | None:
    """Return the split ("train", "valid" or "test") after which a file or one of its folders is named, or None.

    Args:
        path: The file.
        root: The folder that the user named. Only the names of folders below `root` count.

    Example:
        The split of "wiki.valid.tokens" and of "validation/part-1.txt" is "valid".
    """
    folder_names = path.relative_to(root).parts[:-1] if root else ()
    for name in (path.stem, *reversed(folder_names)):
        match = _SPLIT_NAME.fullmatch(name)
        if match is not None:
            return match.lastgroup  # The groups of the pattern are named train, valid and test.
    return None


def _detect_kind(path: Path) -> DocumentKind:
    """Return how a text file is split into documents: into rows, stretches of plain text, or WikiText articles.

    "rows" makes each row of a table a document. "stretches" cuts a plain text after paragraphs. A file of WikiText is
    recognized by an article title, such as " = Title = ", in its first three lines.
    """
    if suffix(path) == ".jsonl":
        return "rows"
    if suffix(path) == ".parquet":
        records = parquet_rows(path, cursor=None, errors="replace")
        default_kind: DocumentKind = "rows"
    else:
        records = text_rows(path, cursor=None, errors="replace")
        default_kind = "stretches"
    first_records = islice(records, 3)
    has_title = any(HEADING.fullmatch(record.text) for record in first_records)
    return "articles" if has_title else default_kind
