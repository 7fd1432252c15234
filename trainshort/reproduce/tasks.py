"""From tables to work: one task per model, with everything that is wanted of it. No torch.

Tables share models (Table 5's ALiBi at 512 is Figure 1's), and at the laptop the three test beds share a corpus; tasks
are merged by run name, so nothing is trained or evaluated twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainshort.config import RunConfig
from trainshort.evaluate.query import Query
from trainshort.recipes.experiments import Experiment, moments, queries, reseeded
from trainshort.recipes.names import run_name
from trainshort.recipes.scales import Scale

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
    """Configurations whose speed and memory are measured, by run name."""


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
    return Assignment(scale, list(tasks.values()), costs)


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
