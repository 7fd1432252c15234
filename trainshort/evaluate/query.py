"""Which stored evaluation answers a question: asked by what computes a table and by what prints it. No torch.

One rule for both. If they had two, a table could count as done and stay empty, or take a number from another text.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainshort.evaluate.results import Evaluation, LengthScore, load_checked
from trainshort.files import read_object


@dataclass(frozen=True)
class Stored:
    """An evaluation and the file it lies in."""

    path: Path
    evaluation: Evaluation
    sealed: bool = True
    """Whether its checksum was verified; results of 0.1.0 have none."""


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
        if self.step is None:
            same_weights = target["kind"] == "run"
        else:
            same_weights = target["kind"] in ("checkpoint", "run") and target.get("step") == self.step
        as_trained = protocol["slopes"] is None and protocol["precision"] == "float32"
        return same_weights and as_trained and protocol["stride"] == self.stride and self._same_text(evaluation)

    def _same_text(self, evaluation: Evaluation) -> bool:
        """Exactly the tokens that are meant. Evaluations of version 0.1.0 do not say how long the whole text was: they
        match where the asked number was scored, and an evaluation of the whole text is looked at again."""
        corpus = evaluation.corpus
        whole = corpus.get("whole")
        wanted = whole if self.tokens is None else min(self.tokens, whole or self.tokens)
        return corpus.get("own", True) and corpus["split"] == self.split and corpus["tokens"] == wanted


def find(folder: Path) -> list[Stored]:
    """The evaluations in a run folder, the newest last. Those that call weights the run's best which no longer are,
    because it was evaluated before its training ended, are left out."""
    found = [Stored(path, *load_checked(path)) for path in sorted((folder / "eval").glob("*.json"))]
    best = best_step(folder)
    kept = [one for one in found if best is None or _step(one.evaluation) in (None, best)]
    return sorted(kept, key=lambda one: str(one.evaluation.provenance.get("time", "")))


def rows(stored: Iterable[Stored], query: Query) -> dict[int, tuple[LengthScore, Path]]:
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
    for path in folder.glob("checkpoints/step-*/state.json"):
        try:
            state = read_object(path)
            losses[int(state["step"])] = state["valid_nll"] / state["valid_count"]
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue  # not validated, or damaged: whoever loads it says so
    return min(losses, key=losses.__getitem__, default=None)


def _step(evaluation: Evaluation) -> int | None:
    """The step that an evaluation takes for the run's best; None for other kinds."""
    return evaluation.target.get("step") if evaluation.target["kind"] == "run" else None
