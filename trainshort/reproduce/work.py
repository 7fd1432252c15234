"""One task from wherever it stands to its end. Runs in this process, or on a cluster's node."""

from dataclasses import replace
from pathlib import Path

from trainshort.claims.collection import COST_FORMAT, read_costs
from trainshort.config import RunConfig
from trainshort.evaluate.query import Query, find
from trainshort.files import make_folder, write_sealed
from trainshort.reproduce import tasks
from trainshort.reproduce.tasks import Task
from trainshort.runs import provenance

WRITTEN, TIMES = 64, (1, 4, 16)
"""Tokens written (at most half a training length), and where: they end at so many training lengths of text."""
TEMPERATURE, TOP_K, SEED = 0.8, 40, 1


def work(task: Task, root: Path) -> str:
    """Train, evaluate, sample: whatever of it is missing. Interrupted at any moment, the next call goes on."""
    from trainshort.train import train

    folder = root / task.name
    if not tasks.trained(folder, task):
        train(task.config, folder, resume=True, quiet=True)
    found = find(folder)
    for query, lengths in task.lengths.items():
        _evaluate(folder, query, tasks.missing(found, query, lengths))
    for checkpoint in tasks.checkpoints(folder) if task.curves else ():
        for query, lengths in task.curves.items():
            at = replace(query, step=tasks.step_of(checkpoint))
            _evaluate(checkpoint, at, tasks.missing(found, at, lengths))
    sample = folder / tasks.SAMPLE
    if task.sample and not sample.exists():
        _write_sample(folder, sample)
    if task.sample and not (folder / tasks.REACH).exists():
        _reach(folder)
    return task.name


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
    length, speller = target.config.train.length, target.speller()
    count = max(1, min(WRITTEN, length // 2))
    settings = {"temperature": TEMPERATURE, "top_k": min(TOP_K, target.vocabulary), "seed": SEED}
    passages = []
    for end in (times * length for times in TIMES if times * length <= len(text)):
        prompt = np.asarray(text[: end - count]).astype(np.int64)
        # Without a tokenizer nothing stops the stream early: an end of text is a token like any other here.
        made = list(stream(target.model, prompt, tokens=count, **settings))
        ids = [token.id for token in made]
        read = [speller.decode(ids[:number]) for number in range(count + 1)]
        written = [
            [after[len(before) :], -token.logprob] for before, after, token in zip(read, read[1:], made, strict=False)
        ]
        passages.append({"end": end, "given": speller.decode(prompt[-count:]), "written": written})
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


# ---- speed and memory: the paper's Table 1

ROUNDS = 15
"""A round varies by 5 to 10 % on a shared machine, and a claim of the paper is about 1 %."""


def measure_costs(configs: dict[str, RunConfig], path: Path) -> None:
    """Measure what `path` does not hold yet, and add it there.

    Speeds are taken in rounds, one step of each configuration after the other, so that whatever else the machine does
    falls on all of them alike; the median round counts. Memory is the peak above what the program had before the model
    was built, each configuration in a process of its own, since a process does not forget what it once held.
    """
    import torch

    from trainshort.bench.measure import alone, in_turns
    from trainshort.bench.rig import Rig
    from trainshort.evaluate.target import pick_device

    entries = read_costs(path.parent)
    todo = {name: config for name, config in configs.items() if name not in entries}
    if not todo:
        return
    origin, device = provenance(threads=torch.get_num_threads()), pick_device(None)
    rigs = {name: Rig(config, device) for name, config in todo.items()}
    work = {f"train {name}": rig.step for name, rig in rigs.items()}
    work |= {f"read {name}": rig.infer for name, rig in rigs.items()}
    timings = in_turns(work, ROUNDS)
    for name, config in todo.items():
        entries[name] = {
            "position": config.model.position,
            "length": config.train.length,
            "batch": config.train.batch,
            "vocabulary": config.data.vocabulary,
            "train_seconds": timings[f"train {name}"].seconds,
            "read_seconds": timings[f"read {name}"].seconds,
            "tokens": config.train.batch * config.train.length,
            "train_memory": alone("rig", config=config.model_dump(mode="json"), device=device)["training"].get("above"),
            "provenance": origin,
        }
    write_sealed(path, {"format": COST_FORMAT, "entries": entries})
