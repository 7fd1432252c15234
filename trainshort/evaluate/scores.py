"""Losses already computed, on disk, so that a killed evaluation goes on where it stopped.

Passes score targets in order, so the file is nothing but one float32 per target, appended batch by batch; how far it
got is its size. A batch that was torn by the kill is cut off at the last whole pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from trainshort.errors import InputError
from trainshort.files import locked, make_folder, open_file, reason
from trainshort.passes import Passes

KIND = np.dtype("<f4")


class Scores:
    """An open file of losses. `done` targets are in it."""

    def __init__(self, path: Path, passes: Passes) -> None:
        self.path = path
        open_file(path).close()  # whatever is not a regular file is told
        self.file = path.open("a+b")
        self.done = whole_passes(passes, path.stat().st_size // KIND.itemsize)
        self.file.truncate(self.done * KIND.itemsize)

    def append(self, losses: np.ndarray) -> None:
        try:
            self.file.write(losses.astype(KIND).tobytes())
            self.file.flush()
        except OSError as error:
            raise InputError(
                f"Cannot write {self.path}: {reason(error)}. Make room there, then run it again."
            ) from error
        self.done += len(losses)

    def read(self) -> np.ndarray:
        self.file.seek(0)
        return np.frombuffer(self.file.read(), dtype=KIND)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def whole_passes(passes: Passes, targets: int) -> int:
    """The most targets, up to this many, that whole passes score.

    ten tokens, length 4, stride 2:   3 → 0    4 → 4    5 → 4    10 → 10
    """
    if targets >= passes.tokens:
        return passes.tokens
    return passes[passes.at(targets)].first


@contextmanager
def open_scores(path: Path, passes: Passes) -> Iterator[Scores]:
    make_folder(path.parent)
    with locked(path, f"Another process is computing {path}. Wait for it, or stop it first."):
        scores = Scores(path, passes)
        try:
            yield scores
        finally:
            with suppress(OSError):  # what could not be written was told by append
                scores.file.close()
