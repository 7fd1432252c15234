"""What is done already, read from the files alone, without torch: a second run has nothing to load.

A run is done when its last update's checkpoint is there, an evaluation when its file has a row for every length.
Progress is counted in tokens put through a model; an update costs three times a reading.
"""

from dataclasses import dataclass
from pathlib import Path

from trainshort.evaluate.results import Evaluation, load
from trainshort.journal import read_lines
from trainshort.reproduce.tasks import Group, Task
from trainshort.runs import RunFolder

UPDATE_WEIGHT = 3
SAMPLE = Path("samples") / "sample.json"
REACH = Path("analysis") / "reach.json"


@dataclass(frozen=True)
class Share:
    """Work done and in all, in tokens read."""

    done: float
    total: float


def trained(folder: Path, task: Task) -> bool:
    return (folder / "checkpoints" / f"step-{task.config.train.steps:09d}" / "manifest.json").exists()


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that are whole, oldest first."""
    return sorted(path.parent for path in folder.glob("checkpoints/step-*/manifest.json"))


def evaluations(folder: Path) -> list[Evaluation]:
    return [load(path) for path in sorted((folder / "eval").glob("*.json"))]


def belongs(evaluation: Evaluation, group: Group, step: int | None = None) -> bool:
    """Whether an evaluation is of this kind: of the run's best weights, or with `step` of that checkpoint."""
    kind, corpus, protocol = evaluation.target["kind"], evaluation.corpus, evaluation.protocol
    same_weights = kind == "run" if step is None else kind == "checkpoint" and evaluation.target["step"] == step
    same_text = corpus["split"] == group.split and (group.tokens is None or corpus["tokens"] <= group.tokens)
    return same_weights and same_text and protocol["stride"] == group.stride and protocol["slopes"] is None


def missing(found: list[Evaluation], group: Group, lengths: set[int], step: int | None = None) -> list[int]:
    """Lengths that no evaluation of this kind has a row for."""
    have = {row.length for one in found if belongs(one, group, step) for row in one.rows}
    return sorted(lengths - have)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def finished(root: Path, task: Task) -> bool:
    """Whether nothing is left to do."""
    folder = root / task.name
    extras = (SAMPLE, REACH) if task.sample else ()
    if not trained(folder, task) or not all((folder / file).exists() for file in extras):
        return False
    found = evaluations(folder)
    if any(missing(found, group, lengths) for group, lengths in task.groups.items()):
        return False
    steps = [step_of(path) for path in checkpoints(folder)]
    return not any(missing(found, group, lengths, step) for group, lengths in task.curves.items() for step in steps)


def share(root: Path, task: Task) -> Share:
    """How far a task is. Text that is not cut counts as 100,000 tokens here; it only shapes the progress bar."""
    folder, settings = root / task.name, task.config.train
    update = UPDATE_WEIGHT * settings.batch * settings.length
    total = done = 0.0
    total += update * settings.steps
    done += update * (settings.steps if trained(folder, task) else last_step(folder))
    found = evaluations(folder) if (folder / "eval").exists() else []
    for group, lengths in task.groups.items():
        left = set(missing(found, group, lengths))
        for length in lengths:
            reads = (group.tokens or 100_000) * (length / (group.stride or length))
            total += reads
            done += reads * (length not in left)
    return Share(done, total)


def last_step(folder: Path) -> int:
    """The last update that was logged."""
    records = read_lines(RunFolder(folder).metrics)
    return records[-1]["step"] if records else 0
