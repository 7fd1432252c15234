"""What is done already, read from the files alone, without torch: a second run has nothing to load.

A run is done when its last update's checkpoint is there, an evaluation when every length has a number.
Progress is counted in tokens put through a model; an update costs three times a reading.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from trainshort.evaluate.query import Query, Stored, find, rows
from trainshort.journal import read_lines
from trainshort.reproduce.tasks import Task
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


def missing(found: list[Stored], query: Query, lengths: set[int]) -> list[int]:
    """Lengths without a number: never tried, or tried and failed (out of memory, cannot), which is tried again."""
    have = {length for length, (row, _) in rows(found, query).items() if row.status == "scored"}
    return sorted(lengths - have)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def finished(root: Path, task: Task) -> bool:
    """Whether nothing is left to do."""
    folder = root / task.name
    extras = (SAMPLE, REACH) if task.sample else ()
    if not trained(folder, task) or not all((folder / file).exists() for file in extras):
        return False
    found = find(folder)
    if any(missing(found, query, lengths) for query, lengths in task.lengths.items()):
        return False
    steps = [step_of(path) for path in checkpoints(folder)]
    curves = [(replace(query, step=step), lengths) for query, lengths in task.curves.items() for step in steps]
    return not any(missing(found, query, lengths) for query, lengths in curves)


def share(root: Path, task: Task) -> Share:
    """How far a task is. Text that is not cut counts as 100,000 tokens here; it only shapes the progress bar."""
    folder, settings = root / task.name, task.config.train
    update = UPDATE_WEIGHT * settings.batch * settings.length
    total = done = 0.0
    total += update * settings.steps
    done += update * (settings.steps if trained(folder, task) else last_step(folder))
    found = find(folder)
    for query, lengths in task.lengths.items():
        left = set(missing(found, query, lengths))
        for length in lengths:
            reads = (query.tokens or 100_000) * (length / (query.stride or length))
            total += reads
            done += reads * (length not in left)
    return Share(done, total)


def last_step(folder: Path) -> int:
    """The last update that was logged."""
    records = read_lines(RunFolder(folder).metrics)
    return records[-1]["step"] if records else 0
