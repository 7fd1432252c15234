"""Batches for training: a pure function of (seed, step, rank, world).

The text is cut into consecutive blocks; grain gives each epoch its own order of them, and can say which block is the
n-th of all epochs without going through the ones before. So the state of the data is one integer, the step, and the
share of a rank is exactly the slice of the batch that one process alone would get.
"""

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Integer

from trainshort.errors import InputError


class _QuietWithoutJax(logging.Filter):
    """grain reports at import that jax, which it does not need here, is not installed."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "jax profiler" not in record.getMessage()


_quiet = _QuietWithoutJax()
logging.getLogger("absl").addFilter(_quiet)
import grain  # noqa: E402

logging.getLogger("absl").removeFilter(_quiet)

IGNORED = -100
"""Target that the loss leaves out, as torch's cross entropy does."""


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step. Targets are the inputs shifted by one."""

    inputs: Int64[np.ndarray, "batch length"]
    targets: Int64[np.ndarray, "batch length"]
    documents: Int32[np.ndarray, "batch length"] | None
    """Which positions of a row belong to the same document; None: all of them."""


class Stream:
    """Batches of blocks.

    Ten tokens, length 3 (the first token is context only, the last block must be whole):

        tokens   0 1 2 3 4 5 6 7 8 9
        block 0  inputs 0 1 2   targets 1 2 3
        block 1  inputs 3 4 5   targets 4 5 6
        block 2  inputs 6 7 8   targets 7 8 9
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, " tokens"],
        *,
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        packing: str = "blocks",
        documents: Int64[np.ndarray, " documents"] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        _check(len(tokens), length, batch, rank, world)
        if packing not in ("blocks", "documents"):
            raise InputError(f"packing must be 'blocks' or 'documents', not '{packing}'.")
        if packing == "documents" and documents is None:
            raise InputError("packing='documents' needs the document offsets: documents=prepared.documents('train').")
        self.length = length
        self.blocks = (len(tokens) - 1) // length
        self.vocabulary = vocabulary
        self._tokens = tokens
        self._documents = documents if packing == "documents" else None
        self._share = batch // world
        self._batch = batch
        self._offset = rank * self._share
        # grain uses seed + epoch within; hashing keeps the epochs of neighbouring seeds apart.
        mixed = int.from_bytes(hashlib.sha256(f"order {seed}".encode()).digest()[:4], "big")
        self._order = grain.MapDataset.range(self.blocks).shuffle(seed=mixed).repeat()

    def block_numbers(self, step: int) -> list[int]:
        """Which blocks this rank reads at a step."""
        first = step * self._batch + self._offset
        order: Any = self._order  # typed as if elements could be filtered out
        return [int(order[index]) for index in range(first, first + self._share)]

    def batch(self, step: int) -> Batch:
        """The share of this rank at a step, whatever was read before."""
        starts = np.array(self.block_numbers(step), dtype=np.int64) * self.length
        rows = np.stack([self._tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)
        self._check_range(rows, starts)
        inputs, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        if self._documents is None:
            return Batch(inputs, targets, None)
        numbers = np.stack([self._document_numbers(start) for start in starts])
        targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        # Counted from the row's first document, so that they fit whatever the corpus holds.
        return Batch(inputs, targets, (numbers[:, :-1] - numbers[:, :1]).astype(np.int32))

    def _document_numbers(self, start: int) -> Int64[np.ndarray, " positions"]:
        """The document of each token of a block and of the one after.

        Documents that begin at 0 and 4, block of 3 from 2:   tokens 2 3 4 5 -> 0 0 1 1
        """
        assert self._documents is not None
        positions = np.arange(start, start + self.length + 1)
        first = int(np.searchsorted(self._documents, start, side="right"))
        last = int(np.searchsorted(self._documents, positions[-1], side="right"))
        return first + np.searchsorted(np.asarray(self._documents[first:last]), positions, side="right")

    def _check_range(self, rows: Int64[np.ndarray, "batch tokens"], starts: Int64[np.ndarray, " batch"]) -> None:
        if self.vocabulary is None or int(rows.max()) < self.vocabulary:
            return
        row, column = np.unravel_index(int(rows.argmax()), rows.shape)
        raise InputError(
            f"Token {rows.max()} at position {starts[row] + column} is outside the vocabulary of {self.vocabulary}. "
            "The data is damaged or was made for another vocabulary; prepare it again."
        )


def _check(tokens: int, length: int, batch: int, rank: int, world: int) -> None:
    if batch % world:
        raise InputError(
            f"A batch of {batch} sequences cannot be shared by {world} processes; use a multiple of {world}."
        )
    if not 0 <= rank < world:
        raise InputError(f"rank must be from 0 to {world - 1}, not {rank}.")
    if tokens < length + 1:
        raise InputError(
            f"The text has {tokens} tokens, but one sequence of length {length} needs {length + 1}. "
            "Use a shorter length or a larger corpus."
        )
