"""Passes: which tokens each forward pass of an evaluation reads, and which of them it scores.

Every token of a text is a prediction target. A text of n tokens has the targets 0 to n - 1, and each target is scored
exactly once. A pass over the targets `start` to `stop` - 1 reads the tokens before these targets, which are the tokens
`start` - 1 to `stop` - 2. No token precedes target 0. The model reads the BOS token instead, as in fairseq.

For ten tokens and the length 4, these are the passes with the stride 2, and with the stride 4 (no overlap):

    targets 0 1 2 3   scored 0 1 2 3             targets 0 1 2 3   scored 0 1 2 3
    targets 2 3 4 5   scored     4 5             targets 4 5 6 7   scored 4 5 6 7
    targets 4 5 6 7   scored     6 7             targets 8 9       scored 8 9
    targets 6 7 8 9   scored     8 9

This module does not import torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
from jaxtyping import Int64, Integer

from trainshort.errors import InputError

PAPER_STEPS = (0, 1, *range(10, 100, 10), *range(100, 1000, 100), *range(1000, 15_001, 1000))
"""The input lengths of Tables 2 to 4 of the ALiBi paper, as numbers of tokens above the training length."""

DEFAULT_MULTIPLES = (1, 2, 4, 8, 16)
"""The default input lengths of an evaluation, as multiples of the training length."""


@dataclass(frozen=True)
class Pass:
    """One forward pass of an evaluation.

    Attributes:
        start: The first target of the pass. The model reads the token before this target first.
        first: The first target that the pass scores. Targets from `start` to `first` - 1 are only context.
        stop: The first target after the pass.
    """

    start: int
    first: int
    stop: int

    @property
    def read(self) -> int:
        """The number of tokens that the pass reads."""
        return self.stop - self.start

    @property
    def scored(self) -> int:
        """The number of targets that the pass scores."""
        return self.stop - self.first


@dataclass(frozen=True)
class Passes:
    """All passes over a text, in the order of the targets that they score.

    The first pass scores all targets that it covers. Each later pass covers the last `length` - `stride` targets of the
    pass before it again, as context, and scores the next `stride` targets. The last pass may be shorter.

    Attributes:
        tokens: The number of tokens of the text.
        length: The number of tokens that a pass reads.
        stride: The number of targets that a pass scores. Equal to `length` if passes do not overlap.
    """

    tokens: int
    length: int
    stride: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"A length must be at least 1 token, got {self.length}.")
        if not 1 <= self.stride <= self.length:
            raise InputError(
                f"The stride must be between 1 and the length {self.length}, got {self.stride}. "
                "A stride equal to the length means that passes do not overlap."
            )
        if self.tokens < 1:
            raise InputError("The text has no tokens. Use a longer text, or a larger --max-tokens.")

    def __len__(self) -> int:
        """Return the number of passes."""
        tokens_after_first_pass = max(0, self.tokens - self.length)
        later_passes = -(-tokens_after_first_pass // self.stride)  # division that rounds up
        return 1 + later_passes

    def __getitem__(self, index: int) -> Pass:
        """Return the pass with an index from 0 on. `IndexError` is raised if there is no such pass.

        A pass reads the targets from `start` to `stop` - 1 and scores those from `first` on. For the length 4 and the
        stride 2, pass 0 reads and scores the targets 0 to 3. Pass 1 reads the targets 2 to 5 and scores 4 and 5.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index == 0:
            return Pass(start=0, first=0, stop=min(self.length, self.tokens))
        overlap = self.length - self.stride  # targets that the previous pass has scored, and that are context here
        first = self.length + (index - 1) * self.stride
        stop = min(first + self.stride, self.tokens)
        return Pass(start=first - overlap, first=first, stop=stop)

    @property
    def read(self) -> int:
        """The number of tokens that all passes read together. Overlapping tokens are counted once for each pass."""
        overlap = self.length - self.stride
        later_passes = len(self) - 1
        return self.tokens + later_passes * overlap

    def at(self, target: int) -> int:
        """Return the index of the pass that scores a target.

        Pass 0 scores the first `length` targets, and each later pass scores the next `stride` targets.

        Args:
            target: The position of the target in the text.
        """
        if target < self.length:
            return 0
        return 1 + (target - self.length) // self.stride

    def batches(self, budget: int, begin: int = 0) -> Iterator[list[Pass]]:
        """Yield the passes in batches. All passes of a batch read and score the same number of tokens.

        A pass reads one window of the text, and scores the targets (tokens to predict) at the end of the window.

        Args:
            budget: The largest number of tokens that a batch reads. A batch has at least one pass.
            begin: The index of the first pass.

        Example:
            For 10 tokens, the length 4, the stride 2 and a budget of 8 tokens, the batches are the passes [0], [1, 2]
            and [3]. Pass 0 is alone, because it scores more targets than pass 1.
        """
        passes_per_batch = max(1, budget // self.length)
        passes = (self[index] for index in range(begin, len(self)))
        for _, same_shape_passes in groupby(passes, key=_shape):
            yield from _cut_into_batches(same_shape_passes, passes_per_batch)

    def positions(self) -> Int64[np.ndarray, " tokens"]:
        """Return the position of each target inside the pass that scores the target.

        A target is a token that the model predicts. A target at position p is predicted from p + 1 tokens.

        Example:
            For 10 tokens, the length 4 and the stride 2, the positions are 0 1 2 3 2 3 2 3 2 3.
        """
        targets = np.arange(self.tokens)
        overlap = self.length - self.stride
        positions_in_later_passes = overlap + (targets - self.length) % self.stride
        return np.where(targets < self.length, targets, positions_in_later_passes)


def _shape(window: Pass) -> tuple[int, int]:
    """Return how many tokens a pass reads and how many it scores. Passes of equal shape fit into one batch."""
    return window.read, window.scored


def _cut_into_batches(passes: Iterator[Pass], batch_size: int) -> Iterator[list[Pass]]:
    """Yield lists of at most `batch_size` passes (windows of the text). The passes are created one batch at a time."""
    while True:
        batch = list(islice(passes, batch_size))
        if not batch:
            return
        yield batch


def fill(
    tokens: Integer[np.ndarray, " tokens"], passes: Sequence[Pass], bos: int
) -> tuple[Int64[np.ndarray, "passes length"], Int64[np.ndarray, "passes length"]]:
    """Return the inputs and the targets of a batch of passes that read the same number of tokens.

    A pass is one forward pass over a window of the text. The input of a target is the token before the target.

    Args:
        tokens: All tokens of the text.
        passes: The passes of the batch. A pass covers the targets from `start` to `stop` - 1.
        bos: The token that the model reads before the first token of the text.

    Returns:
        The inputs and the targets, one row for each pass.

    Example:
        For the tokens 5 6 7 8, the pass over all four targets and bos=9, the inputs are 9 5 6 7 and the targets are
        5 6 7 8.
    """
    target_rows = [tokens[window.start : window.stop] for window in passes]
    targets = np.stack(target_rows).astype(np.int64)

    first_inputs = []
    for window in passes:
        if window.start == 0:
            first_inputs.append(bos)
        else:
            first_inputs.append(tokens[window.start - 1])

    inputs = np.empty_like(targets)
    inputs[:, 0] = first_inputs
    inputs[:, 1:] = targets[:, :-1]
    return inputs, targets


def read_lengths(arguments: Sequence[str], trained_at: int | None, tokens: int) -> list[int]:
    """Parse the input lengths that a user gave on the command line.

    Args:
        arguments: Words such as "128", "128,256", "2x" (a multiple of the training length) and "paper" (the lengths of
            the ALiBi paper's tables). If there are no words, `DEFAULT_MULTIPLES` times the training length are used.
        trained_at: The training length, or None if it is unknown.
        tokens: The number of tokens of the text. Default lengths are not longer than the text.

    Returns:
        The lengths in ascending order.

    Raises:
        InputError: If a word is invalid, or requires a training length that is unknown.
    """
    if not arguments:
        return _default_lengths(_require_training_length(trained_at, "the default lengths"), tokens)

    words = [word for argument in arguments for word in argument.split(",") if word]
    if not words:
        raise InputError("--lengths requires at least one length, for example --lengths 128,256.")
    lengths: set[int] = set()
    for word in words:
        number = word.removesuffix("x").replace("_", "")
        is_positive_number = number.isascii() and number.isdigit() and int(number) > 0
        if word == "paper":
            training_length = _require_training_length(trained_at, "the paper's lengths")
            lengths.update(training_length + step for step in PAPER_STEPS)
        elif is_positive_number and word.endswith("x"):
            lengths.add(int(number) * _require_training_length(trained_at, f"the length '{word}'"))
        elif is_positive_number:
            lengths.add(int(number))
        else:
            raise InputError(
                f"Invalid length '{word}': expected a positive whole number (128,256), a multiple of the training "
                "length (1x,2x) or 'paper'."
            )
    return sorted(lengths)


def _default_lengths(training_length: int, tokens: int) -> list[int]:
    """Return the default multiples of the training length that do not exceed the text, but at least one length."""
    lengths = [training_length * multiple for multiple in DEFAULT_MULTIPLES]
    lengths_in_text = [length for length in lengths if length <= tokens]
    return lengths_in_text or [training_length]


def _require_training_length(trained_at: int | None, subject: str) -> int:
    """Return the training length, or raise `InputError` if the model does not know it.

    Args:
        trained_at: The training length, or None if it is unknown.
        subject: What requires the training length, such as "the default lengths".
    """
    if trained_at is None:
        raise InputError(
            f"The training length of this model is unknown, and {subject} cannot be computed without it. "
            "Give the training length with --trained-at, or give the lengths as numbers."
        )
    return trained_at


def position_edges(length: int) -> list[int]:
    """Return the edges of bins for the positions 0 to `length` - 1.

    The first eight bins contain one position each. After them, there are four bins per doubling of the position. The
    last bin ends at `length`.

    Example:
        >>> position_edges(20)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    """
    edges = list(range(min(length, 8) + 1))
    bin_width = 2  # four bins of width 2 lead from 8 to 16, four bins of width 4 lead from 16 to 32, ...
    while edges[-1] < length:
        for _ in range(4):
            edges.append(edges[-1] + bin_width)
        bin_width *= 2
    edges_below_length = [edge for edge in edges if edge < length]
    return [*edges_below_length, length]
