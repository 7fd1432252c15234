"""What a person sees of an evaluation: how far it is, from the first second, its results as a table, and their picture:
perplexity against length, and loss against position. No torch.

The picture's right panel tells two reasons apart why longer is better: a loss that keeps falling with position uses the
longer context; a flat one gains only because fewer tokens stand at a block's beginning.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trainshort.evaluate.evidence import bounds, pooled
from trainshort.evaluate.results import Evaluation, LengthScore, interval, perplexity
from trainshort.plots.figures import OTHERS, Figure, Series, color, spaced
from trainshort.plots.figures import draw as draw_figures
from trainshort.terminal import new_console


def result_table(evaluation: Evaluation, lengths: Sequence[int] | None = None) -> Table:
    """One line per length; the training length is marked."""
    table = Table(title=_title(evaluation), title_justify="left", box=None, pad_edge=False)
    for name in ("length", evaluation.measure, "95 %", "per word", "bits/byte", "tokens/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in evaluation.rows:
        if lengths is None or row.length in lengths:
            table.add_row(*_cells(evaluation, row))
    return table


def _title(evaluation: Evaluation) -> str:
    corpus, protocol = evaluation.corpus, evaluation.protocol
    split = f" ({corpus['split']})" if corpus["split"] else ""
    how = f"stride {protocol['stride']}" if protocol["stride"] else "non-overlapping"
    how += f", each token scored while {masked} are masked" if (masked := protocol.get("masked")) else ""
    slopes = f", slopes {protocol['slopes']}" if protocol["slopes"] else ""
    return f"{evaluation.target['name']} on {corpus['name']}{split}: {corpus['tokens']:,} targets, {how}{slopes}"


def _cells(evaluation: Evaluation, row: LengthScore) -> list[str]:
    mark = " = L" if row.length == evaluation.trained_at else ""
    first = f"{row.length:,}{mark}"
    if row.status != "scored":
        return [first, row.status, *([""] * 5)]
    bounds = interval(row)
    return [
        first,
        f"{row.perplexity:.3f}",
        f"{perplexity(bounds[0]):.2f}-{perplexity(bounds[1]):.2f}" if bounds else "",
        number(evaluation.word_perplexity(row), ",.4g"),
        number(evaluation.bits_per_byte(row), ".4f"),
        number(row.speed, ",.0f"),
        size(row.memory),
    ]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def size(memory: int | None) -> str:
    return "" if memory is None else f"{memory / 1e6:,.0f} MB"


def duration(seconds: float) -> str:
    """A time as people say it.

    40 → 40 s      400 → 7 min      40000 → 11.1 h
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


PATIENCE = 10.0
"""Seconds between two lines where there is no terminal."""


class Meter(AbstractContextManager["Meter"]):
    """Counts work that is done against work that is expected, in any unit, and says so on `console`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or new_console(stderr=True, quiet=True)
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


SHADES = ("#482475", "#414487", "#2f6c8e", "#1f988b", "#42be71", "#a2da37")
"""Of the lengths in the right panel, from short to long; as many are drawn at most."""
SHORT = {"out of memory": "OOM", "cannot": "cannot", "not finite": "not finite"}


def draw(evaluations: Sequence[Evaluation], path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg; the first evaluation in its method's colour."""
    return draw_figures([lengths_figure(evaluations), positions_figure(evaluations[0])], path, (11.0, 4.4))


def label(evaluation: Evaluation) -> str:
    stride, slopes = evaluation.protocol.get("stride"), evaluation.protocol.get("slopes")
    parts = [str(evaluation.target["name"]), f"stride {stride}" if stride else "", f"slopes {slopes}" if slopes else ""]
    return ", ".join(part for part in parts if part)


def lengths_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """Perplexity against length with 95 % intervals, a line for each evaluation; where there is no number, why."""
    first = evaluations[0]
    own = color(str(first.target.get("position") or first.target["name"]))
    series, absent = [], []
    for index, evaluation in enumerate(evaluations):
        shade = OTHERS[(index - 1) % len(OTHERS)] if index else own
        rows = evaluation.scored
        found = [bound for row in rows if (bound := interval(row))]
        low, high = (tuple(perplexity(bound[i]) for bound in found if len(found) == len(rows)) for i in (0, 1))
        at, values = tuple(row.length for row in rows), tuple(row.perplexity for row in rows)
        series += [Series(label(evaluation), at, values, shade, low, high)] if rows else []
        absent += [(row.length, shade, SHORT[row.status]) for row in evaluation.rows if row.status != "scored"]
    trained = sorted({one.trained_at for one in evaluations if one.trained_at})
    return Figure(
        name="lengths",
        title=f"{first.corpus['name']}, {first.corpus['tokens']:,} tokens ({first.corpus['tokenizer']})",
        alt=f"{first.measure.capitalize()} against the number of tokens read at once.",
        series=tuple(series),
        x_label="tokens read at once (log scale)",
        y_label=f"{first.measure} per token (log scale)",
        x_log=True,
        y_log=True,
        ticks=spaced([row.length for one in evaluations for row in one.rows]),
        marks=tuple((length, f"trained at {length:,}") for length in trained),
        absent=tuple(absent),
        named=True,
    )


def positions_figure(evaluation: Evaluation) -> Figure:
    """Mean loss by distance from the start of the block, for a few of the lengths."""
    read = [(row.length, bins) for row in evaluation.scored if (bins := pooled(row))]
    last = max(1, min(len(SHADES), len(read)) - 1)
    chosen = [read[i] for i in sorted({round(k * (len(read) - 1) / last) for k in range(last + 1)})] if read else []
    series = [
        Series(f"read at {at:,}", tuple(b.middle for b in bins), tuple(b.mean for b in bins), shade, *bounds(bins))
        for (at, bins), shade in zip(chosen, SHADES, strict=False)
    ]
    return Figure(
        name="positions",
        title="loss by distance from the start of the block",
        alt="Mean loss against the position in the block.",
        series=tuple(series),
        x_label="position in the block (log scale)",
        y_label="mean loss, nats per token",
        x_log=True,
        named=True,
        marks=((evaluation.trained_at, ""),) if evaluation.trained_at and series else (),
    )
