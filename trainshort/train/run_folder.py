"""The run folder: the paths of its files, and the checks before a run is created or resumed.

    runs/NAME/
      config.json      all settings of the run
      metrics.jsonl    one line per logged step or validation (trainshort.train.metrics_log)
      sessions.jsonl   one line per start or resume: commit, versions, machine, threads, first step
      tokenizer.json   the tokenizer of the data
      data.json        the description of the data (trainshort.train.run_data)
      checkpoints/     the checkpoints (trainshort.train.checkpoint)

If a run is stopped and resumed, its metrics.jsonl equals that of an uninterrupted run, except for times. This module
does not import torch.
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

# The process that trains holds a lock on this file.
LOCK_FILE = "train.lock"

# Settings that do not change results beyond rounding: the place of the data, the speed, and what is stored how often.
RESULT_NEUTRAL_SETTINGS = frozenset(
    {
        "data.folder",
        "model.backend",
        "train.checkpoint_activations",
        "train.compile",
        "train.keep_checkpoints",
        "train.log_every",
        "train.micro_batch",
        "train.parallel",
        "train.save_every",
        "train.tensorboard",
    }
)

# If `model.tolerance` (the softmax mass that attention may skip) is not larger than this number, the error is not
# larger than the rounding error of float32.
ROUNDING_TOLERANCE = 1e-6

# Settings that may differ when a run is resumed. The required plug-ins were checked before.
RESUME_CHANGEABLE_SETTINGS = RESULT_NEUTRAL_SETTINGS | {
    "plugins",
    "train.patience",
    "train.steps",
    "train.valid_every",
    "train.valid_tokens",
}


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files in a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """Return the path of the settings of the run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """Return the path of the log of training and validation losses."""
        return self.path / "metrics.jsonl"

    @property
    def sessions(self) -> Path:
        """Return the path of the log of starts and resumes."""
        return self.path / "sessions.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def imported(self) -> Path:
        """Return the path of the description of an imported model. The file exists only in imported runs."""
        return self.path / "import.json"


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run in the order of their steps.

    The content of the checkpoints is not verified. Partial and quarantined checkpoints have other names and are left
    out.

    Args:
        run: The run folder.

    Raises:
        InputError: If the folder of the checkpoints cannot be read.
    """
    folder = RunFolder(run).checkpoints
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise InputError(f"Cannot list {folder}: {io.describe_os_error(error)}.") from None
    return sorted(path for path in paths if re.fullmatch(r"step-\d{9}", path.name))


def read_checkpoint_states(run: Path) -> list[dict[str, Any]]:
    """Return the content of state.json of all checkpoints, in the order of their steps.

    The files are not verified. Files that cannot be read are left out. An error is reported when such a checkpoint is
    loaded.

    Args:
        run: The run folder.
    """
    states = []
    for checkpoint in list_checkpoints(run):
        with suppress(InputError):
            states.append(io.read_json_object(checkpoint / "state.json"))
    return states


@contextmanager
def open_run(path: Path, config: RunConfig, *, resume: bool) -> Iterator[RunFolder]:
    """Context manager: create or resume a run folder, and lock the folder against other processes.

    Args:
        path: The run folder.
        config: The settings of the run. They are written to config.json.
        resume: Whether the run may exist already. With `resume=True`, a run that does not exist is started. So the same
            command line starts and resumes a run.

    Yields:
        The paths of the run folder.

    Raises:
        InputError: If the run exists and `resume` is false, if the settings do not match the existing run, or if
            another process holds the lock.
    """
    folder = RunFolder(path)
    stored_config = check_run_path_free(path, resume=resume)
    if stored_config is not None:
        plugins.require_plugins(stored_config.plugins, str(path))
        _check_same_config(stored_config, config, path, was_trained=folder.sessions.exists())
    io.make_folder(folder.path)
    busy_message = f"Another process is training in {path}. Wait until it ends, or stop it first."
    with io.file_lock(folder.path / LOCK_FILE, busy_message):
        if config != stored_config:
            io.write_atomic(folder.config, config.model_dump_json(indent=2) + "\n")
        io.make_folder(folder.checkpoints)
        yield folder


def check_run_path_free(path: Path, *, resume: bool) -> RunConfig | None:
    """Check that a run can be started or resumed at a path. Nothing is written.

    Args:
        path: The run folder.
        resume: Whether the run may exist already.

    Returns:
        The settings of the existing run, or None if there is no run yet.

    Raises:
        InputError: If the path is a file or not writable, if the run exists and `resume` is false, if the folder is not
            a run folder, or if its config.json is invalid.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"Expected a folder at {path}, found a file. Choose another --out.")
    io.check_folder_writable(path)
    try:
        entries = set(os.listdir(path)) if path.exists() else set()
    except OSError as error:
        raise InputError(f"Cannot list {path}: {io.describe_os_error(error)}. Choose another --out.") from None

    # A process that was killed before the run was created leaves at most these two files.
    files_before_start = {"config.json" + io.PARTIAL, LOCK_FILE}  # `io.PARTIAL` is the suffix of incomplete files.
    exists_already = bool(entries - files_before_start)
    if not exists_already:
        return None
    if not resume:
        raise InputError(f"{path} already exists. Continue the run with --resume, or choose another --out.")
    if not RunFolder(path).config.exists():
        raise InputError(f"{path} is not a run folder: it contains files but no config.json. Choose another --out.")
    return load_config(RunFolder(path).config)


def _check_same_config(stored_config: RunConfig, new_config: RunConfig, path: Path, *, was_trained: bool) -> None:
    """Raise `InputError` for the first setting that must not change when a run is resumed.

    Args:
        stored_config: The settings in config.json of the run.
        new_config: The settings with which the run is resumed.
        path: The run folder, for the error message.
        was_trained: Whether a training step was made. If the run is an imported model that was not trained yet, only
            the settings of the model are compared.
    """
    stored_values = flatten(stored_config.model_dump(mode="json"))
    new_values = flatten(new_config.model_dump(mode="json"))
    for name in sorted(stored_values.keys() | new_values.keys()):
        stored_value = stored_values.get(name)
        new_value = new_values.get(name)
        if stored_value == new_value or name in RESUME_CHANGEABLE_SETTINGS:
            continue
        if not was_trained and not name.startswith("model."):
            continue
        # Neither value changes results beyond rounding.
        if is_result_neutral(name, stored_value) and is_result_neutral(name, new_value):
            continue
        raise InputError(
            f"{path} was started with {name}={stored_value}, but got {name}={new_value}. "
            "Resume with the same settings, or choose another --out for a new run."
        )


def is_result_neutral(name: str, value: Any) -> bool:
    """Return whether a value of a setting does not change results beyond rounding.

    Args:
        name: The dotted name of the setting, such as "train.log_every".
        value: The value of the setting. Only the setting "model.tolerance" depends on the value.
    """
    if name in RESULT_NEUTRAL_SETTINGS:
        return True
    return name == "model.tolerance" and value is not None and value <= ROUNDING_TOLERANCE


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
    settings = _reset_neutral_settings(config).model_dump(mode="json", exclude_defaults=True)
    content = json.dumps({"format": CONFIG_FORMAT, "settings": settings}, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{config.model.position}-{config.train.length}-{digest}"


def _reset_neutral_settings(config: RunConfig) -> RunConfig:
    """Return a copy in which every setting that does not influence results has its default value.

    For example, how often training is logged does not influence results.
    """
    defaults = flatten(RunConfig().model_dump())
    changes: dict[str, dict[str, Any]] = {}
    for name, value in flatten(config.model_dump()).items():
        if is_result_neutral(name, value):
            section, _, setting = name.partition(".")  # "train.log_every" has the section "train".
            changes.setdefault(section, {})[setting] = defaults[name]
    return config.replace(**changes)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dictionary with dotted names.

    Args:
        values: The nested settings.
        prefix: Text before all names.

    Example:
        >>> flatten({"train": {"steps": 3}})
        {'train.steps': 3}
    """
    flat_values = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat_values.update(flatten(value, f"{prefix}{name}."))
        else:
            flat_values[prefix + name] = value
    return flat_values
