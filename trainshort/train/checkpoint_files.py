"""Which checkpoints a run has, which of them are whole, which to keep. No torch, and no file inside is ever changed.

checkpoints/
  step-000000200/            whole, or damaged since; never half written
  step-000000400/
  .partial-step-000000600/   a save that was cut off, or is going on
  .removed-step-000000100/   a removal that was cut off
  step-000000500.damaged/    set aside when the run was resumed from an earlier one
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainshort.config.base import StrictConfig
from trainshort.config.run_config import load_config
from trainshort.errors import InputError
from trainshort.train.run_folder import RunFolder, list_checkpoints
from trainshort.utils import io

log = logging.getLogger(__name__)

STATE = "state.json"

Say = Callable[[str], None]


class TrainState(StrictConfig):
    """Where a run stands, beside its tensors. Data order, dropout and learning rate all follow from `step`."""

    step: int
    """Steps done."""
    tokens: int
    """Targets trained on."""
    seconds: float
    """Time spent training, over all sessions."""
    window_nll: float
    """Sum of losses since the last line in metrics.jsonl."""
    window_count: int
    """Targets in that sum."""
    valid_nll: float | None = None
    """Sum of validation losses, if this step was validated."""
    valid_count: int | None = None
    """Targets in that sum."""
    best_loss: float | None = None
    """Lowest mean validation loss so far."""
    stale: int = 0
    """Validations since then."""
    metrics: str | None = None
    """Checksum of the last line in metrics.jsonl, by which lines missing there are noticed."""

    @property
    def valid_loss(self) -> float | None:
        return self.valid_nll / self.valid_count if self.valid_nll is not None and self.valid_count else None


def name(step: int) -> str:
    return f"step-{step:09d}"


def partial_path(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(f".partial-{folder.name}")


def read_state(folder: Path) -> TrainState:
    """A checkpoint's state.json, its bytes verified; not its tensors."""
    if problem := find_corruption(folder, only=STATE):
        raise InputError(f"{folder} is damaged: {problem}.")
    try:
        return TrainState.parse(io.read_json_object(folder / STATE))
    except InputError:
        raise InputError(f"{folder} was written by another version of trainshort; use that one to read it.") from None


def latest(run: Path, say: Say = log.warning) -> Path | None:
    """The last checkpoint that is whole; damaged ones after it are named. None when there is no whole one."""
    return _first_valid(reversed(list_checkpoints(run)), say)


def best(run: Path, say: Say = log.warning) -> Path | None:
    """The whole checkpoint with the lowest validation loss, or the last one if none was validated."""
    told: list[str] = []
    losses = _losses(run, told.append)
    found = _first_valid(sorted(losses, key=losses.__getitem__), told.append) or latest(run, told.append)
    for line in dict.fromkeys(told):  # each once
        say(line)
    return found


def _losses(run: Path, say: Say) -> dict[Path, float]:
    """Validation losses of the checkpoints that have one."""
    losses = {}
    for folder in list_checkpoints(run):
        try:
            loss = read_state(folder).valid_loss
        except InputError as error:
            say(f"{error} It is passed over.")
            continue
        if loss is not None:
            losses[folder] = loss
    return losses


def _first_valid(folders: Iterable[Path], say: Say) -> Path | None:
    for passed_over, folder in enumerate(folders):
        problem = find_corruption(folder)
        if problem is None:
            if passed_over:
                say(f"Using {folder} instead.")
            return folder
        say(f"{folder} is damaged: {problem}. It is passed over.")
    return None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or of a run the best; anything else there is told in words."""
    if path.is_file():
        raise InputError(
            f"{path} is a file, and a checkpoint is a folder of safetensors and JSON. Pickled files (.pt, .bin, .ckpt) "
            "are never opened, because reading one can execute code."
        )
    if (path / MANIFEST).exists():
        return path
    if is_hugging_face(path):
        bring = f"trainshort import {path} --out runs/{path.resolve().name}"
        raise InputError(f"{path} is a Hugging Face model. Bring it in first: {bring}.")
    found = list_checkpoints(path)
    if not found and not RunFolder(path).config.exists():
        raise InputError(f"There is no run at '{path}'. Give a run folder, or one of the folders in its checkpoints/.")
    if not found:
        load_config(RunFolder(path).config)  # what is no run's says so itself
        raise InputError(f"{path} has no checkpoint yet. Train it first, or resume it.")
    return find_valid_checkpoint(path, best)


def find_valid_checkpoint(
    run: Path, choose: Callable[[Path, Say], Path | None], *, otherwise: str = "", say: Say = log.warning
) -> Path:
    """The checkpoint that `choose` (best, latest) takes of a run that has some. What it passed over is told when one
    is left; when none is, that is one sentence."""
    told: list[str] = []
    folder = choose(run, told.append)
    if folder is None:
        there = list_checkpoints(run)
        raise InputError(
            f"None of the {len(there)} checkpoints in {run} is whole ({there[-1].name}: {find_corruption(there[-1])}). "
            f"Restore one from a copy{otherwise}."
        )
    for line in told:
        say(line)
    return folder


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder holds a saved transformers model: its config names a model_type, ours never does."""
    try:
        return b'"model_type"' in io.read_bytes(RunFolder(folder).config)
    except InputError:
        return False


def extrapolation_summary(run: Path) -> str | None:
    """Return the extrapolation summary of the run's evaluation, or None if the run was not evaluated."""
    try:
        return io.read_with_checksum(run / "extrapolation.json").get("summary")
    except InputError:
        return None


def finalize_checkpoint(folder: Path, digests: "Digests") -> None:
    """Write the manifest of a fully written checkpoint, then give it its name: until this rename it does not exist,
    after it it is complete."""
    write_manifest(partial_path(folder), digests)
    if folder.exists():
        raise InputError(f"{folder} already exists, and checkpoints are never overwritten.")
    for inside in (path for path in partial_path(folder).rglob("*") if path.is_dir()):
        io.fsync(inside)
    io.fsync(partial_path(folder))
    partial_path(folder).rename(folder)
    io.fsync(folder.parent)


def delete_old_checkpoints(run: Path, keep: int) -> None:
    """Remove all but the best and the last `keep`."""
    folders = list_checkpoints(run)
    kept = set(folders[-keep:])
    if losses := _losses(run, log.warning):
        kept.add(min(losses, key=losses.__getitem__))
    for folder in set(folders) - kept:
        # Renamed first: a kill while files are removed must not leave something that looks like a checkpoint.
        removed = folder.with_name(f".removed-{folder.name}")
        try:
            folder.rename(removed)
            _remove(removed)
        except OSError as error:
            log.warning(f"The old checkpoint {folder} could not be removed: {io.describe_os_error(error)}.")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_partial_checkpoints(run: Path) -> None:
    """Clear what a kill left behind: saves and removals that were cut off. Only for the process that holds the run."""
    for path in RunFolder(run).checkpoints.iterdir():
        if path.name.startswith((".partial-", ".removed-")):
            with io.translate_os_errors("remove", path, "Remove it, then go on by --resume."):
                _remove(path)


def quarantine_checkpoints(run: Path, after: Path) -> None:
    """Move checkpoints later than `after`, which are damaged, out of the way of the ones that will replace them."""
    for folder in list_checkpoints(run):
        if folder.name > after.name:
            number = sum(path.name.startswith(folder.name + ".damaged") for path in folder.parent.iterdir())
            aside = folder.with_name(folder.name + ".damaged" + (f"-{number}" if number else ""))
            os.rename(folder, aside)
            log.warning(f"The damaged {folder.name} is kept as {aside}.")


# ---- the manifest: a checkpoint's files with their sha256; it is valid when every byte is the one written
#
# The manifest is written last, in exactly one form, with a digest of itself, so that a change to any byte of any file,
# the manifest's own included, is noticed before a weight is used.

MANIFEST = "manifest.json"

ALLOWED_SUFFIXES = (".safetensors", ".json")
"""What a checkpoint may hold, and all that is ever read from one; neither can execute code."""

Digests = dict[str, dict[str, Any]]
"""File name inside the checkpoint to {"bytes": ..., "sha256": ...}."""


def files_of(folder: Path) -> list[str]:
    """Names of all files inside, in a fixed order, without the manifest."""
    inside = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in inside if name != MANIFEST)


def digest_of(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": io.sha256(path, hint="")}


def write_manifest(folder: Path, digests: Digests) -> None:
    io.write_atomic(folder / MANIFEST, _manifest_text(digests))


def _manifest_text(digests: Digests) -> str:
    """The one form a manifest can have."""
    listed = json.dumps(digests, sort_keys=True)
    own = hashlib.sha256(listed.encode()).hexdigest()
    return json.dumps({"files": digests, "sha256": own}, sort_keys=True, indent=1) + "\n"


def find_corruption(folder: Path, only: str | None = None) -> str | None:
    """What is wrong with a checkpoint, in words; None when nothing is. `only` checks one file (and the manifest)."""
    if not folder.is_dir():
        return "it is a file, and a checkpoint is a folder"
    try:
        return _damage(folder, only)
    except InputError as error:  # of a file that cannot be opened
        message = str(error).removesuffix(".")
        return message[0].lower() + message[1:]
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({io.describe_os_error(error)})"


def _damage(folder: Path, only: str | None) -> str | None:
    digests = _read_manifest(folder)
    there = files_of(folder)
    for name in there:
        if not name.endswith(ALLOWED_SUFFIXES):
            return f"{name} is neither safetensors nor JSON, and nothing else is ever opened"
        if name not in digests:
            return f"{name} is not in the manifest"
    for name, expected in digests.items():
        if only not in (None, name):
            continue
        if name not in there:
            return f"{name} is missing"
        found = digest_of(folder / name)
        if found["bytes"] != expected["bytes"]:
            return f"{name} has {found['bytes']} bytes instead of {expected['bytes']}"
        if found != expected:
            return f"{name} has another sha256 than when it was written"
    return None


def _read_manifest(folder: Path) -> Digests:
    """The manifest's content; one that cannot be believed is refused."""
    try:
        text = io.read_text(folder / MANIFEST, hint="")
    except io.MissingFileError:
        raise InputError(f"{MANIFEST} is missing") from None
    try:
        digests = io.parse_json(text, MANIFEST, hint="")["files"]
        believed = text == _manifest_text(digests) and all(
            entry.keys() == {"bytes", "sha256"} for entry in digests.values()
        )
    except (InputError, KeyError, TypeError, AttributeError):
        raise InputError(f"{MANIFEST} is not readable") from None
    if not believed:
        raise InputError(f"{MANIFEST} was changed after it was written")
    return digests
