"""A prepared folder: what lies in it, and how it is opened.

train.bin               tokens, little-endian unsigned integers of the smallest size that fits, nothing else
train.documents.bin     where each document begins, in tokens, as int64; one number per document
valid.bin ...  test.bin ...
tokenizer.json          made for the tokenizers library
meta.json               all that is needed to read them, written last: a folder with it is complete
checked.json            which files were read and found whole; may be deleted

`checked.json` says which files had the expected sha256, and in which state of the file system (size, times, inode). A
file in that state is not read again; any other is. The memory is a convenience: where it is missing, damaged or cannot
be written, everything is read.
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

from trainshort.config.base import StrictConfig
from trainshort.data.tokenizers.base import TOKENIZER_FILE as TOKENIZER_FILE
from trainshort.data.tokenizers.base import Tokenizer, load_tokenizer
from trainshort.errors import InputError
from trainshort.utils import io

log = logging.getLogger(__name__)

CHECKSUM_CACHE_FILE = "checked.json"
MTIME_RESOLUTION_SECONDS = 0.02
"""Seconds after which a file system gives a further change another time."""


class ChecksumCache:
    """What is known of the files that belong to a data folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CHECKSUM_CACHE_FILE
        self.known: dict[str, list[str]] = {}
        """Name to the state and the checksum that were found together."""
        with suppress(InputError):
            self.known = io.read_json_object(self._path)
        self._read = dict(self.known)

    def matches(self, name: str, paths: Sequence[Path], expected: str) -> bool:
        """Whether these files' content has the expected checksum, read only where that is not known yet."""
        state = _state(paths)
        if self.known.get(name) == [state, expected]:
            return True
        _wait_for_mtime_resolution(paths)
        state, found = _state(paths), content_sha256(paths)
        if found == expected and state == _state(paths):
            self.known[name] = [state, expected]
        return found == expected

    def save(self) -> None:
        """Remember for the next time, where the folder can be written."""
        if self.known != self._read:
            with suppress(InputError):
                io.write_atomic(self._path, json.dumps(self.known, indent=1) + "\n")


def content_sha256(paths: Sequence[Path]) -> str:
    """Of a file's content; of several, of their checksums in order."""
    digests = [io.sha256(path) for path in paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _state(paths: Sequence[Path]) -> str:
    """Changes whenever a file is written to, replaced, or given other times."""
    lines = [f"{at.st_size} {at.st_mtime_ns} {at.st_ctime_ns} {at.st_ino}" for at in map(_stat, paths)]
    return lines[0] if len(lines) == 1 else hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _wait_for_mtime_resolution(paths: Sequence[Path]) -> None:
    """Wait until a change after this moment cannot have the time of one before it."""
    newest = max((_stat(path).st_ctime_ns for path in paths), default=0) / 1e9
    if 0 <= time.time() - newest < MTIME_RESOLUTION_SECONDS:
        time.sleep(MTIME_RESOLUTION_SECONDS)


def _stat(path: Path) -> os.stat_result:
    with io.open_file(path) as file:
        return os.fstat(file.fileno())


DATASET_FORMAT = 2
META_FILE = "meta.json"
UNFINISHED_FILE = "unfinished.json"
OFFSET_TYPE = "<i8"

LOG_ABOVE_BYTES = 1 << 31
"""Bytes whose reading takes seconds."""

PREPARE_AGAIN_HINT = "Delete the folder and prepare it again, or put the right files back."


class DataRequest(StrictConfig):
    """What was asked for; another request is refused the same folder."""

    corpus: str
    """Name, path, glob or hub dataset, as given."""
    fingerprint: str
    """Of the names and sizes of the corpus' files, or of what was asked of the hub."""
    content: str | None = None
    """Of what the files hold; None where a corpus is streamed."""
    tokenizer: str
    """bytes, words, bpe, or the path of a tokenizer.json."""
    tokenizer_sha256: str | None
    """Of the tokenizer.json that was given."""
    vocab_size: int | None
    """Size asked for, where the vocabulary is built here."""


class SplitMeta(StrictConfig):
    """One split's counts and checksums."""

    tokens: int = 0
    words: int = 0
    """Words between white space, for perplexities per word."""
    bytes: int = 0
    """Bytes of UTF-8, for bits per byte."""
    documents: int = 0
    sha256: str = ""
    """Of <split>.bin."""
    documents_sha256: str = ""
    """Of <split>.documents.bin, the document offsets."""


class DatasetMeta(StrictConfig):
    """The content of meta.json."""

    format: int = DATASET_FORMAT
    request: DataRequest
    tokenizer: str
    """The tokenizer's name."""
    tokenizer_sha256: str
    """Of tokenizer.json."""
    vocab_size: int
    """Number of token types; a model needs as many."""
    end: int | None
    """The token after each document."""
    dtype: Literal["uint8", "uint16", "uint32"]
    """Type of a token in the .bin files."""
    errors: Literal["strict", "replace"]
    """What was done about bytes that are not UTF-8."""
    splits: dict[str, SplitMeta]

    @property
    def bos(self) -> int:
        """Read before a text's first token: the end token, as fairseq does."""
        return self.end or 0


@dataclass(frozen=True)
class PreparedDataset:
    """An open data folder."""

    folder: Path
    meta: DatasetMeta

    def split(self, name: str) -> np.ndarray:
        """A split's tokens, mapped from disk; nothing is read before it is used."""
        return _map(bin_path(self.folder, name), self._split(name).tokens, self.meta.dtype)

    def documents(self, name: str) -> np.ndarray:
        """Where each document of a split begins, in tokens."""
        return _map(offsets_path(self.folder, name), self._split(name).documents, OFFSET_TYPE)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder, name=self.meta.tokenizer)

    def verify(self) -> None:
        """Compare all files with their checksums; what did not change since it was found whole is not read."""
        checked, expected = ChecksumCache(self.folder), {self.folder / TOKENIZER_FILE: self.meta.tokenizer_sha256}
        for name, split in self.meta.splits.items():
            expected[bin_path(self.folder, name)] = split.sha256
            expected[offsets_path(self.folder, name)] = split.documents_sha256
        if sum(_stat(path).st_size for path in expected) > LOG_ABOVE_BYTES and not checked.known:
            log.info(f"checking {self.folder} once, as it is new here ...")
        for path, checksum in expected.items():
            if not checked.matches(path.name, [path], checksum):
                raise InputError(
                    f"{path} is damaged or belongs to another preparation: its checksum is not the one in meta.json. "
                    f"{PREPARE_AGAIN_HINT}"
                )
        checked.save()

    def _split(self, name: str) -> SplitMeta:
        if name not in self.meta.splits:
            raise InputError(f"{self.folder} has no split '{name}'; it has {', '.join(self.meta.splits)}.")
        return self.meta.splits[name]


def bin_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def offsets_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.documents.bin"


def token_type(vocab_size: int) -> Literal["uint8", "uint16", "uint32"]:
    """The smallest type that holds every token."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def is_dataset_folder(folder: Path | str) -> bool:
    """Whether a folder is a complete data folder, or at least says so; opening it tells what is wrong with it."""
    return os.path.lexists(Path(folder) / META_FILE)


def open_dataset(folder: Path | str) -> PreparedDataset:
    """Open a prepared folder; files that are not what meta.json says, by size or by content, are refused."""
    folder = Path(folder)
    meta = _read_meta(folder)
    for name, split in meta.splits.items():
        _check_size(bin_path(folder, name), split.tokens, np.dtype(meta.dtype).itemsize, "tokens")
        _check_size(offsets_path(folder, name), split.documents, np.dtype(OFFSET_TYPE).itemsize, "document offsets")
    prepared = PreparedDataset(folder, meta)
    prepared.verify()
    return prepared


def _read_meta(folder: Path) -> DatasetMeta:
    path = folder / META_FILE
    try:
        values = io.read_with_checksum(path, hint=PREPARE_AGAIN_HINT)
    except io.MissingFileError:
        if (folder / UNFINISHED_FILE).exists():
            raise InputError(
                f"The preparation of {folder} did not finish. Run the same prepare command to continue."
            ) from None
        raise InputError(
            f"{folder} is not a prepared data folder (it has no {META_FILE}). See trainshort prepare --help."
        ) from None
    if (found := values.get("format")) != DATASET_FORMAT:
        raise InputError(
            f"{path} has {'no format' if found is None else f'format {found}'}, and this version of trainshort reads "
            f"format {DATASET_FORMAT}. {PREPARE_AGAIN_HINT}"
        )
    return DatasetMeta.parse(values, origin_path=path)


def _check_size(path: Path, count: int, width: int, what: str) -> None:
    size = _stat(path).st_size
    if size != count * width:
        raise InputError(
            f"{path} should hold {count:,} {what} in {count * width:,} bytes as its meta.json says, "
            f"but has {size:,} bytes. {PREPARE_AGAIN_HINT}"
        )


def _map(path: Path, count: int, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).newbyteorder("<")
    return np.memmap(path, dtype=kind, mode="r", shape=(count,)) if count else np.empty(0, dtype=kind)
