"""What each position method costs on this machine: the paper's Table 1, in one run.

Training speed, inference speed and peak memory for each method at each length, with the run's own model shape and
random weights (the cost does not depend on them, with one exception: ALiBi's proven windows depend on the norms of
queries and keys, so its speed is measured with the run's own weights). Every measurement is a process of its own,
because a process never gives all its memory back: only so is the peak that of this method at this length.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group

from trainshort.analyze.base import Analysis, Lab, analyses, new_table, titled
from trainshort.config import ModelConfig
from trainshort.errors import InputError
from trainshort.evaluate.memory import Peak, is_out_of_memory
from trainshort.evaluate.target import RunTarget
from trainshort.model import TransformerLM
from trainshort.positions import positions

SECONDS = 1.0
"""Time to repeat a step for, after one that warms up; at least twice."""
BATCH_TOKENS = 4096
"""Tokens per step, the same for all lengths, as far as the length itself allows."""


@dataclass(frozen=True)
class Task:
    """One measurement: a model shape, a length, and whether to train."""

    model: dict[str, Any]
    length: int
    train: bool
    device: str
    threads: int
    weights: str | None = None
    """Checkpoint whose weights to use."""


def run(lab: Lab) -> dict[str, Any]:
    config = lab.model("the cost analysis").config
    checkpoint = str(lab.target.checkpoint) if isinstance(lab.target, RunTarget) else None
    rows = []
    for method in positions.names():
        for length in lab.lengths or (lab.trained_at, 4 * lab.trained_at, 16 * lab.trained_at):
            weights = checkpoint if method == config.position else None
            row: dict[str, Any] = {"position": method, "length": length, "weights": "run" if weights else "random"}
            for train in (True, False):
                model = config.replace(position=method).reaching(length)
                task = Task(
                    model.model_dump(mode="json"),
                    length,
                    train,
                    str(lab.target.device),
                    torch.get_num_threads(),
                    weights,
                )
                row["training" if train else "inference"] = measure_apart(task)
            rows.append(row)
    return {"summary": summary(rows), "batch_tokens": BATCH_TOKENS, "rows": rows}


def measure_apart(task: Task) -> dict[str, Any]:
    """Measure in a process of its own; running out of memory there is a result."""
    command = [sys.executable, "-m", "trainshort.analyze.cost"]
    done = subprocess.run(command, input=json.dumps(vars(task)), capture_output=True, text=True)
    if done.returncode:
        if done.returncode == -9:  # killed, and nobody but the kernel's memory watch does that here
            return {"status": "out of memory"}
        last = done.stderr.strip().rpartition("\n")[2]
        raise InputError(f"measuring {task.model['position']} at {task.length:,} tokens failed: {last}")
    return json.loads(done.stdout)


def measure(task: Task) -> dict[str, Any]:
    """Tokens per second and peak bytes of training steps or of inference."""
    torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    model = _model(task).to(device).train(task.train)
    batch = max(1, BATCH_TOKENS // task.length)
    tokens = torch.randint(
        model.config.vocabulary, (batch, task.length + 1), generator=torch.Generator().manual_seed(0)
    )
    inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6) if task.train else None
    peak = Peak(device)
    seconds = []
    try:
        while len(seconds) < 3 or sum(seconds[1:]) < SECONDS:
            began = time.perf_counter()
            _step(model, inputs, targets, optimizer)
            seconds.append(time.perf_counter() - began)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "out of memory"}
    # The fastest, not the mean: other programs can only make a step slower. The first step warms up.
    speed = inputs.numel() / min(seconds[1:])
    return {
        "status": "measured",
        "tokens_per_second": speed,
        "memory": peak.bytes(),
        "batch": batch,
        "steps": len(seconds),
    }


def _model(task: Task) -> TransformerLM:
    if task.weights is None:
        return TransformerLM(ModelConfig.read(task.model))
    from trainshort.checkpoint import load_model

    return load_model(Path(task.weights))


def _step(
    model: TransformerLM, inputs: torch.Tensor, targets: torch.Tensor, optimizer: torch.optim.Optimizer | None
) -> None:
    if optimizer is None:
        model.token_nll(inputs, targets).sum().item()
        return
    loss = model.loss(inputs, targets)
    (loss.total / loss.count).backward()
    optimizer.step()
    optimizer.zero_grad()


def summary(rows: list[dict[str, Any]]) -> str:
    """ALiBi against sinusoidal at the longest length: what the paper's Table 1 is about."""
    longest = max(row["length"] for row in rows)
    at = {row["position"]: row for row in rows if row["length"] == longest}
    speeds = [at.get(name, {}).get("inference", {}).get("tokens_per_second") for name in ("alibi", "sinusoidal")]
    if not all(speeds):
        return f"measured up to {longest:,} tokens"
    return f"at {longest:,} tokens ALiBi infers at {speeds[0] / speeds[1]:.0%} of sinusoidal's speed"


def table(result: dict[str, Any]) -> Group:
    title = f"Tokens per second and peak memory, {result['batch_tokens']:,} tokens a step"
    shown = new_table("position", "length", "train tok/s", "infer tok/s", "train MB", "infer MB")
    for row in result["rows"]:
        speeds = (_cell(row[kind], "tokens_per_second", 1) for kind in ("training", "inference"))
        memory = (_cell(row[kind], "memory", 1e6) for kind in ("training", "inference"))
        shown.add_row(row["position"], f"{row['length']:,}", *speeds, *memory)
    return titled(title, shown)


def _cell(found: dict[str, Any], name: str, unit: float) -> str:
    if found["status"] != "measured":
        return "OOM"
    return "" if found[name] is None else f"{found[name] / unit:,.0f}"


analyses.register("cost")(Analysis("what does each position method cost at each length?", run, table))

if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.load(sys.stdin)))))
