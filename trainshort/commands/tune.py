"""`trainshort tune`: the search behind the laptop's recipe."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tune:
    """Train every position method in every way of one grid; of each the best on the validation split is chosen.

    The grid and its rule are in trainshort/reproduce/tune.py. What is done is kept: the same command goes on after a
    kill. Less than an hour on one core.

    Examples:
      trainshort tune
      trainshort tune --methods alibi,t5 --tokens 1228800
    """

    methods: str = ""
    """Position methods, such as alibi,t5. Default: the paper's four."""
    tokens: int | None = None
    """Tokens that each trial is trained on. Default: 368,640, less than a third of the demo's."""
    out: Path = Path("runs") / "tune"
    """Folder of the trials and of tune.json."""

    def run(self) -> None:
        from rich.console import Console

        from trainshort.errors import InputError
        from trainshort.methods import methods as known
        from trainshort.reproduce import tune

        if self.tokens is not None and self.tokens < 10_000:
            raise InputError(f"--tokens is what a trial is trained on, at least 10000; got {self.tokens}.")
        chosen = [name.strip() for name in self.methods.split(",") if name.strip()] or list(tune.METHODS)
        for name in chosen:
            known.get(name)
        console = Console()
        made = tune.trials(chosen, self.tokens or tune.TOKENS)
        path = tune.tune(made, self.out, lambda line: console.print(line, highlight=False, soft_wrap=True))
        console.print(f"Results: {path}", highlight=False, soft_wrap=True)
