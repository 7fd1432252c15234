"""Tensors to safetensors files and back, of one process or of many.

A part of a checkpoint (model, optimizer) is a folder of safetensors files: one file with whole tensors when a single
process, or one of several equal ones, writes; one file per rank with that rank's shards when they are spread out
(torch's distributed checkpoint, in its safetensors form). Reading is the same for both, into tensors that are whole or
spread over any number of ranks.
"""

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainshort.errors import InputError
from trainshort.files import refused

WHOLE = "whole.safetensors"

Shapes = dict[str, tuple[int, ...]]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored buffers, each once: tied weights have one name and are one tensor again when read."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def sha256_of(tensors: Mapping[str, Tensor], first: bytes = b"") -> str:
    """sha256 of `first` and of all tensors by name, with type, shape and every byte."""
    digest = hashlib.sha256(first)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    """Write one part. With `sharded`, all ranks call this and each writes its shards."""
    if sharded:
        _write_shards(folder, tensors)
        return
    folder.mkdir(exist_ok=True)
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / WHOLE)
    except SafetensorError as error:
        raise refused(error) from error


def read(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    """Fill `tensors` in place from one part. With `sharded`, all ranks call this and each reads its shards."""
    refuse_others(folder, shapes(folder), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    try:
        if sharded or not (folder / WHOLE).exists():
            _read_shards(folder, tensors, sharded=sharded)
            return
        with safe_open(folder / WHOLE, framework="pt") as file, torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder} cannot be read as safetensors ({error}).") from error


def shapes(folder: Path) -> Shapes:
    """Names and shapes of the tensors in a part, without reading one."""
    try:
        if (folder / WHOLE).exists():
            with safe_open(folder / WHOLE, framework="pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{folder} cannot be read as safetensors ({error}).") from error
    return {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}


def refuse_others(folder: Path, found: Shapes, wanted: Shapes) -> None:
    """Stop if the stored tensors are not those of this model, by name or by shape (a copy would repeat one value)."""
    if odd := sorted(found.keys() ^ wanted.keys()):
        raise InputError(f"{folder} was written for another model: {', '.join(odd[:3])} is on one side only.")
    for name, shape in wanted.items():
        if found[name] != shape:
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
