"""Run folders as data: settings, evaluations, metrics, costs. No torch.

Only files are read, and each number keeps the path of the file it came from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from trainshort.config.run_config import RunConfig, load_config
from trainshort.errors import HuggingFaceConfigError, InputError
from trainshort.evaluate.results import LengthScore, Query, StoredEvaluation, find, rows
from trainshort.experiments.experiments import Scale, Variant
from trainshort.experiments.scales import LENGTHS, SETUPS, scales
from trainshort.train.metrics_log import read_lines, read_metrics
from trainshort.train.run_folder import RunFolder
from trainshort.utils import bench_results
from trainshort.utils.bench_results import BenchResult
from trainshort.utils.io import MissingFileError, read_with_checksum

COST_FILE = "cost.json"
COST_FORMAT = 2
SAMPLE_FORMAT = 2
SEEDS = range(1, 10)
"""Seeds that are looked for."""
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run folder."""

    path: Path
    config: RunConfig
    evaluations: list[StoredEvaluation]

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(RunFolder(self.path))

    @cached_property
    def sessions(self) -> list[dict[str, Any]]:
        return read_lines(RunFolder(self.path).sessions)

    def rows(self, query: Query) -> dict[int, tuple[LengthScore, Path]]:
        return rows(self.evaluations, query)

    @property
    def standard_evaluations(self) -> list[StoredEvaluation]:
        """Evaluations of the best weights as trained, without overlap, on any text."""
        return [
            stored
            for stored in self.evaluations
            if (one := stored.evaluation).target["kind"] == "run"
            and one.protocol["stride"] is None
            and one.protocol["slopes"] is None
        ]


@dataclass(frozen=True)
class Collection:
    """All runs under some folders, and the costs beside them."""

    runs: dict[str, Run]
    costs: dict[str, dict[str, Any]]
    """As `read_costs` has them, each with the `path` of its file."""
    benchmark_results: list[tuple[Path, BenchResult]]
    """Results of `trainshort bench`, the newest last."""

    @cached_property
    def scale(self) -> Scale | None:
        """The scale that most of the runs belong to; None when they are somebody's own."""
        runs = {name: (run.config.model.position, run.config.train.seed) for name, run in self.runs.items()}
        known = {name: (str(entry["position"]), 1) for name, entry in self.costs.items()} | runs
        every = [scale for _, scale in scales.items()]
        counts = [(sum(_made_at(scale, run, *which) for run, which in known.items()), scale) for scale in every]
        count, best = max(counts, key=lambda one: one[0])
        return best if count else None


def _made_at(scale: Scale, name: str, position: str, seed: int) -> bool:
    """Whether a run of this name is a model of the scale, by whatever position method."""
    length = name.removeprefix(f"{position}-").partition("-")[0]
    setups = SETUPS[:1] if scale.uses_single_corpus else SETUPS
    wanted = [
        Variant(setup, position, at, seed)
        for setup in setups
        for at in LENGTHS
        if str(scale.scale_length(at)) == length
    ]
    return any(name == scale.run_name(variant) for variant in wanted)


def collect(paths: Sequence[Path]) -> Collection:
    """Read run folders, and folders of run folders. A folder without any result is refused."""
    runs: dict[str, Run] = {}
    costs: dict[str, dict[str, Any]] = {}
    benches: list[tuple[Path, BenchResult]] = []
    for path in paths:
        if not path.is_dir():
            raise InputError(f"There is no folder {path}. Give run folders, or a folder that holds some.")
        for folder in [path] if _has_config(path) else sorted(path.iterdir()):
            if not _has_config(folder):
                continue
            # Two folders of one name are two runs; a table looks for its models by the first.
            name = folder.name if folder.name not in runs else str(folder)
            try:
                runs[name] = Run(folder, load_config(folder / "config.json"), find(folder))
            except HuggingFaceConfigError:
                if folder == path:  # it was named; one that lies beside the runs is none of them
                    raise
        costs |= {name: {**entry, "path": path / COST_FILE} for name, entry in read_costs(path).items()}
        benches += bench_results.find_bench_results(path)
    if not any(run.evaluations for run in runs.values()) and not costs and not benches:
        named = ", ".join("this folder" if path == Path() else str(path) for path in paths)
        where = f"no results in {named}" if paths else "no folder was given"
        raise InputError(
            f"There is nothing to report: {where}. Make some by `trainshort reproduce --scale laptop --only demo`, "
            "or evaluate your own runs by `trainshort evaluate RUN`."
        )
    benches.sort(key=lambda one: str(one[1].made.get("time", "")))
    return Collection(runs, costs, benches)


def _has_config(folder: Path) -> bool:
    """Whether it is meant as a run, also by a broken link; a folder that may not be looked into is told as that."""
    try:
        (folder / "config.json").lstat()
    except PermissionError:
        raise
    except OSError:
        return False
    return True


def read_costs(root: Path) -> dict[str, Any]:
    """Measured costs by run name; none when nothing was measured."""

    def entries(values: dict[str, Any]) -> dict[str, Any]:
        return dict(values["entries"]) if values["format"] == COST_FORMAT else {}

    return read_stored_result(root / COST_FILE, entries, "Remove it, and the costs are measured again.") or {}


def read_stored_result(path: Path, read: Callable[[dict[str, Any]], T], hint: str) -> T | None:
    """What `read` takes from a stored result; None where there is none. A damaged one is told, not left out."""
    try:
        return read(read_with_checksum(path, hint=hint))
    except MissingFileError:
        return None
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise InputError(f"{path} does not hold what such a file should. {hint}") from None
