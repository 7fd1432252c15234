"""Several models at a time on one machine, each in a process of its own with its share of the cores.

A small model gains nothing from a second core (measured: 4 layers of width 128 train at 10,100 tokens/s with two
threads and at 11,000 with one), so two models side by side are done in half the time.

A worker never outlives its command: whatever ends it, a signal, an error or a kill, the workers are told to stop, and
training answers that by saving.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from trainshort.errors import InputError
from trainshort.reproduce.tasks import Task
from trainshort.reproduce.work import evaluate_model, train_model, work

MOST = 8
"""Models at a time, unless more are asked for: each is a process with about half a gigabyte for libraries alone."""
Work = Callable[[Task, Path], None]
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def jobs_for(count: int) -> int:
    """How many of `count` models to run at a time: with a GPU one, else one for each core."""
    import torch

    return 1 if torch.cuda.is_available() else max(1, min(count, cores(), MOST))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_here(tasks: list[Task], root: Path, done: Callable[[str], None], jobs: int | None = None) -> None:
    """On this machine, `jobs` models at a time (None: as many as serve), each with its share of the cores."""
    jobs = min(len(tasks), jobs or jobs_for(len(tasks)))
    if jobs > 1:
        _run_side_by_side(tasks, root, done, jobs)
        return
    for task in tasks:
        done(work(task, root))


def _run_side_by_side(tasks: list[Task], root: Path, done: Callable[[str], None], jobs: int) -> None:
    """Work on `jobs` models at a time. One that fails is named at the end; what the others made stays.

    Training and evaluating a model are two pieces of work, and evaluations wait for the last training to begin: with
    five models on two cores, one core has a third model to train while the other evaluates the first four.
    """
    prepare_data(tasks)
    context = multiprocessing.get_context("spawn")
    threads = max(1, cores() // jobs)
    # Long sequences take longest; begun last, one would keep a single core busy at the end.
    longest_first = sorted(tasks, key=lambda task: -task.config.train.length)
    waiting: list[tuple[Task, Work]] = [(task, train_model) for task in longest_first]
    failed: list[str] = []
    running: dict[Connection, tuple[Task, Work, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task, piece = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(target=_worker, args=(piece, task, root, threads, os.getpid(), theirs))
                worker.start()
                theirs.close()  # so that its end shows here, however the worker ends
                running[ours] = (task, piece, worker)
            for ended in wait(list(running)):
                task, piece, worker = running.pop(ended)  # pyright: ignore[reportArgumentType]
                problem = _last_word(ended, worker)  # pyright: ignore[reportArgumentType]
                if problem is not None:
                    failed.append(f"{task.name} ({problem})")
                elif piece is train_model:
                    waiting.append((task, evaluate_model))
                else:
                    done(task.name)
    finally:
        _stop([worker for *_, worker in running.values()])
    if failed:
        raise InputError(f"{len(failed)} models failed: {'; '.join(failed)}. The same command runs what is missing.")


def prepare_data(tasks: list[Task]) -> None:
    """Before the workers begin: two of them would prepare the same text twice."""
    from trainshort.data import open_or_prepare

    for data in {task.config.data.model_dump_json(): task.config.data for task in tasks}.values():
        open_or_prepare(data)


def _worker(piece: Work, task: Task, root: Path, threads: int, parent: int, tell: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; the command passes it on
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before we could ask
            return
    import torch

    torch.set_num_threads(threads)
    try:
        piece(task, root)
        tell.send(None)
    except InputError as error:
        tell.send(str(error))
    except KeyboardInterrupt as interrupt:  # told to stop, and everything is saved
        sys.exit(getattr(interrupt, "code", 1))


def _last_word(ended: Connection, worker: BaseProcess) -> str | None:
    """What a worker said of its task, None when all went well; one that fell silent is told by its exit code."""
    try:
        return ended.recv()
    except EOFError:
        worker.join()  # it has an exit code only then
        code = worker.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"stopped with exit code {code}"
    finally:
        ended.close()
        worker.join()


def _stop(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()
