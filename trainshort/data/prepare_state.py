"""A preparation under way: its progress bar, its files, and the note from which a killed one continues.

Tokens are appended; now and then everything is flushed to disk and `unfinished.json` says how much is certain and where
the corpus goes on. After a kill the files are cut back to that, so the result is the same as without one.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import Field

from trainshort.config.base import StrictConfig
from trainshort.data.dataset import OFFSET_TYPE, UNFINISHED_FILE, DataRequest, SplitMeta, bin_path, offsets_path
from trainshort.data.documents import Document
from trainshort.data.encode_workers import EncodedChunk
from trainshort.errors import InputError
from trainshort.utils import io
from trainshort.utils.terminal import escape_control_characters, new_console

DISK_FULL_HINT = "Free some space, and run the same command to continue."


class PrepareState(StrictConfig):
    """The content of unfinished.json."""

    request: DataRequest
    test_below: int = 0
    valid_below: int = 0
    missing: tuple[str, ...] = ()
    ready: bool = False
    """Whether the split rule and tokenizer.json are settled."""
    cursor: Any = None
    done: int = 0
    splits: dict[str, SplitMeta] = Field(default_factory=dict)


def read_prepare_state(folder: Path) -> PrepareState | None:
    """The note of an unfinished preparation, if there is one."""
    path, again = folder / UNFINISHED_FILE, f"Delete the folder {folder} and prepare it again."
    try:
        return PrepareState.parse(io.read_with_checksum(path, hint=again), origin_path=path)
    except io.MissingFileError:
        return None


def write_prepare_state(folder: Path, note: PrepareState, **changes: Any) -> PrepareState:
    note = note.model_copy(update=changes)
    io.write_with_checksum(folder / UNFINISHED_FILE, note.model_dump(mode="json"), hint=DISK_FULL_HINT)
    return note


class TokenWriter:
    """Appends tokens and document offsets from where a note says."""

    def __init__(self, folder: Path, note: PrepareState, splits: tuple[str, ...], width: int) -> None:
        self.folder = folder
        self.note = note
        self._counts = {name: note.splits.get(name, SplitMeta()) for name in splits}
        self._files: dict[Path, BinaryIO] = {}
        for name, counts in self._counts.items():
            self._reopen(bin_path(folder, name), counts.tokens * width)
            self._reopen(offsets_path(folder, name), counts.documents * np.dtype(OFFSET_TYPE).itemsize)

    def _reopen(self, path: Path, size: int) -> None:
        path.touch()
        if path.stat().st_size < size:
            raise InputError(
                f"{path} is shorter than {UNFINISHED_FILE} says. Delete the folder {self.folder} and prepare it again."
            )
        os.truncate(path, size)
        self._files[path] = path.open("ab")

    def append(self, encoded: dict[str, EncodedChunk]) -> None:
        for name, part in encoded.items():
            before = self._counts[name]
            lengths = np.array(part.lengths, dtype=np.int64)
            starts = before.tokens + np.cumsum(lengths) - lengths
            self._files[bin_path(self.folder, name)].write(part.tokens)
            self._files[offsets_path(self.folder, name)].write(starts.astype(OFFSET_TYPE).tobytes())
            self._counts[name] = SplitMeta(
                tokens=before.tokens + int(lengths.sum()),
                words=before.words + part.words,
                bytes=before.bytes + part.bytes,
                documents=before.documents + len(lengths),
            )

    def commit(self, cursor: Any, done: int) -> None:
        """From here on a kill loses nothing that was appended before."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.note = write_prepare_state(self.folder, self.note, cursor=cursor, done=done, splits=dict(self._counts))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class PrepareProgress:
    """Shows stages on a terminal; elsewhere it prints the last line only, and nothing at all when not `wanted`."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.started = time.perf_counter()
        self._bar: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not (self.wanted and sys.stderr.isatty()):
            yield
            return
        from rich import progress as rich

        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
        columns += (rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
        with rich.Progress(*columns, console=new_console(stderr=True)) as self._bar:
            yield
        self._bar = None

    def stage(self, name: str, total: int | None, done: int = 0) -> None:
        """Begin a stage of `total` bytes, of which `done` were done before."""
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(name, total=total, completed=done)

    def at(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def watch(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The same documents, with the bar following them."""
        for document in documents:
            self.at(document.done)
            yield document

    def say(self, line: str) -> None:
        if self.wanted:
            print(escape_control_characters(line), file=sys.stderr, flush=True)
