"""Real runs in real processes, for tests that hurt them: a tiny corpus, a tiny model, and what "identical" means."""

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
TIMES = ("seconds", "tokens_per_second", "checksum")


def write_corpus(folder: Path) -> Path:
    """A text of invented sentences, the same for everybody."""
    chance = random.Random(7)
    words = ["the", "a", "old", "grey", "ship", "sailed", "past", "seven", "quiet", "islands", "gulls", "cried", "over"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines_wanted in (("train", 600), ("valid", 60), ("test", 60)):
        lines = (" ".join(chance.choices(words, k=chance.randint(4, 12))) for _ in range(lines_wanted))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def tiny_config(corpus: Path) -> RunConfig:
    """Dropout is on, so that random states count; a checkpoint is due every few updates."""
    data = DataConfig(corpus=str(corpus), tokenizer="bytes", folder=corpus.with_name("prepared"))
    prepare(data, progress=False)
    return RunConfig(
        model=ModelConfig(layers=2, width=32, heads=4, dropout=0.1),
        data=data,
        optim=OptimConfig(lr=3e-3, warmup=10),
        train=TrainConfig(
            length=32,
            batch=8,
            steps=80,
            log_every=3,
            valid_every=20,
            valid_tokens=512,
            save_every=6,
            keep_checkpoints=2,
        ),
    )


class Process:
    """A run that a zygote started: what is needed of subprocess.Popen."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.returncode: int | None = None
        wait_until(lambda: self._file("pid").exists())
        self.pid = int(self._file("pid").read_text())

    def _file(self, kind: str) -> Path:
        return self.output.with_name(f"{self.output.name}.{kind}")

    def poll(self) -> int | None:
        if self.returncode is None and self._file("status").exists():
            self.returncode = int(self._file("status").read_text())
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        wait_until(lambda: self.poll() is not None, timeout)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        self.wait(timeout)
        return self.output.read_text(), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@dataclass
class Runner:
    """Starts `trainshort train` on one config: `fresh` as a user would, else by a zygote that has torch imported."""

    config: Path
    zygote: subprocess.Popen
    fresh: bool = False

    def arguments(self, out: Path, *options: str) -> list[str]:
        return ["train", str(self.config), "--out", str(out), "--resume", "--quiet", *options]

    def start(
        self, out: Path, *options: str, driver: Path | None = None, **environment: str
    ) -> "Process | subprocess.Popen[str]":
        if self.fresh:
            main = [str(driver)] if driver else ["-m", "trainshort"]
            return self._popen([*main, *self.arguments(out, *options)], environment)
        return self._fork(out, *options, driver=driver, **environment)

    def _fork(self, out: Path, *options: str, driver: Path | None = None, **environment: str) -> Process:
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
        return Process(output)

    def torchrun(self, out: Path, *options: str, driver: Path | None = None, restarts: int = 0, **environment: str):
        """Two ranks; a restart resumes by itself, so --resume is not asked for."""
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--max_restarts={restarts}"]
        launcher += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--monitor_interval=0.2"]
        main = [str(driver)] if driver else ["-m", "trainshort"]
        words = [word for word in self.arguments(out) if word != "--resume"]
        return self._popen([*launcher, *main, *words, *options], environment)

    def _popen(self, words: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=ENVIRONMENT | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, out: Path, *options: str) -> str:
        """Let a run come to its end, and return what it printed."""
        process = self._fork(out, *options)
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
        return text


def make_config(folder: Path) -> Path:
    save_config(tiny_config(write_corpus(folder / "corpus")), folder / "faults.json")
    return folder / "faults.json"


def result(run: Path) -> dict[str, object]:
    """What two identical runs have in common to the last bit: final weights and moments, and all metrics but times."""
    last = checkpoint_files.list_checkpoints(run)[-1]
    tensors = {}
    for path in last.rglob("*.safetensors"):
        # Not the files' bytes: the order inside a shard's header is arbitrary.
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[f"{path.relative_to(last)}: {name}"] = file.get_tensor(name).tobytes()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    return {"step": last.name, "tensors": tensors, "metrics": metrics}


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.0005)


def wait_for(condition: Callable[[], object], process, seconds: float = 300.0) -> bool:
    """Wait until `condition()`; False when the process ended before."""
    wait_until(lambda: condition() or process.poll() is not None, seconds)
    return process.poll() is None


def logged(run: Path) -> int:
    """Size of the metrics so far: it grows when the loop runs."""
    try:
        return (run / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def saving(run: Path) -> bool:
    """Whether a save is going on, or was cut off."""
    try:
        return any(name.startswith(".partial-") for name in os.listdir(run / "checkpoints"))
    except FileNotFoundError:
        return False


def kill(process) -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
