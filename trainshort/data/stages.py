"""The progress bar of a preparation: rate and time left, on stderr, and only where somebody watches."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainshort.data.document import Document


class Stages:
    """Shows stages on a terminal; elsewhere it prints the last line only, and nothing at all when not `wanted`."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.started = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def shown(self) -> Iterator["Stages"]:
        if not (self.wanted and sys.stderr.isatty()):
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Bar(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as self._bar:
            yield self
        self._bar = None

    def stage(self, name: str, total: int | None, done: int = 0) -> None:
        """Begin a stage of `total` bytes, of which `done` were done before."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=total, completed=done)

    def at(self, done: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

    def watch(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The same documents, with the bar following them."""
        for document in documents:
            self.at(document.done)
            yield document

    def say(self, line: str) -> None:
        if self.wanted:
            print(line, file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started
