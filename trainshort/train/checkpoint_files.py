"""List, verify, finalize and delete the checkpoint folders of a run, without reading tensors.

    checkpoints/
      step-000000200/            a complete checkpoint
      step-000000400/
      .partial-step-000000600/   a checkpoint that is being saved, or whose save was interrupted
      .removed-step-000000100/   a checkpoint whose removal was interrupted
      step-000000500.damaged/    a damaged checkpoint that was moved aside when the run was resumed

A checkpoint folder is created under another name and renamed when it is complete. Files in a checkpoint never change.
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

STATE_FILE = "state.json"

# A function that is called with one line of text for each damaged checkpoint, such as `log.warning`.
ReportFunction = Callable[[str], None]


class TrainState(StrictConfig):
    """The progress of a training run, without tensors.

    The order of the data, the dropout masks and the learning rate depend only on `step`, so they are not stored.
    """

    step: int
    """Number of training steps that were done."""
    tokens: int
    """Number of target tokens that the model was trained on."""
    seconds: float
    """Time of training, over all sessions."""
    window_nll: float
    """Sum of the losses since the last line in metrics.jsonl."""
    window_count: int
    """Number of targets in `window_nll`."""
    valid_nll: float | None = None
    """Sum of the validation losses, or None if there was no validation at this step."""
    valid_count: int | None = None
    """Number of targets in `valid_nll`."""
    best_loss: float | None = None
    """Lowest mean validation loss so far."""
    stale: int = 0
    """Number of validations since the lowest loss."""
    metrics: str | None = None
    """Checksum of the last line in metrics.jsonl. It reveals lines that are missing later."""

    @property
    def valid_loss(self) -> float | None:
        """Return the mean validation loss, or None if there was no validation at this step."""
        if self.valid_nll is None or not self.valid_count:
            return None
        return self.valid_nll / self.valid_count


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint, such as "step-000000200"."""
    return f"step-{step:09d}"


def partial_path(folder: Path) -> Path:
    """Return the path to which a checkpoint is written before it is complete.

    Args:
        folder: The final path of the checkpoint.
    """
    return folder.with_name(f".partial-{folder.name}")


def read_state(folder: Path) -> TrainState:
    """Read and verify state.json of a checkpoint. The other files are not verified.

    Args:
        folder: The checkpoint folder.

    Raises:
        InputError: If the file is damaged, or was written by another version of trainshort.
    """
    problem = find_corruption(folder, only=STATE_FILE)
    if problem is not None:
        raise InputError(f"{folder} is damaged: {problem}.")
    try:
        return TrainState.parse(io.read_json_object(folder / STATE_FILE))
    except InputError:
        raise InputError(
            f"{folder} was written by another version of trainshort. Use that version to read it."
        ) from None


# ---- choose a checkpoint of a run


def latest_checkpoint(run: Path, report: ReportFunction = log.warning) -> Path | None:
    """Return the last valid checkpoint of a run, or None if no checkpoint is valid.

    Args:
        run: The run folder.
        report: Called with a message for each damaged checkpoint that is skipped.
    """
    return _first_valid(reversed(list_checkpoints(run)), report)


def best_checkpoint(run: Path, report: ReportFunction = log.warning) -> Path | None:
    """Return the valid checkpoint with the lowest validation loss, or None if no checkpoint is valid.

    If no valid checkpoint has a validation loss, the last valid checkpoint is returned.

    Args:
        run: The run folder.
        report: Called with a message for each damaged checkpoint that is skipped.
    """
    messages: list[str] = []
    losses = _read_validation_losses(run, messages.append)
    folders_by_loss = sorted(losses, key=lambda folder: losses[folder])
    best_folder = _first_valid(folders_by_loss, messages.append)
    if best_folder is None:
        best_folder = latest_checkpoint(run, messages.append)
    unique_messages = dict.fromkeys(messages)  # A dictionary keeps the order and removes duplicates.
    for message in unique_messages:
        report(message)
    return best_folder


def _read_validation_losses(run: Path, report: ReportFunction) -> dict[Path, float]:
    """Return the mean validation loss by checkpoint folder. Checkpoints without a validation loss are left out.

    Args:
        run: The run folder.
        report: Called with a message for each checkpoint whose state.json is damaged.
    """
    losses: dict[Path, float] = {}
    for folder in list_checkpoints(run):
        try:
            loss = read_state(folder).valid_loss
        except InputError as error:
            report(f"{error} The checkpoint is skipped.")
            continue
        if loss is not None:
            losses[folder] = loss
    return losses


def _first_valid(folders: Iterable[Path], report: ReportFunction) -> Path | None:
    """Return the first checkpoint that is not damaged, or None if all checkpoints are damaged.

    Args:
        folders: Checkpoint folders in the order of preference.
        report: Called with a message for each damaged checkpoint, and with the checkpoint that is used instead.
    """
    has_skipped = False
    for folder in folders:
        problem = find_corruption(folder)  # a text such as "state.json is missing", or None
        if problem is None:
            if has_skipped:
                report(f"Using {folder} instead.")
            return folder
        report(f"{folder} is damaged: {problem}. The checkpoint is skipped.")
        has_skipped = True
    return None


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint folder that a path stands for.

    Args:
        path: A checkpoint folder, or a run folder. A run folder stands for its best checkpoint.

    Returns:
        The checkpoint folder.

    Raises:
        InputError: If there is no valid checkpoint at the path.
    """
    if path.is_file():
        raise InputError(
            f"Expected a folder at {path}, found a file. A checkpoint is a folder of safetensors and JSON files. "
            "Pickled files (.pt, .bin, .ckpt) are never opened, because reading a pickle can execute code."
        )
    is_checkpoint_folder = (path / MANIFEST_FILE).exists()
    if is_checkpoint_folder:
        return path
    if is_hugging_face(path):
        import_command = f"trainshort import {path} --out runs/{path.resolve().name}"
        raise InputError(f"{path} is a Hugging Face model. Import the model first with `{import_command}`.")

    has_config = RunFolder(path).config.exists()
    has_checkpoints = bool(list_checkpoints(path))
    if not has_config and not has_checkpoints:
        raise InputError(f"There is no run at '{path}'. Give a run folder, or a folder inside its checkpoints folder.")
    if not has_checkpoints:
        load_config(RunFolder(path).config)  # Raises InputError if the file is not the config of a run.
        raise InputError(f"{path} has no checkpoint yet. Train the run first, or resume it.")
    return find_valid_checkpoint(path, best_checkpoint)


def find_valid_checkpoint(
    run: Path,
    choose: Callable[[Path, ReportFunction], Path | None],
    *,
    alternative: str = "",
    report: ReportFunction = log.warning,
) -> Path:
    """Choose a checkpoint of a run that has at least one checkpoint.

    Args:
        run: The run folder.
        choose: How to choose the checkpoint: `best_checkpoint` or `latest_checkpoint`.
        alternative: What the user can do besides restoring a checkpoint, for the error message.
        report: Called with a message for each damaged checkpoint that is skipped.

    Returns:
        The checkpoint folder.

    Raises:
        InputError: If all checkpoints are damaged.
    """
    messages: list[str] = []
    folder = choose(run, messages.append)
    if folder is None:
        checkpoints = list_checkpoints(run)
        last_checkpoint = checkpoints[-1]
        problem = find_corruption(last_checkpoint)
        raise InputError(
            f"None of the {len(checkpoints)} checkpoints in {run} is valid ({last_checkpoint.name}: {problem}). "
            f"Restore a checkpoint from a copy{alternative}."
        )
    for message in messages:
        report(message)
    return folder


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a model that was saved by Hugging Face Transformers.

    The config.json of such a model contains the key "model_type". The config.json of a run folder does not.
    """
    try:
        return b'"model_type"' in io.read_bytes(RunFolder(folder).config)
    except InputError:
        return False


def extrapolation_summary(run: Path) -> str | None:
    """Return a sentence that says up to which input length the model of a run works well.

    The result is None if the run was not evaluated.
    """
    try:
        return io.read_with_checksum(run / "extrapolation.json").get("summary")
    except InputError:
        return None


# ---- finalize and remove checkpoints


def finalize_checkpoint(folder: Path, digests: "Digests") -> None:
    """Write the manifest of a completely written checkpoint, and rename the partial folder to its final name.

    The manifest lists the size and the SHA-256 of each file.

    Before the rename, the checkpoint does not exist. After the rename, the checkpoint is complete.

    Args:
        folder: The final path of the checkpoint.
        digests: The size and the SHA-256 of each file.

    Raises:
        InputError: If the checkpoint exists already.
    """
    partial = partial_path(folder)
    write_manifest(partial, digests)
    if folder.exists():
        raise InputError(f"{folder} already exists. Checkpoints are never overwritten.")
    # The entries of all folders must be on the disk before the rename.
    for path in partial.rglob("*"):
        if path.is_dir():
            io.fsync(path)
    io.fsync(partial)
    partial.rename(folder)
    io.fsync(folder.parent)


def delete_old_checkpoints(run: Path, keep: int) -> None:
    """Delete all checkpoints of a run except the best checkpoint and the last checkpoints.

    Args:
        run: The run folder.
        keep: How many of the last checkpoints to keep.
    """
    checkpoints = list_checkpoints(run)
    checkpoints_to_keep = set(checkpoints[-keep:])
    losses = _read_validation_losses(run, log.warning)
    if losses:
        best_folder = min(losses, key=lambda folder: losses[folder])
        checkpoints_to_keep.add(best_folder)
    for folder in set(checkpoints) - checkpoints_to_keep:
        # The folder is renamed first. If the process is killed during the removal, the remaining files are not in a
        # folder with the name of a checkpoint.
        renamed_folder = folder.with_name(f".removed-{folder.name}")
        try:
            folder.rename(renamed_folder)
            _remove(renamed_folder)
        except OSError as error:
            log.warning(f"Cannot remove the old checkpoint {folder}: {io.describe_os_error(error)}.")


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_partial_checkpoints(run: Path) -> None:
    """Remove what interrupted saves and interrupted deletions of checkpoints left behind.

    The caller must hold the lock of the run, so that no other process writes to the folder.

    Args:
        run: The run folder.
    """
    for path in RunFolder(run).checkpoints.iterdir():
        if path.name.startswith((".partial-", ".removed-")):
            with io.translate_os_errors("remove", path, "Remove it, then continue with --resume."):
                _remove(path)


def quarantine_checkpoints(run: Path, after: Path) -> None:
    """Rename the damaged checkpoints after a valid checkpoint, so that the run can save new checkpoints there.

    Args:
        run: The run folder.
        after: The last valid checkpoint. All checkpoints with later steps are renamed to "step-000000500.damaged", or
            to "step-000000500.damaged-1" if that name is taken.
    """
    for folder in list_checkpoints(run):
        if folder.name <= after.name:
            continue
        damaged_name = f"{folder.name}.damaged"
        # The same step may have been renamed before. Then a number makes the new name unique.
        earlier_names = [path.name for path in folder.parent.iterdir() if path.name.startswith(damaged_name)]
        if earlier_names:
            damaged_name += f"-{len(earlier_names)}"
        new_path = folder.with_name(damaged_name)
        os.rename(folder, new_path)
        log.warning(f"The damaged checkpoint {folder.name} was renamed to {new_path}.")


# ---- the manifest of a checkpoint: the size and the SHA-256 of each file
#
# The manifest is written last and contains a digest of itself. The manifest text for given digests is unique. Therefore
# a change of any byte in the checkpoint, also in the manifest, is found before a tensor is read.

MANIFEST_FILE = "manifest.json"

# Only these files are ever read from a checkpoint. They cannot execute code.
ALLOWED_SUFFIXES = (".safetensors", ".json")

# For each file name inside the checkpoint: {"bytes": size, "sha256": hash}.
Digests = dict[str, dict[str, Any]]


def list_files(folder: Path) -> list[str]:
    """Return the sorted paths of all files inside a checkpoint folder, except the manifest.

    The paths are relative to the folder, such as "model/whole.safetensors".
    """
    names = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and name != MANIFEST_FILE:
            names.append(name)
    return sorted(names)


def compute_digest(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file, as the manifest stores them."""
    return {"bytes": path.stat().st_size, "sha256": io.sha256(path, hint="")}


def write_manifest(folder: Path, digests: Digests) -> None:
    """Write the manifest of a checkpoint: a file with the size and the SHA-256 of all other files.

    Args:
        folder: The checkpoint folder, or the partial folder of a checkpoint.
        digests: The size and the SHA-256 of each file.
    """
    io.write_atomic(folder / MANIFEST_FILE, _format_manifest(digests))


def _format_manifest(digests: Digests) -> str:
    """Return the text of the manifest. The text also contains a SHA-256 of the digests."""
    digests_json = json.dumps(digests, sort_keys=True)
    manifest_sha256 = hashlib.sha256(digests_json.encode()).hexdigest()
    return json.dumps({"files": digests, "sha256": manifest_sha256}, sort_keys=True, indent=1) + "\n"


def find_corruption(folder: Path, only: str | None = None) -> str | None:
    """Compare the files of a checkpoint with its manifest, which lists the size and the SHA-256 of each file.

    Args:
        folder: The checkpoint folder.
        only: The only file to verify besides the manifest. The default is to verify all files.

    Returns:
        The first problem as a part of a sentence, such as "state.json is missing". None if there is no problem.
    """
    if not folder.is_dir():
        return "it is a file, and a checkpoint is a folder"
    try:
        return _compare_with_manifest(folder, only)
    except InputError as error:
        # The message becomes a part of another sentence, so it must start in lower case and have no period.
        message = str(error).removesuffix(".")
        return message[0].lower() + message[1:]
    except OSError as error:
        return f"cannot read {error.filename or folder}: {io.describe_os_error(error)}"


def _compare_with_manifest(folder: Path, only: str | None) -> str | None:
    """Return the first difference between a checkpoint and its manifest, or None. See `find_corruption`.

    Raises:
        InputError: If the manifest is missing or invalid, or if a file cannot be read.
        OSError: If the operating system reports an error.
    """
    digests = _read_manifest(folder)
    names = list_files(folder)
    for name in names:
        if not name.endswith(ALLOWED_SUFFIXES):
            return f"{name} is neither a safetensors nor a JSON file, and other files are never opened"
        if name not in digests:
            return f"{name} is not in the manifest"

    for name, expected_digest in digests.items():
        is_selected = only is None or name == only
        if not is_selected:
            continue
        if name not in names:
            return f"{name} is missing"
        digest = compute_digest(folder / name)
        if digest["bytes"] != expected_digest["bytes"]:
            return f"{name} has {digest['bytes']} bytes instead of {expected_digest['bytes']}"
        if digest != expected_digest:
            return f"the checksum of {name} does not match, so the file was modified after it was written"
    return None


def _read_manifest(folder: Path) -> Digests:
    """Read and verify the manifest of a checkpoint.

    Args:
        folder: The checkpoint folder.

    Returns:
        The size and the SHA-256 of each file.

    Raises:
        InputError: If the manifest is missing, is not valid, or was modified after it was written.
    """
    try:
        text = io.read_text(folder / MANIFEST_FILE, hint="")
    except io.MissingFileError:
        raise InputError(f"{MANIFEST_FILE} is missing") from None
    try:
        digests = io.parse_json(text, MANIFEST_FILE, hint="")["files"]
        is_unmodified = text == _format_manifest(digests)
        has_valid_entries = all(entry.keys() == {"bytes", "sha256"} for entry in digests.values())
    except (InputError, KeyError, TypeError, AttributeError):
        raise InputError(f"{MANIFEST_FILE} is not valid") from None
    if not is_unmodified or not has_valid_entries:
        raise InputError(f"{MANIFEST_FILE} was modified after it was written")
    return digests
