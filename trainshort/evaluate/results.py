"""Store evaluation results, read them again, and compute perplexities and confidence intervals from them.

Result files contain sums and counts only. All numbers for readers (perplexity, bits per byte, confidence intervals) are
computed in this module from those sums. A `Query` selects the stored evaluations that belong into one table.

This module does not import torch, because reports read results without torch.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainshort.config.base import StrictConfig
from trainshort.data.passes import Passes, position_edges
from trainshort.errors import InputError
from trainshort.train.run_folder import read_checkpoint_states
from trainshort.utils.io import MissingFileError, make_folder, read_with_checksum, write_with_checksum
from trainshort.utils.terminal import perplexity

# The version of the file format. Files of other versions are rejected.
EVALUATION_FORMAT = 2

# The text is split into this many spans, and the loss is stored for each span. The spans do not depend on the input
# length, so results at two lengths can be compared span by span.
MAX_SPANS = 100

# A span has at least this many tokens. A short text is therefore split into fewer spans.
MIN_SPAN_TOKENS = 32

# The number of bootstrap resamples of a confidence interval.
BOOTSTRAP_RESAMPLES = 1000

CONFIDENCE_LEVEL = 0.95

Interval = tuple[float, float]
"""The lower and the upper end of a confidence interval."""

Status = Literal["scored", "cannot", "out of memory", "not finite"]
"""The outcome of one length: scored, length not supported, out of memory, or a loss that is not a finite number."""


class LengthScore(StrictConfig):
    """The result of an evaluation at one input length.

    A pass is one forward pass of the evaluation for one window of the text. A target is a token that is predicted.
    """

    length: int
    """Number of tokens that a pass reads (L_valid in the paper)."""
    stride: int
    """Number of targets that a pass scores. If the stride equals the length, the windows do not overlap."""
    status: Status
    """Whether the length was scored, or why there is no result."""
    reason: str | None = None
    """A sentence that explains why there is no result."""
    tokens: int = 0
    """Number of targets that were scored."""
    nll: float = 0.0
    """Sum of the negative log-likelihoods of all targets, in nats."""
    passes: int = 0
    """Number of passes."""
    tokens_read: int = 0
    """Number of tokens that all passes read together."""
    seconds: float = 0.0
    """Time to score the last `timed` targets."""
    timed: int = 0
    """Number of targets that were timed. It is smaller than `tokens` if the evaluation was resumed."""
    memory: int | None = None
    """Peak memory in bytes. On a CPU, it is the memory of the process. On a GPU, it is the allocated GPU memory."""
    blocks: tuple[tuple[int, float], ...] = ()
    """Number of targets and sum of their losses, for each span of the text."""
    positions: tuple[tuple[int, int, int, float], ...] = ()
    """First position, last position + 1, number of targets and sum of their losses, for each bin of positions."""
    position_squares: tuple[float, ...] = ()
    """Sum of the squared losses of each bin in `positions`."""

    @property
    def loss(self) -> float:
        """Return the mean loss in nats, or infinity if the length was not scored."""
        if self.status != "scored" or self.tokens == 0:
            return math.inf
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """Return the perplexity per token, or infinity if the length was not scored."""
        return perplexity(self.loss)

    @property
    def speed(self) -> float | None:
        """Return the number of targets that were scored per second, or None if the time is unknown.

        `timed` is the number of targets that were scored during the measured time (`seconds`).
        """
        if self.timed == 0 or self.seconds == 0:
            return None
        return self.timed / self.seconds


class Evaluation(StrictConfig):
    """The results of one model on one text with one protocol, at any number of input lengths."""

    format: int = EVALUATION_FORMAT
    """Version of the file format."""
    target: dict[str, Any]
    """The model: name, kind, hash of the weights, training step, training length, config."""
    corpus: dict[str, Any]
    """The text: name, split, hash, tokenizer, and the number of scored tokens, words and bytes."""
    protocol: dict[str, Any]
    """The settings: name, stride, overrides of the model, first token, precision, device."""
    provenance: dict[str, Any]
    """The origin of the last result: time, commit, package versions, machine, threads."""
    rows: tuple[LengthScore, ...] = ()
    """One result per length, sorted by length."""

    @property
    def trained_at(self) -> int | None:
        """Return the training length of the model, or None if it is unknown."""
        return self.target.get("trained_at")

    @property
    def scored(self) -> list[LengthScore]:
        """Return the results of the lengths that were scored."""
        return [row for row in self.rows if row.status == "scored"]

    def row(self, length: int) -> LengthScore | None:
        """Return the result at a length, or None if the length was not evaluated."""
        for row in self.rows:
            if row.length == length:
                return row
        return None

    def with_row(self, new_row: LengthScore) -> "Evaluation":
        """Return a copy that contains `new_row`. It replaces the existing result at the same length."""
        other_rows = [row for row in self.rows if row.length != new_row.length]
        sorted_rows = sorted([*other_rows, new_row], key=lambda row: row.length)
        return self.model_copy(update={"rows": tuple(sorted_rows)})

    @property
    def metric_name(self) -> str:
        """Return "perplexity", or "pseudo-perplexity" for an encoder.

        An encoder predicts masked tokens and sees the text on both sides of them. Its losses therefore do not add up to
        the log-probability of the text.
        """
        return "pseudo-perplexity" if self._is_masked else "perplexity"

    @property
    def _is_masked(self) -> bool:
        """Return whether the model is an encoder, which predicts masked tokens."""
        return bool(self.protocol.get("masked"))

    def word_perplexity(self, row: LengthScore) -> float | None:
        """Return the perplexity per word. Unlike the perplexity per token, it is comparable between tokenizers.

        Args:
            row: The result at one length.

        Returns:
            The perplexity per word, or None if it is not defined. It is defined if the length was scored, the number of
            words is known, and the model is not an encoder.
        """
        words = self.corpus.get("words")
        if self._is_masked or not words or row.status != "scored":
            return None
        return perplexity(row.nll / words)

    def bits_per_byte(self, row: LengthScore) -> float | None:
        """Return the loss in bits per byte of the text, which is comparable between tokenizers.

        Args:
            row: The result at one length.

        Returns:
            The bits per byte, or None if they are not defined. They are defined if the length was scored, the number of
            bytes is known, and the model is not an encoder.
        """
        num_bytes = self.corpus.get("bytes")
        if self._is_masked or not num_bytes or row.status != "scored":
            return None
        return row.nll / math.log(2) / num_bytes


# ---- from losses to sums


def summarize(passes: Passes, nll: np.ndarray) -> LengthScore:
    """Create the result of an evaluation at one input length from the losses of all targets.

    A target is a token that the model predicts. A pass is one forward pass, which reads one window of the text.

    Args:
        passes: The passes that were made over the text.
        nll: The loss of each target, in the order of the text.

    Returns:
        The result. Its status is "not finite" if a loss is infinite or not a number.
    """
    row = LengthScore(
        length=passes.length,
        stride=passes.stride,
        status="scored",
        tokens=len(nll),
        passes=len(passes),
        tokens_read=passes.read,
    )
    losses = nll.astype(np.float64)
    num_not_finite = int((~np.isfinite(losses)).sum())
    if num_not_finite:
        reason = f"{num_not_finite:,} of {len(nll):,} targets have a loss that is not a finite number"
        return row.replace(status="not finite", reason=reason)

    # The sums of squares are stored, so that the variance of the losses at each position can be computed later.
    squared_bins = sum_by_position(passes, losses**2)
    squared_sums = tuple(squared_sum for _, _, _, squared_sum in squared_bins)  # one sum for each bin of positions
    return row.replace(
        nll=float(losses.sum()),
        blocks=sum_by_span(losses),
        positions=sum_by_position(passes, losses),
        position_squares=squared_sums,
    )


def sum_by_span(losses: np.ndarray) -> tuple[tuple[int, float], ...]:
    """Split the losses of a text into consecutive spans of nearly equal size, and sum the losses of each span.

    Args:
        losses: The loss of each target, in the order of the text.

    Returns:
        The number of targets and the sum of their losses, for each span. For example, 217,646 targets are split into
        100 spans with 2,176 or 2,177 targets.
    """
    num_spans = max(1, min(MAX_SPANS, len(losses) // MIN_SPAN_TOKENS))
    spans = np.array_split(losses, num_spans)
    return tuple((len(span), float(span.sum())) for span in spans)


def sum_by_position(passes: Passes, losses: np.ndarray) -> tuple[tuple[int, int, int, float], ...]:
    """Sum the losses of all targets by their position in the pass that scores them.

    A pass reads one window of the text, and scores (computes the losses of) the targets at the end of the window.
    Neighboring positions are combined in a bin.

    Args:
        passes: The passes over the text.
        losses: The loss of each target, in the order of the text.

    Returns:
        First position, last position + 1, number of targets and sum of their losses, for each bin of positions. Bins
        without targets are left out.
    """
    edges = position_edges(passes.length)  # for example [0, 1, 2, 3, 4, 5, 6, 7, 8, 10] for the length 10
    num_bins = len(edges) - 1
    bin_indices = np.digitize(passes.positions(), edges) - 1
    counts = np.bincount(bin_indices, minlength=num_bins).tolist()
    sums = np.bincount(bin_indices, weights=losses, minlength=num_bins).tolist()

    bins = []
    for first, end, count, total in zip(edges[:-1], edges[1:], counts, sums, strict=True):
        if count > 0:
            bins.append((first, end, count, total))
    return tuple(bins)


# ---- confidence intervals


def interval(row: LengthScore, other: LengthScore | None = None) -> Interval | None:
    """Return the 95 % bootstrap interval of a mean loss, or of the difference between two mean losses.

    A span is a consecutive part of the text. The interval of a difference is usually much narrower, because both
    results are compared span by span: a span that is hard to predict raises both losses.

    Args:
        row: The result at one length.
        other: A second result on the same text. Its loss is subtracted from the loss of `row`.

    Returns:
        The interval, or None if `row` was not scored or the text has fewer than two spans.

    Raises:
        InputError: If the two results belong to different texts.
    """
    if row.status != "scored" or len(row.blocks) < 2:
        return None
    # `blocks` has one pair for each span of the text: the number of targets and the sum of their losses.
    counts, sums = np.array(row.blocks, dtype=np.float64).T
    if other is None:
        return bootstrap_interval(sums, counts)

    span_counts = [count for count, _ in row.blocks]
    other_span_counts = [count for count, _ in other.blocks]
    if span_counts != other_span_counts:
        raise InputError("Cannot compare these two evaluations, because they did not score the same text.")
    other_sums = np.array(other.blocks, dtype=np.float64)[:, 1]
    return bootstrap_interval(sums - other_sums, counts)


def bootstrap_interval(sums: np.ndarray, counts: np.ndarray | None = None) -> Interval | None:
    """Return the 95 % bootstrap interval of a mean that is computed from groups of values.

    The bootstrap draws groups at random with replacement, and computes the mean of the drawn groups. The random seed is
    fixed.

    Args:
        sums: The sum of the values in each group. A group is a span of the text, or a sample.
        counts: The number of values in each group. None means one value per group.

    Returns:
        The interval, or None if there are fewer than two groups.
    """
    num_groups = len(sums)
    if num_groups < 2:
        return None
    weights = np.ones(num_groups) if counts is None else counts.astype(np.float64)  # values in each group
    rng = np.random.default_rng(0)
    drawn_groups = rng.integers(num_groups, size=(BOOTSTRAP_RESAMPLES, num_groups))
    # Each row of `drawn_groups` is one resample, so `means` has one mean for each resample.
    drawn_sums = sums.astype(np.float64)[drawn_groups].sum(axis=1)
    means = drawn_sums / weights[drawn_groups].sum(axis=1)
    lower_quantile = (1 - CONFIDENCE_LEVEL) / 2
    upper_quantile = (1 + CONFIDENCE_LEVEL) / 2
    low, high = np.quantile(means, [lower_quantile, upper_quantile])
    return float(low), float(high)


# ---- files


def save(evaluation: Evaluation, path: Path) -> None:
    """Write an evaluation to a JSON file. The folder is created if it does not exist."""
    make_folder(path.parent)
    write_with_checksum(path, json.loads(evaluation.model_dump_json()))


def load(path: Path) -> Evaluation:
    """Read an evaluation from a file that `save` wrote.

    Args:
        path: A file `eval/*.json` in a run folder.

    Returns:
        The evaluation.

    Raises:
        InputError: If the file does not exist, is damaged, or is not an evaluation.
    """
    hint = "Remove it and evaluate again."
    try:
        values = read_with_checksum(path, hint=hint)
    except MissingFileError:
        raise InputError(f"Evaluation not found: {path}. Create it with `trainshort evaluate RUN`.") from None
    if values.get("format") != EVALUATION_FORMAT:
        raise InputError(f"Invalid file {path}: expected an evaluation of format {EVALUATION_FORMAT}. {hint}")
    try:
        return Evaluation.parse(values)
    except InputError as error:
        raise InputError(f"Invalid evaluation {path}: {error} {hint}") from None


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation and the file that it was read from."""

    path: Path
    evaluation: Evaluation


def find_evaluations(folder: Path) -> list[StoredEvaluation]:
    """Read all evaluations in a run folder that are still valid.

    If a run was evaluated before its training ended, its best checkpoint may have changed since. Evaluations of a
    former best checkpoint are left out.

    Args:
        folder: The run folder.

    Returns:
        The evaluations, sorted by the time when they were made.

    Raises:
        InputError: If a result file is damaged.
    """
    best = best_step(folder)
    valid_evaluations = []
    for path in sorted((folder / "eval").glob("*.json")):
        evaluation = load(path)
        if not _is_outdated(evaluation, best):
            valid_evaluations.append(StoredEvaluation(path, evaluation))
    return sorted(valid_evaluations, key=lambda stored: str(stored.evaluation.provenance.get("time", "")))


def _is_outdated(evaluation: Evaluation, best: int | None) -> bool:
    """Return whether an evaluation of the best checkpoint is outdated, because another checkpoint is the best now.

    Args:
        evaluation: The evaluation. If the user chose a certain checkpoint for it, it is never outdated.
        best: The training step of the checkpoint that is the best now, or None if it is unknown.
    """
    evaluates_best_checkpoint = evaluation.target["kind"] == "run"
    if best is None or not evaluates_best_checkpoint:
        return False
    evaluated_step = evaluation.target.get("step")
    return evaluated_step is not None and evaluated_step != best


def best_step(folder: Path) -> int | None:
    """Return the training step of the checkpoint with the lowest validation loss.

    Args:
        folder: The run folder.

    Returns:
        The training step, or None if no checkpoint was validated.
    """
    losses: dict[int, float] = {}
    for state in read_checkpoint_states(folder):
        try:
            step = int(state["step"])
            # The mean validation loss: the sum of the losses divided by the number of predicted tokens.
            losses[step] = state["valid_nll"] / state["valid_count"]
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue  # The checkpoint was not validated, or is damaged. Loading a damaged checkpoint raises an error.
    if not losses:
        return None
    return min(losses, key=losses.__getitem__)


# ---- select results for a table


@dataclass(frozen=True)
class Query:
    """The properties that evaluations must have in common to appear in one table. The input length may differ.

    Attributes:
        split: The split of the run's own data that was evaluated.
        stride: The number of targets per pass. None means that the windows do not overlap.
        tokens: The number of tokens at the start of the split that were evaluated. None means all tokens.
        step: The training step of the evaluated checkpoint. None means the best checkpoint of the run.
    """

    split: str = "valid"
    stride: int | None = None
    tokens: int | None = None
    step: int | None = None

    def matches(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation has the properties of this query.

        Evaluations with an override of the model, or with another precision than float32, never match.
        """
        protocol = evaluation.protocol
        has_override = protocol["slopes"] is not None  # The key "slopes" contains every kind of override.
        has_same_settings = protocol["stride"] == self.stride and protocol["precision"] == "float32"
        if has_override or not has_same_settings:
            return False
        return self._has_same_weights(evaluation) and self._has_same_text(evaluation)

    def _has_same_weights(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation belongs to the checkpoint of this query.

        A query without a step asks for the best checkpoint of the run.
        """
        kind = evaluation.target["kind"]
        if self.step is None:
            return kind == "run"  # the best checkpoint
        return kind in ("run", "checkpoint") and evaluation.target.get("step") == self.step

    def _has_same_text(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation scored exactly the tokens of this query: its split, cut to its token count."""
        corpus = evaluation.corpus
        split_tokens = corpus["whole"]  # the number of tokens in the complete split (a part of the data)
        expected_tokens = split_tokens if self.tokens is None else min(self.tokens, split_tokens)
        # "own" says whether the text is the data on which the run was trained.
        is_data_of_run = corpus.get("own", True)
        return is_data_of_run and corpus["split"] == self.split and corpus["tokens"] == expected_tokens


def select_rows(stored: Iterable[StoredEvaluation], query: Query) -> dict[int, tuple[LengthScore, Path]]:
    """Select the results that match a query.

    Args:
        stored: The evaluations of a run.
        query: The properties that an evaluation must have.

    Returns:
        The result at each length and the file that contains it, sorted by length. If a length was evaluated several
        times, a result with the status "scored" is preferred, and a later evaluation is preferred to an earlier one.
    """
    selected: dict[int, tuple[LengthScore, Path]] = {}
    for stored_evaluation in stored:
        if not query.matches(stored_evaluation.evaluation):
            continue
        for row in stored_evaluation.evaluation.rows:
            # Later evaluations come later in `stored`, so a later result replaces an earlier one.
            if row.length not in selected or row.status == "scored":
                selected[row.length] = (row, stored_evaluation.path)
    return dict(sorted(selected.items()))
