"""What a person sees of a training run: a live line on a terminal, an occasional plain line elsewhere. No torch.

Nothing is read back from here; `metrics.jsonl` is the truth.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainshort.runs import perplexity
from trainshort.terminal import new_console

PLAIN_SECONDS = 10.0
"""Time between two lines when the output is not a terminal."""


def _board(folder: Path, step: int) -> Any:
    """A TensorBoard writer that goes on after `step`, and hides what an earlier session wrote past it."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


class Display:
    """Shows the records of metrics.jsonl as they come: on the console unless `quiet`, on a TensorBoard if given."""

    def __init__(
        self,
        step: int,
        steps: int,
        *,
        quiet: bool = False,
        board: Path | None = None,
        console: Console | None = None,
    ) -> None:
        self.steps = steps
        self.quiet = quiet
        self.console = console or new_console(stderr=True)
        self.next_line = 0.0
        self.began, self.first = time.monotonic(), step
        self.board = _board(board, step) if board else None
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
        elif not self.quiet:  # the first line of numbers may be minutes away
            self._print(f"step {self.first}/{self.steps}  training")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()
        if self.board:
            self.board.close()

    def show(self, record: dict[str, float]) -> None:
        """One record of metrics.jsonl."""
        if self.board:
            for name, value in record.items():
                if name not in ("step", "seconds"):
                    self.board.add_scalar(name, value, int(record["step"]))
        if not self.quiet:
            (self._show_valid if "valid_loss" in record else self._show_update)(record)

    def _show_update(self, record: dict[str, float]) -> None:
        numbers = (
            f"loss {record['loss']:.3f}  ppl {perplexity(record['loss']):.4g}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  lr {record['lr']:.2e}"
        )
        step = int(record["step"])
        if self.live:
            self.live.update(self.task, completed=step, numbers=numbers)
        elif time.monotonic() >= self.next_line or step == self.steps:
            self.next_line = time.monotonic() + PLAIN_SECONDS
            self._print(f"step {step}/{self.steps}  {numbers}  {self._left(step)}")

    def _show_valid(self, record: dict[str, float]) -> None:
        loss = record["valid_loss"]
        self._print(f"step {int(record['step'])}/{self.steps}  valid loss {loss:.4f}  ppl {perplexity(loss):.4g}")

    def note(self, message: str) -> None:
        """What is not a number; shown even when quiet."""
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
