"""Types that all export targets share: the target, the exported model, and the program that loads the export."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from trainshort.data.tokenizers.base import Tokenizer
from trainshort.interop.export.transforms import ExportModel, Requirement

# If a target needs a maximum input length, an export gets this multiple of the training length.
MAX_LENGTH_MULTIPLE = 16

EXPORT_AGAIN_HINT = "Export the run again."

# The largest number of values that `last_log_probabilities` returns. They need 64 MB in float32.
MAX_LOG_PROBABILITIES = 1 << 24


@dataclass(frozen=True)
class ExportSource:
    """The checkpoint that is exported.

    Attributes:
        path: The run folder or the checkpoint.
        model: The config and the weights.
        training_length: The training length.
        tokenizer: The tokenizer, or None if the run has no tokenizer.
        dtype: The dtype of the exported weights, such as "f32" or "q8_0".
        card: The extrapolation card, which says how the perplexity changes with the input length. None if these
            weights were not evaluated.
    """

    path: Path
    model: ExportModel
    training_length: int
    tokenizer: Tokenizer | None
    dtype: str = "f32"
    card: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.path.resolve().name


class Runtime(ABC):
    """An export that is loaded in the program it was made for.

    A subclass is created with the folder of the export and the length of the longest input.

    Attributes:
        package: The Python package that runs the export.
        allows_end_token: Whether `generate_greedy` may generate the end token and continue after it. Programs that
            always stop at the end token must choose another token instead.
    """

    package: str
    allows_end_token = False

    @abstractmethod
    def __init__(self, folder: Path, max_length: int) -> None: ...

    @abstractmethod
    def log_probabilities(
        self, tokens: list[int]
    ) -> tuple[Int64[Tensor, " positions"], Float[Tensor, "positions vocab"]]:
        """Return the log-probabilities of the next token at some or all positions of an input.

        The wrapper of a slow program may return some positions only.

        Args:
            tokens: The input.

        Returns:
            The positions, and the log-probabilities of all tokens of the vocabulary at these positions.
        """

    @abstractmethod
    def generate_greedy(self, tokens: list[int], count: int) -> list[int]:
        """Generate text without sampling: each token is the most likely token.

        Args:
            tokens: The prompt.
            count: The number of tokens to generate.

        Returns:
            The generated tokens, without the prompt.
        """

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text, or None if the program has no tokenizer."""
        return None

    @property
    def version(self) -> str:
        """The name and the version of the package."""
        return f"{self.package} {metadata.version(self.package)}"


@dataclass(frozen=True)
class MaxError:
    """The largest differences between an export and its run that `verify` accepts.

    Attributes:
        logits: The largest difference of two logits, in standard deviations of the logits.
        kl: The largest Kullback-Leibler divergence at one position.
    """

    logits: float
    kl: float


@dataclass(frozen=True)
class ExportTarget:
    """A program or file format that runs can be exported to.

    Attributes:
        requirements: What the target requires of a model.
        transform: Changes the weights, so that the target supports the model and the logits stay the same.
        write: Writes the files of an export into a folder.
        runtime: The program that loads the export: a subclass of `Runtime`.
        max_errors: The supported dtypes, and the differences that `verify` accepts for each dtype. The first dtype is
            the default.
        loading: How to load the export, for the model card.
        tokenizer_unsupported_reason: Returns why the target does not support a tokenizer and what to do, or None. The
            text continues the sentence "Export to this target does not support".
    """

    requirements: tuple[Requirement, ...]
    transform: Callable[[ExportModel], ExportModel]
    write: Callable[[Path, ExportSource], None]
    runtime: Callable[[Path, int], Runtime]
    max_errors: Mapping[str, MaxError]
    loading: str
    tokenizer_unsupported_reason: Callable[[Tokenizer | None], str | None] = lambda _: None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The supported dtypes. The first dtype is the default."""
        return tuple(self.max_errors)


def identity(model: ExportModel) -> ExportModel:
    """Return the model unchanged, for targets that need no transform."""
    return model


def last_log_probabilities(
    logits: Float[Tensor, "length vocab"],
) -> tuple[Int64[Tensor, " positions"], Float[Tensor, "positions vocab"]]:
    """Return the log-probabilities at all positions of an input, or at the last positions of a long input.

    The log-probabilities of a long input with a large vocabulary would need too much memory.

    Args:
        logits: The logits at all positions.

    Returns:
        The positions, and the log-probabilities at these positions.
    """
    length, vocab_size = logits.shape
    # The result has at most `MAX_LOG_PROBABILITIES` numbers, and at least one position.
    max_positions = max(1, MAX_LOG_PROBABILITIES // vocab_size)
    first_position = max(0, length - max_positions)
    positions = torch.arange(first_position, length)
    return positions, logits[first_position:].float().log_softmax(-1)
