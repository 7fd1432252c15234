"""PyTorch's pickled checkpoints, read without executing anything that is in them.

A pickle is a program: it names functions and calls them. torch's `weights_only` reader calls nothing but what rebuilds
tensors, and fairseq's checkpoints name a few classes more (their settings are an `argparse.Namespace`, their meters
hold numpy numbers). Those names, and no others, are given stand-ins of ours that only keep what they are called with;
the classes they mean are never imported. A file that names anything else is refused, by that name.
"""

import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainshort.errors import InputError
from trainshort.utils.io import open_file

MEND = "Give the checkpoint as it was saved."

STAND_INS = re.compile(
    r"argparse\.Namespace|numpy\.dtype|numpy\.(_core|core)\.multiarray\.scalar|(omegaconf|fairseq)\.[\w.]+"
)
"""Names that a checkpoint of fairseq can hold, in any of its versions."""

LEGACY_PICKLES = 5
"""Pickles at the beginning of a file of torch before 1.6; raw numbers follow."""


class UnpickleStub:
    """Takes the place of a class that a checkpoint names; it keeps what it is given and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content: tensors, plain values, and stand-ins for the rest."""
    with open_file(path, hint=MEND):  # a regular file, or a sentence
        pass
    try:
        zipped = zipfile.is_zipfile(path)
        names = filter(STAND_INS.fullmatch, _names_in_zip(path) if zipped else _names_in_legacy(path))
        stand_ins: list[Any] = [(type(name.rpartition(".")[2], (UnpickleStub,), {}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            values = torch.load(path, weights_only=True, map_location="cpu", mmap=zipped or None)
    except MemoryError:
        raise InputError(f"{path} asks for more memory than there is. {MEND}") from None
    except Exception as error:  # a damaged or hostile file can make the reader fail in any way it likes
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            raise InputError(f"{path} names {name[1]}, and no fairseq checkpoint does. Nothing was executed.") from None
        first = re.sub(r"\s+", " ", str(error)).strip()[:160]
        raise InputError(f"{path} is not a checkpoint of torch ({first or type(error).__name__}). {MEND}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a {type(values).__name__}, and a checkpoint is a dictionary. {MEND}")
    return values


def _names_in_zip(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        if any(entry.file_size > entry.compress_size for entry in archive.infolist()):
            raise ValueError("its parts are compressed, which torch never does")
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))


def _names_in_legacy(path: Path) -> list[str]:
    """Names in the pickles before the raw numbers."""
    found = set()
    with open_file(path, hint=MEND) as file:
        for _ in range(LEGACY_PICKLES):
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":
                    found.add(str(argument).replace(" ", ".", 1))
                elif opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                    raise pickle.UnpicklingError(f"it uses {opcode.name}, which torch never writes")
    return sorted(found)


def is_stored(tensor: torch.Tensor) -> bool:
    """Whether a file holds all numbers of a tensor: not of one without any (meta), and not of one whose few numbers
    stand for many (strides of 0), by which a kilobyte can claim to be a gigabyte."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def plain(value: Any) -> Any:
    """A stand-in's content: a Namespace is its settings, anything else what it was made of."""
    if not isinstance(value, UnpickleStub):
        return value
    return value.state if value.state is not None else value.arguments
