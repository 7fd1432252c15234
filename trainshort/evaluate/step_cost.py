"""One model, ready to be timed and weighed in training and in inference, on random tokens.

The one instrument for what a configuration costs: `bench training`, `analyze --only cost` and the reproduction of the
paper's Table 1 all ask it.
"""

from pathlib import Path
from typing import Any

import torch

from trainshort.config.run_config import RunConfig
from trainshort.model.transformer import TransformerLM
from trainshort.train import optim
from trainshort.train.checkpoint import load_model
from trainshort.utils.machine import PeakMemory, is_out_of_memory
from trainshort.utils.timing import time_interleaved

OUT_OF_MEMORY = {"status": "out of memory"}


class StepBenchmark:
    """A configuration's model, optimizer and one batch. Weights are random unless a checkpoint is given."""

    def __init__(self, config: RunConfig, device: str = "cpu", weights: Path | None = None) -> None:
        self.config, self.device = config, torch.device(device)
        size = config.model.vocab_size or config.data.vocab_size
        torch.manual_seed(0)
        model = load_model(weights) if weights else TransformerLM(config.model.replace(vocab_size=size))
        self.model = model.to(self.device)
        self.optimizer = optim.build(self.model, config.optim)
        self.tokens = torch.randint(0, size, (config.train.batch, config.train.length + 1), device=self.device)
        self.micro = config.train.micro_batch or config.train.batch
        self.scored = config.train.batch * config.train.length
        """Targets of a batch."""

    def step(self) -> None:
        """One training step."""
        self.model.train()
        for rows in self.tokens.split(self.micro):
            loss = self.model.loss(rows[:, :-1], rows[:, 1:])
            (loss.total / self.scored).backward()
        if self.config.optim.max_grad_norm:
            optim.clip_grad_norm(self.model.parameters(), self.config.optim.max_grad_norm)
        optim.step(self.optimizer, self.model.parameters(), self.config.optim.lr)
        self._finish()

    def infer(self) -> None:
        """The losses of the same tokens."""
        self.model.eval()
        for rows in self.tokens.split(self.micro):
            self.model.token_nll(rows[:, :-1], rows[:, 1:])
        self._finish()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak(
    config: dict[str, Any], device: str = "cpu", weights: str | None = None, rounds: int = 2, train: bool = True
) -> dict[str, Any]:
    """Seconds and peak memory of inference and of training, in this process alone; `above` is what was not in use
    before the model was built. Running out of memory is a result."""
    place = torch.device(device)
    warm = torch.nn.Linear(8, 8)  # the libraries' own first allocations are not the model's
    warm(torch.zeros(1, 8)).sum().backward()
    before = PeakMemory(place).bytes()
    found: dict[str, Any] = {}
    for name in ("inference", "training") if train else ("inference",):
        try:
            found[name] = _measure_peak_memory(name, RunConfig.parse(config), device, weights, rounds, before)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found[name] = dict(OUT_OF_MEMORY)
    return found


def _measure_peak_memory(
    name: str, config: RunConfig, device: str, weights: str | None, rounds: int, before: int | None
) -> dict[str, Any]:
    most = PeakMemory(torch.device(device))
    rig = StepBenchmark(config, device, None if weights is None else Path(weights))
    timing = time_interleaved({name: rig.step if name == "training" else rig.infer}, rounds)[name]
    memory = most.bytes()
    return {
        "status": "measured",
        "seconds": timing.seconds,
        "tokens": rig.scored,
        "memory": memory,
        "above": None if memory is None else max(0, memory - (before or 0)),
    }
