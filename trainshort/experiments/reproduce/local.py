"""Where tasks run: on this machine, several models at a time, or on a Slurm cluster, one job each.

Here each model has a process of its own with its share of the cores. A small model gains nothing from a second core
(measured: 4 layers of width 128 train at 10,100 tokens/s with two threads and at 11,000 with one), so two models side
by side are done in half the time. A worker never outlives its command: whatever ends it, a signal, an error or a kill,
the workers are told to stop, and training answers that by saving.

On a cluster jobs go through submitit. What they ask for is the site's affair: a TOML file.

    partition = "gpu"          # each is optional; without any the cluster's own defaults hold
    account = "lab"
    qos = "long"
    gpus = 1                   # 0: none is asked for, as on a cluster that has none
    cores = 8
    memory = 32                # GB
    minutes = 720
    setup = ["module load cuda"]
    options = {constraint = "a100"}   # any other option of sbatch

A job that Slurm requeues, for whatever reason, is started again with the same task and goes on from its checkpoint.
"""

import ctypes
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pydantic import Field

from trainshort.config.base import StrictConfig
from trainshort.errors import InputError
from trainshort.experiments.reproduce.jobs import Job, evaluate_model, run_job, train_model
from trainshort.utils.io import read_text
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import show_log_messages

MAX_PARALLEL_JOBS = 8
"""Models at a time, unless more are asked for: each is a process with about half a gigabyte for libraries alone."""
Work = Callable[[Job, Path], None]
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def default_parallelism() -> int:
    """How many models to run at a time: with a GPU one, else one for each core."""
    import torch

    return 1 if torch.cuda.is_available() else min(available_cores(), MAX_PARALLEL_JOBS)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_parallel(tasks: list[Job], root: Path, done: Callable[[str], None], jobs: int) -> None:
    """Work on `jobs` models at a time. One that fails is named at the end; what the others made stays.

    Training and evaluating a model are two pieces of work, and evaluations wait for the last training of their seed to
    begin: with five models on two cores, one core has a third model to train while the other evaluates the first four.
    A seed is done before the next is begun, so that a command that is stopped has whole ones.
    """
    prepare_data(tasks)
    context = multiprocessing.get_context("spawn")
    threads = max(1, available_cores() // jobs)
    waiting: list[tuple[Job, Work]] = [(task, train_model) for task in tasks]
    failed: list[str] = []
    running: dict[Connection, tuple[Job, Work, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task, piece = waiting.pop(waiting.index(min(waiting, key=_scheduling_key)))
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(target=_worker, args=(piece, task, root, threads, os.getpid(), theirs))
                worker.start()
                theirs.close()  # so that its end shows here, however the worker ends
                running[ours] = (task, piece, worker)
            for ended in wait(list(running)):
                task, piece, worker = running.pop(ended)  # pyright: ignore[reportArgumentType]
                problem = _worker_error(ended, worker)  # pyright: ignore[reportArgumentType]
                if problem is not None:
                    failed.append(f"{task.name} ({problem})")
                elif piece is train_model:
                    waiting.append((task, evaluate_model))
                else:
                    done(task.name)
    finally:
        for *_, worker in running.values():
            worker.terminate()
        for *_, worker in running.values():
            worker.join()
    if failed:
        raise InputError(f"{len(failed)} models failed: {'; '.join(failed)}. The same command runs what is missing.")


def _scheduling_key(waiting: tuple[Job, Work]) -> tuple[int, bool, int]:
    """What is done first is least. Long sequences take longest; begun last, one would keep a single core busy."""
    task, piece = waiting
    return task.config.train.seed, piece is evaluate_model, -task.config.train.length


def prepare_data(tasks: list[Job]) -> None:
    """Before the workers begin: two of them would prepare the same text twice."""
    from trainshort.data.preparation import open_or_prepare

    for data in {task.config.data.model_dump_json(): task.config.data for task in tasks}.values():
        open_or_prepare(data)


def _worker(piece: Work, task: Job, root: Path, threads: int, parent: int, tell: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; the command passes it on
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before we could ask
            return
    import torch

    torch.set_num_threads(threads)
    try:
        with show_log_messages():
            piece(task, root)
        tell.send(None)
    except InputError as error:
        tell.send(str(error))
    except KeyboardInterrupt as interrupt:  # told to stop, and everything is saved
        sys.exit(getattr(interrupt, "code", 1))


def _worker_error(ended: Connection, worker: BaseProcess) -> str | None:
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


POLL_SECONDS = 0.5
QUEUE_SECONDS = 10.0
"""Time between two looks at the queue, which tells of jobs that ended without a word."""


class SlurmConfig(StrictConfig):
    """What a job asks for."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: int = Field(default=1, ge=0)
    """0: the option is not given at all, since a cluster without GPUs refuses it."""
    cores: int | None = Field(default=None, ge=1)
    memory: float | None = Field(default=None, gt=0)
    """GB."""
    minutes: int = Field(default=24 * 60, ge=1)
    setup: tuple[str, ...] = ()
    """Shell lines that run before the job."""
    options: dict[str, str | int] = Field(default_factory=dict)
    """Other options of sbatch, by their long names."""

    def to_submitit(self) -> dict[str, Any]:
        """In submitit's words."""
        wanted = {
            "timeout_min": self.minutes,
            "gpus_per_node": self.gpus,
            "cpus_per_task": self.cores,
            "mem_gb": self.memory,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_qos": self.qos,
            "slurm_setup": list(self.setup),
            "slurm_additional_parameters": self.options,
        }
        return {name: value for name, value in wanted.items() if value}


def read_slurm_config(path: Path | None, gpus: int) -> SlurmConfig:
    """A site file's settings; what it does not say of GPUs, the scale says."""
    if path is None:
        return SlurmConfig(gpus=gpus)
    try:
        values = tomllib.loads(read_text(path, hint="Write one as docs/reproduce.md shows, or leave --site out."))
        return SlurmConfig.parse({"gpus": gpus, **values})
    except (tomllib.TOMLDecodeError, InputError) as error:
        raise InputError(f"The site file {path}: {error}{'' if str(error)[-1:] in '.?' else '.'}") from None


@dataclass(frozen=True)
class ClusterJob:
    """A task as a job: what submitit calls, and calls again after a time limit or a preemption."""

    cores: int | None

    def __call__(self, task: Job, root: Path) -> str:
        if self.cores:
            import torch

            torch.set_num_threads(self.cores)
        with show_log_messages():
            return run_job(task, root)

    def checkpoint(self, task: Job, root: Path) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task, root)


def make_executor(root: Path, site: SlurmConfig, kind: str = "slurm") -> Any:
    """What takes jobs; nothing is written before the first. `kind` is submitit's name of it: slurm, or local for
    processes on this machine."""
    require_package("submitit", "Starting Slurm jobs", "trainshort[report]")
    import submitit

    # On a cluster that keeps no accounts it warns at every look, on standard output; `_queued` asks the queue instead.
    logging.getLogger("submitit").setLevel(logging.ERROR)
    try:
        executor = submitit.AutoExecutor(folder=root / "jobs", cluster=kind)
        executor.update_parameters(name="trainshort", **site.to_submitit())
    except (RuntimeError, ValueError) as error:
        raise InputError(f"submitit cannot start jobs here ({error}). Use --launcher local.") from None
    if kind == "slurm" and _queued() is None:
        raise InputError("Slurm is installed here and does not answer (squeue). Start it, or use --launcher local.")
    return executor


def run_on_cluster(
    tasks: list[Job], root: Path, done: Callable[[str], None], site: SlurmConfig, kind: str = "slurm"
) -> None:
    """One job per task."""
    executor = make_executor(root, site, kind)
    from submitit.core.utils import FailedJobError

    prepare_data(tasks)  # two jobs would prepare the same text twice
    try:
        jobs = [executor.submit(ClusterJob(site.cores), task, root.resolve()) for task in tasks]
    except (RuntimeError, OSError, FailedJobError) as error:
        raise InputError(
            f"Slurm did not take the jobs ({_cause(str(error))}). Say what it wants in a site file (--site), "
            "or use --launcher local."
        ) from None
    names = [task.name for task in tasks]
    _wait(dict(zip(names, jobs, strict=True)), root, done, queue=kind == "slurm")


def _cause(message: str) -> str:
    """The sentence of the error that ended a job, out of submitit's account of it."""
    lines = [line.strip() for line in message.strip().splitlines()]
    errors = [line for line in lines if re.match(r"([\w.]+(Error|Interrupted|Exception)|\w+: error): ", line)]
    return (errors or lines or ["no reason given"])[-1].partition(": ")[2] or lines[-1]


def _queued() -> set[str] | None:
    """The jobs that are waiting or running; None when Slurm does not answer just now. Unlike the accounts that submitit
    asks, the queue is there on every cluster."""
    try:
        asked = subprocess.run(["squeue", "--noheader", "--format=%A"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(asked.stdout.split()) if asked.returncode == 0 else None


def _wait(jobs: dict[str, Any], root: Path, done: Callable[[str], None], *, queue: bool) -> None:
    """Until all jobs have ended; then the failed ones are named. What the others made stays."""
    failed: list[str] = []
    gone: set[str] = set()
    look = time.monotonic() + QUEUE_SECONDS
    while jobs:
        for name in [name for name, job in jobs.items() if job.done()]:
            error = jobs.pop(name).exception()
            if error is None:
                done(name)
            else:
                failed.append(f"{name} ({_cause(str(error))})")
        if queue and jobs and time.monotonic() >= look:
            there = _queued()
            lost = set() if there is None else {name for name, job in jobs.items() if job.job_id not in there}
            for name in lost & gone:  # missing twice, so that a result still on its way is not taken for a failure
                if not jobs[name].done():
                    del jobs[name]
                    failed.append(f"{name} (it left the queue without a result)")
            gone, look = lost, time.monotonic() + QUEUE_SECONDS
        time.sleep(POLL_SECONDS if jobs else 0)
    if failed:
        raise InputError(
            f"{len(failed)} jobs failed: {'; '.join(failed)}. Their logs are in {root / 'jobs'}; "
            "the same command runs what is missing."
        )
