"""The folder of a prepared dataset: its files, how it is opened, and how its files are verified.

    train.bin             the tokens as little-endian unsigned integers of the smallest sufficient size
    train.documents.bin   the position in train.bin where each document begins, as int64
    valid.bin, valid.documents.bin, test.bin, test.documents.bin
    tokenizer.json        the tokenizer in the format of the Hugging Face library `tokenizers`
    meta.json             the description of the dataset; it is written last, so a folder with it is complete
    checked.json          which files were verified before; it may be deleted

All files are verified when a dataset is opened. A file that was verified before is only read again if its size, times
or inode have changed.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt

from trainshort.config.base import StrictConfig
from trainshort.data.tokenizers.base import TOKENIZER_FILE as TOKENIZER_FILE
from trainshort.data.tokenizers.base import Tokenizer, load_tokenizer
from trainshort.errors import InputError
from trainshort.utils import io

log = logging.getLogger(__name__)

DATASET_FORMAT = 2
"""The version of the format of dataset folders. Folders with another version are rejected."""

META_FILE = "meta.json"
UNFINISHED_FILE = "unfinished.json"
CHECKSUM_CACHE_FILE = "checked.json"

# The data type of document offsets: little-endian int64.
OFFSET_TYPE = "<i8"

# Two changes of a file within this time can get the same modification time.
MTIME_RESOLUTION_SECONDS = 0.02

# Reading more bytes than this takes seconds, so the user is told that files are verified.
LOG_ABOVE_BYTES = 1 << 31

PREPARE_AGAIN_HINT = "Delete the folder and prepare it again, or restore its files."


# ---- verification of files


class ChecksumCache:
    """Remembers which files were verified, so that unchanged files are not read again.

    The file checked.json stores the SHA-256 of each file together with a description of its state (size, times and
    inode). If checked.json is missing or damaged, all files are read. If it cannot be written, nothing is remembered.

    Attributes:
        known: The state and the SHA-256 that belong together, by the name of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CHECKSUM_CACHE_FILE
        # For each verified file, or group of files: the state (size and times) at the verification, and the checksum.
        self.known: dict[str, list[str]] = {}
        with suppress(InputError):
            self.known = io.read_json_object(self._path)
        self._stored = dict(self.known)

    def matches(self, name: str, paths: Sequence[Path], expected: str) -> bool:
        """Return whether files have the expected content. Files are only read if they may have changed.

        checked.json stores the state (sizes and times) of files whose content was verified before.

        Args:
            name: The name of the entry in checked.json, such as "train.bin".
            paths: The file, or several files that are verified together.
            expected: The expected result of `content_sha256`.
        """
        state = _describe_state(paths)
        if self.known.get(name) == [state, expected]:
            return True
        _wait_for_mtime_resolution(paths)
        state = _describe_state(paths)
        actual = content_sha256(paths)
        is_unchanged = state == _describe_state(paths)  # False if a file was written while it was read.
        if actual == expected and is_unchanged:
            self.known[name] = [state, expected]
        return actual == expected

    def save(self) -> None:
        """Write checked.json if it has changed and the folder is writable."""
        if self.known != self._stored:
            with suppress(InputError):
                io.write_atomic(self._path, json.dumps(self.known, indent=1) + "\n")


def content_sha256(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a file. For several files, return the SHA-256 of the list of their checksums."""
    checksums = [io.sha256(path) for path in paths]
    if len(checksums) == 1:
        return checksums[0]
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()


def _describe_state(paths: Sequence[Path]) -> str:
    """Return a text that changes if a file is modified or replaced, or if its times are changed. No file is read.

    For one file, the text consists of its size, its times and its inode number. For several files, the text is a hash.
    """
    lines = []
    for path in paths:
        status = _stat(path)
        lines.append(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}")
    if len(lines) == 1:
        return lines[0]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _wait_for_mtime_resolution(paths: Sequence[Path]) -> None:
    """Wait until the last change of the files is so long ago that a new change will get another time.

    File systems store times with a limited resolution. Without the wait, a change directly after the verification could
    get the same time as the last change, and would not be noticed.
    """
    newest_change = max((_stat(path).st_ctime_ns for path in paths), default=0) / 1e9
    age = time.time() - newest_change  # It is negative if the clock was set back.
    if 0 <= age < MTIME_RESOLUTION_SECONDS:
        time.sleep(MTIME_RESOLUTION_SECONDS)


def _stat(path: Path) -> os.stat_result:
    """Return the status of a regular file. `InputError` is raised for other paths."""
    with io.open_file(path) as file:
        return os.fstat(file.fileno())


# ---- meta.json


class DataRequest(StrictConfig):
    """What the user requested. A folder that was prepared for another request is not used."""

    corpus: str
    """The name, path, glob pattern or hub dataset that the user gave."""
    fingerprint: str
    """The hash that `Corpus.fingerprint` returned, for example of the names and sizes of the files."""
    content: str | None = None
    """The SHA-256 of the content of the files, or None for a streamed corpus."""
    tokenizer: str
    """The name of a tokenizer, or the path of a tokenizer.json."""
    tokenizer_sha256: str | None
    """The SHA-256 of the tokenizer.json that the user gave, or None."""
    vocab_size: int | None
    """The requested vocabulary size, or None if the tokenizer has a fixed size."""


class SplitMeta(StrictConfig):
    """The size and the checksums of one split."""

    tokens: int = 0
    """The number of tokens."""
    words: int = 0
    """The number of words between white space, for the perplexity per word."""
    bytes: int = 0
    """The size of the text in bytes of UTF-8, for the loss in bits per byte."""
    documents: int = 0
    """The number of documents."""
    sha256: str = ""
    """The SHA-256 of the file with the tokens."""
    documents_sha256: str = ""
    """The SHA-256 of the file with the document offsets."""


class DatasetMeta(StrictConfig):
    """The content of meta.json."""

    format: int = DATASET_FORMAT
    """The version of the format."""
    request: DataRequest
    """The request for which the dataset was prepared."""
    tokenizer: str
    """The short name of the tokenizer."""
    tokenizer_sha256: str
    """The SHA-256 of tokenizer.json."""
    vocab_size: int
    """The size of the vocabulary. A model must have at least this size."""
    end: int | None
    """The token after each document, or None."""
    dtype: Literal["uint8", "uint16", "uint32"]
    """The data type of the tokens in the files."""
    errors: Literal["strict", "replace"]
    """What happened to bytes that were not valid UTF-8."""
    splits: dict[str, SplitMeta]
    """The splits by name."""

    @property
    def bos(self) -> int:
        """The token that a model reads before the first token of a text. It is the end token, as in fairseq."""
        return self.end or 0


# ---- the dataset


@dataclass(frozen=True)
class PreparedDataset:
    """An open dataset.

    Attributes:
        folder: The folder of the dataset.
        meta: The content of meta.json.
    """

    folder: Path
    meta: DatasetMeta

    def split(self, name: str) -> UInt[np.ndarray, " tokens"]:
        """Return the tokens of a split ("train", "valid" or "test").

        The array is mapped from the disk, so tokens are read when they are used.

        Raises:
            InputError: If the dataset has no such split.
        """
        return _map_array(bin_path(self.folder, name), self._split_meta(name).tokens, self.meta.dtype)

    def documents(self, name: str) -> Int64[np.ndarray, " documents"]:
        """Return the position of the first token of each document in a split.

        Raises:
            InputError: If the dataset has no such split.
        """
        return _map_array(offsets_path(self.folder, name), self._split_meta(name).documents, OFFSET_TYPE)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the dataset."""
        return load_tokenizer(self.folder, name=self.meta.tokenizer)

    def verify(self) -> None:
        """Compare all files with the checksums in meta.json. Files that were verified before are not read again.

        Raises:
            InputError: If a file has another checksum.
        """
        cache = ChecksumCache(self.folder)
        expected_checksums = {self.folder / TOKENIZER_FILE: self.meta.tokenizer_sha256}
        for name, split in self.meta.splits.items():
            expected_checksums[bin_path(self.folder, name)] = split.sha256
            expected_checksums[offsets_path(self.folder, name)] = split.documents_sha256

        total_bytes = sum(_stat(path).st_size for path in expected_checksums)
        if total_bytes > LOG_ABOVE_BYTES and not cache.known:
            log.info(f"verifying the files of {self.folder}, because they were not verified before ...")
        for path, checksum in expected_checksums.items():
            if not cache.matches(path.name, [path], checksum):
                raise InputError(
                    f"{path} is damaged or belongs to another preparation: its checksum differs from the checksum in "
                    f"meta.json. {PREPARE_AGAIN_HINT}"
                )
        cache.save()

    def _split_meta(self, name: str) -> SplitMeta:
        """Return the description of a split. `InputError` is raised if there is no such split."""
        if name not in self.meta.splits:
            raise InputError(f"{self.folder} has no split '{name}'; it has {', '.join(self.meta.splits)}.")
        return self.meta.splits[name]


def bin_path(folder: Path, split: str) -> Path:
    """Return the path of the file with the tokens of a split."""
    return folder / f"{split}.bin"


def offsets_path(folder: Path, split: str) -> Path:
    """Return the path of the file with the document offsets of a split."""
    return folder / f"{split}.documents.bin"


def token_type(vocab_size: int) -> Literal["uint8", "uint16", "uint32"]:
    """Return the smallest unsigned integer type that holds all tokens of a vocabulary."""
    if vocab_size <= 1 << 8:
        return "uint8"
    if vocab_size <= 1 << 16:
        return "uint16"
    return "uint32"


def is_dataset_folder(folder: Path | str) -> bool:
    """Return whether a folder has a meta.json. The content of the folder is not checked."""
    return os.path.lexists(Path(folder) / META_FILE)


def open_dataset(folder: Path | str) -> PreparedDataset:
    """Open a prepared dataset, and verify the sizes and checksums of its files.

    Args:
        folder: The folder of the dataset.

    Raises:
        InputError: If the folder is not a complete dataset, or if a file does not match meta.json.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    token_bytes = np.dtype(meta.dtype).itemsize
    offset_bytes = np.dtype(OFFSET_TYPE).itemsize
    for name, split in meta.splits.items():
        _check_size(bin_path(folder, name), split.tokens, token_bytes, "tokens")
        _check_size(offsets_path(folder, name), split.documents, offset_bytes, "document offsets")
    prepared = PreparedDataset(folder, meta)
    prepared.verify()
    return prepared


def _read_meta(folder: Path) -> DatasetMeta:
    """Read and validate meta.json, which describes a prepared dataset and marks its folder as complete.

    `InputError` is raised if meta.json is missing or invalid.
    """
    path = folder / META_FILE
    try:
        values = io.read_with_checksum(path, hint=PREPARE_AGAIN_HINT)
    except io.MissingFileError:
        if (folder / UNFINISHED_FILE).exists():
            message = f"The preparation of {folder} was interrupted. Run the same prepare command to continue."
        else:
            message = f"{folder} is not a dataset folder (it has no {META_FILE}). See trainshort prepare --help."
        raise InputError(message) from None

    dataset_format = values.get("format")
    if dataset_format != DATASET_FORMAT:
        raise InputError(
            f"Unsupported dataset in {path}: expected format {DATASET_FORMAT}, got {dataset_format}. "
            f"{PREPARE_AGAIN_HINT}"
        )
    return DatasetMeta.parse(values, origin_path=path)


def _check_size(path: Path, count: int, item_bytes: int, items: str) -> None:
    """Raise `InputError` if a file does not have the size that meta.json states.

    Args:
        path: The file.
        count: The expected number of items.
        item_bytes: The size of one item in bytes.
        items: What the items are, for the error message: "tokens" or "document offsets".
    """
    expected_bytes = count * item_bytes
    actual_bytes = _stat(path).st_size
    if actual_bytes != expected_bytes:
        raise InputError(
            f"Invalid size of {path}: meta.json states {count:,} {items} in {expected_bytes:,} bytes, "
            f"but the file has {actual_bytes:,} bytes. {PREPARE_AGAIN_HINT}"
        )


def _map_array(path: Path, count: int, dtype: str) -> np.ndarray:
    """Map an array of little-endian integers from a file, so that integers are read from the disk when they are used.

    Args:
        path: The file.
        count: The number of integers in the file. An empty file cannot be mapped, so the result is an empty array.
        dtype: The name of the integer type, such as "uint16".
    """
    little_endian_dtype = np.dtype(dtype).newbyteorder("<")
    if count == 0:
        return np.empty(0, dtype=little_endian_dtype)
    return np.memmap(path, dtype=little_endian_dtype, mode="r", shape=(count,))
