"""The run folder: where everything about a run lies, and who may write there. No torch.

    runs/NAME/
      config.json      the resolved settings; what the run is
      metrics.jsonl    one line per logged update or validation; what happened
      sessions.jsonl   one line per start or resume: commit, versions, machine, threads, first step
      checkpoints/     what to go on from (trainshort.checkpoint)

`metrics.jsonl` is the truth: on resume the lines past the checkpoint are cut, so that the file of a run that was
stopped ten times equals that of a run that never was, apart from times.
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import trainshort
from trainshort.config import RunConfig, load_config
from trainshort.errors import InputError

PARTIAL = ".partial"
"""Suffix of a file that is still being written; a leftover of it means nothing."""

LOCK = "train.lock"

HARMLESS = frozenset(
    {
        "data.folder",
        "model.backend",
        "model.tolerance",
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

CHANGEABLE = HARMLESS | {"train.patience", "train.steps", "train.valid_every", "train.valid_tokens"}
"""Settings that may differ on resume: how far, how often and on what, not which model or which data."""

RECORDED = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "grain")
"""Packages whose versions can move a result."""


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
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"


@contextmanager
def open_run(path: Path, config: RunConfig, *, resume: bool) -> Iterator[RunFolder]:
    """Make a new run folder, or on resume check that an existing one is the same run; hold it while it is written to.

    A run is never overwritten. `resume` on a folder that is not there starts the run, so that one command line serves
    the first start and all restarts.
    """
    folder = RunFolder(path)
    refuse_existing(path, resume=resume)
    stored = load_config(folder.config) if folder.config.exists() else None
    if stored:
        _refuse_another_run(stored, config, path)
    folder.path.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if config != stored:
            write_whole(folder.config, config.model_dump_json(indent=2) + "\n")
        folder.checkpoints.mkdir(exist_ok=True)
        yield folder


def refuse_existing(path: Path, *, resume: bool) -> None:
    """Stop if `path` is taken: by a run that is not to be resumed, or by something that is no run."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, but a run needs a folder. Choose another --out.")
    entries = {entry.name for entry in path.iterdir()} if path.exists() else set()
    started = bool(entries - {"config.json" + PARTIAL, LOCK})
    if started and not resume:
        raise InputError(f"{path} already exists. Go on with it by --resume, or choose another --out.")
    if started and not RunFolder(path).config.exists():
        raise InputError(f"{path} holds files but no config.json, so it is not a run. Choose another --out.")


def _refuse_another_run(stored: RunConfig, asked: RunConfig, path: Path) -> None:
    """Name the first setting whose change would make it another run."""
    before, after = flatten(stored.model_dump(mode="json")), flatten(asked.model_dump(mode="json"))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and name not in CHANGEABLE:
            raise InputError(
                f"{path} was started with {name}={before.get(name)}, but {name}={after.get(name)} was asked for. "
                "Resume with the same settings, or choose another --out for a new run."
            )


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names: {"train": {"steps": 3}} becomes {"train.steps": 3}."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """Hold the folder against a second writer; the kernel lets go when the process ends, however it ends."""
    with (folder.path / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"Another process is training in {folder.path}. Wait for it, or stop it first.") from None
        yield


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line to a .jsonl file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}. Make room there, then go on by --resume.") from error


def sync_lines(path: Path) -> None:
    """Bring the lines appended so far to the disk."""
    try:
        sync_file(path)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}. Make room there, then go on by --resume.") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a .jsonl file; a last line that a kill tore is left out, since its writer never finished it."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is empty, or torn
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise InputError(f"{path}, line {number}, is not JSON. Restore the file, or remove that line.") from None
    return records


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace a .jsonl file."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def cut_metrics(folder: RunFolder, step: int) -> None:
    """Drop what was logged after update `step`, and a torn last line."""
    write_lines(folder.metrics, [record for record in read_lines(folder.metrics) if record["step"] <= step])


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a power cut, finds the old content or the new, never a part."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"Cannot write {path}: {error.strerror}. Make room there, or choose another --out.") from error


def sync_file(path: Path) -> None:
    """Ask the kernel to bring a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Ask the kernel to bring a folder's entries to the disk; a rename is durable only then."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
