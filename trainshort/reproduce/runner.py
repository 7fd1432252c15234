"""All tasks of some experiments, with one progress bar over everything; after them what is measured: Table 1.

Speeds are taken in rounds, one step of each configuration after the other, so that whatever else the machine does
falls on all of them alike, and two of them are compared round by round. Memory is the peak above what the program had
before the model was built, each configuration in a process of its own, since a process does not forget what it once
held; it is taken several times, since peaks differ a little, and several processes run side by side, since they may.
"""

import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trainshort.bench.measure import Timing, alone, in_turns
from trainshort.bench.rig import Rig
from trainshort.claims.collection import COST_FILE, COST_FORMAT, read_costs
from trainshort.config import RunConfig
from trainshort.evaluate.target import pick_device
from trainshort.files import make_folder, write_sealed
from trainshort.reproduce import tasks
from trainshort.reproduce.launchers import Site, cores, run_here, run_on_cluster
from trainshort.reproduce.tasks import Assignment, Task
from trainshort.runs import provenance

PLAIN_SECONDS = 20.0
"""Time between two lines when the output is not a terminal."""


def reproduce(
    assignment: Assignment,
    root: Path,
    *,
    launcher: str = "local",
    jobs: int | None = None,
    site: Site | None = None,
    console: Console,
) -> None:
    """Compute what is missing under `root`, here or on a cluster."""
    todo = [task for task in assignment.tasks if not tasks.finished(root, task)]
    kept = len(assignment.tasks) - len(todo)
    if kept:
        console.print(f"{kept} of {len(assignment.tasks)} models are done already, in {root}.", highlight=False)
    if todo:
        with _progress(todo, root, console) as done:
            if launcher == "local":
                run_here(todo, root, done, jobs)
            else:
                run_on_cluster(todo, root, done, site or Site(gpus=assignment.scale.gpus))
    if missing_costs(assignment, root):
        console.print("Measuring speed and memory ...", highlight=False)
        make_folder(root)
        measure_costs(assignment.costs, root / COST_FILE, assignment.weighed, assignment.read)


def missing_costs(assignment: Assignment, root: Path) -> bool:
    """Whether a wanted cost was not measured yet; told without torch."""
    return bool(assignment.costs.keys() - read_costs(root).keys())


@contextmanager
def _progress(todo: list[Task], root: Path, console: Console) -> Iterator:
    """The bar follows the files that training and evaluation write, so it serves a cluster as well."""
    stop = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.percentage:>3.0f} %"))
    live = Progress(*columns, TimeRemainingColumn(compact=True), console=console, disable=not console.is_terminal)
    bar = live.add_task(f"{len(todo)} models", total=1.0)
    begun = time.monotonic()
    first = _fraction(todo, root)
    finished: list[str] = []

    def follow() -> None:
        next_line = begun + PLAIN_SECONDS
        while not stop.wait(1.0):
            fraction = _fraction(todo, root)
            live.update(bar, completed=fraction, description=f"{len(finished)} of {len(todo)} models")
            if not console.is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + PLAIN_SECONDS
                console.print(_line(fraction, first, begun, len(finished), len(todo)), highlight=False)

    watcher = threading.Thread(target=follow, daemon=True)

    def done(name: str) -> None:
        finished.append(name)
        console.print(f"{name} is done ({len(finished)} of {len(todo)}).", highlight=False)

    with live:
        watcher.start()
        try:
            yield done
        finally:
            stop.set()
            watcher.join()


def _fraction(todo: list[Task], root: Path) -> float:
    shares = [tasks.share(root, task) for task in todo]
    return sum(share.done for share in shares) / max(1.0, sum(share.total for share in shares))


def _line(fraction: float, first: float, begun: float, finished: int, count: int) -> str:
    """`37 % of all, 1 of 4 models done, about 0:05:10 left`"""
    left = ""
    if fraction > first:
        seconds = int((time.monotonic() - begun) * (1 - fraction) / (fraction - first))
        left = f", about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
    return f"{fraction:.0%} of all, {finished} of {count} models done{left}"


TOGETHER = 1024
"""Configurations of up to so many tokens a sequence take turns with each other; longer ones with those of their length,
or a single long step would fill a round."""
SECONDS = 12.0
LEAST, MOST = 9, 41
"""Rounds: as many as fit into the seconds. With 9 a median is between the second and the eighth, 96 times in 100."""
WEIGHINGS = 2


def measure_costs(
    configs: dict[str, RunConfig],
    path: Path,
    weighed: Collection[str] | None = None,
    read: Collection[str] | None = None,
) -> None:
    """Measure all, if `path` does not hold all yet: only what took turns with each other can be compared. Memory only
    of those in `weighed`, speed of reading only of those in `read`; None: of all."""
    entries = read_costs(path.parent)
    if not configs.keys() - entries.keys():
        return
    origin, device = provenance(threads=torch.get_num_threads()), pick_device(None)
    groups: dict[int, dict[str, RunConfig]] = {}
    for name, config in configs.items():
        length = config.train.length
        groups.setdefault(TOGETHER if length <= TOGETHER else length, {})[name] = config
    memories = _memories({name: one for name, one in configs.items() if weighed is None or name in weighed}, device)
    for length, group in sorted(groups.items()):
        rigs = {name: Rig(config, device) for name, config in group.items()}
        timings = _in_rounds(rigs, [name for name in rigs if read is None or name in read])
        for name, config in group.items():
            entries[name] = {
                "position": config.model.position,
                "length": config.train.length,
                "batch": config.train.batch,
                "vocabulary": config.data.vocabulary,
                "train_seconds": timings[f"train {name}"].seconds,
                "read_seconds": timings[f"read {name}"].seconds if f"read {name}" in timings else None,
                "tokens": config.train.batch * config.train.length,
                "train_memory": max(memories[name]) if memories.get(name) else None,
                "train_memories": memories.get(name),
                "session": f"{origin['time']}, up to {length}",
                "provenance": origin,
            }
    write_sealed(path, {"format": COST_FORMAT, "entries": entries})


def _in_rounds(rigs: dict[str, Rig], read: list[str]) -> dict[str, Timing]:
    work = {f"train {name}": rig.step for name, rig in rigs.items()}
    work |= {f"read {name}": rigs[name].infer for name in read}
    once = in_turns(work, 1)
    rounds = round(SECONDS / sum(timing.best for timing in once.values()))
    return in_turns(work, max(LEAST, min(MOST, rounds)), warmup=0)


def _memories(configs: dict[str, RunConfig], device: str) -> dict[str, list[int]]:
    """Peaks of training, `WEIGHINGS` of each; empty where the device does not tell."""

    def weigh(config: RunConfig) -> int | None:
        return alone("rig", config=config.model_dump(mode="json"), device=device)["training"].get("above")

    names = [name for name in configs for _ in range(WEIGHINGS)]
    with ThreadPoolExecutor(cores() if device == "cpu" else 1) as several:
        found = list(several.map(weigh, [configs[name] for name in names]))
    return {
        name: [peak for other, peak in zip(names, found, strict=True) if other == name and peak is not None]
        for name in configs
    }
