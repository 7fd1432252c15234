"""What a person sees of a training run: a live line on a terminal, an occasional plain line elsewhere. No torch.

Nothing is read back from here; `metrics.jsonl` is the truth.
"""

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 10.0
"""Time between two lines when the output is not a terminal."""


def perplexity(loss: float) -> float:
    """e to the loss; infinity where that is larger than any float."""
    return math.exp(loss) if loss < 700 else math.inf


class Display:
    """Shows the updates of one session; `quiet` shows nothing but notes."""

    def __init__(self, step: int, steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.steps = steps
        self.quiet = quiet
        self.console = console or Console(stderr=True)
        self.next_line = 0.0
        self.began, self.first = time.monotonic(), step
        self.live: Progress | None = None
        if self.console.is_terminal and not quiet:
            self.live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
            )
            self.task = self.live.add_task("", total=steps, completed=step, numbers="")

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def update(self, record: dict[str, float]) -> None:
        """One record of metrics.jsonl about training."""
        numbers = (
            f"loss {record['loss']:.3f}  ppl {perplexity(record['loss']):.4g}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  lr {record['lr']:.2e}"
        )
        step = int(record["step"])
        if self.live:
            self.live.update(self.task, completed=step, numbers=numbers)
        elif not self.quiet and (time.monotonic() >= self.next_line or step == self.steps):
            self.next_line = time.monotonic() + PLAIN_SECONDS
            self._print(f"step {step}/{self.steps}  {numbers}  {self._left(step)}")

    def validated(self, record: dict[str, float]) -> None:
        """One record of metrics.jsonl about validation."""
        if not self.quiet:
            loss = record["valid_loss"]
            self._print(f"step {int(record['step'])}/{self.steps}  valid loss {loss:.4f}  ppl {perplexity(loss):.4g}")

    def note(self, message: str) -> None:
        """Something that is not a number and should be seen even when quiet."""
        self._print(f"trainshort: {message}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        """Time left, from the pace of this session."""
        if step <= self.first:
            return ""
        seconds = (time.monotonic() - self.began) / (step - self.first) * (self.steps - step)
        hours, rest = divmod(round(seconds), 3600)
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d} left"
