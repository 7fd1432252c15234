"""The search behind the laptop's recipe: one grid, one rule, every method alike.

The rule, older than any number: every method is trained once in every way of `GRID`, with equally many tokens; of each
method the way with the lowest perplexity on the beginning of the validation split at its training length is chosen,
whatever it does beyond that length. What is reported of the chosen is the test split's.

This grid was committed before any of its trials ran, and is not changed after. What had been seen before it, and what
was decided on that, stands in `PILOT`. Not searched, and decided without a number: the linear decay, and Muon's three
polynomials in place of five steps of one.

A trial is a run folder like any other, so a search that was stopped goes on. No torch until a trial is trained.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from trainshort.cli.main import exit_with, run_command
from trainshort.cli.parser import Arg
from trainshort.config.position_config import methods as known
from trainshort.config.run_config import RunConfig
from trainshort.errors import InputError
from trainshort.experiments.experiments import Variant
from trainshort.experiments.reproduce.jobs import Job, is_trained
from trainshort.experiments.scales import LAPTOP_TOKENS_PER_STEP, TrainingRecipe, laptop_config
from trainshort.train.metrics_log import read_metrics
from trainshort.train.run_folder import RunFolder, run_name
from trainshort.utils.io import make_folder, read_with_checksum, write_with_checksum
from trainshort.utils.terminal import perplexity, print_line

METHODS = ("alibi", "rotary", "t5", "sinusoidal")
TOKENS = 480 * LAPTOP_TOKENS_PER_STEP
"""Tokens of a trial: less than a third of the demo's, so that the whole grid takes less than an hour on one core."""
FILE = "tune.json"
FORMAT = 2


GRID: dict[str, TrainingRecipe] = {
    "Muon 1.2e-2": TrainingRecipe(optimizer="muon", lr=1.2e-2, position_lr=5),
    "Muon 1.2e-2, embeddings x 0.3": TrainingRecipe(optimizer="muon", lr=1.2e-2, position_lr=5, embedding_lr=0.3),
    "Muon 2.4e-2": TrainingRecipe(optimizer="muon", lr=2.4e-2, position_lr=5),
    "Muon 2.4e-2, embeddings x 0.3": TrainingRecipe(optimizer="muon", lr=2.4e-2, position_lr=5, embedding_lr=0.3),
}
"""Ways to train, by name; the rate of position tables is five times the others', and means nothing without one."""
PILOT = {
    "ALiBi, Muon 1e-2, 360 steps of 8 x 128": 56.17,
    "ALiBi, AdamW 8e-3, 360 steps of 8 x 128": 57.10,
    "ALiBi, Muon 2e-2, 360 steps of 8 x 128": 56.72,
    "ALiBi, Muon 1e-2, 720 steps of 4 x 128": 53.98,
    "ALiBi, AdamW 4e-3, 480 steps of 6 x 128": 71.12,
    "ALiBi, AdamW 1.2e-2, 480 steps of 6 x 128": 93.35,
    "ALiBi, Muon 1.2e-2": 54.33,
    "rotary, Muon 1.2e-2": 58.42,
    "T5 bias, Muon 1.2e-2": 59.06,
    "T5 bias, Muon 1.2e-2, tables x 5": 50.64,
    "sinusoidal, Muon 1.2e-2": 69.59,
    "ALiBi, Muon 2.4e-2": 55.65,
    "rotary, Muon 2.4e-2": 58.15,
    "T5 bias, Muon 2.4e-2, tables x 5": 50.99,
    "sinusoidal, Muon 2.4e-2": 70.50,
    "sinusoidal, Muon 1.2e-2, 1440 steps of 6 x 128": 46.8,
}
"""Validation perplexities seen before this grid was written, all of one seed; where no steps are named, 480 of
6 x 128, cosine decay. On ALiBi's were decided the size of a step and that AdamW is left out (1.6 % behind Muon at the
same batch); on T5's the rate of tables; on sinusoidal's distance from the others that the rate of embeddings, which
grow beyond the sinusoids added to them, should be searched. The grid before this one was changed four times while its
trials ran."""
WITH_TABLE = ("t5", "learned")
"""Methods with a trained table; for others a learning rate of tables means nothing. By name, since whether a method has
trained parameters is known to its module alone, which takes torch; and the rate is part of the names of trials that
are stored. Parameters that are no table (KERPLE's) are trained at the rate of all others."""


@dataclass(frozen=True)
class Trial:
    """One method trained in one way."""

    method: str
    way: str
    config: RunConfig

    @property
    def name(self) -> str:
        return run_name(self.config)

    def result(self, root: Path) -> dict[str, Any] | None:
        """Its validation loss as sum and count, and what it took; None when it was not trained to its end."""
        folder = root / self.name
        if not is_trained(folder, Job(self.name, self.config)):
            return None
        records = read_metrics(RunFolder(folder))
        last = next(record for record in reversed(records) if "valid_nll" in record)
        loss = {"nll": last["valid_nll"], "count": last["valid_count"]}
        took = {"tokens": last["tokens"], "seconds": last["seconds"]}
        return {"method": self.method, "way": self.way, "run": self.name, **loss, **took}


def trials(methods: Iterable[str] = METHODS, tokens: int = TOKENS) -> list[Trial]:
    """Every method in every way; ways by turns, so that a search that is stopped early has tried all methods alike."""
    made = []
    for way, settings in GRID.items():
        for method in methods:
            own = settings if method in WITH_TABLE else settings.replace(position_lr=1.0)
            config = laptop_config(Variant("wikitext103", method, 512), own, tokens)
            made.append(
                Trial(method, way, config.replace(train={"valid_every": 0, "save_every": 0, "keep_checkpoints": 1}))
            )
    return made


def tune(chosen: list[Trial], root: Path, tell: Callable[[str], None]) -> Path:
    """Train what is missing and store everything after each trial; returns the file."""
    from trainshort.train.loop import NotFiniteError, train

    make_folder(root)
    for number, trial in enumerate(chosen, 1):
        note = ""
        if trial.result(root) is None and trial.name not in failures(root):
            try:
                train(trial.config, root / trial.name, resume=True, quiet=True)
            except NotFiniteError as error:
                note = str(error)
        store(chosen, root, {trial.name: note} if note else {})
        found = trial.result(root)
        told = f"{perplexity(found['nll'] / found['count']):.2f}" if found else note or "failed before"
        tell(f"{number} of {len(chosen)}: {trial.method}, {trial.way}: {told}")
    return root / FILE


def failures(root: Path) -> dict[str, str]:
    """Runs that came to no end, with their reason, from the stored results."""
    path = root / FILE
    return dict(read_with_checksum(path)["failed"]) if path.exists() else {}


def store(chosen: list[Trial], root: Path, failed: dict[str, str]) -> None:
    from trainshort.utils.machine import collect_provenance

    found = [one for trial in chosen if (one := trial.result(root))]
    values = {
        "format": FORMAT,
        "grid": {name: way.model_dump(mode="json") for name, way in GRID.items()},
        "tried": len(found),
        "planned": len(chosen),
        "results": found,
        "failed": failures(root) | failed,
        "best": best(found),
        "pilot": PILOT,
        "provenance": collect_provenance(),
    }
    write_with_checksum(root / FILE, values)


def best(results: list[dict[str, Any]]) -> dict[str, str]:
    """The way that the rule chooses, by method."""
    methods = dict.fromkeys(one["method"] for one in results)
    found = {method: [one for one in results if one["method"] == method] for method in methods}
    return {method: min(ways, key=lambda one: one["nll"] / one["count"])["way"] for method, ways in found.items()}


@dataclass(frozen=True)
class Tune:
    """Train every position method in every way of one grid; of each the best on the validation split is chosen.

    The grid and its rule are in benchmarks/tune_laptop.py. What is done is kept: the same command goes on after a
    kill. Less than an hour on one core.

    Examples:
      trainshort tune
      trainshort tune --methods alibi,t5 --tokens 1228800
    """

    methods: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Position methods, such as alibi,t5. Default: the paper's four."""
    tokens: int | None = None
    """Tokens that each trial is trained on. Default: 368,640, less than a third of the demo's."""
    out: Path = Path("runs") / "tune"
    """Folder of the trials and of tune.json."""

    def run(self) -> None:
        if self.tokens is not None and self.tokens < 10_000:
            raise InputError(f"--tokens is what a trial is trained on, at least 10000; got {self.tokens}.")
        for name in self.methods:
            known.get(name)
        made = trials(self.methods or METHODS, self.tokens or TOKENS)
        print_line(f"Results: {tune(made, self.out, print_line)}")


if __name__ == "__main__":
    exit_with(lambda: run_command(Tune, sys.argv[1:]))
