"""How many files of the package one model of Table 5 goes through: tasks to run folder, then run folder to report.

    python tests/table5_walk.py

The corpus is prepared and the modules are imported beforehand: preparation is a walk of its own, and what importing
executes is none.
"""

import inspect
import io
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from tiny_paper import tiny_scale

import trainshort
import trainshort.evaluate.session
import trainshort.train
from trainshort.claims.collection import collect
from trainshort.data import open_or_prepare
from trainshort.recipes.experiments import choose
from trainshort.report.write import write_report
from trainshort.reproduce.tasks import assign, reproduce

PACKAGE = Path(trainshort.__file__).parent
INNER = re.compile(r"<(listcomp|dictcomp|setcomp|genexpr|lambda)>$")

Walk = set[tuple[str, str]]


def walk(work: Callable[[], object]) -> Walk:
    """File and name of every function that runs; comprehensions belong to the function they stand in."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code
        runs = event == "call" and code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        if runs and code.co_filename.startswith(str(PACKAGE)) and not INNER.search(code.co_qualname):
            found.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def files(*walks: Walk) -> set[str]:
    return {str(Path(file).relative_to(PACKAGE)) for one in walks for file, _ in one}


def table5(folder: Path) -> tuple[Walk, Walk]:
    """ALiBi's model at 1,024 of a test's scale, 32 tokens: trained and evaluated; then reported. (That at 512 would be
    trained on so few that the formula itself computes them, which no table's lengths are.)"""
    scale, table = tiny_scale(folder), choose(["table5"])[0]
    cells = [cell for cell in table.cells if cell.variant and cell.variant.position == "alibi"]
    cells = [cell for cell in cells if cell.variant and cell.variant.length == 1024]
    open_or_prepare(scale.config(cells[0].variant).data)

    def run() -> None:
        assignment = assign([replace(table, cells=tuple(cells))], scale)
        reproduce(assignment, folder / "runs", jobs=1, console=Console(file=io.StringIO()))

    def report() -> None:
        collection = collect([folder / "runs"])
        collection.__dict__["scale"] = scale  # one for tests, which no registry knows
        write_report(collection, folder / "report")

    return walk(run), walk(report)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        ran, reported = table5(Path(place))
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h")]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    print(f"trained and evaluated: {len(files(ran))} files; reported: {len(files(reported))}", end="; ")
    print(f"both: {len(files(ran, reported))} of {len(sources)} files, {lines:,} lines in all")
