"""One task from wherever it stands to its end. Runs in this process, or on a cluster's node."""

from dataclasses import replace
from pathlib import Path

from trainshort.evaluate.query import Query, find
from trainshort.reproduce import state
from trainshort.reproduce.tasks import Task


def work(task: Task, root: Path) -> str:
    """Train, evaluate, sample: whatever of it is missing. Interrupted at any moment, the next call goes on."""
    from trainshort.train import train

    folder = root / task.name
    if not state.trained(folder, task):
        train(task.config, folder, resume=True, quiet=True)
    found = find(folder)
    for query, lengths in task.lengths.items():
        _evaluate(folder, query, state.missing(found, query, lengths))
    for checkpoint in state.checkpoints(folder) if task.curves else ():
        for query, lengths in task.curves.items():
            at = replace(query, step=state.step_of(checkpoint))
            _evaluate(checkpoint, at, state.missing(found, at, lengths))
    sample = folder / state.SAMPLE
    if task.sample and not sample.exists():
        from trainshort.reproduce.sample import write_sample

        write_sample(folder, sample)
    if task.sample and not (folder / state.REACH).exists():
        _reach(folder)
    return task.name


def _reach(folder: Path) -> None:
    """How far each head looks, by `trainshort analyze`."""
    from rich.console import Console

    from trainshort.analyze.base import Lab
    from trainshort.analyze.session import analyze
    from trainshort.evaluate.target import RunTarget
    from trainshort.evaluate.text import open_text

    target = RunTarget(folder)
    text = open_text(target, ())
    lab = Lab(target, text.tokens, target.config.train.length)
    analyze(lab, text, ["reach"], Console(quiet=True))


def _evaluate(path: Path, query: Query, lengths: list[int]) -> None:
    """Evaluate a run's best weights, or one checkpoint, at some lengths; the report draws them all."""
    if not lengths:
        return
    from trainshort.evaluate.session import evaluate
    from trainshort.evaluate.sweep import Plan
    from trainshort.evaluate.target import RunTarget, pick_device
    from trainshort.evaluate.text import open_text

    target = RunTarget(path, device=pick_device(None))
    text = open_text(target, (), query.split, query.tokens)
    evaluate(target, text, Plan(text.tokens, lengths, query.stride), picture=False)
