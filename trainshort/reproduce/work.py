"""One task from wherever it stands to its end. Runs in this process, or on a cluster's node."""

from dataclasses import replace
from pathlib import Path

from trainshort.evaluate.query import Query, best_step, find
from trainshort.files import make_folder, write_sealed
from trainshort.reproduce import tasks
from trainshort.reproduce.tasks import Task
from trainshort.runs import provenance

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

    if not tasks.trained(root / task.name, task):
        train(task.config, root / task.name, resume=True, quiet=True)


def evaluate_model(task: Task, root: Path) -> None:
    """All that is wanted of a trained model: its evaluations, its learning curve, a text, the reach of its heads."""
    folder = root / task.name
    found = find(folder)
    for query, lengths in task.lengths.items():
        _evaluate(folder, query, tasks.missing(found, query, lengths))
    best = best_step(folder)
    for checkpoint in tasks.checkpoints(folder) if task.curves else ():
        step = tasks.step_of(checkpoint)
        for query, lengths in task.curves.items():
            at = replace(query, step=step)
            # The best one is the run itself: its evaluations lie in one file, and must go on being the run's.
            _evaluate(folder if step == best else checkpoint, at, tasks.missing(found, at, lengths))
    sample = folder / tasks.SAMPLE
    if task.sample and not sample.exists():
        _write_sample(folder, sample)
    if task.sample and not (folder / tasks.REACH).exists():
        _reach(folder)


def _reach(folder: Path) -> None:
    """How far each head looks, by `trainshort analyze`."""
    from rich.console import Console

    from trainshort.analyze.lab import Lab, analyze
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
    from trainshort.evaluate.sweep import Sweep
    from trainshort.evaluate.target import RunTarget, pick_device
    from trainshort.evaluate.text import open_text

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
