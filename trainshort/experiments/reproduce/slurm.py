"""Run jobs on a Slurm cluster with submitit. Each model is one Slurm job.

A TOML file (the option `--site`) describes the resources that a Slurm job requests. All settings are optional:

    partition = "gpu"
    account = "lab"
    qos = "long"
    gpus = 1
    cores = 8
    memory = 32                       # GB
    minutes = 720
    setup = ["module load cuda"]
    options = {constraint = "a100"}   # other options of sbatch
"""

import logging
import re
import subprocess
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from trainshort.config.base import StrictConfig
from trainshort.errors import InputError
from trainshort.experiments.reproduce.jobs import Job, run_job
from trainshort.experiments.reproduce.local import prepare_data
from trainshort.utils.io import read_text
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import show_log_messages

# Seconds between two checks for finished jobs.
POLL_SECONDS = 0.5

# Seconds between two calls of squeue. The queue shows jobs that ended without a result.
QUEUE_SECONDS = 10.0

# Lines such as "ValueError: ..." or "sbatch: error: ...".
ERROR_LINE = re.compile(r"([\w.]+(Error|Interrupted|Exception)|\w+: error): ")


class SlurmConfig(StrictConfig):
    """The resources that a Slurm job requests."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: int = Field(default=1, ge=0)
    """The number of GPUs. With 0 the option is left out, because a cluster without GPUs rejects the option."""
    cores: int | None = Field(default=None, ge=1)
    memory: float | None = Field(default=None, gt=0)
    """The memory in GB."""
    minutes: int = Field(default=24 * 60, ge=1)
    """The time limit."""
    setup: tuple[str, ...] = ()
    """Shell commands that run before the job."""
    options: dict[str, str | int] = Field(default_factory=dict)
    """Other options of sbatch, by their long names."""

    def to_submitit(self) -> dict[str, Any]:
        """Return the settings as parameters of submitit's executor. Settings without a value are left out."""
        parameters = {
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
        # Settings that are None, 0 or empty are left out.
        return {name: value for name, value in parameters.items() if value}


def read_slurm_config(path: Path | None, gpus: int) -> SlurmConfig:
    """Read the settings of Slurm jobs from a TOML file.

    Args:
        path: The file. None returns the default settings.
        gpus: The number of GPUs if the file does not set it.

    Raises:
        InputError: If the file cannot be read or contains an invalid setting.
    """
    if path is None:
        return SlurmConfig(gpus=gpus)
    try:
        text = read_text(path, hint="See docs/reproduce.md for an example, or remove the option --site.")
        values = tomllib.loads(text)
        return SlurmConfig.parse({"gpus": gpus, **values})
    except (tomllib.TOMLDecodeError, InputError) as error:
        message = str(error)
        # The messages of `tomllib` do not end with a period.
        if not message.endswith((".", "?")):
            message += "."
        raise InputError(f"Invalid site file {path}: {message}") from None


@dataclass(frozen=True)
class ClusterJob:
    """The function that submitit calls on the cluster for one job.

    Attributes:
        cores: The number of torch threads. None uses the default of torch.
    """

    cores: int | None

    def __call__(self, job: Job, root: Path) -> str:
        """Run a job in the process that submitit started on the cluster.

        Args:
            job: The job, which trains and evaluates one model.
            root: The folder that contains the run folders.

        Returns:
            The name of the job.
        """
        if self.cores:
            import torch

            torch.set_num_threads(self.cores)
        with show_log_messages():
            return run_job(job, root)

    def checkpoint(self, job: Job, root: Path) -> Any:
        """Return the call that submitit submits again after a time limit or a preemption. submitit calls this method.

        The same call is submitted again. The training then continues from the last checkpoint in the run folder.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job, root)


def make_executor(root: Path, config: SlurmConfig, cluster: str = "slurm") -> Any:
    """Create the submitit executor that accepts the jobs. No file is written before the first job is submitted.

    Args:
        root: The folder that contains the run folders. Log files are written to its subfolder `jobs`.
        config: The resources that a job requests.
        cluster: The name of a submitit plug-in: "slurm", or "local" for processes on this machine.

    Raises:
        InputError: If submitit is not installed, or Slurm cannot be used.
    """
    require_package("submitit", "Starting Slurm jobs", "trainshort[report]")
    import submitit

    # submitit asks the job accounting of Slurm, and prints a warning each time if the cluster has no accounting.
    # `_read_queue` asks the job queue instead.
    logging.getLogger("submitit").setLevel(logging.ERROR)
    try:
        executor = submitit.AutoExecutor(folder=root / "jobs", cluster=cluster)
        executor.update_parameters(name="trainshort", **config.to_submitit())
    except (RuntimeError, ValueError) as error:
        raise InputError(f"submitit cannot start jobs on this machine: {error}. Use --launcher local.") from None
    if cluster == "slurm" and _read_queue() is None:
        raise InputError(
            "Slurm is installed but does not respond to squeue. Check that Slurm is running, or use --launcher local."
        )
    return executor


def run_on_cluster(
    jobs: list[Job], root: Path, on_done: Callable[[str], None], config: SlurmConfig, cluster: str = "slurm"
) -> None:
    """Submit one cluster job for each job and wait until all of them have ended.

    Args:
        jobs: The jobs.
        root: The folder that contains the run folders. The cluster must be able to access it.
        on_done: Called with the name of each job that is done.
        config: The resources that a cluster job requests.
        cluster: The name of a submitit plug-in: "slurm", or "local" for processes on this machine.

    Raises:
        InputError: If the cluster rejects the jobs or a job fails.
    """
    executor = make_executor(root, config, cluster)
    # submitit is an optional package. `make_executor` raises InputError if it is not installed.
    from submitit.core.utils import FailedJobError

    prepare_data(jobs)  # All cluster jobs then read the prepared datasets.
    submitted: dict[str, Any] = {}
    try:
        for job in jobs:
            # On the cluster, submitit calls `ClusterJob(config.cores)(job, root)`.
            submitted[job.name] = executor.submit(ClusterJob(config.cores), job, root.resolve())
    except (RuntimeError, OSError, FailedJobError) as error:
        raise InputError(
            f"Slurm rejected the jobs: {_extract_error(str(error))}. "
            "Set the required options in a site file (--site), or use --launcher local."
        ) from None
    _wait_for_jobs(submitted, root, on_done, checks_queue=cluster == "slurm")


def _wait_for_jobs(
    submitted: dict[str, Any], root: Path, on_done: Callable[[str], None], *, checks_queue: bool
) -> None:
    """Wait until all submitted jobs have ended.

    Args:
        submitted: The jobs of submitit, by the names of our jobs. Jobs that have ended are removed.
        root: The folder that contains the run folders.
        on_done: Called with the name of each job that is done.
        checks_queue: Whether to check that unfinished jobs are in the Slurm queue.

    Raises:
        InputError: If a job failed. The error is raised after all jobs have ended.
    """
    failures: list[str] = []
    missing_before: set[str] = set()
    next_queue_check = time.monotonic() + QUEUE_SECONDS
    while submitted:
        failures += _remove_finished(submitted, on_done)

        if checks_queue and submitted and time.monotonic() >= next_queue_check:
            missing = _find_jobs_missing_in_queue(submitted)
            # A job fails if it is missing twice. After the first time, its result may still be on its way.
            for name in missing & missing_before:
                if not submitted[name].done():
                    del submitted[name]
                    failures.append(f"{name} (it left the queue without a result)")
            missing_before = missing
            next_queue_check = time.monotonic() + QUEUE_SECONDS

        if submitted:
            time.sleep(POLL_SECONDS)

    if failures:
        raise InputError(
            f"{len(failures)} jobs failed: {'; '.join(failures)}. Their log files are in {root / 'jobs'}. "
            "Run the same command again to continue."
        )


def _remove_finished(submitted: dict[str, Any], on_done: Callable[[str], None]) -> list[str]:
    """Remove the jobs that have ended from `submitted`.

    Args:
        submitted: The jobs of submitit, by name.
        on_done: Called with the name of each successful job.

    Returns:
        The name and the error of each failed job.
    """
    failures: list[str] = []
    finished_names = [name for name, submitit_job in submitted.items() if submitit_job.done()]
    for name in finished_names:
        error = submitted.pop(name).exception()
        if error is None:
            on_done(name)
        else:
            failures.append(f"{name} ({_extract_error(str(error))})")
    return failures


def _find_jobs_missing_in_queue(submitted: dict[str, Any]) -> set[str]:
    """Return the names of the jobs that are neither waiting nor running in Slurm.

    Args:
        submitted: The jobs of submitit, by name.
    """
    queued_ids = _read_queue()
    if queued_ids is None:
        return set()  # Slurm does not respond, so nothing is known about the jobs.
    return {name for name, submitit_job in submitted.items() if submitit_job.job_id not in queued_ids}


def _read_queue() -> set[str] | None:
    """Return the IDs of all waiting and running Slurm jobs, or None if Slurm does not respond."""
    command = ["squeue", "--noheader", "--format=%A"]  # The output has one job ID per line.
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if process.returncode != 0:
        return None
    return set(process.stdout.split())


def _extract_error(message: str) -> str:
    """Return the text of the last error line in an error message of submitit, which may contain a traceback.

    Example:
        >>> _extract_error("Traceback (most recent call last):\\n  ...\\nValueError: no such file")
        'no such file'
    """
    lines = [line.strip() for line in message.strip().splitlines()]
    if not lines:
        return "no reason given"
    error_lines = [line for line in lines if ERROR_LINE.match(line)]
    last_line = error_lines[-1] if error_lines else lines[-1]
    text_after_colon = last_line.partition(": ")[2]
    return text_after_colon or lines[-1]
