"""Plan and run the jobs of experiments.

A job trains one model and runs all evaluations of this model. Several tables can share a model, so jobs are merged by
run name and no model is trained twice.

The state of a job is read from the files of its run folder. Reading the state does not import torch, so a command that
finds nothing to do ends quickly.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainshort.config.run_config import RunConfig
from trainshort.evaluate.results import Query, best_step, find_evaluations, select_rows
from trainshort.experiments.claims.collection import COST_FILE, read_costs
from trainshort.experiments.experiments import (
    Experiment,
    Quantity,
    Scale,
    Variant,
    build_learning_curve_query,
    build_queries,
    with_seed,
)
from trainshort.train.metrics_log import read_metrics
from trainshort.train.run_folder import RunFolder, list_checkpoints, run_name
from trainshort.utils.io import make_folder
from trainshort.utils.terminal import ProgressMeter, escape_for_output

if TYPE_CHECKING:
    from trainshort.experiments.reproduce.slurm import SlurmConfig

# Work is counted in tokens for the progress bar. Training on a token costs about three times as much as evaluating it.
TRAINING_COST_PER_TOKEN = 3

# The progress bar assumes this number of tokens for an evaluation of a complete split, whose size is not known yet.
ASSUMED_SPLIT_TOKENS = 100_000

# Files in the run folder of a job with `needs_sample`.
SAMPLE_PATH = Path("samples") / "sample.json"
REACH_RESULT_PATH = Path("analysis") / "reach.json"

# The models of this experiment that have the shortest training length also generate a text sample.
SAMPLED_EXPERIMENT = "demo"


@dataclass
class Job:
    """The work on one model: training and all evaluations.

    Attributes:
        name: The name of the run folder.
        config: The settings of the training run.
        eval_lengths: The sequence lengths at which the trained model is evaluated, for each evaluation query.
        curve_lengths: The sequence lengths at which all kept checkpoints are evaluated, for each evaluation query.
        needs_sample: Whether to generate a text sample and to measure how far the attention heads look.
    """

    name: str
    config: RunConfig
    eval_lengths: dict[Query, set[int]] = field(default_factory=dict)
    curve_lengths: dict[Query, set[int]] = field(default_factory=dict)
    needs_sample: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the values that are pickled when the job is sent to another process. The config is plain data.

        The config may contain an object of a plug-in class. Another process can only create such an object after it has
        loaded the plug-in. `RunConfig.parse` loads the plug-in.
        """
        return {**vars(self), "config": self.config.model_dump(mode="json")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the values that `__getstate__` returned. The config is created from plain data."""
        vars(self).update(state, config=RunConfig.parse(state["config"]))


@dataclass(frozen=True)
class JobPlan:
    """All work that a set of experiments needs at one scale.

    Attributes:
        jobs: The models to train and evaluate.
        cost_configs: The configs whose training speed is measured, by run name.
        memory_measured: The run names in `cost_configs` whose training memory is also measured.
        eval_speed_measured: The run names in `cost_configs` whose evaluation speed is also measured.
    """

    jobs: list[Job]
    cost_configs: dict[str, RunConfig]
    memory_measured: frozenset[str] = frozenset()
    eval_speed_measured: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MissingEvaluation:
    """An evaluation that still has to be computed.

    Attributes:
        path: The run folder, which stands for the best checkpoint, or the folder of one checkpoint.
        query: The text and the protocol of the evaluation.
        lengths: The sequence lengths without a result, in ascending order.
    """

    path: Path
    query: Query
    lengths: list[int]


# ---- planning


def plan_jobs(experiments: Sequence[Experiment], scale: Scale, seeds: Iterable[int] = (1,)) -> JobPlan:
    """Return all work that is needed to measure the numbers of some experiments.

    A variant is a model of the paper, such as ALiBi trained at length 512. A scale converts it to the config of a
    smaller model.

    Args:
        experiments: The tables and figures of the paper.
        scale: The size at which the experiments are run (laptop, gpu or paper).
        seeds: Every model is trained once with each of these seeds.

    Returns:
        The plan. Each model has one job, which trains and evaluates the model. The jobs are in the order in which the
        experiments name the models. The plan also contains the models whose speed or memory is measured.
    """
    jobs: dict[str, Job] = {}
    for seed in seeds:
        for experiment in experiments:
            _add_jobs(with_seed(experiment, seed), scale, jobs)

    # Costs (speed and memory) are measured without training, so these models need no job.
    cost_configs: dict[str, RunConfig] = {}
    for experiment in experiments:
        for variant in experiment.variants_to_measure(scale):
            config = scale.make_config(variant)
            cost_configs[run_name(config)] = config

    return JobPlan(
        jobs=list(jobs.values()),
        cost_configs=cost_configs,
        memory_measured=_find_measured_runs(experiments, scale, "train memory"),
        eval_speed_measured=_find_measured_runs(experiments, scale, "read speed"),
    )


def _find_measured_runs(experiments: Sequence[Experiment], scale: Scale, quantity: Quantity) -> frozenset[str]:
    """Return the run names of the models whose cost (speed or memory) is part of a table.

    The cells of an experiment are the numbers of the table. Each cell says which quantity of which model it contains.

    Args:
        experiments: The tables and figures of the paper.
        scale: The size at which the experiments are run (laptop, gpu or paper).
        quantity: The cost, such as "train memory".
    """
    names: set[str] = set()
    for experiment in experiments:
        for cell in experiment.cells:
            if cell.variant is not None and cell.is_cost and cell.quantity == quantity:
                names.add(run_name(scale.make_config(cell.variant)))
    return frozenset(names)


def _add_jobs(experiment: Experiment, scale: Scale, jobs: dict[str, Job]) -> None:
    """Add the models of an experiment to the jobs. A job that already exists gets additional evaluations.

    Args:
        experiment: The table or figure that needs the models.
        scale: The size at which the experiment is run (laptop, gpu or paper).
        jobs: The jobs by run name. The function changes this dictionary.
    """
    variants = experiment.variants_to_train(scale)
    for variant in variants:
        config = scale.make_config(variant)
        name = run_name(config)
        job = jobs.setdefault(name, Job(name, config))

        # Only the models of the demo with the shortest training length generate a text sample.
        shortest_length = min(other_variant.length for other_variant in variants)
        if experiment.name == SAMPLED_EXPERIMENT and variant.length == shortest_length:
            job.needs_sample = True

        _add_evaluations(job, experiment, scale, variant)


def _add_evaluations(job: Job, experiment: Experiment, scale: Scale, variant: Variant) -> None:
    """Add the evaluations of one model to its job.

    A protocol is an evaluation of the paper: a length, a stride and a split. A query is the corresponding evaluation at
    the scale, without the length. The job stores the lengths of each query.

    Args:
        job: The job of the model. The function changes its fields `eval_lengths` and `curve_lengths`.
        experiment: The table or figure that needs the evaluations.
        scale: The size at which the experiment is run (laptop, gpu or paper).
        variant: The model.
    """
    for protocol in experiment.eval_protocols(scale, variant):
        for query in build_queries(scale, protocol):
            lengths = job.eval_lengths.setdefault(query, set())
            lengths.add(scale.scale_length(protocol.length))

    for protocol in experiment.learning_curve_protocols(scale, variant):
        query = build_learning_curve_query(scale, protocol)
        lengths = job.curve_lengths.setdefault(query, set())
        lengths.add(scale.scale_length(protocol.length))


# ---- finding out what is done


def is_trained(folder: Path, job: Job) -> bool:
    """Return whether the run folder contains the checkpoint of the last training step."""
    steps = [checkpoint_step(checkpoint) for checkpoint in complete_checkpoints(folder)]
    return job.config.train.steps in steps


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run that were written completely, oldest first."""
    # The manifest is the last file of a checkpoint that is written.
    return [checkpoint for checkpoint in list_checkpoints(folder) if (checkpoint / "manifest.json").exists()]


def find_missing_evaluations(folder: Path, job: Job) -> list[MissingEvaluation]:
    """Return the evaluations of a job without a result.

    An evaluation that failed, for example because the memory was full, also has no result. It is tried again.

    Args:
        folder: The run folder of the job.
        job: The job with the required evaluations.

    Returns:
        The missing evaluations of the run and of its checkpoints.
    """
    stored = find_evaluations(folder)
    missing: list[MissingEvaluation] = []
    for path, query, lengths in _required_evaluations(folder, job):
        stored_rows = select_rows(stored, query)
        # Other results have a status such as "out of memory".
        scored_lengths = {length for length, (row, _) in stored_rows.items() if row.status == "scored"}
        missing_lengths = lengths - scored_lengths
        if missing_lengths:
            missing.append(MissingEvaluation(path, query, lengths=sorted(missing_lengths)))
    return missing


def _required_evaluations(folder: Path, job: Job) -> list[tuple[Path, Query, set[int]]]:
    """Return the folder, the query and the sequence lengths of each evaluation of a job.

    A query describes an evaluation without its length: the split, the stride, the number of tokens and the step of the
    checkpoint.

    Args:
        folder: The run folder of the job.
        job: The job. If it needs learning curves, all complete checkpoints of the run are also evaluated.
    """
    required = [(folder, query, lengths) for query, lengths in job.eval_lengths.items()]
    if not job.curve_lengths:
        return required

    best = best_step(folder)
    for checkpoint in complete_checkpoints(folder):
        step = checkpoint_step(checkpoint)
        # The best checkpoint is evaluated by the path of the run. Its results then share a file with those of the run.
        path = folder if step == best else checkpoint
        for query, lengths in job.curve_lengths.items():
            required.append((path, replace(query, step=step), lengths))
    return required


def checkpoint_step(checkpoint: Path) -> int:
    """Return the training step of a checkpoint folder such as `step-000000600`."""
    return int(checkpoint.name.removeprefix("step-"))


def is_finished(root: Path, job: Job) -> bool:
    """Return whether all work of a job is done.

    Args:
        root: The folder that contains the run folders.
        job: The job.
    """
    folder = root / job.name
    if not is_trained(folder, job):
        return False
    if job.needs_sample:
        has_sample = (folder / SAMPLE_PATH).exists()
        has_reach_result = (folder / REACH_RESULT_PATH).exists()
        if not (has_sample and has_reach_result):
            return False
    return not find_missing_evaluations(folder, job)


def fraction_done(jobs: Sequence[Job], root: Path) -> float:
    """Estimate how much of the work (training and evaluations) is done, for a progress bar.

    Args:
        jobs: The jobs.
        root: The folder that contains the run folders.

    Returns:
        A number between 0 and 1.
    """
    done = 0.0
    total = 0.0
    for job in jobs:
        folder = root / job.name
        train = job.config.train
        cost_per_step = TRAINING_COST_PER_TOKEN * train.batch * train.length
        total += cost_per_step * train.steps
        done += cost_per_step * _steps_done(folder, job)

        missing: set[tuple[Query, int]] = set()
        for evaluation in find_missing_evaluations(folder, job):
            for length in evaluation.lengths:
                missing.add((evaluation.query, length))
        for query, lengths in job.eval_lengths.items():
            for length in lengths:
                stride = query.stride or length  # Windows without overlap have no stride.
                # The cost is the number of tokens that the model reads. Overlapping windows read each token
                # `length / stride` times.
                cost = (query.tokens or ASSUMED_SPLIT_TOKENS) * (length / stride)
                total += cost
                if (query, length) not in missing:
                    done += cost
    return done / max(1.0, total)


def _steps_done(folder: Path, job: Job) -> int:
    """Return the number of training steps that are done.

    If the training has not finished, the number is the last step in the metrics log of the run folder.
    """
    if is_trained(folder, job):
        return job.config.train.steps
    steps = [record["step"] for record in read_metrics(RunFolder(folder))]
    return max(steps, default=0)


# ---- running


def run_job(job: Job, root: Path) -> str:
    """Do all work of a job that is not done yet. An interrupted job is continued.

    Args:
        job: The job.
        root: The folder that contains the run folders.

    Returns:
        The name of the job.
    """
    train_model(job, root)
    evaluate_model(job, root)
    return job.name


def train_model(job: Job, root: Path) -> None:
    """Train the model of a job, or continue its training. A trained model is left unchanged."""
    from trainshort.train.loop import train

    folder = root / job.name
    if not is_trained(folder, job):
        train(job.config, folder, resume=True, quiet=True)


def evaluate_model(job: Job, root: Path) -> None:
    """Run the missing evaluations of a trained model.

    If the job needs a text sample, also generate text, and measure how far the attention heads look ("reach").

    Args:
        job: The job of the model.
        root: The folder that contains the run folders.
    """
    from trainshort.evaluate.evaluation import evaluate
    from trainshort.evaluate.sweep import Sweep
    from trainshort.evaluate.targets import RunTarget
    from trainshort.evaluate.text import open_text
    from trainshort.utils.machine import pick_device

    folder = root / job.name
    for missing in find_missing_evaluations(folder, job):
        target = RunTarget(missing.path, device=pick_device(None))
        # `data=()` chooses the dataset that the model was trained on.
        text = open_text(target, data=(), split=missing.query.split, max_tokens=missing.query.tokens)
        sweep = Sweep(text.tokens, missing.lengths, missing.query.stride)
        evaluate(target, text, sweep, picture=False)  # The report draws the figures of all models.

    if job.needs_sample:
        from trainshort.experiments.reproduce.samples import measure_reach, write_sample

        if not (folder / SAMPLE_PATH).exists():
            write_sample(folder, folder / SAMPLE_PATH)
        if not (folder / REACH_RESULT_PATH).exists():
            measure_reach(folder)


def reproduce(
    plan: JobPlan,
    root: Path,
    *,
    jobs: int | None = None,
    site: "SlurmConfig | None" = None,
    console: Console,
) -> None:
    """Do all work of a plan that is not done yet.

    Args:
        plan: The models and the measurements.
        root: The folder that contains the run folders.
        jobs: How many jobs run at the same time on this machine. None chooses a suitable number.
        site: The settings of a Slurm cluster that runs the jobs. None runs the jobs on this machine.
        console: The console for the progress.

    Raises:
        InputError: If a job fails. The results of the other jobs are kept.
    """
    unfinished_jobs = [job for job in plan.jobs if not is_finished(root, job)]
    finished_count = len(plan.jobs) - len(unfinished_jobs)
    if finished_count:
        folder_text = escape_for_output(str(root))
        message = f"{finished_count} of {len(plan.jobs)} models are already done, in {folder_text}."
        console.print(message, highlight=False)

    if unfinished_jobs:
        with _show_progress(unfinished_jobs, root, console) as on_done:
            if site is None:
                run_locally(unfinished_jobs, root, on_done, jobs)
            else:
                from trainshort.experiments.reproduce.slurm import run_on_cluster

                run_on_cluster(unfinished_jobs, root, on_done, site)

    # This check is made before `costs` is imported, because `costs` imports torch.
    unmeasured_runs = plan.cost_configs.keys() - read_costs(root).keys()
    if unmeasured_runs:
        from trainshort.experiments.reproduce.costs import measure_costs

        console.print("Measuring speed and memory ...", highlight=False)
        make_folder(root)
        measure_costs(plan.cost_configs, root / COST_FILE, plan.memory_measured, plan.eval_speed_measured)


def run_locally(
    jobs: list[Job], root: Path, on_done: Callable[[str], None], max_parallel_jobs: int | None = None
) -> None:
    """Run jobs on this machine.

    Args:
        jobs: The jobs.
        root: The folder that contains the run folders.
        on_done: Called with the name of each job that is done.
        max_parallel_jobs: How many jobs run at the same time. The CPU cores are divided among these jobs. None chooses
            a suitable number.

    Raises:
        InputError: If a job fails.
    """
    # `local` imports this module, so it cannot be imported at the top of the file.
    from trainshort.experiments.reproduce.local import default_parallelism, run_parallel

    parallel_jobs = min(len(jobs), max_parallel_jobs or default_parallelism())
    if parallel_jobs > 1:
        run_parallel(jobs, root, on_done, parallel_jobs)
        return
    for job in jobs:
        on_done(run_job(job, root))


@contextmanager
def _show_progress(jobs: list[Job], root: Path, console: Console) -> Iterator[Callable[[str], None]]:
    """Context manager: show a progress bar while the block runs jobs.

    A thread reads the progress from the files in the run folders once per second. The jobs may therefore run in other
    processes or on a cluster.

    Args:
        jobs: The jobs that the block runs.
        root: The folder that contains the run folders.
        console: The console for the progress bar.

    Yields:
        A function that the block calls with the name of each job that is done.
    """
    stop_event = threading.Event()
    finished_count = 0

    def update_meter() -> None:
        """Update the progress bar once per second until all jobs have ended. This function runs in a thread."""
        # `wait(1.0)` returns False after one second, and True as soon as `stop_event` is set after the last job.
        while not stop_event.wait(1.0):
            progress = fraction_done(jobs, root)  # between 0 and 1
            meter.advance(progress - meter.done, f"{finished_count} of {len(jobs)} models")

    def on_done(name: str) -> None:
        """Count a finished job and print its name."""
        nonlocal finished_count
        finished_count += 1
        console.print(f"{name} is done ({finished_count} of {len(jobs)}).", highlight=False)

    with ProgressMeter(console) as meter:
        meter.start(1.0, fraction_done(jobs, root))
        thread = threading.Thread(target=update_meter, daemon=True)
        thread.start()
        try:
            yield on_done
        finally:
            stop_event.set()
            thread.join()
