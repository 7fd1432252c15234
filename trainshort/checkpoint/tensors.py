"""Tensors to safetensors files and back, of one process or of many.

A part of a checkpoint (model, optimizer) is a folder of safetensors files: one file with whole tensors when a single
process, or one of several equal ones, writes; one file per rank with that rank's shards when they are spread out
(torch's distributed checkpoint, in its safetensors form). Reading is the same for both, into tensors that are whole or
spread over any number of ranks.
"""

import warnings
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainshort.errors import InputError


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored buffers, each once: tied weights have one name and are one tensor again when read."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def write(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    """Write one part. With `sharded`, all ranks call this and each writes its shards."""
    if sharded:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        return
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "whole.safetensors")


def read(folder: Path, tensors: dict[str, Tensor], *, sharded: bool) -> None:
    """Fill `tensors` in place from one part. With `sharded`, all ranks call this and each reads its shards."""
    try:
        reader = HuggingFaceStorageReader(str(folder))
        names = reader.read_metadata().state_dict_metadata.keys()
        if names != tensors.keys():
            odd = sorted(names ^ tensors.keys())
            raise InputError(f"{folder} was written for another model: {', '.join(odd[:3])} is on one side only.")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is what no_dist asks for
            load(dict(tensors), storage_reader=reader, no_dist=not sharded)
    except (SafetensorError, CheckpointException) as error:
        raise InputError(f"{folder} cannot be read as safetensors ({error}).") from error
