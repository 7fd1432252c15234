"""Batches of a training run, as a pure function of seed, step, rank and number of processes."""

import hashlib
import logging
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Integer

from trainshort.config.run_config import IGNORED
from trainshort.data.mlm import mask_tokens, training_mask
from trainshort.errors import InputError
from trainshort.utils.optional import require_package

# The text is cut into consecutive blocks; grain gives each epoch its own order of them, and can say which block is the
# n-th of all epochs without going through the ones before. So the state of the data is one integer, the step, and the
# share of a rank is exactly the slice of the batch that one process alone would get.


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step. Targets are the inputs shifted by one, or what is hidden of them."""

    inputs: Int64[np.ndarray, "batch length"]
    targets: Int64[np.ndarray, "batch length"]
    segment_ids: Int32[np.ndarray, "batch length"] | None
    """The segment that each token belongs to, or None if each row is one segment. Tokens see only their own segment."""


@dataclass(eq=False)
class BatchStream:
    """Batches of blocks. Every token is predicted once an epoch, as in the paper's code: the first one after `bos`, and
    the last block may be shorter than the others (its row is filled up, and what fills it is not predicted).

    Ten tokens, length 4, `bos` 9:

        tokens   0 1 2 3 4 5 6 7 8 9
        block 0  inputs 9 0 1 2   targets 0 1 2 3
        block 1  inputs 3 4 5 6   targets 4 5 6 7
        block 2  inputs 7 8 9 9   targets 8 9 - -

    With drop_last=True, the first token is context only and the last block must be whole:

        block 0  inputs 0 1 2 3   targets 1 2 3 4
        block 1  inputs 4 5 6 7   targets 5 6 7 8
    """

    tokens: Integer[np.ndarray, " tokens"]
    _: KW_ONLY
    length: int
    batch_size: int
    """Rows of a step, over all ranks."""
    seed: int
    rank: int = 0
    world: int = 1
    packing: str = "blocks"
    documents: Int64[np.ndarray, " documents"] | None = None
    """Where documents begin; used with packing="documents", which hides them from each other."""
    vocab_size: int | None = None
    bos: int = 0
    drop_last: bool = False
    mask: int | None = None
    """An encoder's mask token: tokens that it hides are predicted (masking.py), not each one from those before it."""

    def __post_init__(self) -> None:
        self._first = 1 if self.drop_last else 0
        self._check()
        self.blocks = (len(self.tokens) - 1) // self.length + (1 - self._first)
        self._order = _shuffle_blocks(self.blocks, self.seed)

    def block_numbers(self, step: int) -> list[int]:
        """Which blocks this rank reads at a step."""
        share = self.batch_size // self.world
        first = step * self.batch_size + self.rank * share
        return [int(self._order[index]) for index in range(first, first + share)]

    def batch(self, step: int) -> Batch:
        """The share of this rank at a step, whatever was read before."""
        firsts = self._first + np.array(self.block_numbers(step), dtype=np.int64) * self.length
        rows = np.stack([self._row(first) for first in firsts])
        self._check_range(rows, firsts - 1)
        inputs, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        targets[firsts[:, None] + np.arange(self.length) >= len(self.tokens)] = IGNORED
        if self.mask is not None:
            return self._mlm_batch(step, firsts, targets)
        if self.packing == "blocks":
            return Batch(inputs, targets, None)
        numbers = np.stack([self._document_numbers(first) for first in firsts])
        targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        # Counted from the row's first document, so that they fit whatever the corpus holds.
        return Batch(inputs, targets, (numbers[:, :-1] - numbers[:, :1]).astype(np.int32))

    def _mlm_batch(
        self, step: int, firsts: Int64[np.ndarray, " batch"], tokens: Int64[np.ndarray, "batch length"]
    ) -> Batch:
        """Blocks with some tokens hidden. What fills the last block up is a document of its own: nobody sees it."""
        assert self.mask is not None
        begin = step * self.batch_size + self.rank * len(firsts)
        beyond = tokens == IGNORED
        hidden = training_mask(self.seed, range(begin, begin + len(firsts)), self.length) & ~beyond
        inputs, targets = mask_tokens(np.where(beyond, self.bos, tokens), hidden, self.mask)
        if self.packing == "blocks":
            return Batch(inputs, targets, beyond.astype(np.int32) if beyond.any() else None)
        numbers = np.stack([self._document_numbers(first)[1:] for first in firsts])
        numbers = np.where(beyond, numbers[:, -1:] + 1, numbers) - numbers[:, :1]
        return Batch(inputs, targets, numbers.astype(np.int32))

    def _row(self, first: int) -> Int64[np.ndarray, " positions"]:
        """The token before a block, and the block; what is not there is `bos`."""
        row = np.full(self.length + 1, self.bos, dtype=np.int64)
        there = self.tokens[max(first - 1, 0) : first + self.length]
        begin = 1 if first == 0 else 0
        row[begin : begin + len(there)] = there
        return row

    def _document_numbers(self, start: int) -> Int64[np.ndarray, " positions"]:
        """The document of the token before a block and of each of the block's. The text's first has no token before.

        Documents that begin at 0 and 4, block of 3 from 3:   tokens 2 3 4 5 -> 0 0 1 1
        """
        assert self.documents is not None
        positions = np.maximum(np.arange(start - 1, start + self.length), 0)
        first = int(np.searchsorted(self.documents, positions[0], side="right"))
        last = int(np.searchsorted(self.documents, positions[-1], side="right"))
        return first + np.searchsorted(np.asarray(self.documents[first:last]), positions, side="right")

    def _check_range(self, rows: Int64[np.ndarray, "batch tokens"], starts: Int64[np.ndarray, " batch"]) -> None:
        if self.vocab_size is None or int(rows.max()) < self.vocab_size:
            return
        row, column = np.unravel_index(int(rows.argmax()), rows.shape)
        raise InputError(
            f"Token {rows.max()} at position {starts[row] + column} is outside the vocabulary of {self.vocab_size}. "
            "The data is damaged or was made for another vocabulary; prepare it again."
        )

    def _check(self) -> None:
        if self.batch_size % self.world:
            raise InputError(
                f"A batch of {self.batch_size} sequences cannot be shared by {self.world} processes; use a multiple of "
                f"{self.world}."
            )
        if not 0 <= self.rank < self.world:
            raise InputError(f"rank must be from 0 to {self.world - 1}, not {self.rank}.")
        needed = self.length + self._first
        if len(self.tokens) < needed:
            raise InputError(
                f"The text has {len(self.tokens)} tokens, but one sequence of length {self.length} needs {needed}. "
                "Use a shorter length or a larger corpus."
            )
        if self.packing not in ("blocks", "documents"):
            raise InputError(f"packing must be 'blocks' or 'documents', not '{self.packing}'.")
        if self.packing == "documents" and self.documents is None:
            raise InputError("packing='documents' needs the document offsets: documents=prepared.documents('train').")


def _shuffle_blocks(blocks: int, seed: int) -> Any:
    """The blocks of all epochs, each in an order of its own."""
    require_package("grain", "Training", "trainshort[train]")
    absl = logging.getLogger("absl")

    def quiet(record: logging.LogRecord) -> bool:
        """grain reports at import that jax, which it does not need here, is not installed."""
        return "jax profiler" not in record.getMessage()

    absl.addFilter(quiet)
    import grain  # here, since whoever opens data alone needs no batches

    absl.removeFilter(quiet)
    # grain uses seed + epoch within; hashing keeps the epochs of neighbouring seeds apart.
    mixed = int.from_bytes(hashlib.sha256(f"order {seed}".encode()).digest()[:4], "big")
    return grain.MapDataset.range(blocks).shuffle(seed=mixed).repeat()
