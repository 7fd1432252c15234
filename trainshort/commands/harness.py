"""`trainshort harness`: the tasks of lm-evaluation-harness on a run, an import or an export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from trainshort.commands.parser import Arg
from trainshort.errors import InputError


@dataclass(frozen=True)
class Harness:
    """Run tasks of lm-evaluation-harness on a run, or on any Hugging Face model; results go to RUN/harness.

    Most tasks fetch their data from the Hugging Face hub. One of your own is a YAML file in a folder, and its data can
    be files here (docs/interop.md has one); Python functions that a definition names are executed.

    Examples:
      trainshort harness runs/demo-alibi --tasks lambada_openai arc_easy --limit 200
      trainshort harness runs/demo-alibi --tasks book --include tasks/
      trainshort harness exported/hf --tasks book --include tasks/ --length 1024
    """

    target: Annotated[str, Arg(metavar="RUN", positional=True)]
    """A run folder, one of its checkpoints, a Hugging Face model's folder, or its name on the hub."""
    tasks: tuple[str, ...]
    """Names of tasks, as lm_eval has them."""
    include: Annotated[Path | None, Arg(metavar="FOLDER")] = None
    """Folder with task definitions of your own."""
    length: int | None = None
    """Tokens that are read at once. Default: the training length."""
    limit: int | None = None
    """Samples of each task. Default: all."""
    shots: int | None = None
    """Examples before each question. Default: as the task says."""
    batch: int = 8
    """Sequences read at once."""
    out: Path | None = None
    """Folder for results. Default: the run folder; for Hugging Face models runs/NAME."""

    def run(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from trainshort.evaluate.target import open_target, pick_device
        from trainshort.files import make_folder
        from trainshort.interop.harness import Asked, evaluate_tasks, save

        for option, number in (("length", self.length), ("limit", self.limit), ("batch", self.batch)):
            if number is not None and number < 1:
                raise InputError(f"--{option} must be at least 1, got {number}.")
        if self.shots is not None and self.shots < 0:
            raise InputError(f"--shots must be at least 0, got {self.shots}.")
        target = open_target(self.target, device=pick_device(None))
        if self.out is not None:
            target.folder = make_folder(self.out)
        tasks = tuple(name for word in self.tasks for name in word.split(",") if name)
        asked = Asked(tasks, self.include, self.length, self.limit, self.shots, self.batch)
        result = evaluate_tasks(target, asked)
        path = save(result, target)
        table = Table("task", "metric", "value", "standard error", title=target.name)
        for task, numbers in result["results"].items():
            for row in _rows(numbers):
                table.add_row(task, *row)
        Console().print(table)
        print(f"Written: {path}")


def _rows(numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Metric, value and standard error; the harness keeps them side by side, as acc,none and acc_stderr,none."""
    rows = []
    for name, value in numbers.items():
        metric, _, kind = name.partition(",")
        if isinstance(value, int | float) and not metric.endswith("_stderr") and kind:
            error = numbers.get(f"{metric}_stderr,{kind}")
            rows.append((metric, f"{value:.4g}", f"{error:.2g}" if isinstance(error, float) else ""))
    return rows
