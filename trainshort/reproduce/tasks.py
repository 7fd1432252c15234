"""From tables to work: one task per model, with everything that is wanted of it, how far it is, and its way to the end.

Tables share models (Table 5's ALiBi at 512 is Figure 1's), and at the laptop the three test beds share a corpus; tasks
are merged by run name, so nothing is trained or evaluated twice. What is done is read from the files alone: a run is
done when its last checkpoint is there, an evaluation when every length has a number. Progress is counted in tokens put
through a model; one trained on costs three times one evaluated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainshort.config import RunConfig
from trainshort.evaluate.results import Query, Stored, best_step, find, rows
from trainshort.files import make_folder, write_sealed
from trainshort.recipes.experiments import Experiment, moments, queries, reseeded
from trainshort.recipes.scales import Scale
from trainshort.runs import RunFolder, present, read_metrics, run_name
from trainshort.terminal import new_console

STEP_WEIGHT = 3
SAMPLE = Path("samples") / "sample.json"
REACH = Path("analysis") / "reach.json"
SAMPLED = "demo"
"""The experiment whose models also write a text; those of its shortest length, which are read far beyond it."""


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
    read: frozenset[str] = frozenset()
    """Those of them that are timed while reading, too."""


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
    weighed, read = (_asked(chosen, scale, quantity) for quantity in ("train memory", "read speed"))
    return Assignment(scale, list(tasks.values()), costs, weighed, read)


def _asked(chosen: Sequence[Experiment], scale: Scale, quantity: str) -> frozenset[str]:
    """The configurations of which a cell wants this cost."""
    cells = (cell for one in chosen for cell in one.cells if cell.apart and cell.quantity == quantity)
    return frozenset(run_name(scale.config(cell.variant)) for cell in cells if cell.variant)


def _add(experiment: Experiment, scale: Scale, tasks: dict[str, Task]) -> None:
    variants = experiment.variants(scale)
    for variant in variants:
        config = scale.config(variant)
        task = tasks.setdefault(run_name(config), Task(run_name(config), config))
        task.sample |= experiment.name == SAMPLED and variant.length == min(one.length for one in variants)
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
    return [path for path in present(folder) if (path / "manifest.json").exists()]


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


WRITTEN, TIMES = 64, (1, 4, 16)
"""Tokens written (at most half a training length), and where: they end at so many training lengths of text."""
TEMPERATURE, TOP_K, SEED = 0.8, 40, 1


def work(task: Task, root: Path) -> str:
    """Train, evaluate, sample: whatever of it is missing. Interrupted at any moment, the next call goes on."""
    train_model(task, root)
    evaluate_model(task, root)
    return task.name


def train_model(task: Task, root: Path) -> None:
    from trainshort.train import train

    if not trained(root / task.name, task):
        train(task.config, root / task.name, resume=True, quiet=True)


def evaluate_model(task: Task, root: Path) -> None:
    """All that is wanted of a trained model: its evaluations, its learning curve, a text, the reach of its heads."""
    folder = root / task.name
    found = find(folder)
    for query, lengths in task.lengths.items():
        _evaluate(folder, query, missing(found, query, lengths))
    best = best_step(folder)
    for checkpoint in checkpoints(folder) if task.curves else ():
        step = step_of(checkpoint)
        for query, lengths in task.curves.items():
            at = replace(query, step=step)
            # The best one is the run itself: its evaluations lie in one file, and must go on being the run's.
            _evaluate(folder if step == best else checkpoint, at, missing(found, at, lengths))
    sample = folder / SAMPLE
    if task.sample and not sample.exists():
        _write_sample(folder, sample)
    if task.sample and not (folder / REACH).exists():
        _reach(folder)


def _reach(folder: Path) -> None:
    """How far each head looks, by `trainshort analyze`."""

    from trainshort.analyze.lab import Lab, analyze
    from trainshort.evaluate.target import RunTarget, open_text

    target = RunTarget(folder)
    text = open_text(target, ())
    lab = Lab(target, text.tokens, target.config.train.length)
    analyze(lab, text, ["reach"], new_console(quiet=True))


def _evaluate(path: Path, query: Query, lengths: list[int]) -> None:
    """Evaluate a run's best weights, or one checkpoint, at some lengths; the report draws them all."""
    if not lengths:
        return
    from trainshort.evaluate.session import evaluate
    from trainshort.evaluate.sweep import Sweep
    from trainshort.evaluate.target import RunTarget, open_text
    from trainshort.machine import pick_device

    target = RunTarget(path, device=pick_device(None))
    text = open_text(target, (), query.split, query.tokens)
    evaluate(target, text, Sweep(text.tokens, lengths, query.stride), picture=False)


def _write_sample(run: Path, path: Path) -> None:
    """Continue the test text where so much of it was read that the last token written stands at 1, 4 and 16 times the
    training length; each token with the model's own surprise at it."""
    import numpy as np
    import torch

    from trainshort.data.of_run import open_own
    from trainshort.evaluate.target import RunTarget
    from trainshort.generate import stream
    from trainshort.machine import provenance

    target = RunTarget(run)
    text = open_own(run, target.config.data).split("test")
    length, tokenizer = target.config.train.length, target.tokenizer()
    count = max(1, min(WRITTEN, length // 2))
    settings = {"temperature": TEMPERATURE, "top_k": min(TOP_K, target.vocabulary), "seed": SEED}
    passages = []
    for end in (times * length for times in TIMES if times * length <= len(text)):
        prompt = np.asarray(text[: end - count]).astype(np.int64)
        # Without a tokenizer nothing stops the stream early: an end of text is a token like any other here.
        made = list(stream(target.model, prompt, tokens=count, **settings))
        ids = [token.id for token in made]
        read = [tokenizer.decode(ids[:number]) for number in range(count + 1)]
        written = [
            [after[len(before) :], -token.logprob] for before, after, token in zip(read, read[1:], made, strict=False)
        ]
        passages.append({"end": end, "given": tokenizer.decode(prompt[-count:]), "written": written})
    record = {
        "format": 2,
        "run": run.name,
        "trained_at": length,
        "settings": settings,
        "passages": passages,
        "provenance": provenance(threads=torch.get_num_threads()),
    }
    make_folder(path.parent)
    write_sealed(path, record)
