"""The headline as a table in the terminal."""

from rich.table import Table

from trainshort.claims.collection import Collection
from trainshort.report.headline import find_headline


def headline_table(collection: Collection) -> Table | None:
    """Perplexity by method and length; None when nothing was read past its training length."""
    headline = find_headline(collection)
    if headline is None:
        return None
    table = Table(box=None, pad_edge=False)
    table.add_column(f"trained at {headline.length:,}, read at", no_wrap=True)
    for line in headline.lines:
        table.add_column(line.name, justify="right", no_wrap=True)
    for length in headline.lengths:
        cells = [line.at(length) for line in headline.lines]
        times = f"{length:,} ({length / headline.length:.4g}x)"
        table.add_row(times, *("" if cell is None else f"{cell:.2f}" for cell in cells))
    return table
