"""`trainshort report`: one page from stored results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainshort.commands.parser import Arg


@dataclass(frozen=True)
class Report:
    """Write index.html, report.md and the figures from run folders. Nothing is computed; only JSON is read.

    Examples:
      trainshort report runs/laptop
      trainshort report runs/mine runs/theirs --out report/comparison
    """

    runs: Annotated[tuple[Path, ...], Arg(metavar="RUN", positional=True)]
    """Run folders, or folders that hold some."""
    out: Path = Path("report")
    """Folder to write."""

    def run(self) -> None:
        from trainshort.claims.collection import collect
        from trainshort.report.writing import write_report

        print(f"Report: {write_report(collect(self.runs), self.out)}")
