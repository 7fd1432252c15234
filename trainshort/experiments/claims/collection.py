"""Read run folders: settings, evaluations, metrics and costs. Every value keeps the path of the file it comes from.

This module does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from trainshort.config.run_config import RunConfig, load_config
from trainshort.errors import HuggingFaceConfigError, InputError
from trainshort.evaluate.results import Evaluation, LengthScore, Query, StoredEvaluation, find_evaluations, select_rows
from trainshort.experiments.experiments import Scale, Variant
from trainshort.experiments.scales import LENGTHS, SETUPS, scales
from trainshort.train.metrics_log import read_lines, read_metrics
from trainshort.train.run_folder import RunFolder
from trainshort.utils import bench_results
from trainshort.utils.bench_results import BenchResult
from trainshort.utils.io import MissingFileError, read_with_checksum

# The file with the measured speed and memory of models. It is in the folder that contains the run folders.
COST_FILE = "cost.json"
COST_FORMAT = 2  # The version of this file.

# The format of text samples (`samples/sample.json` in a run folder).
SAMPLE_FORMAT = 2

SEEDS = range(1, 10)
"""The seeds of a model that are looked up. `trainshort reproduce --seeds` accepts at most 9."""

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The content of a run folder.

    Attributes:
        path: The run folder.
        config: The settings of the training run.
        evaluations: The stored evaluations, the newest last.
    """

    path: Path
    config: RunConfig
    evaluations: list[StoredEvaluation]

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        return self.path.name

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of the metrics log, such as the loss of a training step."""
        return read_metrics(RunFolder(self.path))

    @cached_property
    def sessions(self) -> list[dict[str, Any]]:
        """Return one record for each time that the training was started, with the machine and the versions."""
        return read_lines(RunFolder(self.path).sessions)

    def rows(self, query: Query) -> dict[int, tuple[LengthScore, Path]]:
        """Return the results of the evaluations that match a query, by sequence length, each with its file."""
        return select_rows(self.evaluations, query)

    @property
    def standard_evaluations(self) -> list[StoredEvaluation]:
        """Return the evaluations that used the standard settings, on any text.

        An evaluation is standard if all of these conditions hold:

        - The evaluation used the best checkpoint of the run.
        - The text was split into windows that do not overlap.
        - The ALiBi slopes of the model were not changed.
        """
        return [stored for stored in self.evaluations if _is_standard(stored.evaluation)]


def _is_standard(evaluation: Evaluation) -> bool:
    """Return whether an evaluation used the standard settings.

    The standard is the best checkpoint, windows that do not overlap, and the ALiBi slopes of the trained model.
    """
    # An evaluation of a run folder uses the best checkpoint. An evaluation of another checkpoint has another kind.
    uses_best_checkpoint = evaluation.target["kind"] == "run"
    has_no_overlap = evaluation.protocol["stride"] is None
    has_unchanged_slopes = evaluation.protocol["slopes"] is None
    return uses_best_checkpoint and has_no_overlap and has_unchanged_slopes


@dataclass(frozen=True)
class Collection:
    """All runs and measurements in some folders.

    Attributes:
        runs: The runs by name.
        costs: The entries of the cost files (speed and memory) by run name. The key `path` of an entry is its file.
        benchmark_results: The results of `trainshort bench` with their files, the newest last.
    """

    runs: dict[str, Run]
    costs: dict[str, dict[str, Any]]
    benchmark_results: list[tuple[Path, BenchResult]]

    @cached_property
    def scale(self) -> Scale | None:
        """Return the scale (laptop, gpu or paper) that most of the runs belong to.

        A run belongs to a scale if it is a model of the paper at this size. The result is None if no run belongs to a
        scale.
        """
        # The position method and the seed of each model, by run name. Costs are always measured with seed 1.
        models = {name: (str(entry["position"]), 1) for name, entry in self.costs.items()}
        for name, run in self.runs.items():
            models[name] = (run.config.model.position, run.config.train.seed)

        best_scale = None
        best_count = 0
        for _, scale in scales.items():
            count = 0
            for name, (position, seed) in models.items():
                if _belongs_to_scale(scale, name, position, seed):
                    count += 1
            if count > best_count:
                best_scale = scale
                best_count = count
        return best_scale


def _belongs_to_scale(scale: Scale, name: str, position: str, seed: int) -> bool:
    """Return whether a run is a model of the paper at a scale.

    The run names of all models of the scale with the same training length are computed and compared with `name`.

    Args:
        scale: The size at which experiments are run (laptop, gpu or paper).
        name: The run name, such as "alibi-128-0123abcd". The last part is a hash of all settings.
        position: The position method of the run, which may also be a plug-in.
        seed: The seed of the run.
    """
    # Computing a run name is slow. Therefore only variants with the same training length are compared.
    length_text = name.removeprefix(f"{position}-").partition("-")[0]
    # A scale with a single corpus trains the same model for every setup, so one setup is enough.
    setups = SETUPS[:1] if scale.uses_single_corpus else SETUPS
    for setup in setups:
        for length in LENGTHS:
            # `scale_length` converts a length of the paper to the length of this scale, such as 512 to 128.
            if str(scale.scale_length(length)) == length_text:
                variant = Variant(setup, position, length, seed)
                if scale.run_name(variant) == name:
                    return True
    return False


def collect(paths: Sequence[Path]) -> Collection:
    """Read all results in some folders.

    Args:
        paths: Run folders, or folders that contain run folders.

    Raises:
        InputError: If a folder does not exist, a file is invalid, or there are no results.
    """
    runs: dict[str, Run] = {}
    costs: dict[str, dict[str, Any]] = {}
    benchmark_results: list[tuple[Path, BenchResult]] = []
    for path in paths:
        if not path.is_dir():
            raise InputError(f"Folder not found: {path}. Expected a run folder, or a folder that contains run folders.")
        for run in _read_runs(path):
            # If two folders have the same name, the second run gets its path as its name.
            name = run.name if run.name not in runs else str(run.path)
            runs[name] = run
        for name, entry in read_costs(path).items():
            costs[name] = {**entry, "path": path / COST_FILE}
        benchmark_results += bench_results.find_bench_results(path)

    has_evaluations = any(run.evaluations for run in runs.values())
    if not has_evaluations and not costs and not benchmark_results:
        raise _no_results_error(paths)
    benchmark_results.sort(key=_creation_time)
    return Collection(runs, costs, benchmark_results)


def _read_runs(path: Path) -> list[Run]:
    """Read the results of the run at `path`, or of all runs in the folder `path`.

    Args:
        path: A run folder, or a folder that contains run folders. A run folder contains a config file.
    """
    if _has_config(path):
        return [_read_run(path)]
    runs: list[Run] = []
    for folder in sorted(path.iterdir()):
        if _has_config(folder):
            try:
                runs.append(_read_run(folder))
            except HuggingFaceConfigError:
                continue  # A model folder of Hugging Face next to the run folders is ignored.
    return runs


def _read_run(folder: Path) -> Run:
    """Read the config and the stored evaluations of a run folder."""
    return Run(folder, load_config(folder / "config.json"), find_evaluations(folder))


def _has_config(folder: Path) -> bool:
    """Return whether a folder contains a config file.

    A broken symbolic link counts as a config file, because reading the link then reports the problem to the user.

    Raises:
        PermissionError: If the folder cannot be accessed.
    """
    try:
        (folder / "config.json").lstat()
    except PermissionError:
        raise  # `PermissionError` is a subclass of `OSError`, but it must not be ignored.
    except OSError:
        return False  # There is no such file.
    return True


def _creation_time(result: tuple[Path, BenchResult]) -> str:
    """Return the time at which a benchmark result was created, as a sort key."""
    _, bench_result = result
    return str(bench_result.made.get("time", ""))


def _no_results_error(paths: Sequence[Path]) -> InputError:
    """Return the error for folders without any result."""
    if paths:
        folder_names = ["this folder" if path == Path() else str(path) for path in paths]
        problem = f"no results found in {', '.join(folder_names)}"
    else:
        problem = "no folder was given"
    return InputError(
        f"Cannot write a report: {problem}. Run `trainshort reproduce --scale laptop --only demo`, "
        "or evaluate your own runs with `trainshort evaluate RUN`."
    )


def read_costs(root: Path) -> dict[str, Any]:
    """Read the measured speed and memory of models.

    Args:
        root: The folder that contains the run folders.

    Returns:
        The entries of the cost file by run name. An entry contains the measured times, the memory and the training
        length of a model. The dictionary is empty if nothing was measured, or if the file has an old format.

    Raises:
        InputError: If the file is damaged.
    """

    def parse_entries(values: dict[str, Any]) -> dict[str, Any]:
        """Return the entries in the content of the cost file. A file of another format has no usable entries."""
        if values["format"] != COST_FORMAT:
            return {}
        return dict(values["entries"])

    hint = "Remove it to measure the costs again."
    return read_stored_result(root / COST_FILE, parse_entries, hint) or {}


def read_stored_result(path: Path, parse: Callable[[dict[str, Any]], T], hint: str) -> T | None:
    """Read a JSON file with a checksum.

    Args:
        path: The file.
        parse: A function that converts the content of the file. It may raise errors for unexpected content.
        hint: The last sentence of error messages.

    Returns:
        The result of `parse`, or None if the file does not exist.

    Raises:
        InputError: If the file is damaged or has an unexpected content.
    """
    try:
        return parse(read_with_checksum(path, hint=hint))
    except MissingFileError:
        return None
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise InputError(f"Invalid results file {path}: unexpected content. {hint}") from None
