"""Which tokens a pass reads and which it scores: evaluation's exact accounting, in integers alone. No torch.

A text of n tokens is n targets, 0 … n − 1, and every one of them is scored exactly once. A pass over targets
start … stop − 1 is fed the tokens before each of them, so its inputs are tokens start − 1 … stop − 2: the first
prediction of a block sees one token of context, as in the released code. Target 0 has no token before it; it is fed the
BOS (the end-of-line or end-of-text token, as fairseq does).

    ten tokens, length 4, stride 2:              ten tokens, length 4, stride 4 (non-overlapping):
        read 0 1 2 3   score 0 1 2 3                 read 0 1 2 3   score 0 1 2 3
        read 2 3 4 5   score     4 5                 read 4 5 6 7   score 4 5 6 7
        read 4 5 6 7   score     6 7                 read 8 9       score 8 9
        read 6 7 8 9   score     8 9
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from trainshort.errors import InputError

PAPER_STEPS = (0, 1, *range(10, 100, 10), *range(100, 1000, 100), *range(1000, 15_001, 1000))
"""How far past the training length the paper's Tables 2 to 4 go: 0, 1, 10 … 100, 200 … 1000, 2000 … 15000."""

DEFAULT_MULTIPLES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Pass:
    """Reads targets start … stop − 1, scores first … stop − 1."""

    start: int
    first: int
    stop: int

    @property
    def read(self) -> int:
        return self.stop - self.start

    @property
    def scored(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Passes:
    """All passes over a text. The first scores all it reads; each later one re-reads length − stride tokens and scores
    the next `stride`; the last may be shorter, and so is the only one where the text is shorter than the length. Passes
    come in the order of what they score."""

    tokens: int
    length: int
    stride: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"a length must be at least 1 token, got {self.length}.")
        if not 1 <= self.stride <= self.length:
            raise InputError(
                f"the stride must be between 1 and the length {self.length}, got {self.stride}; "
                "the length itself is the non-overlapping protocol."
            )
        if self.tokens < 1:
            raise InputError("the text has no tokens; use a longer text, or more --max-tokens.")

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.tokens - self.length) // self.stride))

    def __getitem__(self, index: int) -> Pass:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index == 0:
            return Pass(0, 0, min(self.length, self.tokens))
        first = self.length + (index - 1) * self.stride
        return Pass(first - (self.length - self.stride), first, min(first + self.stride, self.tokens))

    @property
    def read(self) -> int:
        """Tokens read by all passes together: what the evaluation costs."""
        return self.tokens + (len(self) - 1) * (self.length - self.stride)

    def at(self, target: int) -> int:
        """The pass that scores this target."""
        return 0 if target < self.length else 1 + (target - self.length) // self.stride

    def batches(self, budget: int, begin: int = 0) -> Iterator[list[Pass]]:
        """Consecutive passes of one shape, together reading at most `budget` tokens (always at least one pass).

        tokens 10, length 4, stride 2, budget 8:    [0]  [1 2]  [3]      (pass 0 scores more than the others)
        """
        together = max(1, budget // self.length)
        passes = (self[index] for index in range(begin, len(self)))
        for _, alike in groupby(passes, key=lambda one: (one.read, one.scored)):
            while batch := list(islice(alike, together)):
                yield batch

    def positions(self) -> np.ndarray:
        """For each target, its distance from the start of the pass that scores it; it sees one input more than that.

        tokens 10, length 4, stride 2:    0 1 2 3 2 3 2 3 2 3
        """
        target = np.arange(self.tokens)
        later = self.length - self.stride + (target - self.length) % self.stride
        return np.where(target < self.length, target, later)


def fill(tokens: np.ndarray, passes: Sequence[Pass], bos: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of passes of one shape, (passes, read) each.

    tokens 5 6 7 8, pass over targets 0 … 3, BOS 9:   inputs 9 5 6 7   targets 5 6 7 8
    """
    targets = np.stack([tokens[one.start : one.stop] for one in passes]).astype(np.int64)
    inputs = np.empty_like(targets)
    inputs[:, 1:] = targets[:, :-1]
    inputs[:, 0] = [tokens[one.start - 1] if one.start else bos for one in passes]
    return inputs, targets


def read_lengths(words: Sequence[str], trained_at: int | None, tokens: int) -> list[int]:
    """Lengths as a user writes them, ascending: numbers ("128 256" or "128,256"), multiples of the training length
    ("1x 2x 16x"), or "paper". Nothing given: 1, 2, 4, 8 and 16 times the training length, as far as the text goes."""
    if not words:
        base = _known(trained_at, "the default lengths")
        return [base * k for k in DEFAULT_MULTIPLES if base * k <= tokens] or [base]
    lengths: set[int] = set()
    for word in (part for text in words for part in text.split(",") if part):
        number = word.removesuffix("x").replace("_", "")
        if word == "paper":
            lengths.update(_known(trained_at, "the paper's grid") + step for step in PAPER_STEPS)
        elif number.isascii() and number.isdigit() and int(number) > 0:
            lengths.add(int(number) * (_known(trained_at, f"'{word}'") if word.endswith("x") else 1))
        else:
            raise InputError(
                f"lengths are positive whole numbers (128,256), multiples of the training length (1x,2x) or 'paper'; "
                f"got '{word}'."
            )
    if not lengths:
        raise InputError("no length was given; name at least one, such as --lengths 128,256.")
    return sorted(lengths)


def _known(trained_at: int | None, what: str) -> int:
    if trained_at is None:
        raise InputError(
            f"{what} start from the training length, which this model does not tell; give it by --trained-at, "
            "or give lengths as numbers."
        )
    return trained_at


def position_edges(length: int) -> list[int]:
    """Edges of the bins that positions 0 … length − 1 fall in: single at first, then four per doubling.

    position_edges(20):   0 1 2 3 4 5 6 7 8 10 12 14 16 20     (the last bin is cut at the length)
    """
    edges = list(range(min(length, 8) + 1))
    step = 2
    while edges[-1] < length:
        for _ in range(4):
            edges.append(edges[-1] + step)
        step *= 2
    return [edge for edge in edges if edge < length] + [length]
