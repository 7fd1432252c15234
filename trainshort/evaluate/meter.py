"""How far a long computation is: a live bar on a terminal, now and then a line elsewhere, from the first second on."""

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainshort.evaluate.wording import duration

PATIENCE = 10.0
"""Seconds between two lines where there is no terminal."""


class Meter(AbstractContextManager["Meter"]):
    """Counts work that is done against work that is expected, in any unit, and says so on `console`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=True)
        self.total, self.done, self.what = 0.0, 0.0, "starting"
        self.began = self.told = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.quiet:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30))
            columns += (TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(), TextColumn("gone,"))
            columns += (TimeRemainingColumn(compact=True), TextColumn("left"))
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._bar.add_task(self.what, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def expect(self, total: float) -> None:
        """Forget what was counted; so much is to be done."""
        self.total, self.done, self.began = total, 0.0, time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._bar.task_ids[0], total=total)

    def advance(self, amount: float, what: str | None = None) -> None:
        """So much more is done; `what` names the part that it belonged to."""
        self.done += amount
        self.what = what or self.what
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, description=self.what)
        elif time.monotonic() - self.told > PATIENCE and self.done < self.total:
            left = (time.monotonic() - self.began) * (self.total / self.done - 1) if self.done else 0.0
            self.line(f"{self.what}: {self.done / self.total:.0%} done, about {duration(left)} left")

    def line(self, text: str) -> None:
        self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)
        self.told = time.monotonic()
