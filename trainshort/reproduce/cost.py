"""Speed and memory of training and reading, all configurations in one run on this machine: the paper's Table 1.

Speeds are taken in rounds, one update of each configuration after the other, so that whatever else the machine does
falls on all of them alike; the median round counts. Memory is the peak above what the program had before the model was
built, each configuration in a process of its own, since a process does not forget what it once held.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from trainshort import optim
from trainshort.claims.collection import COST_FORMAT, read_costs
from trainshort.config import RunConfig
from trainshort.errors import InputError
from trainshort.evaluate.memory import Peak
from trainshort.evaluate.target import pick_device
from trainshort.files import write_sealed
from trainshort.model import TransformerLM
from trainshort.runs import provenance

ROUNDS = 15
"""A round varies by 5 to 10 % on a shared machine, and a claim of the paper is about 1 %."""


def measure_costs(configs: dict[str, RunConfig], path: Path) -> None:
    """Measure what `path` does not hold yet, and add it there."""
    entries = read_costs(path.parent)
    todo = {name: config for name, config in configs.items() if name not in entries}
    if not todo:
        return
    origin = provenance(threads=torch.get_num_threads())
    speeds = _speeds(todo)
    for name, config in todo.items():
        entries[name] = {
            "position": config.model.position,
            "length": config.train.length,
            "batch": config.train.batch,
            "vocabulary": config.data.vocabulary,
            "train_seconds": speeds[name][0],
            "read_seconds": speeds[name][1],
            "tokens": config.train.batch * config.train.length,
            "train_memory": _memory_apart(config),
            "provenance": origin,
        }
    write_sealed(path, {"format": COST_FORMAT, "entries": entries})


class Rig:
    """One configuration, ready to be timed on random tokens."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(None)
        size = config.model.vocabulary or config.data.vocabulary
        self.model = TransformerLM(config.model.replace(vocabulary=size)).to(self.device)
        self.optimizer = optim.build(self.model, config.optim)
        shape = (config.train.batch, config.train.length)
        self.tokens = torch.randint(0, size, shape, device=self.device)
        self.micro = config.train.micro_batch or config.train.batch

    def update(self) -> float:
        began = time.perf_counter()
        for rows in self.tokens.split(self.micro):
            loss = self.model.loss(rows, rows)
            (loss.total / self.tokens.numel()).backward()
        optim.clip(self.model.parameters(), self.config.optim.clip)
        optim.update(self.optimizer, self.model.parameters(), self.config.optim.lr)
        return self._seconds(began)

    def read(self) -> float:
        began = time.perf_counter()
        for rows in self.tokens.split(self.micro):
            self.model.token_nll(rows, rows)
        return self._seconds(began)

    def _seconds(self, began: float) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began


def _speeds(configs: dict[str, RunConfig]) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of an update and of a reading, every round; the first round warms up and is left out."""
    rigs = {name: Rig(config) for name, config in configs.items()}
    rounds = [{name: (rig.update(), rig.read()) for name, rig in rigs.items()} for _ in range(1 + ROUNDS)][1:]
    return {name: ([r[name][0] for r in rounds], [r[name][1] for r in rounds]) for name in rigs}


def _memory_apart(config: RunConfig) -> int | None:
    """Peak memory of two updates in a fresh process, in bytes; None where the system does not tell."""
    command = [sys.executable, "-m", "trainshort.reproduce.cost"]
    done = subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"Memory could not be measured: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def peak_of_training(config: RunConfig) -> int | None:
    """Peak memory of two updates above what was in use before."""
    device = torch.device(pick_device(None))
    warm = torch.nn.Linear(8, 8)  # the libraries' own first allocations are not the model's
    warm(torch.zeros(1, 8)).sum().backward()
    before = Peak(device).bytes()
    peak = Peak(device)
    rig = Rig(config)
    for _ in range(2):
        rig.update()
    after = peak.bytes()
    return None if before is None or after is None else max(0, after - (0 if device.type == "cuda" else before))


if __name__ == "__main__":
    print(json.dumps(peak_of_training(RunConfig.model_validate_json(sys.stdin.read()))))
