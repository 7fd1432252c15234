"""From tables to work: one task per model, with everything that is wanted of it, and how far it is. No torch.

Tables share models (Table 5's ALiBi at 512 is Figure 1's), and at the laptop the three test beds share a corpus; tasks
are merged by run name, so nothing is trained or evaluated twice. What is done is read from the files alone: a run is
done when its last checkpoint is there, an evaluation when every length has a number. Progress is counted in tokens put
through a model; one trained on costs three times one evaluated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainshort.config import RunConfig
from trainshort.evaluate.query import Query, Stored, find, rows
from trainshort.recipes.experiments import Experiment, moments, queries, reseeded
from trainshort.recipes.scales import Scale
from trainshort.runs import RunFolder, read_metrics, run_name

STEP_WEIGHT = 3
SAMPLE = Path("samples") / "sample.json"
REACH = Path("analysis") / "reach.json"
SAMPLED = "demo"
"""The experiment whose models also write a text."""


@dataclass
class Task:
    """One model: train it, then evaluate it in these ways."""

    name: str
    config: RunConfig
    lengths: dict[Query, set[int]] = field(default_factory=dict)
    """Lengths at which it is evaluated, by what those evaluations have in common."""
    curves: dict[Query, set[int]] = field(default_factory=dict)
    """The same for the checkpoints that were kept on the way."""
    sample: bool = False
    """Whether a text is generated past the training length, and the reach of attention measured."""


@dataclass(frozen=True)
class Assignment:
    """All that a set of experiments needs at one scale."""

    scale: Scale
    tasks: list[Task]
    costs: dict[str, RunConfig]
    """Configurations whose speed is measured, by run name."""
    weighed: frozenset[str] = frozenset()
    """Those of them whose memory is measured too."""


def assign(chosen: Sequence[Experiment], scale: Scale, seeds: Iterable[int] = (1,)) -> Assignment:
    """The tasks of some experiments, each model once, in the order in which the experiments name them."""
    tasks: dict[str, Task] = {}
    costs: dict[str, RunConfig] = {}
    for seed in seeds:
        for experiment in (reseeded(one, seed) for one in chosen):
            _add(experiment, scale, tasks)
    for experiment in chosen:
        for variant in experiment.measured_apart(scale):
            config = scale.config(variant)
            costs[run_name(config)] = config
    cells = (cell for experiment in chosen for cell in experiment.cells if cell.quantity == "train memory")
    weighed = frozenset(run_name(scale.config(cell.variant)) for cell in cells if cell.variant)
    return Assignment(scale, list(tasks.values()), costs, weighed)


def _add(experiment: Experiment, scale: Scale, tasks: dict[str, Task]) -> None:
    for variant in experiment.variants(scale):
        config = scale.config(variant)
        task = tasks.setdefault(run_name(config), Task(run_name(config), config))
        task.sample |= experiment.name == SAMPLED
        for reading in experiment.readings(scale, variant):
            for query in queries(scale, reading):
                task.lengths.setdefault(query, set()).add(scale.length(reading.length))
        for reading in experiment.curves(scale, variant):
            task.curves.setdefault(moments(scale, reading), set()).add(scale.length(reading.length))


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
    step = STEP_WEIGHT * settings.batch * settings.length
    total = done = 0.0
    total += step * settings.steps
    done += step * (settings.steps if trained(folder, task) else last_step(folder))
    found = find(folder)
    for query, lengths in task.lengths.items():
        left = set(missing(found, query, lengths))
        for length in lengths:
            reads = (query.tokens or 100_000) * (length / (query.stride or length))
            total += reads
            done += reads * (length not in left)
    return Share(done, total)


def last_step(folder: Path) -> int:
    """The last step that was logged."""
    records = read_metrics(RunFolder(folder))
    return records[-1]["step"] if records else 0
