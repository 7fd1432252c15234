"""`trainshort tune`: the search behind the laptop's recipe."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tune:
    """Train every position method in every way of one grid; of each the best on the validation split is chosen.

    The grid and its rule are in trainshort/reproduce/tune.py. What is done is kept: the same command goes on after a
    kill. Half an hour on one core.

    Examples:
      trainshort tune
      trainshort tune --methods alibi,t5 --steps 800
    """

    methods: str = ""
    """Position methods, such as alibi,t5. Default: the paper's four."""
    steps: int | None = None
    """Updates of each trial. Default: 240, less than a third of the demo's."""
    out: Path = Path("runs") / "tune"
    """Folder of the trials and of tune.json."""

    def run(self) -> None:
        from rich.console import Console

        from trainshort.errors import InputError
        from trainshort.methods import methods as known
        from trainshort.reproduce import tune

        if self.steps is not None and self.steps < 10:
            raise InputError(f"--steps is the number of updates of a trial, at least 10; got {self.steps}.")
        chosen = [name.strip() for name in self.methods.split(",") if name.strip()] or list(tune.METHODS)
        for name in chosen:
            known.get(name)
        console = Console()
        made = tune.trials(chosen, self.steps or tune.STEPS)
        path = tune.tune(made, self.out, lambda line: console.print(line, highlight=False, soft_wrap=True))
        console.print(f"Results: {path}", highlight=False, soft_wrap=True)
