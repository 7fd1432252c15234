"""Run several jobs at the same time on this machine.

Each job runs in its own process with its share of the CPU cores. A small model trains equally fast with one core and
with two, so two models at a time finish in half the time.

If the main process ends for any reason, it stops its worker processes. A worker saves a checkpoint before it stops.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from trainshort.errors import InputError
from trainshort.experiments.reproduce.jobs import Job, evaluate_model, train_model
from trainshort.utils.terminal import show_log_messages

# The default limit of jobs at the same time. Each process needs about 0.5 GB of memory for its libraries.
MAX_PARALLEL_JOBS = 8

# PR_SET_PDEATHSIG, an option of the Linux function `prctl`.
SIGNAL_AT_PARENT_DEATH = 1

JobStep = Callable[[Job, Path], None]
"""One of the two steps of a job, `train_model` or `evaluate_model`. The arguments are the job and the root folder."""


@dataclass(frozen=True)
class Worker:
    """A worker process that runs one step of a job."""

    job: Job
    step: JobStep
    process: BaseProcess


def default_parallelism() -> int:
    """Return how many jobs run at the same time by default.

    With a GPU one job runs at a time. Otherwise there is one job per CPU core, and at most `MAX_PARALLEL_JOBS`.
    """
    import torch

    if torch.cuda.is_available():
        return 1
    return min(available_cores(), MAX_PARALLEL_JOBS)


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_parallel(jobs: list[Job], root: Path, on_done: Callable[[str], None], parallel_jobs: int) -> None:
    """Run several jobs at the same time.

    Training and evaluating a model are two separate steps. A core that has no model to train evaluates a model that is
    already trained.

    Args:
        jobs: The jobs.
        root: The folder that contains the run folders.
        on_done: Called with the name of each job that is done.
        parallel_jobs: How many jobs run at the same time.

    Raises:
        InputError: If a job fails. The error is raised after all other jobs have ended.
    """
    prepare_data(jobs)
    threads = max(1, available_cores() // parallel_jobs)
    waiting: list[tuple[Job, JobStep]] = [(job, train_model) for job in jobs]
    failures: list[str] = []
    workers: dict[Connection, Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < parallel_jobs:
                next_item = min(waiting, key=_scheduling_key)
                waiting.remove(next_item)
                job, step = next_item
                connection, worker = _start_worker(job, step, root, threads)
                workers[connection] = worker

            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                worker = workers.pop(connection)
                error = _receive_error(connection, worker.process)
                if error is not None:
                    failures.append(f"{worker.job.name} ({error})")
                elif worker.step is train_model:
                    waiting.append((worker.job, evaluate_model))
                else:
                    on_done(worker.job.name)
    finally:
        # Workers are left here only if this process was interrupted.
        for worker in workers.values():
            worker.process.terminate()
        for worker in workers.values():
            worker.process.join()

    if failures:
        raise InputError(
            f"{len(failures)} models failed: {'; '.join(failures)}. Run the same command again to continue."
        )


def _scheduling_key(item: tuple[Job, JobStep]) -> tuple[int, bool, int]:
    """Return a sort key for one step of a job (training or evaluation). The step with the smallest key runs first.

    All models of one seed are finished before the next seed. Training goes before evaluation. Long training sequences
    go before short ones, because the slowest job must not start last.
    """
    job, step = item
    is_evaluation = step is evaluate_model
    # False is sorted before True, so training goes first.
    return job.config.train.seed, is_evaluation, -job.config.train.length


def prepare_data(jobs: list[Job]) -> None:
    """Prepare the datasets of all jobs, so that two worker processes do not prepare the same dataset."""
    from trainshort.data.preparation import open_or_prepare

    # Configs are not hashable. Their JSON text identifies equal configs.
    unique_configs = {job.config.data.model_dump_json(): job.config.data for job in jobs}
    for data_config in unique_configs.values():
        open_or_prepare(data_config)


def _start_worker(job: Job, step: JobStep, root: Path, threads: int) -> tuple[Connection, Worker]:
    """Start a process that runs one step of a job.

    Args:
        job: The job.
        step: `train_model` or `evaluate_model`.
        root: The folder that contains the run folders.
        threads: The number of torch threads of the process.

    Returns:
        The connection from which the result of the process is received, and the process.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker_main, args=(step, job, root, threads, os.getpid(), sender))
    process.start()
    # Only the worker keeps the sender open. The receiver then sees the end of the connection if the worker dies.
    sender.close()
    return receiver, Worker(job, step, process)


def _worker_main(step: JobStep, job: Job, root: Path, threads: int, parent_id: int, sender: Connection) -> None:
    """Run one step of a job in a worker process.

    Args:
        step: `train_model` or `evaluate_model`.
        job: The job.
        root: The folder that contains the run folders.
        threads: The number of torch threads.
        parent_id: The process ID of the main process.
        sender: The connection to the main process. The worker sends None, or the message of an `InputError`.
    """
    # The terminal sends Ctrl-C to all processes. The main process stops the workers, so workers ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        # Ask Linux to send SIGTERM to this process when the main process dies.
        ctypes.CDLL(None).prctl(SIGNAL_AT_PARENT_DEATH, signal.SIGTERM)
        is_parent_dead = os.getppid() != parent_id
        if is_parent_dead:
            return  # The parent died before the call of prctl, so no signal will come.

    import torch

    torch.set_num_threads(threads)
    try:
        with show_log_messages():
            step(job, root)
        sender.send(None)
    except InputError as error:
        sender.send(str(error))
    except KeyboardInterrupt as interrupt:
        # The training loop raises this error after a signal, when the checkpoint is saved.
        sys.exit(getattr(interrupt, "code", 1))


def _receive_error(connection: Connection, process: BaseProcess) -> str | None:
    """Return the error message of a worker process that has ended, or None if its work is done.

    Args:
        connection: The connection from which the result of the worker is received. The connection is closed.
        process: The worker process.
    """
    try:
        return connection.recv()
    except EOFError:
        # The worker died without sending a result. The exit code is known only after `join`.
        process.join()
        exit_code = process.exitcode or 0
        if exit_code < 0:
            return f"killed by {signal.Signals(-exit_code).name}"
        return f"stopped with exit code {exit_code}"
    finally:
        connection.close()
        process.join()
