"""Results as tables in the terminal. No torch."""

from collections.abc import Sequence

from rich.table import Table

from trainshort.evaluate.results import Evaluation, LengthScore, interval, perplexity


def result_table(evaluation: Evaluation, lengths: Sequence[int] | None = None) -> Table:
    """One line per length; the training length is marked."""
    table = Table(title=_title(evaluation), title_justify="left", box=None, pad_edge=False)
    for name in ("length", "perplexity", "95 %", "per word", "bits/byte", "tokens/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in evaluation.rows:
        if lengths is None or row.length in lengths:
            table.add_row(*_cells(evaluation, row))
    return table


def _title(evaluation: Evaluation) -> str:
    corpus, protocol = evaluation.corpus, evaluation.protocol
    split = f" ({corpus['split']})" if corpus["split"] else ""
    how = f"stride {protocol['stride']}" if protocol["stride"] else "non-overlapping"
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
