"""`trainshort demo`: the paper's main result in ten minutes."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """Train four position methods at 128 tokens and read them at up to 2,048, and one at 768; then write the report.

    The same as `trainshort reproduce --scale laptop --only demo`: about ten minutes on two cores the first time,
    seconds after that. Stopped in the middle, the same command goes on.

    Examples:
      trainshort demo
      trainshort demo --methods alibi,none
      trainshort demo --out /tmp/runs --report /tmp/report
    """

    methods: str = ""
    """Position methods in place of the paper's four, such as alibi,none or your own."""
    out: Path | None = None
    """Folder of the runs. Default: runs/laptop."""
    report: Path | None = None
    """Folder of the report. Default: report/laptop."""

    def run(self) -> None:
        from trainshort.commands.reproduce import Reproduce

        Reproduce(only="demo", methods=self.methods, out=self.out, report=self.report).run()
