"""The run folder: where everything about a run lies, and who may write there. No torch.

    runs/NAME/
      config.json      the resolved settings; what the run is
      metrics.jsonl    one line per logged step or validation; what happened
      sessions.jsonl   one line per start or resume: commit, versions, machine, threads, first step
      tokenizer.json   what its tokens mean, and
      data.json        what it was trained on (trainshort.train.run_data)
      checkpoints/     what to go on from (trainshort.train.checkpoint)

`metrics.jsonl` is the truth: on resume the lines past the checkpoint are cut, so that the file of a run that was
stopped ten times equals that of a run that never was, apart from times.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.config.run_config import CONFIG_FORMAT, RunConfig, load_config
from trainshort.errors import InputError
from trainshort.utils import io, plugins

LOCK = "train.lock"

_FAST = {"model.backend", "train.checkpoint_activations", "train.compile", "train.micro_batch", "train.parallel"}
_NOTED = {"train.keep_checkpoints", "train.log_every", "train.save_every", "train.tensorboard"}
RESULT_NEUTRAL_SETTINGS = frozenset({"data.folder"} | _FAST | _NOTED)
"""Settings that move no result beyond rounding: where, how fast and how often noted."""

ROUNDING_TOLERANCE = 1e-6
"""Softmax mass whose absence is no larger than float32's rounding: up to here model.tolerance moves no result."""
RESUME_CHANGEABLE_SETTINGS = RESULT_NEUTRAL_SETTINGS | {
    "plugins",
    "train.patience",
    "train.steps",
    "train.valid_every",
    "train.valid_tokens",
}
"""Settings that may differ on resume: how far, how often and on what, not which model or which data. (Plug-ins that the
run needs have been asked for before.)"""

METRIC_FIELDS = ("step", "tokens", "seconds")
"""Numbers that every line of metrics.jsonl has."""
Line = tuple[dict[str, Any], str]
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


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders by step, complete or not, without those that were set aside."""
    checkpoints = RunFolder(run).checkpoints
    try:
        entries = list(checkpoints.iterdir()) if checkpoints.is_dir() else []
    except OSError as error:
        raise InputError(f"{checkpoints} cannot be listed: {io.describe_os_error(error)}.") from None
    return sorted(path for path in entries if re.fullmatch(r"step-\d{9}", path.name))


def read_checkpoint_states(run: Path) -> list[dict[str, Any]]:
    """What its checkpoints tell of themselves, the newest last, without torch and not verified; those that tell nothing
    are left out: whoever loads them says why."""
    states = []
    for checkpoint in list_checkpoints(run):
        with suppress(InputError):
            states.append(io.read_json_object(checkpoint / "state.json"))
    return states


@contextmanager
def open_run(path: Path, config: RunConfig, *, resume: bool) -> Iterator[RunFolder]:
    """Make a new run folder, or on resume check that an existing one is the same run; hold it while it is written to.

    A run is never overwritten. `resume` on a folder that is not there starts the run, so that one command line serves
    the first start and all restarts.
    """
    folder = RunFolder(path)
    stored = check_run_path_free(path, resume=resume)
    if stored:
        plugins.require_plugins(stored.plugins, str(path))
        _check_same_config(stored, config, path, begun=folder.sessions.exists())
    io.make_folder(folder.path)
    with io.file_lock(folder.path / LOCK, f"Another process is training in {path}. Wait for it, or stop it first."):
        if config != stored:
            io.write_atomic(folder.config, config.model_dump_json(indent=2) + "\n")
        io.make_folder(folder.checkpoints)
        yield folder


def check_run_path_free(path: Path, *, resume: bool) -> RunConfig | None:
    """Stop if `path` is taken: by a run that is not to be resumed, or by something that is no run. What a run to resume
    was started with, since a config.json that cannot be read is told before data is prepared for it."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, but a run needs a folder. Choose another --out.")
    io.check_folder_writable(path)
    try:
        entries = set(os.listdir(path)) if path.exists() else set()
    except OSError as error:
        raise InputError(f"{path} cannot be listed: {io.describe_os_error(error)}. Choose another --out.") from None
    started = bool(entries - {"config.json" + io.PARTIAL, LOCK})
    if started and not resume:
        raise InputError(f"{path} already exists. Go on with it by --resume, or choose another --out.")
    if started and not RunFolder(path).config.exists():
        raise InputError(f"{path} holds files but no config.json, so it is not a run. Choose another --out.")
    return load_config(RunFolder(path).config) if started else None


def _check_same_config(stored: RunConfig, asked: RunConfig, path: Path, *, begun: bool) -> None:
    """Name the first setting whose change would make it another run; before any training (a model that was imported)
    only the model is given."""
    before, after = flatten(stored.model_dump(mode="json")), flatten(asked.model_dump(mode="json"))
    for name in sorted(before.keys() | after.keys()):
        if (
            before.get(name) == after.get(name)
            or name in RESUME_CHANGEABLE_SETTINGS
            or not (begun or name.startswith("model."))
        ):
            continue
        if not (is_result_neutral(name, before.get(name)) and is_result_neutral(name, after.get(name))):
            raise InputError(
                f"{path} was started with {name}={before.get(name)}, but {name}={after.get(name)} was asked for. "
                "Resume with the same settings, or choose another --out for a new run."
            )


def is_result_neutral(name: str, value: Any) -> bool:
    """Whether this value of a setting moves no result beyond rounding."""
    return name in RESULT_NEUTRAL_SETTINGS or (
        name == "model.tolerance" and value is not None and value <= ROUNDING_TOLERANCE
    )


def run_name(config: RunConfig) -> str:
    """Return the folder name of a run, for example "alibi-128-1f2e3d4c".

    The name consists of the position method, the training length and a digest. The digest is a hash of the format
    version and of all settings that differ from their defaults and influence results. So two runs with different
    results have different names, and `reproduce` finds a run that is already trained. A new setting does not change
    the names of runs that leave the setting at its default. A change of a default must increase the format version.

    Args:
        config: The settings of the run.

    Returns:
        The name of the run folder.
    """
    settings = _reset_harmless(config).model_dump(mode="json", exclude_defaults=True)
    content = json.dumps({"format": CONFIG_FORMAT, "settings": settings}, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{config.model.position}-{config.train.length}-{digest}"


def _reset_harmless(config: RunConfig) -> RunConfig:
    """Return a copy in which every setting that does not influence results has its default value."""
    defaults = flatten(RunConfig().model_dump())
    changes: dict[str, dict[str, Any]] = {}
    for name, value in flatten(config.model_dump()).items():
        if is_result_neutral(name, value):
            section, _, setting = name.partition(".")
            changes.setdefault(section, {})[setting] = defaults[name]
    return config.replace(**changes)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names: {"train": {"steps": 3}} becomes {"train.steps": 3}."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def truncate_metrics(folder: RunFolder, step: int, last: str | None = None) -> None:
    """Drop what was logged after `step`, and a torn last line.

    `last` is the checksum of the last line at that moment. Lines that went missing since are not passed over: only a
    file that is gone altogether, or was begun anew after that step, is taken as it is.
    """
    truncate_lines(folder.metrics, len(_records_up_to(folder, read_verified_lines(folder.metrics), step, last)))


def _records_up_to(folder: RunFolder, records: list[Line], step: int, last: str | None) -> list[Line]:
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
    states = read_checkpoint_states(folder.path)  # first: whoever is training may log and save while this is read
    records = read_verified_lines(folder.metrics)
    for record, _ in records:
        for name in METRIC_FIELDS:
            _number(folder, record, name)
    for saved in states[-1:]:
        if isinstance(step := saved.get("step"), int):
            _records_up_to(folder, records, step, saved.get("metrics"))
    return [record for record, _ in records]


def _number(folder: RunFolder, record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if type(value) is int or (type(value) is float and name != "step"):
        return value
    raise InputError(f"{folder.metrics} has a line without the number '{name}'. {RESTORE_HINT}")


# ---- records that are added line by line, each with a checksum over itself and the line before it
#
#     {"step": 10, "loss": 5.1, "checksum": "9f2c..."}    sha256 of "" and this record
#     {"step": 20, "loss": 4.7, "checksum": "03ab..."}    sha256 of the line above and this record
#
# So a changed number, a line taken out and a line put in are noticed wherever they are; lines missing at the end are
# noticed by whoever noted the last checksum (a checkpoint's state.json). A last line without its newline was torn by a
# kill.

DIGITS = 16
"""Hexadecimal digits of a line's checksum: enough against chance."""
TAIL_BYTES = 2**16
"""Bytes in which the last line is looked for."""
DISK_FULL_HINT = "Make room there, then go on by --resume."
RESTORE_HINT = "Restore the file from a copy."


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records, verified, without their checksums; none when there is no file."""
    return [record for record, _ in read_verified_lines(path)]


def read_verified_lines(path: Path) -> list[Line]:
    """The records with their checksums."""
    records: list[Line] = []
    before = b""
    for number, line in enumerate(_complete_lines(path), start=1):
        name = f"{path}, line {number}"
        record = io.parse_json(line, name, hint=RESTORE_HINT)
        if not isinstance(record, dict):
            raise InputError(f"{name}, holds no JSON object. {RESTORE_HINT}")
        found = record.pop(io.CHECKSUM, None)
        if found is None:
            raise InputError(f"{name}, has no checksum. {RESTORE_HINT}")
        if found != _checksum(before, record):
            raise InputError(f"{name}, or the line before it was changed after it was written. {RESTORE_HINT}")
        records.append((record, found))
        before = line
    return records


def _complete_lines(path: Path) -> list[bytes]:
    try:
        return io.read_bytes(path, hint=RESTORE_HINT).split(b"\n")[
            :-1
        ]  # what follows the last newline is empty, or torn
    except io.MissingFileError:
        return []


def _checksum(before: bytes, record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True).encode()
    return hashlib.sha256(before + b"\n" + text).hexdigest()[:DIGITS]


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add one line; the file ends with a whole one (`keep_lines`)."""
    # Through JSON, so that what is written and what is read back have the same checksum.
    record = json.loads(json.dumps(record, allow_nan=False))
    with io.translate_os_errors("write", path, DISK_FULL_HINT):
        line = json.dumps({**record, io.CHECKSUM: _checksum(_last_line(path), record)})
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _last_line(path: Path) -> bytes:
    try:
        with io.open_file(path, hint=RESTORE_HINT) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().removesuffix(b"\n").rpartition(b"\n")[2]
    except io.MissingFileError:
        return b""


def last_checksum(path: Path) -> str | None:
    """The checksum of the last line, by which lines that go missing at the end are noticed."""
    line = _last_line(path)
    return io.parse_json(line, str(path), hint=RESTORE_HINT).get(io.CHECKSUM) if line else None


def truncate_lines(path: Path, count: int) -> None:
    """Cut the file after its first `count` lines, and with them a torn last one."""
    content = b"".join(line + b"\n" for line in _complete_lines(path)[:count])
    if path.exists() and content != io.read_bytes(path, hint=RESTORE_HINT):
        io.write_atomic(path, content, hint=DISK_FULL_HINT)


def sync_lines(path: Path) -> None:
    """Bring the lines appended so far to the disk."""
    with io.translate_os_errors("write", path, DISK_FULL_HINT):
        if path.exists():
            io.fsync(path)
