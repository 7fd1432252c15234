"""Measure the time and the memory of one training step and one inference step of a configuration.

`bench training`, `analyze --only cost` and the reproduction of the paper's Table 1 use this module. The text is random
tokens.
"""

from pathlib import Path
from typing import Any, Literal

import torch

from trainshort.config.run_config import RunConfig
from trainshort.model.transformer import TransformerLM
from trainshort.train import optim
from trainshort.train.checkpoint import load_model
from trainshort.utils.machine import PeakMemory, is_out_of_memory
from trainshort.utils.timing import time_interleaved

Mode = Literal["training", "inference"]

# The result of a mode that needs more memory than available.
OUT_OF_MEMORY = {"status": "out of memory"}


class StepBenchmark:
    """A model with an optimizer and one batch of random tokens, for timing single steps.

    Args:
        config: The configuration of the model, the optimizer and the batch.
        device: The device of the model.
        weights: A checkpoint folder. None initializes the weights at random.

    Attributes:
        tokens: One batch of random tokens.
        num_targets: The number of targets in the batch.
    """

    def __init__(self, config: RunConfig, device: str = "cpu", weights: Path | None = None) -> None:
        self.config = config
        self.device = torch.device(device)
        vocab_size = config.model.vocab_size or config.data.vocab_size
        torch.manual_seed(0)
        if weights is None:
            model = TransformerLM(config.model.replace(vocab_size=vocab_size))
        else:
            model = load_model(weights)
        self.model = model.to(self.device)
        self.optimizer = optim.build(self.model, config.optim)
        # Each row has one more token than the model reads, because the target of a token is the next token.
        batch_shape = (config.train.batch, config.train.length + 1)
        self.tokens = torch.randint(0, vocab_size, batch_shape, device=self.device)
        # The number of rows in one forward pass. The gradients of several forward passes are added up.
        self.micro_batch = config.train.micro_batch or config.train.batch
        self.num_targets = config.train.batch * config.train.length

    def step(self) -> None:
        """Run one training step: forward, backward, gradient clipping and optimizer."""
        self.model.train()
        for rows in self.tokens.split(self.micro_batch):
            loss = self.model.loss(rows[:, :-1], rows[:, 1:])
            (loss.total / self.num_targets).backward()
        if self.config.optim.max_grad_norm:
            optim.clip_grad_norm(self.model.parameters(), self.config.optim.max_grad_norm)
        optim.step(self.optimizer, self.model.parameters(), self.config.optim.lr)
        self._synchronize()

    def infer(self) -> None:
        """Compute the losses of the batch without gradients."""
        self.model.eval()
        for rows in self.tokens.split(self.micro_batch):
            self.model.token_nll(rows[:, :-1], rows[:, 1:])
        self._synchronize()

    def _synchronize(self) -> None:
        """Wait until the GPU has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak(
    config: dict[str, Any], device: str = "cpu", weights: str | None = None, rounds: int = 2, train: bool = True
) -> dict[str, Any]:
    """Measure the time and the peak memory of inference and training.

    Run this function in its own process (see `trainshort.utils.timing.run_in_subprocess`). A process does not return
    all of its memory, so an earlier measurement in the same process would change the peak.

    Args:
        config: The values of a `RunConfig`.
        device: The device of the model.
        weights: The path of a checkpoint folder. None initializes the weights at random.
        rounds: How often each step is timed.
        train: Whether to measure training. Inference is always measured.

    Returns:
        One result for "inference", and one for "training" if `train` is True. A result has these keys:

        - `status`: "measured" or "out of memory". The other keys exist only if the status is "measured".
        - `seconds`: the time of each round
        - `tokens`: the number of targets in one step
        - `memory`: the peak memory in bytes, or None if it is unknown
        - `above`: the part of the peak memory above the memory that was in use before the model was created
    """
    # The first backward pass allocates memory for libraries. This memory does not belong to the model.
    warmup_layer = torch.nn.Linear(8, 8)
    warmup_layer(torch.zeros(1, 8)).sum().backward()
    memory_before = PeakMemory(torch.device(device)).bytes() or 0

    modes: list[Mode] = ["inference", "training"] if train else ["inference"]
    results: dict[str, Any] = {}
    for mode in modes:
        try:
            results[mode] = _measure_mode(mode, RunConfig.parse(config), device, weights, rounds, memory_before)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            results[mode] = dict(OUT_OF_MEMORY)
    return results


def _measure_mode(
    mode: Mode, config: RunConfig, device: str, weights: str | None, rounds: int, memory_before: int
) -> dict[str, Any]:
    """Measure the time and the peak memory of one mode.

    Args:
        mode: "training" or "inference".
        config: The configuration of the model, the optimizer and the batch.
        device: The device of the model.
        weights: The path of a checkpoint folder, or None for random weights.
        rounds: How often the step is timed.
        memory_before: The memory in bytes that was in use before the model was created.

    Returns:
        The status, the seconds of each round, the number of targets per step, the peak memory in bytes, and the part
        of the peak memory above `memory_before`. Memory that cannot be measured is None.
    """
    peak_memory = PeakMemory(torch.device(device))
    benchmark = StepBenchmark(config, device, None if weights is None else Path(weights))
    step = benchmark.step if mode == "training" else benchmark.infer
    timing = time_interleaved({mode: step}, rounds)[mode]
    memory = peak_memory.bytes()
    memory_above = None if memory is None else max(0, memory - memory_before)
    return {
        "status": "measured",
        "seconds": timing.seconds,
        "tokens": benchmark.num_targets,
        "memory": memory,
        "above": memory_above,
    }
