"""One task from wherever it stands to its end. Runs in this process, or on a cluster's node."""

from collections.abc import Iterable
from pathlib import Path

from trainshort.errors import InputError
from trainshort.reproduce import state
from trainshort.reproduce.tasks import Group, Task


def work(task: Task, root: Path) -> str:
    """Train, read, sample: whatever of it is missing. Interrupted at any moment, the next call goes on."""
    from trainshort.train import train

    folder = root / task.name
    if not state.trained(folder, task):
        train(task.config, folder, resume=True, quiet=True)
    found = state.evaluations(folder)
    for group, lengths in task.groups.items():
        _read(folder, group, state.missing(found, group, lengths))
    for checkpoint in state.checkpoints(folder) if task.curves else ():
        for group, lengths in task.curves.items():
            _read(checkpoint, group, state.missing(found, group, lengths, state.step_of(checkpoint)))
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


def _read(path: Path, group: Group, lengths: Iterable[int]) -> None:
    """Evaluate a run's best weights, or one checkpoint, at some lengths. As `trainshort evaluate` does, but without a
    picture each: the report draws them all."""
    wanted = sorted(lengths)
    if not wanted:
        return
    from trainshort.evaluate import card
    from trainshort.evaluate.session import new_evaluation, result_path, resumed
    from trainshort.evaluate.sweep import Plan, sweep
    from trainshort.evaluate.target import RunTarget, pick_device
    from trainshort.evaluate.text import open_text

    target = RunTarget(path, device=pick_device(None))
    text = open_text(target, (), group.split, group.tokens)
    plan = Plan(text.tokens, _fitting(wanted, len(text.tokens), text.name), group.stride)
    evaluation = new_evaluation(target, text, plan, "float32")
    file = result_path(target.folder, evaluation)
    evaluation = sweep(target, plan, resumed(evaluation, file), file)
    made = card.make(evaluation, str(file.relative_to(target.folder))) if target.kind == "run" else None
    if made:
        card.save(made, target.folder)


def _fitting(lengths: list[int], tokens: int, text: str) -> list[int]:
    """The lengths, if the text is long enough for all of them."""
    if lengths[-1] > tokens:
        raise InputError(f"{text} has {tokens:,} tokens, fewer than the {lengths[-1]:,} that one reading takes.")
    return lengths
