"""From tables to work: one task per model, with everything that is wanted of it. No torch.

Tables share models (Table 5's ALiBi at 512 is Figure 1's), and at the laptop the three test beds share a corpus; tasks
are merged by run name, so nothing is trained or read twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainshort.config import RunConfig
from trainshort.recipes.experiments import Experiment, Reading, reseeded
from trainshort.recipes.names import run_name
from trainshort.recipes.scales import Scale

SAMPLED = "demo"
"""The experiment whose models also write a text."""


@dataclass(frozen=True)
class Group:
    """Evaluations that share everything but the length; numbers of the scale, not of the paper."""

    split: str
    stride: int | None
    tokens: int | None
    """At most so many tokens of text; None: all."""


@dataclass
class Task:
    """One model: train it, then read it in these ways."""

    name: str
    config: RunConfig
    groups: dict[Group, set[int]] = field(default_factory=dict)
    curves: dict[Group, set[int]] = field(default_factory=dict)
    """Readings of the checkpoints that were kept on the way."""
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
            for group in groups(scale, reading):
                task.groups.setdefault(group, set()).add(scale.length(reading.length))
        for reading in experiment.curves(scale, variant):
            group = Group(reading.split, None, scale.sliding_tokens)
            task.curves.setdefault(group, set()).add(scale.length(reading.length))


def groups(scale: Scale, reading: Reading) -> list[Group]:
    """The evaluations that a reading belongs to, its own first. A sliding one has a companion without overlap on the
    same text: their difference is what the beginnings of blocks cost."""
    stride = scale.stride(reading.stride)
    if stride is None:
        return [Group(reading.split, None, scale.eval_tokens)]
    return [Group(reading.split, stride, scale.sliding_tokens), Group(reading.split, None, scale.sliding_tokens)]
