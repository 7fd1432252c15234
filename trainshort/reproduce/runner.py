"""All tasks of some experiments, with one progress bar over everything; after them what is measured: Table 1.

No torch: what is done already is known from files, which makes a second run quick.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trainshort.claims.collection import COST_FILE, read_costs
from trainshort.files import make_folder
from trainshort.reproduce import tasks
from trainshort.reproduce.launchers import Site, jobs_for, run_on_cluster, run_side_by_side
from trainshort.reproduce.tasks import Assignment, Task

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
        from trainshort.reproduce.rounds import measure_costs

        console.print("Measuring speed and memory ...", highlight=False)
        make_folder(root)
        measure_costs(assignment.costs, root / COST_FILE, assignment.weighed, assignment.read)


def run_here(todo: list[Task], root: Path, done: Callable[[str], None], jobs: int | None = None) -> None:
    """On this machine, `jobs` models at a time (None: as many as serve), each with its share of the cores."""
    jobs = min(len(todo), jobs or jobs_for(len(todo)))
    if jobs > 1:
        run_side_by_side(todo, root, done, jobs)
        return
    for task in todo:
        done(tasks.work(task, root))


def missing_costs(assignment: Assignment, root: Path) -> bool:
    """Whether a wanted cost was not measured yet; told without torch."""
    return bool(assignment.costs and assignment.costs.keys() - read_costs(root).keys())


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
