"""Save and load checkpoints: folders of safetensors and JSON files.

    step-000000200/
      manifest.json    the SHA-256 of every other file; written last
      state.json       the progress of the training run
      config.json      the settings of the run
      model/           the parameters and buffers, as safetensors
      optimizer/       the tensors of the optimizer, as safetensors

A checkpoint is written to a temporary folder, flushed to the disk and then renamed. So an interrupted save never
damages a checkpoint. All files are verified with their SHA-256 before tensors are loaded.
"""

import hashlib
import logging
import math
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainshort.config.run_config import ModelConfig, RunConfig, load_config, save_config
from trainshort.errors import InputError
from trainshort.model.transformer import TransformerLM
from trainshort.train import checkpoint_files
from trainshort.train.checkpoint_files import (
    STATE_FILE,
    TrainState,
    best_checkpoint,
    find_checkpoint,
    is_hugging_face,
    latest_checkpoint,
    read_state,
)
from trainshort.train.parallel import World
from trainshort.utils import plugins
from trainshort.utils.io import fsync, translate_os_errors, unwrap_os_error, write_atomic

log = logging.getLogger(__name__)

__all__ = [
    "CheckpointData",
    "Parts",
    "TrainState",
    "best_checkpoint",
    "find_checkpoint",
    "fingerprint",
    "hash_tensors",
    "is_hugging_face",
    "latest_checkpoint",
    "load_model",
    "model_tensors",
    "read_state",
    "restore",
    "save",
]

CONFIG_FILE = "config.json"

# Loading a larger checkpoint takes several seconds, so a message is logged before.
LOG_LOADING_ABOVE_BYTES = 250 * 10**6

# The tensors of a checkpoint by part ("model" or "optimizer") and by name.
Parts = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class CheckpointData:
    """The content of a checkpoint.

    Attributes:
        config: The settings of the run.
        state: The progress of the run.
        parts: The tensors by part ("model" or "optimizer") and by name.
        sharded: Whether each rank holds only a shard of the tensors, as with FSDP.
    """

    config: RunConfig
    state: TrainState
    parts: Parts
    sharded: bool = False


def save(run: Path, data: CheckpointData, world: World) -> Path:
    """Save a checkpoint of a run. All ranks must call this function.

    If the run already has a checkpoint of this step, nothing is written, because its content is the same.

    Args:
        run: The run folder.
        data: The content of the checkpoint.
        world: The ranks that train together.

    Returns:
        The checkpoint folder.

    Raises:
        InputError: If the checkpoint cannot be written. The partial checkpoint is removed.
    """
    folder = run / "checkpoints" / checkpoint_files.checkpoint_name(data.state.step)
    if world.broadcast_from_rank0(folder.exists):
        return folder
    partial = checkpoint_files.partial_path(folder)
    hint = "Earlier checkpoints are intact. Free some disk space, then continue with --resume."
    # `report_os_errors(function)` returns a function that raises InputError with this hint instead of OSError.
    report_os_errors = translate_os_errors("save", folder, hint)
    try:
        world.run_on_main(report_os_errors(lambda: _create_partial_folder(partial, data)))
        world.run_on_all_ranks(report_os_errors(lambda: _write_parts(partial, data, world)))
        digests_of_rank = world.run_on_all_ranks(report_os_errors(lambda: _compute_digests_of_rank(partial, world)))
        digests: checkpoint_files.Digests = {}
        for gathered_digests in world.all_gather_objects(digests_of_rank):
            digests.update(gathered_digests)
        world.run_on_main(report_os_errors(lambda: checkpoint_files.finalize_checkpoint(folder, digests)))
    except BaseException:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _create_partial_folder(partial: Path, data: CheckpointData) -> None:
    """Create the partial folder of a checkpoint, and write its JSON files: the config and the progress of the run.

    A checkpoint is written to a partial folder, which is renamed when it is complete.

    Args:
        partial: The path of the partial folder. The remains of an interrupted save at this path are removed.
        data: The content of the checkpoint.
    """
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    save_config(data.config, partial / CONFIG_FILE)
    write_atomic(partial / STATE_FILE, data.state.model_dump_json(indent=2) + "\n")


def _compute_digests_of_rank(partial: Path, world: World) -> checkpoint_files.Digests:
    """Flush a share of the files of a new checkpoint to the disk, and return the sizes and hashes of these files.

    The ranks share the files: with two ranks, each rank processes every second file.

    Args:
        partial: The partial folder of the checkpoint.
        world: The ranks (processes) that train together.
    """
    # Rank 0 takes the files 0, size, 2 * size and so on. Rank 1 takes the files 1, 1 + size and so on.
    names_of_rank = checkpoint_files.list_files(partial)[world.rank :: world.size]
    digests = {}
    for name in names_of_rank:
        fsync(partial / name)
        digests[name] = checkpoint_files.compute_digest(partial / name)
    return digests


def restore(folder: Path, parts: Parts, *, sharded: bool = False) -> TrainState:
    """Copy the tensors of a checkpoint into existing tensors.

    An imported model has a checkpoint of step 0 without optimizer tensors. In this case, the existing optimizer tensors
    are not changed.

    Args:
        folder: The checkpoint folder, which was verified before.
        parts: The tensors to fill, by part of the checkpoint ("model" or "optimizer") and by name.
        sharded: Whether each rank (process) holds only a shard (part) of each tensor. Then all ranks must call this
            function.

    Returns:
        The progress of the run.

    Raises:
        InputError: If the checkpoint does not fit the tensors.
    """
    state = read_state(folder)
    for part, tensors in parts.items():
        is_stored = (folder / part).exists()  # Each part of a checkpoint is a folder.
        if is_stored or state.step > 0:
            read_part(folder / part, tensors, sharded=sharded)
    return state


def load_model(path: Path | str, *, device: str = "cpu") -> TransformerLM:
    """Load the model of a run or of a checkpoint.

    All files of the checkpoint are verified before tensors are loaded. If the run was evaluated, the summary of the
    evaluation is logged.

    Args:
        path: A checkpoint folder, or a run folder. A run folder stands for the checkpoint with the lowest validation
            loss, or for the last checkpoint if there was no validation.
        device: The device of the model.

    Returns:
        The model in evaluation mode.

    Raises:
        InputError: If there is no valid checkpoint, or if a required plug-in is missing.
    """
    path = Path(path)
    folder = find_checkpoint(path)
    tensor_files = [file for file in folder.rglob("*.safetensors") if file.is_file()]
    total_bytes = sum(file.stat().st_size for file in tensor_files)
    if total_bytes > LOG_LOADING_ABOVE_BYTES:
        log.info(f"Verifying and loading {folder} ({total_bytes / 1e9:.1f} GB).")
    problem = checkpoint_files.find_corruption(folder)
    if problem is not None:
        raise InputError(f"{folder} is damaged: {problem}. Use another checkpoint of the run.")

    config = load_config(folder / CONFIG_FILE)
    is_inside_run = folder.parent.name == "checkpoints"
    run = folder.parent.parent if is_inside_run else path
    plugins.require_plugins(config.plugins, str(run))
    _check_size_matches_config(folder, config.model)
    model = TransformerLM(config.model)
    read_part(folder / "model", model_tensors(model), sharded=False)

    summary = checkpoint_files.extrapolation_summary(path)
    if summary is not None:
        log.info(f"{path}: {summary}.")
    return model.to(device).eval()


def _check_size_matches_config(folder: Path, config: ModelConfig) -> None:
    """Raise `InputError` if the config describes another model than the stored tensors.

    The check happens before the model is built. A wrong config could describe a model that does not fit into memory.

    Args:
        folder: The checkpoint folder.
        config: The settings of the model.
    """
    stored_shapes = _read_shapes(folder / "model")
    stored_count = sum(math.prod(shape) for shape in stored_shapes.values())
    if config.min_parameter_count > stored_count:
        raise InputError(
            f"{folder} holds {stored_count:,} weights, but a model of its config.json has at least "
            f"{config.min_parameter_count:,}. Use the config.json that belongs to the checkpoint."
        )
    with torch.device("meta"):  # Tensors on this device have shapes but no memory.
        expected_tensors = model_tensors(TransformerLM(config))
    _check_tensor_names_and_shapes(folder, stored_shapes, expected_tensors)


# ---- read and write the tensors of one part
#
# A part of a checkpoint ("model" or "optimizer") is a folder of safetensors files. If the tensors are not sharded, rank
# 0 writes one file with complete tensors. If the tensors are sharded, each rank writes one file with its shards, in the
# safetensors format of torch.distributed.checkpoint. Both kinds of files can be read into complete or sharded tensors.

UNSHARDED_FILE = "whole.safetensors"

Shapes = dict[str, tuple[int, ...]]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name. Tied weights are contained only once."""
    stored_names = model.state_dict().keys()  # `state_dict` leaves out buffers that are not persistent.
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored_names}
    return dict(model.named_parameters()) | buffers


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors. The hash includes their names, data types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        header = f"{name} {tensor.dtype} {tuple(tensor.shape)}\n"
        digest.update(header.encode())
        raw_bytes = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw_bytes.numpy().tobytes())
    return digest.hexdigest()


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters. Stored results contain it to identify the weights of the model."""
    return hash_tensors(dict(module.named_parameters()))


def _write_parts(partial: Path, data: CheckpointData, world: World) -> None:
    """Write all tensors of a checkpoint. All ranks must call this function.

    Args:
        partial: The partial folder of the checkpoint.
        data: The content of the checkpoint. If the tensors are sharded, each rank writes its shards. Otherwise rank 0
            writes all tensors.
        world: The ranks that train together.
    """
    for part, tensors in data.parts.items():
        if data.sharded:
            _write_shards(partial / part, tensors)
        elif world.is_main:
            (partial / part).mkdir()
            contiguous_tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            try:
                save_file(contiguous_tensors, partial / part / UNSHARDED_FILE)
            except SafetensorError as error:
                raise unwrap_os_error(error) from error


def read_part(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    """Copy the tensors of one part of a checkpoint into existing tensors.

    Args:
        folder: The folder of the part, such as step-000000200/model.
        tensors: The tensors to fill, by name.
        sharded: Whether each rank holds only a shard of `tensors`. Then all ranks must call this function.

    Raises:
        InputError: If the files cannot be read, or the names or shapes differ.
    """
    _check_tensor_names_and_shapes(folder, _read_shapes(folder), tensors)
    unsharded_path = folder / UNSHARDED_FILE
    try:
        if sharded or not unsharded_path.exists():
            _read_shards(folder, tensors, sharded=sharded)
            return
        with safe_open(unsharded_path, framework="pt") as file, torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise _unreadable_error(folder, error) from error


def _unreadable_error(folder: Path, error: BaseException) -> InputError:
    """Return the error for a folder whose safetensors files cannot be read."""
    return InputError(f"Cannot read the safetensors files in {folder} ({error}).")


def _read_shapes(folder: Path) -> Shapes:
    """Return the shapes of all tensors in one part of a checkpoint. The tensors themselves are not read.

    Args:
        folder: The folder of the part, such as step-000000200/model.
    """
    unsharded_path = folder / UNSHARDED_FILE
    try:
        if unsharded_path.exists():
            with safe_open(unsharded_path, framework="pt") as file:
                # `file` is not iterable, so `keys` is required.
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        # This import is slow, and only sharded checkpoints need it.
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise _unreadable_error(folder, error) from error
    # An entry that is not a tensor has no attribute `size`. It gets the shape of a scalar.
    return {name: tuple(getattr(entry, "size", ())) for name, entry in metadata.state_dict_metadata.items()}


def _check_tensor_names_and_shapes(folder: Path, stored_shapes: Shapes, expected: Mapping[str, Tensor]) -> None:
    """Raise `InputError` if the stored tensors have other names or shapes than the tensors of the model.

    Equal shapes are required because `Tensor.copy_` would broadcast a smaller tensor without an error.

    Args:
        folder: The folder of the checkpoint, for error messages.
        stored_shapes: The shapes of the stored tensors by name.
        expected: The tensors of the model by name.
    """
    # The operator ^ returns the names that are in only one of the two sets.
    differing_names = sorted(stored_shapes.keys() ^ expected.keys())
    if differing_names:
        examples = ", ".join(differing_names[:3])
        raise InputError(
            f"{folder} was written for another model: {examples} exists only in the checkpoint or only in the model."
        )
    for name, tensor in expected.items():
        expected_shape = tuple(tensor.shape)
        if stored_shapes[name] != expected_shape:
            raise InputError(
                f"{folder} was written for another model: expected {name} with shape {expected_shape}, got shape "
                f"{stored_shapes[name]}. Use the config.json that belongs to the checkpoint."
            )


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the shards (parts of tensors) of this rank with torch.distributed.checkpoint. All ranks must call this."""
    # These imports are slow, and only sharded checkpoints need them.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise OSError(str(error)) from error


def _read_shards(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    """Read the tensors of a part with torch.distributed.checkpoint.

    Args:
        folder: The folder of the part, such as step-000000200/model.
        tensors: The tensors to fill, by name.
        sharded: Whether `tensors` are shards. Then all ranks must call this function.
    """
    # These imports are slow, and only sharded checkpoints need them.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            # torch warns that torch.distributed is disabled, but `no_dist=True` is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, no_dist=not sharded)
    except CheckpointException as error:
        raise _unreadable_error(folder, error) from error
