"""Helpers of the fault tests: start small training runs in processes, disturb them, and compare their results."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from trainshort.config.run_config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig, save_config
from trainshort.data.preparation import prepare
from trainshort.train import checkpoint_files

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

# Fields of the metrics log that differ between equal runs.
TIME_FIELDS = ("seconds", "tokens_per_second", "checksum")

# The number of training steps of the runs.
STEPS = 80


# Configs


def write_corpus(folder: Path) -> Path:
    """Write a corpus of random sentences, which are always the same, and return the folder."""
    rng = random.Random(7)
    words = ["the", "a", "old", "grey", "ship", "sailed", "past", "seven", "quiet", "islands", "gulls", "cried", "over"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, line_count in (("train", 600), ("valid", 60), ("test", 60)):
        lines = [" ".join(rng.choices(words, k=rng.randint(4, 12))) for _ in range(line_count)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def tiny_config(corpus: Path) -> RunConfig:
    """Return the config of a small run. It uses dropout, so that the states of random generators matter."""
    data = DataConfig(corpus=str(corpus), tokenizer="bytes", folder=corpus.with_name("prepared"))
    prepare(data, progress=False)
    return RunConfig(
        model=ModelConfig(layers=2, width=32, heads=4, dropout=0.1),
        data=data,
        optim=OptimConfig(lr=3e-3, warmup=10),
        train=TrainConfig(
            length=32,
            batch=8,
            steps=STEPS,
            log_every=3,
            valid_every=20,
            valid_tokens=512,
            save_every=6,
            keep_checkpoints=2,
        ),
    )


def make_config(folder: Path) -> Path:
    """Write the corpus and the config of a small run, and return the path of the config."""
    config = tiny_config(write_corpus(folder / "corpus"))
    save_config(config, folder / "faults.json")
    return folder / "faults.json"


# Processes


class ForkedProcess:
    """A run that the zygote has forked. It has the same methods as `subprocess.Popen`.

    Args:
        output: The file with the output of the run. The zygote writes the process id and the exit code into files with
            the same name and the suffixes .pid and .status.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.returncode: int | None = None
        wait_until(lambda: self._file("pid").exists())
        self.pid = int(self._file("pid").read_text())

    def _file(self, kind: str) -> Path:
        return self.output.with_name(f"{self.output.name}.{kind}")

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is running."""
        if self.returncode is None and self._file("status").exists():
            self.returncode = int(self._file("status").read_text())
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Wait for the end of the process, and return the exit code."""
        wait_until(lambda: self.poll() is not None, timeout)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        """Wait for the end of the process, and return its output."""
        self.wait(timeout)
        return self.output.read_text(), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


Process = ForkedProcess | subprocess.Popen


@dataclass
class Runner:
    """Starts `trainshort train --resume` with one config.

    Attributes:
        config: The path of the config.
        zygote: The process whose forks are the runs.
        uses_new_processes: Whether `start` starts a new process instead of a fork. New processes are slower.
    """

    config: Path
    zygote: subprocess.Popen
    uses_new_processes: bool = False

    def arguments(self, out: Path, *options: str) -> list[str]:
        """Return the command line of a run, without the name of the program."""
        return ["train", str(self.config), "--out", str(out), "--resume", "--quiet", *options]

    def start(self, out: Path, *options: str, driver: Path | None = None, **environment: str) -> Process:
        """Start a run.

        Args:
            out: The run folder.
            options: Further options of the command.
            driver: A script that runs instead of the command line, such as nan_at.py.
            environment: Environment variables.
        """
        if self.uses_new_processes:
            program = [str(driver)] if driver else ["-m", "trainshort"]
            return self._start_python([*program, *self.arguments(out, *options)], environment)
        return self._fork(out, *options, driver=driver, **environment)

    def _fork(self, out: Path, *options: str, driver: Path | None = None, **environment: str) -> ForkedProcess:
        """Start a run as a fork of the zygote. The arguments are those of `start`."""
        output = self.config.with_name(f"output-{uuid.uuid4().hex}")
        request = {
            "arguments": ["trainshort", *self.arguments(out, *options)],
            "driver": str(driver) if driver else None,
            "environment": environment,
            "output": str(output),
        }
        assert self.zygote.stdin
        self.zygote.stdin.write(json.dumps(request) + "\n")
        self.zygote.stdin.flush()
        return ForkedProcess(output)

    def torchrun(
        self, out: Path, *options: str, driver: Path | None = None, restarts: int = 0, **environment: str
    ) -> "subprocess.Popen[str]":
        """Start a run with two ranks under torchrun. The arguments are those of `start`.

        Args:
            restarts: How often torchrun restarts the ranks after one of them has failed.
        """
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            f"--max_restarts={restarts}",
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0",
            "--monitor_interval=0.2",
        ]
        program = [str(driver)] if driver else ["-m", "trainshort"]
        # After a restart by torchrun, the run resumes without the option --resume.
        arguments = [argument for argument in self.arguments(out) if argument != "--resume"]
        return self._start_python([*launcher, *program, *arguments, *options], environment)

    def _start_python(self, arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=ENVIRONMENT | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, out: Path, *options: str) -> str:
        """Start or resume a run, wait until it has finished, and return its output."""
        process = self._fork(out, *options)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.0005)


def wait_for(condition: Callable[[], object], process: Process, seconds: float = 300.0) -> bool:
    """Wait until a condition is true or a process has ended. Return whether the process is still running."""
    wait_until(lambda: condition() or process.poll() is not None, seconds)
    return process.poll() is None


def kill(process: Process) -> None:
    """Kill a process with SIGKILL, and wait for its end."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


# Run folders


def read_result(run: Path) -> dict[str, object]:
    """Return what must be bit-identical in equal runs.

    The result contains the tensors of the last checkpoint (weights and optimizer state) and the metrics without times.
    """
    last_checkpoint = checkpoint_files.list_checkpoints(run)[-1]
    tensors = {}
    for path in last_checkpoint.rglob("*.safetensors"):
        # The bytes of the files can differ, because the order of the tensors in the header is arbitrary.
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[f"{path.relative_to(last_checkpoint)}: {name}"] = file.get_tensor(name).tobytes()

    metrics = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        metrics.append({name: value for name, value in record.items() if name not in TIME_FIELDS})
    return {"step": last_checkpoint.name, "tensors": tensors, "metrics": metrics}


def metrics_size(run: Path) -> int:
    """Return the size of the metrics log in bytes, or 0 if there is no log. The size grows during training."""
    try:
        return (run / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def has_partial_checkpoint(run: Path) -> bool:
    """Return whether a checkpoint is being saved, or whether saving a checkpoint was interrupted."""
    try:
        names = os.listdir(run / "checkpoints")
    except FileNotFoundError:
        return False
    return any(name.startswith(".partial-") for name in names)


def assert_checkpoints_are_complete(run: Path) -> None:
    """Assert that no checkpoint of a run is damaged."""
    for folder in checkpoint_files.list_checkpoints(run):
        assert checkpoint_files.find_corruption(folder) is None, folder
