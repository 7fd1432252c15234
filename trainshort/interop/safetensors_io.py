"""Safetensors read and written a tensor at a time, so that a model larger than memory can pass through.

Reading is the safetensors library's, which checks headers before it believes them. Writing is ours, because the library
wants all tensors at once: eight bytes of length, a JSON header, then the numbers in the header's order.
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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MEND = "Copy the model's folder again, with all its files."
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a folder of safetensors, in one file or in several; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.files = weight_files(folder)
        self._file: dict[str, Any] = {}
        for path in self.files:
            with open_file(path, hint=MEND):  # a regular file, or a sentence
                pass
            try:
                opened = safe_open(path, framework="pt")
                names = list(opened.keys())
            except (SafetensorError, OSError, RuntimeError, ValueError) as error:
                raise InputError(f"{path} cannot be read as safetensors ({error}). {MEND}") from None
            if twice := self._file.keys() & names:
                raise InputError(f"The tensor {sorted(twice)[0]} is in more than one file of {folder}. {MEND}")
            self._file |= dict.fromkeys(names, opened)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._file[name].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise InputError(f"The tensor {name} cannot be read ({error}). {MEND}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder: all that its index names, or the only one."""
    if not (folder / INDEX).exists():
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        also = (
            f" It has {pickled[0]}, a pickle, which can execute code and is not opened; save it as safetensors."
            if pickled
            else ""
        )
        raise InputError(f"{folder} has no {SINGLE} and no {INDEX}.{also}")
    table = read_json_object(folder / INDEX, hint=MEND).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise InputError(f"{folder / INDEX} should say under weight_map which file each tensor is in. {MEND}")
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{folder / INDEX} names the file {name!r}; only safetensors beside it are read.")
        if not (folder / name).exists():
            raise InputError(f"{folder} lacks {name}, one of the {len(names)} files its index names. {MEND}")
    return [folder / name for name in names]


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    make: Callable[[str], Tensor],
    *,
    dtype: str = "F32",
    metadata: dict[str, str] | None = None,
) -> None:
    """A safetensors file of tensors that are made one after the other."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    size, end = DTYPES[dtype].itemsize, 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_replace(path) as partial, partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = make(name).to(DTYPES[dtype]).contiguous()
            assert tensor.shape == shape, name
            file.write(
                tensor.view(torch.uint8).numpy().data
                if tensor.dim()
                else tensor.reshape(1).view(torch.uint8).numpy().data
            )
