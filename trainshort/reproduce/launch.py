"""Where tasks run: on this machine, or on a Slurm cluster through submitit."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainshort.errors import InputError
from trainshort.registry import did_you_mean
from trainshort.reproduce.side_by_side import jobs_for, run_side_by_side
from trainshort.reproduce.tasks import Task
from trainshort.reproduce.work import work

LAUNCHERS = ("local", "slurm")
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Cluster:
    """What a job asks for."""

    kind: str = "slurm"
    """submitit's name of the executor: slurm, or local for processes on this machine."""
    minutes: int = 24 * 60
    gpus: int = 1


def check_launcher(name: str) -> None:
    """Refuse an unknown launcher before anything is computed."""
    if name not in LAUNCHERS:
        raise InputError(f"Unknown launcher '{name}'.{did_you_mean(name, LAUNCHERS)} Known: {', '.join(LAUNCHERS)}.")


def run_here(tasks: list[Task], root: Path, done: Callable[[str], None], jobs: int | None = None) -> None:
    """On this machine, `jobs` models at a time (None: as many as serve), each with its share of the cores."""
    jobs = min(len(tasks), jobs or jobs_for(len(tasks)))
    if jobs > 1:
        run_side_by_side(tasks, root, done, jobs)
        return
    for task in tasks:
        done(work(task, root))


def run_on_cluster(tasks: list[Task], root: Path, done: Callable[[str], None], cluster: Cluster) -> None:
    """One job per task; a job that is preempted is started again by submitit and goes on from its checkpoint."""
    try:
        import submitit
    except ImportError:
        raise InputError("The slurm launcher needs a package: pip install 'trainshort[scale]'.") from None
    try:
        executor = submitit.AutoExecutor(folder=root / "jobs", cluster=cluster.kind)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"submitit cannot start jobs here ({error}). Use --launcher local.") from None
    executor.update_parameters(name="trainshort", timeout_min=cluster.minutes, gpus_per_node=cluster.gpus)
    try:
        with executor.batch():
            jobs = [executor.submit(work, task, root.resolve()) for task in tasks]
    except (RuntimeError, FileNotFoundError, OSError) as error:
        raise InputError(f"Slurm did not take the jobs ({error}). Use --launcher local.") from None
    _wait(dict(zip([task.name for task in tasks], jobs, strict=True)), root, done)


def _cause(message: str) -> str:
    """The sentence of the error that ended a job, out of submitit's account of it."""
    lines = [line.strip() for line in message.strip().splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Interrupted|Exception): ", line)]
    return (errors or lines or ["no reason given"])[-1].partition(": ")[2] or lines[-1]


def _wait(jobs: dict, root: Path, done: Callable[[str], None]) -> None:
    """Until all jobs have ended; then the failed ones are named. What the others made stays."""
    failed: list[str] = []
    while jobs:
        for name in [name for name, job in jobs.items() if job.done()]:
            error = jobs.pop(name).exception()
            if error is None:
                done(name)
            else:
                failed.append(f"{name} ({_cause(str(error))})")
        time.sleep(POLL_SECONDS if jobs else 0)
    if failed:
        raise InputError(
            f"{len(failed)} jobs failed: {'; '.join(failed)}. Their logs are in {root / 'jobs'}; "
            "the same command runs what is missing."
        )
