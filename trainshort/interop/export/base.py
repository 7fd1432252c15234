"""Types that all export targets share: what a target is, what it exports, and the program that loads the export."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainshort.data.tokenizers.base import Tokenizer
from trainshort.interop.export.transforms import ExportModel, Requirement

MAX_LENGTH_MULTIPLE = 16
"""An export supports inputs of this many times the training length, if the target needs a maximum length."""
EXPORT_AGAIN_HINT = "Export the run again."
MAX_LOGITS = 1 << 24
"""`last_log_probabilities` returns at most this many numbers."""


@dataclass(frozen=True)
class ExportSource:
    """The best checkpoint of a run, and what describes it."""

    path: Path
    model: ExportModel
    length: int
    """The training length."""
    tokenizer: Tokenizer | None
    dtype: str = "f32"
    card: dict[str, Any] | None = None
    """The extrapolation card of these weights. None if the weights were not evaluated."""

    @property
    def name(self) -> str:
        return self.path.resolve().name


class Runtime(ABC):
    """An export that is loaded in the program it was made for.

    A subclass is created with the folder of the export and the length of the longest input.
    """

    package: str
    """The Python package that runs the export."""
    ends = False
    """Whether greedy text can contain the end token. Programs that stop at this token must choose another token."""

    @abstractmethod
    def __init__(self, folder: Path, longest: int) -> None: ...

    @abstractmethod
    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the token after each position.

        A program that is slow may return some positions only.

        Args:
            tokens: The input.

        Returns:
            The positions, of shape (positions,), and the log-probabilities, of shape (positions, vocabulary).
        """

    @abstractmethod
    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Return `count` tokens that the program generates after `tokens` without sampling."""

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text, or None if the program has no tokenizer."""
        return None

    @property
    def version(self) -> str:
        return f"{self.package} {metadata.version(self.package)}"


@dataclass(frozen=True)
class MaxError:
    """The largest differences between an export and its run that `verify` accepts."""

    logits: float
    """Largest difference of two logits, in standard deviations of the logits."""
    kl: float
    """Largest Kullback-Leibler divergence at one position."""


@dataclass(frozen=True)
class ExportTarget:
    """An export target."""

    summary: str
    """One line for `trainshort list`."""
    requirements: tuple[Requirement, ...]
    """What the target requires of a model."""
    transform: Callable[[ExportModel], ExportModel]
    """Transforms the weights into an equal model that the target supports."""
    write: Callable[[Path, ExportSource], None]
    """Writes the files of the export into a folder."""
    runtime: Callable[[Path, int], Runtime]
    """The program that loads the export: a subclass of `Runtime`."""
    max_errors: Mapping[str, MaxError]
    """The supported dtypes, and the errors that `verify` accepts for each. The first dtype is the default."""
    loading: str
    """How to load the export, for the model card."""
    tokenizer_unsupported_reason: Callable[[Tokenizer | None], str | None] = lambda _: None
    """Returns why the target does not support a tokenizer and what to do, or None."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(self.max_errors)


def identity(model: ExportModel) -> ExportModel:
    """Return the model unchanged, for targets that need no transform."""
    return model


def last_log_probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions and the log-probabilities of all positions, or of the last positions of a long input."""
    vocabulary = logits.shape[1]
    count = max(1, MAX_LOGITS // vocabulary)
    first = max(0, len(logits) - count)
    return torch.arange(first, len(logits)), logits[first:].float().log_softmax(-1)
