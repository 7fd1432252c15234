"""From tables to work: one task per model, with everything that is wanted of it, how far it is, and its way to the end;
then all tasks of some experiments with one progress bar, and after them what is measured: Table 1.

Tables share models (Table 5's ALiBi at 512 is Figure 1's), and at the laptop the three test beds share a corpus; tasks
are merged by run name, so nothing is trained or evaluated twice. What is done is read from the files alone, without
torch, so that a second run is quick: a run is done when its last checkpoint is there, an evaluation when every length
has a number. Progress is counted in tokens put through a model; one trained on costs three times one evaluated.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainshort.config.run_config import RunConfig
from trainshort.evaluate.results import Query, best_step, find, rows
from trainshort.experiments.claims.collection import COST_FILE, read_costs
from trainshort.experiments.experiments import Experiment, Scale, build_learning_curve_query, build_queries, with_seed
from trainshort.train.metrics_log import read_metrics
from trainshort.train.run_folder import RunFolder, list_checkpoints, run_name
from trainshort.utils.io import make_folder
from trainshort.utils.terminal import ProgressMeter, escape_for_output

if TYPE_CHECKING:
    from trainshort.experiments.reproduce.local import SlurmConfig

STEP_WEIGHT = 3
SAMPLE_PATH = Path("samples") / "sample.json"
REACH_RESULT_PATH = Path("analysis") / "reach.json"
SAMPLED = "demo"
"""The experiment whose models also write a text; those of its shortest length, which are read far beyond it."""


@dataclass
class Job:
    """One model: train it, then evaluate it in these ways."""

    name: str
    config: RunConfig
    eval_lengths: dict[Query, set[int]] = field(default_factory=dict)
    """Lengths at which it is evaluated, by what those evaluations have in common."""
    curve_lengths: dict[Query, set[int]] = field(default_factory=dict)
    """The same for the checkpoints that were kept on the way."""
    needs_sample: bool = False
    """Whether a text is generated past the training length, and the reach of attention measured."""

    def __getstate__(self) -> dict[str, Any]:
        """Settings by their values: a plug-in's are of a class that another process knows only when it loaded that."""
        return {**vars(self), "config": self.config.model_dump(mode="json")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, config=RunConfig.parse(state["config"]))


@dataclass(frozen=True)
class JobPlan:
    """All that a set of experiments needs at one scale."""

    jobs: list[Job]
    cost_configs: dict[str, RunConfig]
    """Configurations whose speed is measured, by run name."""
    memory_measured: frozenset[str] = frozenset()
    """Those of them whose memory is measured too."""
    eval_speed_measured: frozenset[str] = frozenset()
    """Those of them that are timed while reading, too."""


def plan_jobs(chosen: Sequence[Experiment], scale: Scale, seeds: Iterable[int] = (1,)) -> JobPlan:
    """The tasks of some experiments, each model once, in the order in which the experiments name them."""
    tasks: dict[str, Job] = {}
    costs: dict[str, RunConfig] = {}
    for seed in seeds:
        for experiment in (with_seed(one, seed) for one in chosen):
            _add(experiment, scale, tasks)
    for experiment in chosen:
        for variant in experiment.variants_to_measure(scale):
            config = scale.make_config(variant)
            costs[run_name(config)] = config
    weighed, read = (_configs_for_cost(chosen, scale, quantity) for quantity in ("train memory", "read speed"))
    return JobPlan(list(tasks.values()), costs, weighed, read)


def _configs_for_cost(chosen: Sequence[Experiment], scale: Scale, quantity: str) -> frozenset[str]:
    """The configurations of which a cell wants this cost."""
    cells = (cell for one in chosen for cell in one.cells if cell.is_cost and cell.quantity == quantity)
    return frozenset(run_name(scale.make_config(cell.variant)) for cell in cells if cell.variant)


def _add(experiment: Experiment, scale: Scale, tasks: dict[str, Job]) -> None:
    variants = experiment.variants_to_train(scale)
    for variant in variants:
        config = scale.make_config(variant)
        task = tasks.setdefault(run_name(config), Job(run_name(config), config))
        task.needs_sample |= experiment.name == SAMPLED and variant.length == min(one.length for one in variants)
        for reading in experiment.eval_protocols(scale, variant):
            for query in build_queries(scale, reading):
                task.eval_lengths.setdefault(query, set()).add(scale.scale_length(reading.length))
        for reading in experiment.learning_curve_protocols(scale, variant):
            task.curve_lengths.setdefault(build_learning_curve_query(scale, reading), set()).add(
                scale.scale_length(reading.length)
            )


def is_trained(folder: Path, task: Job) -> bool:
    return task.config.train.steps in map(checkpoint_step, complete_checkpoints(folder))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that are whole, oldest first."""
    return [path for path in list_checkpoints(folder) if (path / "manifest.json").exists()]


def find_missing_evaluations(folder: Path, task: Job) -> list[tuple[Path, Query, list[int]]]:
    """Evaluations that a model lacks: of the run or one of its checkpoints, by which query, at which lengths. They
    have no number: never tried, or tried and failed (out of memory, cannot), which is tried again."""
    found, best = find(folder), best_step(folder)
    wanted = [(folder, query, lengths) for query, lengths in task.eval_lengths.items()]
    for checkpoint in complete_checkpoints(folder) if task.curve_lengths else ():
        step = checkpoint_step(checkpoint)
        # The best one is the run itself: its evaluations lie in one file, and must go on being the run's.
        path = folder if step == best else checkpoint
        wanted += [(path, replace(query, step=step), lengths) for query, lengths in task.curve_lengths.items()]
    lacking = []
    for path, query, lengths in wanted:
        have = {length for length, (row, _) in rows(found, query).items() if row.status == "scored"}
        if lengths - have:
            lacking.append((path, query, sorted(lengths - have)))
    return lacking


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def is_finished(root: Path, task: Job) -> bool:
    """Whether nothing is left to do."""
    folder = root / task.name
    extras = (SAMPLE_PATH, REACH_RESULT_PATH) if task.needs_sample else ()
    there = is_trained(folder, task) and all((folder / file).exists() for file in extras)
    return there and not find_missing_evaluations(folder, task)


def fraction_done(tasks: Sequence[Job], root: Path) -> float:
    """How far tasks are. Text that is not cut counts as 100,000 tokens here; it only shapes the progress bar."""
    done = total = 0.0
    for task in tasks:
        folder, settings = root / task.name, task.config.train
        step, steps = STEP_WEIGHT * settings.batch * settings.length, [settings.steps]
        total += step * settings.steps
        if not is_trained(folder, task):
            steps = [record["step"] for record in read_metrics(RunFolder(folder))]
        done += step * max(steps, default=0)
        left = {(query, length) for _, query, lengths in find_missing_evaluations(folder, task) for length in lengths}
        for query, length in ((query, length) for query, lengths in task.eval_lengths.items() for length in lengths):
            reads = (query.tokens or 100_000) * (length / (query.stride or length))
            total += reads
            done += reads * ((query, length) not in left)
    return done / max(1.0, total)


def run_job(task: Job, root: Path) -> str:
    """Train, evaluate, sample: whatever of it is missing. Interrupted at any moment, the next call goes on."""
    train_model(task, root)
    evaluate_model(task, root)
    return task.name


def train_model(task: Job, root: Path) -> None:
    from trainshort.train.loop import train

    if not is_trained(root / task.name, task):
        train(task.config, root / task.name, resume=True, quiet=True)


def evaluate_model(task: Job, root: Path) -> None:
    """All that is wanted of a trained model: its evaluations, its learning curve, a text, the reach of its heads."""
    from trainshort.evaluate.evaluation import evaluate
    from trainshort.evaluate.sweep import Sweep
    from trainshort.evaluate.targets import RunTarget, open_text
    from trainshort.utils.machine import pick_device

    folder = root / task.name
    for path, query, lengths in find_missing_evaluations(folder, task):
        target = RunTarget(path, device=pick_device(None))
        text = open_text(target, (), query.split, query.tokens)
        evaluate(target, text, Sweep(text.tokens, lengths, query.stride), picture=False)  # the report draws them all
    if task.needs_sample:
        from trainshort.experiments.reproduce.costs import measure_reach, write_sample

        if not (folder / SAMPLE_PATH).exists():
            write_sample(folder, folder / SAMPLE_PATH)
        if not (folder / REACH_RESULT_PATH).exists():
            measure_reach(folder)


def reproduce(
    assignment: JobPlan,
    root: Path,
    *,
    jobs: int | None = None,
    site: "SlurmConfig | None" = None,
    console: Console,
) -> None:
    """Compute what is missing under `root`: here, or on a cluster if its site is given."""
    todo = [task for task in assignment.jobs if not is_finished(root, task)]
    kept = len(assignment.jobs) - len(todo)
    if kept:
        console.print(
            f"{kept} of {len(assignment.jobs)} models are done already, in {escape_for_output(str(root))}.",
            highlight=False,
        )
    if todo:
        with _progress(todo, root, console) as done:
            if site is None:
                run_locally(todo, root, done, jobs)
            else:
                from trainshort.experiments.reproduce.local import run_on_cluster

                run_on_cluster(todo, root, done, site)
    if assignment.cost_configs.keys() - read_costs(root).keys():  # asked here, since what measures them takes torch
        from trainshort.experiments.reproduce.costs import measure_costs

        console.print("Measuring speed and memory ...", highlight=False)
        make_folder(root)
        measure_costs(
            assignment.cost_configs, root / COST_FILE, assignment.memory_measured, assignment.eval_speed_measured
        )


def run_locally(todo: list[Job], root: Path, done: Callable[[str], None], jobs: int | None = None) -> None:
    """On this machine, `jobs` models at a time (None: as many as serve), each with its share of the cores."""
    from trainshort.experiments.reproduce.local import default_parallelism, run_parallel  # which import this file

    jobs = min(len(todo), jobs or default_parallelism())
    if jobs > 1:
        run_parallel(todo, root, done, jobs)
        return
    for task in todo:
        done(run_job(task, root))


@contextmanager
def _progress(todo: list[Job], root: Path, console: Console) -> Iterator[Callable[[str], None]]:
    """The meter follows the files that training and evaluation write, so it serves a cluster as well."""
    stop, finished = threading.Event(), 0

    def follow() -> None:
        while not stop.wait(1.0):
            meter.advance(fraction_done(todo, root) - meter.done, f"{finished} of {len(todo)} models")

    def done(name: str) -> None:
        nonlocal finished
        finished += 1
        console.print(f"{name} is done ({finished} of {len(todo)}).", highlight=False)

    with ProgressMeter(console) as meter:
        meter.start(1.0, fraction_done(todo, root))
        watcher = threading.Thread(target=follow, daemon=True)
        watcher.start()
        try:
            yield done
        finally:
            stop.set()
            watcher.join()
