"""Read and write safetensors files one tensor at a time, for models that are larger than the memory.

Files are read with the safetensors library. The library can only write all tensors at once, so this module writes the
file format itself: the length of the header in eight bytes, the header in JSON, then the numbers of all tensors.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainshort.errors import InputError
from trainshort.utils.io import atomic_replace, open_file, read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
COPY_AGAIN_HINT = "Copy the model folder again, with all its files."

# The names of the supported dtypes in safetensors files.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# The numbers of the first tensor start at a multiple of this number of bytes.
HEADER_ALIGNMENT = 8


class StoredWeights(Mapping[str, Tensor]):
    """The tensors in the safetensors files of a folder. Each tensor is read when it is requested.

    Args:
        folder: The folder of a Hugging Face model, with one safetensors file, or with several files and an index.

    Raises:
        InputError: If a file is missing or invalid, or if two files contain a tensor of the same name.
    """

    def __init__(self, folder: Path) -> None:
        """Open all safetensors files of a model folder. A model can be split into several files."""
        self.files = find_weight_files(folder)
        self._file_of_tensor: dict[str, Any] = {}  # The opened file that holds each tensor, by the name of the tensor.
        for path in self.files:
            opened_file, names = _open_safetensors(path)
            duplicates = sorted(self._file_of_tensor.keys() & names)
            if duplicates:
                raise InputError(f"Several files of {folder} contain the tensor {duplicates[0]}. {COPY_AGAIN_HINT}")
            for name in names:
                self._file_of_tensor[name] = opened_file

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._file_of_tensor[name].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise InputError(f"Cannot read the tensor {name} ({error}). {COPY_AGAIN_HINT}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of_tensor)

    def __len__(self) -> int:
        return len(self._file_of_tensor)


def _open_safetensors(path: Path) -> tuple[Any, list[str]]:
    """Open a safetensors file, and return the opened file and the names of its tensors."""
    # Rejects folders, named pipes and missing files with a clear message.
    with open_file(path, hint=COPY_AGAIN_HINT):
        pass
    try:
        opened_file: Any = safe_open(path, framework="pt")
        return opened_file, list(opened_file.keys())
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}). {COPY_AGAIN_HINT}") from None


def find_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: the files that its index lists, or the only file.

    Raises:
        InputError: If a file is missing, if the index is invalid, or if the index lists a file outside the folder.
    """
    index_path = folder / INDEX_FILE
    single_path = folder / SINGLE_FILE
    if not index_path.exists():
        if not single_path.exists():
            raise _no_weights_error(folder)
        return [single_path]

    # The index lists the file name of each tensor.
    weight_map = read_json_object(index_path, hint=COPY_AGAIN_HINT).get("weight_map")
    is_valid = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not is_valid or not weight_map:
        raise InputError(
            f"Invalid file {index_path}: weight_map must give the file name of each tensor. {COPY_AGAIN_HINT}"
        )
    file_names = sorted(set(weight_map.values()))
    for file_name in file_names:
        is_in_folder = Path(file_name).name == file_name  # False if the name contains a folder.
        if not is_in_folder or not file_name.endswith(".safetensors"):
            raise InputError(
                f"{index_path} lists the file {file_name!r}. Only safetensors files in the same folder are read."
            )
        if not (folder / file_name).exists():
            raise InputError(
                f"{folder} lacks {file_name}, one of the {len(file_names)} files that its index lists. "
                f"{COPY_AGAIN_HINT}"
            )
    return [folder / file_name for file_name in file_names]


def _no_weights_error(folder: Path) -> InputError:
    """Return the error for a folder without safetensors files. The message mentions pickled weights in the folder."""
    message = f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}."
    pickle_names = sorted(path.name for path in folder.glob("*.bin"))
    if pickle_names:
        message += (
            f" The file {pickle_names[0]} is a pickle, which can execute code and is not opened. "
            "Save the model as safetensors."
        )
    return InputError(message)


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    make_tensor: Callable[[str], Tensor],
    *,
    dtype: str = "F32",
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file. The tensors are created and written one at a time.

    Args:
        path: The file to write.
        shapes: The name and the shape of each tensor, in the order of the file.
        make_tensor: A function that returns the tensor of a name.
        dtype: The dtype of all tensors in the file, a key of `DTYPES`.
        metadata: Entries for the header of the file.

    Raises:
        InputError: If the file cannot be written.
    """
    header_bytes = _make_header(shapes, dtype, metadata)
    with atomic_replace(path) as partial, partial.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little"))
        file.write(header_bytes)
        for name, shape in shapes.items():
            tensor = make_tensor(name)
            tensor = tensor.to(DTYPES[dtype]).contiguous()
            assert tensor.shape == shape, name
            # A tensor without dimensions cannot be viewed as bytes.
            if tensor.dim() == 0:
                tensor = tensor.reshape(1)
            tensor_bytes = tensor.view(torch.uint8).numpy()
            file.write(tensor_bytes.data)


def _make_header(shapes: Mapping[str, tuple[int, ...]], dtype: str, metadata: dict[str, str] | None) -> bytes:
    """Return the JSON header of a safetensors file.

    The header lists the dtype, the shape, and the first and last byte of each tensor.

    Args:
        shapes: The name and the shape of each tensor, in the order of the file.
        dtype: The dtype of all tensors, a key of `DTYPES`.
        metadata: Texts that are stored in the header, or None.
    """
    header: dict[str, Any] = {}
    if metadata is not None:
        header["__metadata__"] = metadata
    start = 0
    for name, shape in shapes.items():
        num_bytes = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        end = start + num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces at the end of the header.
    num_spaces = -len(header_bytes) % HEADER_ALIGNMENT
    return header_bytes + b" " * num_spaces
