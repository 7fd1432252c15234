"""What an evaluation stores: sums and counts with their origin. No torch; reports and cards read these files.

Every number that a person reads (perplexity, bits per byte, confidence interval) is divided out of the sums here, on
reading, and in no other place. A `Query` says which stored evaluation answers a question: asked by what computes a
table and by what prints it. If they had two rules, a table could count as done and stay empty, or take a number from
another text.
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

EVALUATION_FORMAT = 2
BLOCKS = 100
"""Stretches of text whose sums are stored, the same for all lengths: rows can be compared stretch by stretch."""
SMALLEST_BLOCK = 32
"""Tokens that a stretch should have at least; a short text gets fewer stretches."""

RESAMPLES = 1000
LEVEL = 0.95

Interval = tuple[float, float]
Status = Literal["scored", "cannot", "out of memory", "not finite"]


class LengthScore(StrictConfig):
    """One length of a sweep."""

    length: int
    """Tokens read by a pass: the paper's L_valid."""
    stride: int
    """Tokens scored by a pass; the length itself is non-overlapping."""
    status: Status
    """scored, or why there is no number: the model cannot read so far, memory ran out, a loss was not finite."""
    reason: str | None = None
    """The status in words."""
    tokens: int = 0
    """Targets scored."""
    nll: float = 0.0
    """Sum of their negative log-likelihoods, in nats."""
    passes: int = 0
    """Passes made."""
    tokens_read: int = 0
    """Tokens read by all of them."""
    seconds: float = 0.0
    """Time it took to score the last `timed` targets: all of them, unless the evaluation was resumed."""
    timed: int = 0
    """Targets in that time."""
    memory: int | None = None
    """Peak memory in bytes, of the process or of the GPU's allocations."""
    blocks: tuple[tuple[int, float], ...] = ()
    """Targets and nll of consecutive stretches of the text."""
    positions: tuple[tuple[int, int, int, float], ...] = ()
    """By distance from the start of the pass: first position, last position + 1, targets, nll."""
    position_squares: tuple[float, ...] = ()
    """Sums of the squared losses of these bins, for their intervals."""

    @property
    def loss(self) -> float:
        """Mean nll in nats; infinite where nothing was scored."""
        return self.nll / self.tokens if self.tokens and self.status == "scored" else math.inf

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def speed(self) -> float | None:
        """Targets per second."""
        return self.timed / self.seconds if self.timed and self.seconds else None


class Evaluation(StrictConfig):
    """One model on one text by one protocol, at any number of lengths."""

    format: int = EVALUATION_FORMAT
    target: dict[str, Any]
    """What was evaluated: name, kind, weights' sha256, step, training length, configuration."""
    corpus: dict[str, Any]
    """On what: name, split, sha256, tokenizer, and how many tokens, words and bytes were scored."""
    protocol: dict[str, Any]
    """How: name, stride, slopes, first token, precision."""
    provenance: dict[str, Any]
    """Time, commit, versions, machine, threads of the last session."""
    rows: tuple[LengthScore, ...] = ()
    """One per length, ascending."""

    @property
    def trained_at(self) -> int | None:
        return self.target.get("trained_at")

    @property
    def scored(self) -> list[LengthScore]:
        return [row for row in self.rows if row.status == "scored"]

    def row(self, length: int) -> LengthScore | None:
        return next((row for row in self.rows if row.length == length), None)

    def with_row(self, row: LengthScore) -> "Evaluation":
        """A copy in which this row replaces the one of the same length."""
        others = [one for one in self.rows if one.length != row.length]
        return self.model_copy(update={"rows": tuple(sorted([*others, row], key=lambda one: one.length))})

    @property
    def measure(self) -> str:
        """What e to the mean loss is: of an encoder, each of whose losses has seen the text on both sides, no
        probability of the text."""
        return "pseudo-perplexity" if self.protocol.get("masked") else "perplexity"

    def word_perplexity(self, row: LengthScore) -> float | None:
        """Perplexity per word and line end, so that tokenizers compare."""
        words = None if self.protocol.get("masked") else self.corpus.get("words")
        return perplexity(row.nll / words) if words and row.status == "scored" else None

    def bits_per_byte(self, row: LengthScore) -> float | None:
        size = None if self.protocol.get("masked") else self.corpus.get("bytes")
        return row.nll / math.log(2) / size if size and row.status == "scored" else None


def summarize(passes: Passes, nll: np.ndarray) -> LengthScore:
    """A row from the losses of all targets, in their order."""
    row = LengthScore(
        length=passes.length,
        stride=passes.stride,
        status="scored",
        tokens=len(nll),
        passes=len(passes),
        tokens_read=passes.read,
    )
    losses = nll.astype(np.float64)
    if odd := int((~np.isfinite(losses)).sum()):
        reason = f"{odd:,} of {len(nll):,} targets have a loss that is not a finite number"
        return row.replace(status="not finite", reason=reason)
    return row.replace(
        nll=float(losses.sum()),
        blocks=block_sums(losses),
        positions=position_sums(passes, losses),
        position_squares=tuple(total for *_, total in position_sums(passes, losses**2)),
    )


def block_sums(losses: np.ndarray) -> tuple[tuple[int, float], ...]:
    """Count and sum of consecutive stretches of nearly equal size.

    100 blocks of 217,646 targets: 2,176 or 2,177 each
    """
    count = max(1, min(BLOCKS, len(losses) // SMALLEST_BLOCK))
    return tuple((len(part), float(part.sum())) for part in np.array_split(losses, count))


def position_sums(passes: Passes, losses: np.ndarray) -> tuple[tuple[int, int, int, float], ...]:
    """First position, end, count and sum for each bin of positions that has targets."""
    edges = position_edges(passes.length)
    which = np.digitize(passes.positions(), edges) - 1
    counts = np.bincount(which, minlength=len(edges) - 1)
    sums = np.bincount(which, weights=losses, minlength=len(edges) - 1)
    bins = zip(edges[:-1], edges[1:], counts.tolist(), sums.tolist(), strict=True)
    return tuple((first, end, count, total) for first, end, count, total in bins if count)


def interval(row: LengthScore, other: LengthScore | None = None) -> Interval | None:
    """Bootstrap confidence interval (95 %) of the mean loss, or of its difference to another row's over the same
    stretches, which is far narrower; None when there are fewer than two stretches."""
    if len(row.blocks) < 2 or row.status != "scored":
        return None
    counts, sums = np.array(row.blocks, dtype=np.float64).T
    if other is not None:
        if [count for count, _ in row.blocks] != [count for count, _ in other.blocks]:
            raise InputError("these two evaluations did not score the same text, so they cannot be compared by pairs.")
        sums = sums - np.array(other.blocks, dtype=np.float64)[:, 1]
    return interval_of(sums, counts)


def interval_of(sums: np.ndarray, counts: np.ndarray | None = None) -> Interval | None:
    """Bootstrap interval of the mean, from one sum and count per stretch of text or per probe; None for fewer than
    two. Sums may be differences of two measurements on the same stretches, which takes out what both share."""
    if len(sums) < 2:
        return None
    weights = np.ones(len(sums)) if counts is None else counts.astype(np.float64)
    draws = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums.astype(np.float64)[draws].sum(axis=1) / weights[draws].sum(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def save(evaluation: Evaluation, path: Path) -> None:
    make_folder(path.parent)
    write_with_checksum(path, json.loads(evaluation.model_dump_json()))


def load(path: Path) -> Evaluation:
    """Read an evaluation from an `eval/*.json` file.

    Raises:
        InputError: If there is no file, or the file is damaged or not an evaluation.
    """
    hint = "Remove it and evaluate again."
    try:
        values = read_with_checksum(path, hint=hint)
    except MissingFileError:
        raise InputError(f"There is no evaluation at {path}. Make one by: trainshort evaluate RUN") from None
    if values.get("format") != EVALUATION_FORMAT:
        raise InputError(f"{path} is not an evaluation of format {EVALUATION_FORMAT}. {hint}")
    try:
        return Evaluation.parse(values)
    except InputError as error:
        raise InputError(f"{path} is a damaged evaluation: {error} {hint}") from None


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation and the file it lies in."""

    path: Path
    evaluation: Evaluation


@dataclass(frozen=True)
class Query:
    """Everything that evaluations must have in common, but for the length, to stand in one table."""

    split: str = "valid"
    stride: int | None = None
    """None: without overlap."""
    tokens: int | None = None
    """The first so many tokens of the run's own text, or all if there are fewer; None: all."""
    step: int | None = None
    """Of this checkpoint, which may be the run's best; None: of the run's best weights."""

    def matches(self, evaluation: Evaluation) -> bool:
        target, protocol = evaluation.target, evaluation.protocol
        kinds = ("run",) if self.step is None else ("run", "checkpoint")
        same_weights = target["kind"] in kinds and self.step in (None, target.get("step"))
        as_trained = protocol["slopes"] is None and protocol["precision"] == "float32"
        return same_weights and as_trained and protocol["stride"] == self.stride and self._same_text(evaluation)

    def _same_text(self, evaluation: Evaluation) -> bool:
        """Return whether exactly the tokens of this query were scored."""
        corpus = evaluation.corpus
        whole = corpus["whole"]
        wanted = whole if self.tokens is None else min(self.tokens, whole)
        return corpus.get("own", True) and corpus["split"] == self.split and corpus["tokens"] == wanted


def find(folder: Path) -> list[StoredEvaluation]:
    """The evaluations in a run folder, the newest last. Those that call weights the run's best which no longer are,
    because it was evaluated before its training ended, are left out."""
    found = [StoredEvaluation(path, load(path)) for path in sorted((folder / "eval").glob("*.json"))]
    targets, best = [one.evaluation.target for one in found], best_step(folder)
    outdated = [target["kind"] == "run" and target.get("step") not in (None, best) for target in targets]
    kept = [one for one, old in zip(found, outdated, strict=True) if best is None or not old]
    return sorted(kept, key=lambda one: str(one.evaluation.provenance.get("time", "")))


def rows(stored: Iterable[StoredEvaluation], query: Query) -> dict[int, tuple[LengthScore, Path]]:
    """The rows that answer, by length, each with its file; one with a number goes before one that says why not."""
    found: dict[int, tuple[LengthScore, Path]] = {}
    for one in stored:
        for row in one.evaluation.rows if query.matches(one.evaluation) else ():
            if row.length not in found or row.status == "scored":
                found[row.length] = (row, one.path)
    return dict(sorted(found.items()))


def best_step(folder: Path) -> int | None:
    """Step of the checkpoint with the lowest validation loss, as its state.json has it; None when none tells."""
    losses: dict[int, float] = {}
    for state in read_checkpoint_states(folder):
        try:
            losses[int(state["step"])] = state["valid_nll"] / state["valid_count"]
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue  # not validated, or damaged: whoever loads it says so
    return min(losses, key=losses.__getitem__, default=None)
