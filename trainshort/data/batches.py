"""Batches for training. A batch depends only on the seed, the step, the rank and the number of processes.

The text is cut into consecutive blocks. The package grain shuffles the blocks in each epoch, and can compute the n-th
block of all epochs directly. A training run can therefore resume at any step without further state.
"""

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


@dataclass(frozen=True)
class Batch:
    """The part of a training batch that one rank processes.

    Attributes:
        inputs: The tokens that the model reads.
        targets: The tokens that the model predicts. Positions with `IGNORED` are not part of the loss. For a causal
            model, a target is the next token. For an encoder, a target is a masked token.
        segment_ids: The segment of each token, or None if each row is one segment. Tokens attend only to tokens of
            their own segment.
    """

    inputs: Int64[np.ndarray, "batch length"]
    targets: Int64[np.ndarray, "batch length"]
    segment_ids: Int32[np.ndarray, "batch length"] | None


@dataclass(eq=False)
class BatchStream:
    """The training batches of a text.

    The text is cut into blocks of `length` tokens. A row of a batch predicts one block. As in the paper's code, every
    token is predicted once per epoch. The token `bos` precedes the first token. The last block may be shorter. Its row
    is filled up with `bos`, and the targets of these positions are `IGNORED`.

    For ten tokens, length=4 and bos=9, the blocks are:

        tokens   0 1 2 3 4 5 6 7 8 9
        block 0  inputs 9 0 1 2   targets 0 1 2 3
        block 1  inputs 3 4 5 6   targets 4 5 6 7
        block 2  inputs 7 8 9 9   targets 8 9 - -

    With drop_last=True, the first token is only an input, and a short last block is dropped:

        block 0  inputs 0 1 2 3   targets 1 2 3 4
        block 1  inputs 4 5 6 7   targets 5 6 7 8

    Attributes:
        tokens: All tokens of the training split.
        length: The number of tokens in a block.
        batch_size: The number of rows of a batch on all ranks together.
        seed: The seed that determines the order of the blocks.
        rank: The number of this process.
        world: The number of processes.
        packing: "blocks" ignores the ends of documents. "documents" gives each document its own segment, so that tokens
            do not attend to other documents.
        documents: The position in `tokens` where each document begins. Required for packing="documents".
        vocab_size: The number of tokens of the vocabulary. Larger tokens raise an error. None disables the check.
        bos: The token that is read before the first token of the text.
        drop_last: Whether to drop the first token and a short last block, as described above.
        mask: The mask token of an encoder, or None for a causal model. See mlm.py.
    """

    tokens: Integer[np.ndarray, " tokens"]
    _: KW_ONLY
    length: int
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1
    packing: str = "blocks"
    documents: Int64[np.ndarray, " documents"] | None = None
    vocab_size: int | None = None
    bos: int = 0
    drop_last: bool = False
    mask: int | None = None

    def __post_init__(self) -> None:
        # The position of the first token that is predicted. With `drop_last`, the first token of the text is only
        # read. Otherwise, the first token is predicted from the token `bos`.
        self._first_target = 1 if self.drop_last else 0
        self._check_arguments()
        num_targets = len(self.tokens) - self._first_target
        if self.drop_last:
            self.blocks = num_targets // self.length
        else:
            self.blocks = -(-num_targets // self.length)  # division that rounds up
        self._order = _shuffle_blocks(self.blocks, self.seed)  # the order in which the blocks are read

    def block_numbers(self, step: int) -> list[int]:
        """Return the numbers of the blocks that this rank processes in a training step."""
        rows_per_rank = self.batch_size // self.world
        first_row = step * self.batch_size + self.rank * rows_per_rank
        return [int(self._order[row]) for row in range(first_row, first_row + rows_per_rank)]

    def batch(self, step: int) -> Batch:
        """Return the part of the batch of a training step that this rank processes.

        The batch does not depend on earlier calls.

        Args:
            step: The number of the training step, starting at 0.

        Raises:
            InputError: If a token is not in the vocabulary.
        """
        block_numbers = np.array(self.block_numbers(step), dtype=np.int64)
        starts = self._first_target + block_numbers * self.length
        # Each row holds one token more than a block: the token before the block, and the tokens of the block.
        rows = np.stack([self._read_row(start) for start in starts])
        self._check_vocabulary(rows, starts - 1)
        inputs = rows[:, :-1].copy()
        targets = rows[:, 1:].copy()
        target_positions = starts[:, None] + np.arange(self.length)
        # Positions after the end of the text are not part of the loss.
        targets[target_positions >= len(self.tokens)] = IGNORED
        if self.mask is not None:
            return self._mlm_batch(step, starts, targets)
        if self.packing == "blocks":
            return Batch(inputs, targets, None)

        document_numbers = np.stack([self._document_numbers(start) for start in starts])
        # The first token of a document is not predicted from the document before it.
        starts_document = document_numbers[:, 1:] != document_numbers[:, :-1]
        targets[starts_document] = IGNORED
        # Numbers that start at 0 in each row fit into 32 bits.
        segment_ids = document_numbers[:, :-1] - document_numbers[:, :1]
        return Batch(inputs, targets, segment_ids.astype(np.int32))

    def _mlm_batch(
        self, step: int, starts: Int64[np.ndarray, " batch"], tokens: Int64[np.ndarray, "batch length"]
    ) -> Batch:
        """Return a batch for a masked language model, with some tokens replaced by the mask token.

        Segments separate tokens that must not attend to each other. They have the same shape as the tokens.

        Args:
            step: The number of the training step.
            starts: The position in the text where each block starts.
            tokens: The tokens of the blocks. Positions after the end of the text contain `IGNORED`.
        """
        assert self.mask is not None
        # Rows are numbered from the first row of the first training step. A rank is one of several training processes.
        # Each rank has the same number of rows.
        rows_per_rank = len(starts)
        first_row = step * self.batch_size + self.rank * rows_per_rank
        row_numbers = range(first_row, first_row + rows_per_rank)
        is_padding = tokens == IGNORED
        is_masked = training_mask(self.seed, row_numbers, self.length) & ~is_padding
        padded_tokens = np.where(is_padding, self.bos, tokens)
        inputs, targets = mask_tokens(padded_tokens, is_masked, self.mask)

        # Padding gets its own segment, so that no token attends to padding.
        if self.packing == "blocks":
            segment_ids = is_padding.astype(np.int32) if is_padding.any() else None
            return Batch(inputs, targets, segment_ids)
        # With packing="documents", each document is a segment. The padding comes after the last document of a row.
        document_numbers = np.stack([self._document_numbers(start)[1:] for start in starts])  # shape (batch, length)
        padding_segments = document_numbers[:, -1:] + 1
        segment_ids = np.where(is_padding, padding_segments, document_numbers)
        # Numbers that start at 0 in each row fit into 32 bits.
        segment_ids -= document_numbers[:, :1]
        return Batch(inputs, targets, segment_ids.astype(np.int32))

    def _read_row(self, start: int) -> Int64[np.ndarray, " positions"]:
        """Return the token before a block, followed by the tokens of the block.

        Tokens that do not exist are replaced by `bos`: the token before the text, and tokens after the end of the text.

        Args:
            start: The position of the first token of the block.
        """
        row = np.full(self.length + 1, self.bos, dtype=np.int64)
        available_tokens = self.tokens[max(start - 1, 0) : start + self.length]
        offset = 1 if start == 0 else 0  # No token precedes the text.
        row[offset : offset + len(available_tokens)] = available_tokens
        return row

    def _document_numbers(self, start: int) -> Int64[np.ndarray, " positions"]:
        """Return to which document each token of a row belongs. Documents are numbered from 1.

        A row consists of the token before a block and the tokens of the block. If the block starts at position 0, no
        token precedes the block, and the first entry is the number of the first document.

        Args:
            start: The position of the first token of the block.

        Example:
            The documents begin at the positions 0 and 4, and a block has 3 tokens. The row of the block that starts at
            3 has the tokens at the positions 2, 3, 4 and 5, and the result is 1 1 2 2.
        """
        assert self.documents is not None
        positions = np.maximum(np.arange(start - 1, start + self.length), 0)
        # `searchsorted` returns how many documents begin at or before a position. The array of all documents is mapped
        # from the disk, so all positions are searched only in the documents that begin inside the row.
        first_number = int(np.searchsorted(self.documents, positions[0], side="right"))
        last_number = int(np.searchsorted(self.documents, positions[-1], side="right"))
        starts_in_row = np.asarray(self.documents[first_number:last_number])
        return first_number + np.searchsorted(starts_in_row, positions, side="right")

    def _check_vocabulary(self, rows: Int64[np.ndarray, "batch tokens"], starts: Int64[np.ndarray, " batch"]) -> None:
        """Raise `InputError` if a token is not in the vocabulary.

        Args:
            rows: The tokens.
            starts: The position in the text of the first token of each row, for the error message.
        """
        if self.vocab_size is None or int(rows.max()) < self.vocab_size:
            return
        row, column = np.unravel_index(int(rows.argmax()), rows.shape)
        raise InputError(
            f"Token {rows.max()} at position {starts[row] + column} is outside the vocabulary of {self.vocab_size}. "
            "The data is damaged or was prepared for another vocabulary. Prepare it again."
        )

    def _check_arguments(self) -> None:
        """Raise `InputError` if the arguments do not fit together.

        `world` is the number of training processes, which share each batch, and `rank` is the number of this process.
        """
        if self.batch_size % self.world:
            raise InputError(
                f"The batch size {self.batch_size} is not divisible by the {self.world} processes. "
                f"Use a multiple of {self.world}."
            )
        if not 0 <= self.rank < self.world:
            raise InputError(f"rank must be from 0 to {self.world - 1}, got {self.rank}.")
        required_tokens = self.length + self._first_target
        if len(self.tokens) < required_tokens:
            raise InputError(
                f"The text has {len(self.tokens)} tokens, but one sequence of length {self.length} needs "
                f"{required_tokens}. Use a shorter length or a larger corpus."
            )
        if self.packing not in ("blocks", "documents"):
            raise InputError(f"packing must be 'blocks' or 'documents', got '{self.packing}'.")
        if self.packing == "documents" and self.documents is None:
            raise InputError(
                "packing='documents' requires the document offsets: documents=prepared.documents('train')."
            )


def _shuffle_blocks(blocks: int, seed: int) -> Any:
    """Return an endless sequence of block numbers. Each epoch contains all blocks once, in its own order.

    A block is a part of the training text with one training length. An epoch is one pass over all blocks.

    Args:
        blocks: The number of blocks.
        seed: The seed of the training run.

    Returns:
        A grain dataset. Its n-th item is computed directly, without the items before it.
    """
    grain = _import_grain()
    # grain uses the seed plus the number of the epoch. The hash makes sure that consecutive seeds share no order.
    digest = hashlib.sha256(f"order {seed}".encode()).digest()
    hashed_seed = int.from_bytes(digest[:4], "big")
    return grain.MapDataset.range(blocks).shuffle(seed=hashed_seed).repeat()


def _import_grain() -> Any:
    """Import grain without its log message that jax is not installed. grain does not need jax here.

    The import is slow, and only training needs batches.
    """
    require_package("grain", "Training", "trainshort[train]")
    absl_logger = logging.getLogger("absl")

    def is_relevant(record: logging.LogRecord) -> bool:
        """Return whether a log message is shown. The message that jax is not installed is hidden."""
        return "jax profiler" not in record.getMessage()

    absl_logger.addFilter(is_relevant)
    import grain

    absl_logger.removeFilter(is_relevant)
    return grain
