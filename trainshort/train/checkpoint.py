"""Checkpoints: safetensors and JSON, whole or not there, verified before use.

    step-000000200/
      manifest.json    sha256 of every file below; written last
      state.json       step, sums, best loss
      config.json      the run's settings, so that a checkpoint can be read by itself
      model/           *.safetensors
      optimizer/       *.safetensors

A save writes a new folder beside, brings it to the disk, then renames it. So whatever stops a save, the checkpoints
before it are untouched, and what is there is complete. A file that changed later is found by its sha256.
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
    STATE,
    TrainState,
    best,
    find_checkpoint,
    is_hugging_face,
    latest,
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
    "best",
    "find_checkpoint",
    "fingerprint",
    "is_hugging_face",
    "latest",
    "load_model",
    "model_tensors",
    "read_state",
    "restore",
    "save",
    "sha256_of",
]

CONFIG = "config.json"
LOG_LOADING_ABOVE_BYTES = 250 * 10**6
"""Bytes from which loading takes seconds, so that it is told."""

Parts = dict[str, dict[str, Tensor]]
"""Tensors by part (model, optimizer) and name."""


@dataclass(frozen=True)
class CheckpointData:
    """What a run is made of at one moment: settings, counters, and tensors."""

    config: RunConfig
    state: TrainState
    parts: Parts
    sharded: bool = False


def save(run: Path, snapshot: CheckpointData, world: World) -> Path:
    """Add a checkpoint to a run; all ranks call this. Returns its folder."""
    folder = run / "checkpoints" / checkpoint_files.name(snapshot.state.step)
    if world.broadcast_from_rank0(folder.exists):
        return folder  # the same step of the same run: the same content
    hint = "The checkpoints before it are intact; make room there, then go on by --resume."
    partial, guarded = checkpoint_files.partial_path(folder), translate_os_errors("save", folder, hint)
    try:
        world.on_main(guarded(lambda: _begin(partial, snapshot)))
        world.run_on_all_ranks(guarded(lambda: _write(partial, snapshot, world)))
        mine = world.run_on_all_ranks(guarded(lambda: _digests(partial, world)))
        digests = {name: value for share in world.all_gather_objects(mine) for name, value in share.items()}
        world.on_main(guarded(lambda: checkpoint_files.finalize_checkpoint(folder, digests)))
    except BaseException:
        if world.main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _begin(partial: Path, snapshot: CheckpointData) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    save_config(snapshot.config, partial / CONFIG)
    write_atomic(partial / STATE, snapshot.state.model_dump_json(indent=2) + "\n")


def _digests(partial: Path, world: World) -> checkpoint_files.Digests:
    """sha256 of this rank's share of the files, which are brought to the disk on the way."""
    share = {}
    for name in checkpoint_files.files_of(partial)[world.rank :: world.size]:
        fsync(partial / name)
        share[name] = checkpoint_files.digest_of(partial / name)
    return share


def restore(folder: Path, parts: Parts, *, sharded: bool = False) -> TrainState:
    """Fill tensors in place from a checkpoint that was found whole, and return its state.

    A model that was imported has been updated by nobody here, and has no optimizer part.
    """
    state = read_state(folder)
    for part, values in parts.items():
        if state.step or (folder / part).exists():
            read_part(folder / part, values, sharded=sharded)
    return state


def load_model(path: Path | str, *, device: str = "cpu") -> TransformerLM:
    """The model of a run (its best checkpoint by validation loss, else its last) or of one checkpoint, ready to use.

    Nothing is loaded before every byte of the checkpoint has been verified. How far a run's model is good is said on
    standard error, where that was measured.
    """
    path = Path(path)
    folder = find_checkpoint(path)
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors") if file.is_file())
    if size > LOG_LOADING_ABOVE_BYTES:
        log.info(f"Verifying and loading {folder} ({size / 1e9:.1f} GB).")
    if problem := checkpoint_files.find_corruption(folder):
        raise InputError(f"{folder} is damaged: {problem}. Use another checkpoint of the run.")
    config = load_config(folder / CONFIG)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else path  # whose config.json the reader knows
    plugins.require_plugins(config.plugins, str(run))
    _check_size_matches_config(folder, config.model)
    model = TransformerLM(config.model)
    read_part(folder / "model", model_tensors(model), sharded=False)
    if line := checkpoint_files.extrapolation_summary(path):
        log.info(f"{path}: {line}.")
    return model.to(device).eval()


def _check_size_matches_config(folder: Path, config: ModelConfig) -> None:
    """Stop before a model is built that is larger than the weights beside its settings."""
    shapes = _shapes_of(folder / "model")
    stored = sum(math.prod(shape) for shape in shapes.values())
    if config.min_parameter_count > stored:
        raise InputError(
            f"{folder} holds {stored:,} weights, but a model of its config.json has at least "
            f"{config.min_parameter_count:,}. Use the config.json that belongs to it."
        )
    with torch.device("meta"):  # nothing is allocated
        wanted = model_tensors(TransformerLM(config))
    _check_tensor_names_and_shapes(folder, shapes, wanted)


# ---- tensors to safetensors files and back, of one process or of many
#
# A part of a checkpoint (model, optimizer) is a folder of safetensors files: one file with whole tensors when a single
# process, or one of several equal ones, writes; one file per rank with that rank's shards when they are spread out
# (torch's distributed checkpoint, in its safetensors form). Reading is the same for both, into tensors that are whole
# or spread over any number of ranks.

UNSHARDED_FILE = "whole.safetensors"

Shapes = dict[str, tuple[int, ...]]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored buffers, each once: tied weights have one name and are one tensor again when read."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of all tensors by name, with type, shape and every byte."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint(module: nn.Module) -> str:
    """sha256 of all weights, so that results of other weights are never mixed up with these."""
    return sha256_of(dict(module.named_parameters()))


def _write(partial: Path, snapshot: CheckpointData, world: World) -> None:
    """Write all parts; every rank calls this. Each writes its shards, or else the first writes all."""
    for part, tensors in snapshot.parts.items():
        if snapshot.sharded:
            _write_shards(partial / part, tensors)
        elif world.main:
            (partial / part).mkdir()
            try:
                save_file(
                    {n: tensor.detach().contiguous() for n, tensor in tensors.items()}, partial / part / UNSHARDED_FILE
                )
            except SafetensorError as error:
                raise unwrap_os_error(error) from error


def read_part(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    """Fill `tensors` in place from one part. With `sharded`, all ranks call this and each reads its shards."""
    _check_tensor_names_and_shapes(folder, _shapes_of(folder), tensors)
    try:
        if sharded or not (folder / UNSHARDED_FILE).exists():
            _read_shards(folder, tensors, sharded=sharded)
            return
        with safe_open(folder / UNSHARDED_FILE, framework="pt") as file, torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder} cannot be read as safetensors ({error}).") from error


def _shapes_of(folder: Path) -> Shapes:
    """Names and shapes of the tensors in a part, without reading one."""
    try:
        if (folder / UNSHARDED_FILE).exists():
            with safe_open(folder / UNSHARDED_FILE, framework="pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{folder} cannot be read as safetensors ({error}).") from error
    return {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}


def _check_tensor_names_and_shapes(folder: Path, found: Shapes, wanted: Mapping[str, Tensor]) -> None:
    """Stop if the stored tensors are not those of this model, by name or by shape (a copy would repeat one value)."""
    if odd := sorted(found.keys() ^ wanted.keys()):
        raise InputError(f"{folder} was written for another model: {', '.join(odd[:3])} is on one side only.")
    for name, tensor in wanted.items():
        if found[name] != (shape := tuple(tensor.shape)):
            raise InputError(
                f"{folder} was written for another model: {name} has shape {found[name]} there, and {shape} by the "
                "settings. Use the config.json that belongs to it."
            )


# torch's distributed checkpoint takes longer to import than a small model to load, so only those who need it do.


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise OSError(str(error)) from error


def _read_shards(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is what no_dist asks for
            load(dict(tensors), storage_reader=reader, no_dist=not sharded)
    except CheckpointException as error:
        raise InputError(f"{folder} cannot be read as safetensors ({error}).") from error
