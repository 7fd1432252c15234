"""The state of a preparation that is not finished: its output files, its state file and its progress bar.

Tokens are appended to the output files. About once per second, the files are flushed to the disk. The file
unfinished.json then stores how many tokens are complete, and where the corpus continues. A preparation that was killed
first cuts the files to the stored sizes. The result is therefore the same as without an interruption.
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
    """What the user requested."""
    test_below: int = 0
    """The bound `Splitter.test_below` of the rule that assigns documents to splits."""
    valid_below: int = 0
    """The bound `Splitter.valid_below` of the same rule."""
    missing: tuple[str, ...] = ()
    """The splits that the corpus lacks."""
    ready: bool = False
    """Whether the rule and the tokenizer are chosen and stored."""
    cursor: Any = None
    """The cursor of the last document that was encoded, or None at the start."""
    done: int = 0
    """How much of the corpus was read, in bytes."""
    splits: dict[str, SplitMeta] = Field(default_factory=dict)
    """The number of tokens, words, bytes and documents of each split that are stored."""


def read_prepare_state(folder: Path) -> PrepareState | None:
    """Return the state of an unfinished preparation, or None if the folder has no unfinished.json.

    Raises:
        InputError: If unfinished.json is damaged.
    """
    path = folder / UNFINISHED_FILE
    try:
        values = io.read_with_checksum(path, hint=f"Delete the folder {folder} and prepare it again.")
    except io.MissingFileError:
        return None
    return PrepareState.parse(values, origin_path=path)


def write_prepare_state(folder: Path, state: PrepareState, **changes: Any) -> PrepareState:
    """Store the state of a preparation in unfinished.json.

    Args:
        folder: The folder of the dataset.
        state: The state.
        changes: New values of fields of the state.

    Returns:
        The state with the changes.
    """
    new_state = state.model_copy(update=changes)
    io.write_with_checksum(folder / UNFINISHED_FILE, new_state.model_dump(mode="json"), hint=DISK_FULL_HINT)
    return new_state


class TokenWriter:
    """Appends encoded documents to the files of a dataset.

    Args:
        folder: The folder of the dataset.
        state: The state of the preparation. Data after the stored sizes is removed from the files.
        splits: The names of the splits.
        token_bytes: The size of a token in the files, in bytes.

    Attributes:
        state: The state that was stored last.

    Raises:
        InputError: If a file is shorter than the stored state says.
    """

    def __init__(self, folder: Path, state: PrepareState, splits: tuple[str, ...], token_bytes: int) -> None:
        self.folder = folder
        self.state = state
        # The number of tokens, words, bytes and documents that were written to each split.
        self._counts = {name: state.splits.get(name, SplitMeta()) for name in splits}
        self._files: dict[Path, BinaryIO] = {}
        offset_bytes = np.dtype(OFFSET_TYPE).itemsize
        # Anything that was written after the last stored state is cut off.
        for name, counts in self._counts.items():
            self._open_at(bin_path(folder, name), counts.tokens * token_bytes)
            self._open_at(offsets_path(folder, name), counts.documents * offset_bytes)

    def _open_at(self, path: Path, size: int) -> None:
        """Open a file for appending, and cut it to `size` bytes. The file is created if it does not exist."""
        path.touch()
        if path.stat().st_size < size:
            raise InputError(
                f"{path} is shorter than {UNFINISHED_FILE} states. Delete the folder {self.folder} and prepare it "
                "again."
            )
        os.truncate(path, size)
        self._files[path] = path.open("ab")

    def append(self, encoded: dict[str, EncodedChunk]) -> None:
        """Append the encoded documents of a chunk. If the process is killed before the next `commit`, they are lost.

        Args:
            encoded: The encoded documents of each split.
        """
        for name, chunk in encoded.items():
            counts = self._counts[name]
            lengths = np.array(chunk.lengths, dtype=np.int64)
            # A document starts after all tokens of the documents before it. `cumsum` includes the document itself.
            # For example, documents of the lengths 3 and 5 in an empty file start at 0 and 3.
            starts = counts.tokens + np.cumsum(lengths) - lengths
            self._files[bin_path(self.folder, name)].write(chunk.tokens)
            self._files[offsets_path(self.folder, name)].write(starts.astype(OFFSET_TYPE).tobytes())
            self._counts[name] = SplitMeta(
                tokens=counts.tokens + int(lengths.sum()),
                words=counts.words + chunk.words,
                bytes=counts.bytes + chunk.bytes,
                documents=counts.documents + len(lengths),
            )

    def commit(self, cursor: Any, bytes_read: int) -> None:
        """Flush all files and store the state. A preparation that is killed later continues from here.

        Args:
            cursor: The position in the corpus after the last document that was appended.
            bytes_read: How much of the corpus was read, for the progress bar.
        """
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.state = write_prepare_state(
            self.folder, self.state, cursor=cursor, done=bytes_read, splits=dict(self._counts)
        )

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


class PrepareProgress:
    """Shows the progress of a preparation on standard error.

    On a terminal, a progress bar is shown. Elsewhere, only the messages of `say` are printed.

    Args:
        enabled: Whether to show anything at all.

    Attributes:
        start_time: The time at which the object was created, as `time.perf_counter` returns it.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.start_time = time.perf_counter()
        self._bar: Any = None

    @contextmanager
    def show_bar(self) -> Iterator[None]:
        """Context manager: show the progress bar while the block runs, if standard error is a terminal."""
        if not (self.enabled and sys.stderr.isatty()):
            yield
            return
        from rich import progress as rich_progress

        columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.DownloadColumn(),
            rich_progress.TransferSpeedColumn(),
            rich_progress.TimeRemainingColumn(),
        )
        with rich_progress.Progress(*columns, console=new_console(stderr=True)) as self._bar:
            yield
        self._bar = None

    def start_stage(self, name: str, total_bytes: int | None, bytes_done: int = 0) -> None:
        """Replace the progress bar by a bar for the next stage of the preparation, if a bar is shown.

        Args:
            name: The name of the stage, such as "checksums".
            total_bytes: The amount of work in bytes, or None if it is unknown.
            bytes_done: How much of the work was done before.
        """
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(name, total=total_bytes, completed=bytes_done)

    def update(self, bytes_done: int) -> None:
        """Set how much of the current stage is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=bytes_done)

    def track(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield documents, and update the bar for each of them."""
        for document in documents:
            self.update(document.bytes_read)
            yield document

    def say(self, message: str) -> None:
        """Print a message on standard error."""
        if self.enabled:
            print(escape_control_characters(message), file=sys.stderr, flush=True)
