"""The run folder: where everything about a run lies, and who may write there. No torch.

    runs/NAME/
      config.json      the resolved settings; what the run is
      metrics.jsonl    one line per logged step or validation; what happened
      sessions.jsonl   one line per start or resume: commit, versions, machine, threads, first step
      tokenizer.json   what its tokens mean, and
      data.json        what it was trained on (trainshort.data.of_run)
      checkpoints/     what to go on from (trainshort.checkpoint)

`metrics.jsonl` is the truth: on resume the lines past the checkpoint are cut, so that the file of a run that was
stopped ten times equals that of a run that never was, apart from times.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import trainshort
from trainshort import journal, registry
from trainshort.config import RunConfig, load_config
from trainshort.errors import InputError
from trainshort.files import PARTIAL, locked, make_folder, read_object, reason, try_folder, write_whole

LOCK = "train.lock"

HARMLESS = frozenset(
    {
        "data.folder",
        "model.backend",
        "train.checkpoint_activations",
        "train.compile",
        "train.keep",
        "train.log_every",
        "train.micro_batch",
        "train.parallel",
        "train.save_every",
        "train.tensorboard",
    }
)
"""Settings that move no result beyond rounding: where, how fast and how often noted."""

ROUNDING = 1e-6
"""Softmax mass whose absence is no larger than float32's rounding: up to here model.tolerance moves no result."""

CHANGEABLE = HARMLESS | {"train.patience", "train.steps", "train.valid_every", "train.valid_tokens"}
"""Settings that may differ on resume: how far, how often and on what, not which model or which data."""

LOGGED = ("step", "tokens", "seconds")
"""Numbers that every line of metrics.jsonl has."""

RECORDED = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "grain")
"""Packages whose versions can move a result."""


Line = tuple[dict[str, Any], str | None]
"""A record of metrics.jsonl and its checksum."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def sessions(self) -> Path:
        return self.path / "sessions.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def imported(self) -> Path:
        """Where the model comes from, if it was not made here (trainshort.interop)."""
        return self.path / "import.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"


def present(run: Path) -> list[Path]:
    """The run's checkpoints by step, whole or not; not those that were set aside (trainshort.checkpoint.folders)."""
    checkpoints = RunFolder(run).checkpoints
    try:
        entries = list(checkpoints.iterdir()) if checkpoints.is_dir() else []
    except OSError as error:
        raise InputError(f"{checkpoints} cannot be listed: {reason(error)}.") from None
    return sorted(path for path in entries if re.fullmatch(r"step-\d{9}", path.name))


def saved_states(run: Path) -> list[dict[str, Any]]:
    """What its checkpoints tell of themselves, the newest last, without torch and not verified; those that tell nothing
    are left out: whoever loads them says why."""
    states = []
    for checkpoint in present(run):
        with suppress(InputError):
            states.append(read_object(checkpoint / "state.json"))
    return states


@contextmanager
def open_run(path: Path, config: RunConfig, *, resume: bool) -> Iterator[RunFolder]:
    """Make a new run folder, or on resume check that an existing one is the same run; hold it while it is written to.

    A run is never overwritten. `resume` on a folder that is not there starts the run, so that one command line serves
    the first start and all restarts.
    """
    folder = RunFolder(path)
    stored = refuse_existing(path, resume=resume)
    if stored:
        registry.require_plugins(stored.plugins, str(path))
        _refuse_another_run(stored, config, path, begun=folder.sessions.exists())
    make_folder(folder.path)
    with locked(folder.path / LOCK, f"Another process is training in {path}. Wait for it, or stop it first."):
        if config != stored:
            write_whole(folder.config, config.model_dump_json(indent=2) + "\n")
        make_folder(folder.checkpoints)
        yield folder


def refuse_existing(path: Path, *, resume: bool) -> RunConfig | None:
    """Stop if `path` is taken: by a run that is not to be resumed, or by something that is no run. What a run to resume
    was started with, since a config.json that cannot be read is told before data is prepared for it."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, but a run needs a folder. Choose another --out.")
    try_folder(path)
    try:
        entries = set(os.listdir(path)) if path.exists() else set()
    except OSError as error:
        raise InputError(f"{path} cannot be listed: {reason(error)}. Choose another --out.") from None
    started = bool(entries - {"config.json" + PARTIAL, LOCK})
    if started and not resume:
        raise InputError(f"{path} already exists. Go on with it by --resume, or choose another --out.")
    if started and not RunFolder(path).config.exists():
        raise InputError(f"{path} holds files but no config.json, so it is not a run. Choose another --out.")
    return load_config(RunFolder(path).config) if started else None


def _refuse_another_run(stored: RunConfig, asked: RunConfig, path: Path, *, begun: bool) -> None:
    """Name the first setting whose change would make it another run; before any training (a model that was imported)
    only the model is given."""
    before, after = flatten(stored.model_dump(mode="json")), flatten(asked.model_dump(mode="json"))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or name in CHANGEABLE or not (begun or name.startswith("model.")):
            continue
        if not (is_harmless(name, before.get(name)) and is_harmless(name, after.get(name))):
            raise InputError(
                f"{path} was started with {name}={before.get(name)}, but {name}={after.get(name)} was asked for. "
                "Resume with the same settings, or choose another --out for a new run."
            )


def is_harmless(name: str, value: Any) -> bool:
    """Whether this value of a setting moves no result beyond rounding."""
    return name in HARMLESS or (name == "model.tolerance" and value is not None and value <= ROUNDING)


def run_name(config: RunConfig) -> str:
    """A folder's name by what the run is, so that none is trained twice or mistaken for another: words to read, and a
    digest of everything that moves a result: alibi-128-1f2e3d4c."""
    flat = flatten(config.identity())
    settings = {name: value for name, value in flat.items() if not is_harmless(name, value)}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.model.position}-{config.train.length}-{digest}"


def first_name(config: RunConfig) -> str:
    """The name that version 0.1.0 gave to these settings; it read the ends of a text differently."""
    return run_name(config.replace(data={"ends": "dropped"}))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names: {"train": {"steps": 3}} becomes {"train.steps": 3}."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def cut_metrics(folder: RunFolder, step: int, last: str | None = None) -> None:
    """Drop what was logged after `step`, and a torn last line.

    `last` is the checksum of the last line at that moment. Lines that went missing since are not passed over: only a
    file that is gone altogether, or was begun anew after that step, is taken as it is.
    """
    kept = _until(folder, journal.read_checked(folder.metrics), step, last)
    journal.keep_lines(folder.metrics, len(kept))


def _until(folder: RunFolder, records: list[Line], step: int, last: str | None) -> list[Line]:
    """The lines up to `step`, the last of them the one that was noted there."""
    kept = [(record, checksum) for record, checksum in records if _number(folder, record, "step") <= step]
    begun_anew = not kept and (records or not folder.metrics.exists())
    if last and not begun_anew and last not in (checksum for _, checksum in kept[-1:]):
        raise InputError(
            f"{folder.metrics} ends before step {step}, at which the run was saved: lines are missing. "
            "Restore it from a copy, or remove it to go on without what was logged so far."
        )
    return kept


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, each with the numbers it must have, and none missing that was there when the run was
    saved last."""
    states = saved_states(folder.path)  # first: whoever is training may log and save while this is read
    records = journal.read_checked(folder.metrics)
    for record, _ in records:
        for name in LOGGED:
            _number(folder, record, name)
    for saved in states[-1:]:
        if isinstance(step := saved.get("step"), int):
            _until(folder, records, step, saved.get("metrics"))
    return [record for record, _ in records]


def _number(folder: RunFolder, record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if type(value) is int or (type(value) is float and name != "step"):
        return value
    raise InputError(f"{folder.metrics} has a line without the number '{name}'. {journal.RESTORE}")


def provenance(*, threads: int | None = None) -> dict[str, Any]:
    """Where a result comes from: time, commit, versions, machine, threads. Goes beside every number that is stored.

    `threads` is torch's thread count, passed in because this file does not import torch; sums are grouped by it, so
    results are bit-identical only for the same count.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"trainshort": trainshort.__version__, "python": platform.python_version()}
        | {name: _version(name) for name in RECORDED},
        "machine": {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "cores": os.cpu_count()},
        "threads": threads,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout this package runs from, "+changes" when files differ from it; None when installed."""
    here = Path(trainshort.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package can lie inside somebody else's repository; only a tracked file makes the commit ours.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", ".")
    return commit if not commit or not changed else commit + "+changes"


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
