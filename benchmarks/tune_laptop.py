"""Search the training settings of the laptop scale: `trainshort tune`, or `python -m benchmarks.tune_laptop`.

A trial trains one position method with one entry of `GRID`. All trials of all methods use the same number of tokens.
For each method, the entry with the lowest perplexity on the beginning of the validation split, at the training length,
is chosen. Perplexities beyond the training length do not matter. Reported results use the test split.

The rule and the grid were committed before any trial ran, and must not be changed. Results that were known before are
in `PILOT`. Each trial is a run folder, so an interrupted search can be continued.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from trainshort.cli.main import exit_with, run_command
from trainshort.cli.parser import Arg
from trainshort.config.position_config import methods as position_methods
from trainshort.config.run_config import RunConfig
from trainshort.errors import InputError
from trainshort.experiments.experiments import Variant
from trainshort.experiments.reproduce.jobs import Job, is_trained
from trainshort.experiments.scales import LAPTOP_TOKENS_PER_STEP, TrainingRecipe, laptop_config
from trainshort.train.metrics_log import read_metrics
from trainshort.train.run_folder import RunFolder, run_name
from trainshort.utils.io import make_folder, read_with_checksum, write_with_checksum
from trainshort.utils.terminal import perplexity, print_line

# The position methods of the paper.
METHODS = ("alibi", "rotary", "t5", "sinusoidal")

# The number of training tokens of a trial, less than a third of the demo's. All trials together take less than an hour
# on one core.
TOKENS = 480 * LAPTOP_TOKENS_PER_STEP

MIN_TOKENS = 10_000

# The result file, and the version of its format.
FILE = "tune.json"
FORMAT = 2

GRID: dict[str, TrainingRecipe] = {
    "Muon 1.2e-2": TrainingRecipe(optimizer="muon", lr=1.2e-2, position_lr=5),
    "Muon 1.2e-2, embeddings x 0.3": TrainingRecipe(optimizer="muon", lr=1.2e-2, position_lr=5, embedding_lr=0.3),
    "Muon 2.4e-2": TrainingRecipe(optimizer="muon", lr=2.4e-2, position_lr=5),
    "Muon 2.4e-2, embeddings x 0.3": TrainingRecipe(optimizer="muon", lr=2.4e-2, position_lr=5, embedding_lr=0.3),
}
"""The training settings by name. `position_lr` is used only for the methods in `METHODS_WITH_TABLE`."""

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
"""Validation perplexities that were known before the grid was written, each of one seed. If no steps are given, the
trial had 480 steps of 6 x 128 tokens and a cosine decay.

Three choices depend on these numbers. ALiBi's numbers decided the batch size, and that AdamW is not in the grid (1.6 %
worse than Muon at the same batch size). T5's numbers decided the learning rate of tables. Sinusoidal embeddings were
far behind the other methods, so the grid includes the learning rate of the token embeddings. The linear decay of the
learning rate and the three polynomials of Muon were chosen without a measurement. An earlier grid was changed four
times while its trials ran."""

# Position methods with a learned table, whose learning rate `TrainingRecipe.position_lr` changes. The names are listed
# here, because the names of stored trials depend on this rate, and asking the methods would import torch.
METHODS_WITH_TABLE = ("t5", "learned")


@dataclass(frozen=True)
class Trial:
    """One position method that is trained with one entry of the grid.

    Attributes:
        method: The position method.
        settings_name: The name of the entry in `GRID`.
        config: The config of the training run.
    """

    method: str
    settings_name: str
    config: RunConfig

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        return run_name(self.config)

    def load_result(self, root: Path) -> dict[str, Any] | None:
        """Return the result of the trial as it is stored in tune.json, or None if the training has not finished.

        Args:
            root: The folder of all trials.

        Returns:
            A dictionary with the trial, its validation loss (`nll` is the sum over `count` tokens), and the tokens
            and seconds of the training.
        """
        folder = root / self.name
        if not is_trained(folder, Job(self.name, self.config)):
            return None
        records = read_metrics(RunFolder(folder))
        validation_records = [record for record in records if "valid_nll" in record]
        last_record = validation_records[-1]
        return {
            "method": self.method,
            "way": self.settings_name,
            "run": self.name,
            "nll": last_record["valid_nll"],
            "count": last_record["valid_count"],
            "tokens": last_record["tokens"],
            "seconds": last_record["seconds"],
        }


def make_trials(methods: Iterable[str] = METHODS, tokens: int = TOKENS) -> list[Trial]:
    """Return the trials of all position methods with all entries of the grid.

    The trials are sorted by the entry of the grid. If a search is interrupted, all methods have been trained with about
    the same entries.

    Args:
        methods: The position methods.
        tokens: The number of training tokens of each trial.
    """
    method_names = list(methods)
    trials = []
    for settings_name, recipe in GRID.items():
        for method in method_names:
            method_recipe = recipe_for_method(recipe, method)
            config = laptop_config(Variant("wikitext103", method, 512), method_recipe, tokens)
            # Validate and save only at the end of the training.
            config = config.replace(train={"valid_every": 0, "save_every": 0, "keep_checkpoints": 1})
            trials.append(Trial(method, settings_name, config))
    return trials


def recipe_for_method(recipe: TrainingRecipe, method: str) -> TrainingRecipe:
    """Return a recipe without the learning rate of tables if the position method has no learned table."""
    if method in METHODS_WITH_TABLE:
        return recipe
    return recipe.replace(position_lr=1.0)


def run_trials(trials: list[Trial], root: Path, report: Callable[[str], None]) -> Path:
    """Train all trials that are not trained yet, and update the result file after each trial.

    Args:
        trials: The trials.
        root: The folder of the trials and of the result file.
        report: Called with a line of text after each trial.

    Returns:
        The path of the result file.
    """
    from trainshort.train.loop import NotFiniteError, train

    make_folder(root)
    for number, trial in enumerate(trials, 1):
        new_failures = {}
        has_failed_before = trial.name in load_failures(root)
        if trial.load_result(root) is None and not has_failed_before:
            try:
                train(trial.config, root / trial.name, resume=True, quiet=True)
            except NotFiniteError as error:
                new_failures[trial.name] = str(error)
        store_results(trials, root, new_failures)

        result = trial.load_result(root)
        if result is not None:
            outcome = f"{perplexity(result['nll'] / result['count']):.2f}"
        else:
            outcome = new_failures.get(trial.name, "failed before")
        report(f"{number} of {len(trials)}: {trial.method}, {trial.settings_name}: {outcome}")
    return root / FILE


def load_failures(root: Path) -> dict[str, str]:
    """Return the trials whose loss became infinite or NaN, with their error messages, from the result file."""
    path = root / FILE
    if not path.exists():
        return {}
    return dict(read_with_checksum(path)["failed"])


def store_results(trials: list[Trial], root: Path, new_failures: dict[str, str]) -> None:
    """Write the result file.

    Args:
        trials: All planned trials.
        root: The folder of the trials.
        new_failures: The error messages of trials that failed since the file was written, by the name of the trial.
    """
    from trainshort.utils.machine import collect_provenance

    results = []
    for trial in trials:
        result = trial.load_result(root)
        if result is not None:
            results.append(result)
    values = {
        "format": FORMAT,
        "grid": {name: recipe.model_dump(mode="json") for name, recipe in GRID.items()},
        "tried": len(results),
        "planned": len(trials),
        "results": results,
        "failed": load_failures(root) | new_failures,
        "best": choose_best(results),
        "pilot": PILOT,
        "provenance": collect_provenance(),
    }
    write_with_checksum(root / FILE, values)


def choose_best(results: list[dict[str, Any]]) -> dict[str, str]:
    """Return the entry of the grid with the lowest validation loss, for each position method.

    Args:
        results: The results of trials, as returned by `Trial.load_result`.
    """
    best_results: dict[str, dict[str, Any]] = {}
    for result in results:
        best_result = best_results.setdefault(result["method"], result)
        if _mean_loss(result) < _mean_loss(best_result):
            best_results[result["method"]] = result
    return {method: result["way"] for method, result in best_results.items()}


def _mean_loss(result: dict[str, Any]) -> float:
    """Return the validation loss per token of a trial."""
    return result["nll"] / result["count"]


@dataclass(frozen=True)
class Tune:
    """Search the training settings of the laptop scale

    Every position method is trained with every entry of a grid. For each method, the entry with the lowest validation
    perplexity is chosen. The grid and the rule are in benchmarks/tune_laptop.py. An interrupted search is continued by
    the same command. The search takes less than an hour on one core.

    Examples:
      trainshort tune
      trainshort tune --methods alibi,t5 --tokens 1228800
    """

    methods: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Position methods, such as alibi,t5. Default: the four methods of the paper."""
    tokens: int | None = None
    """Number of training tokens of each trial. Default: 368,640, less than a third of the demo's."""
    out: Path = Path("runs") / "tune"
    """Folder of the trials and of tune.json."""

    def run(self) -> None:
        """Check the options and run the search."""
        if self.tokens is not None and self.tokens < MIN_TOKENS:
            raise InputError(f"--tokens must be at least {MIN_TOKENS}, got {self.tokens}.")
        for name in self.methods:
            position_methods.get(name)  # Raises an InputError for an unknown method.
        trials = make_trials(self.methods or METHODS, self.tokens or TOKENS)
        path = run_trials(trials, self.out, print_line)
        print_line(f"Results: {path}")


if __name__ == "__main__":
    exit_with(lambda: run_command(Tune, sys.argv[1:]))
