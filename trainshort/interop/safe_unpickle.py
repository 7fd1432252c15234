"""Read pickled PyTorch checkpoints without executing code from the file.

A pickle can name any Python function, and loading the pickle calls the function. PyTorch's `weights_only` loader calls
only functions that rebuild tensors. Checkpoints of fairseq contain a few other classes, for example an
`argparse.Namespace` with the settings. These classes are replaced by stubs, which store their arguments and do nothing
else. The real classes are never imported. A file that names any other class is rejected.
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

PICKLE_HINT = "Give the original checkpoint file."

# The largest number of characters of PyTorch's error message that are shown to the user.
MAX_CAUSE_LENGTH = 160

STUB_CLASS_NAMES = re.compile(
    r"argparse\.Namespace|numpy\.dtype|numpy\.(_core|core)\.multiarray\.scalar|(omegaconf|fairseq)\.[\w.]+"
)
"""The classes that checkpoints of all fairseq versions contain. They are replaced by stubs."""

# A file of PyTorch before 1.6 begins with five pickles. The numbers of the tensors follow without a pickle.
NUM_LEGACY_PICKLES = 5


class UnpickleStub:
    """Replaces a class that a checkpoint names. The stub stores what the pickle passes to the class.

    Attributes:
        arguments: The arguments of the constructor.
        state: The attributes of the object, or None if the pickle sets no attributes.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(path: Path) -> dict[str, Any]:
    """Read a PyTorch checkpoint without executing code from the file.

    Args:
        path: The checkpoint file, in the current or the legacy format of PyTorch.

    Returns:
        The content of the checkpoint. Objects of the classes in `STUB_CLASS_NAMES` are `UnpickleStub` objects.

    Raises:
        InputError: If the file is not a PyTorch checkpoint, or if it names a class that is not allowed.
    """
    # Rejects folders, named pipes and missing files with a clear message.
    with open_file(path, hint=PICKLE_HINT):
        pass
    try:
        checkpoint = _load_with_stubs(path)
    except MemoryError:
        raise InputError(f"Not enough memory to read {path}. {PICKLE_HINT}") from None
    except Exception as error:  # A corrupted or malicious file can make the loader fail with any exception.
        raise _read_error(path, error) from None
    if not isinstance(checkpoint, dict):
        type_name = type(checkpoint).__name__
        raise InputError(f"Invalid checkpoint {path}: expected a dictionary, got {type_name}. {PICKLE_HINT}")
    return checkpoint


def _load_with_stubs(path: Path) -> Any:
    """Load a checkpoint with PyTorch's `weights_only` loader, and replace the classes of fairseq by stubs.

    A stub only stores the arguments and the attributes of an object. No code of the original class is executed.
    """
    is_zip = zipfile.is_zipfile(path)
    class_names = _class_names_in_zip(path) if is_zip else _class_names_in_legacy_file(path)
    stubs: list[Any] = []
    for class_name in class_names:
        if STUB_CLASS_NAMES.fullmatch(class_name):
            short_name = class_name.rpartition(".")[2]
            stub_class = type(short_name, (UnpickleStub,), {})  # a new subclass of UnpickleStub
            stubs.append((stub_class, class_name))
    # Inside this context, the loader accepts the class names and creates the stubs instead.
    with torch.serialization.safe_globals(stubs):
        # Only zip files can be memory-mapped.
        return torch.load(path, weights_only=True, map_location="cpu", mmap=is_zip or None)


def _read_error(path: Path, error: Exception) -> InputError:
    """Return the error for a file that PyTorch's loader rejected: an unsafe checkpoint, or not a checkpoint at all."""
    # The loader names a class that is not allowed as "GLOBAL os.system".
    forbidden_class = re.search(r"GLOBAL (\S+)", str(error))
    if forbidden_class is not None:
        return InputError(
            f"Unsafe checkpoint: {path} names {forbidden_class[1]}, and no fairseq checkpoint does. "
            "Nothing was executed."
        )
    # Messages of the loader can be long and have several lines.
    one_line_message = re.sub(r"\s+", " ", str(error)).strip()
    cause = one_line_message[:MAX_CAUSE_LENGTH] or type(error).__name__
    return InputError(f"{path} is not a PyTorch checkpoint ({cause}). {PICKLE_HINT}")


def _class_names_in_zip(path: Path) -> list[str]:
    """Return the classes and functions that a checkpoint of PyTorch 1.6 or later names, without loading the file."""
    with zipfile.ZipFile(path) as archive:
        # PyTorch never compresses. A compressed file could be a zip bomb, which expands to an enormous size.
        for entry in archive.infolist():
            if entry.file_size > entry.compress_size:
                raise ValueError("the zip file is compressed, but PyTorch never compresses checkpoints")
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))


def _class_names_in_legacy_file(path: Path) -> list[str]:
    """Return the classes and functions that a checkpoint of PyTorch before 1.6 names, without loading the file."""
    class_names = set()
    with open_file(path, hint=PICKLE_HINT) as file:
        for _ in range(NUM_LEGACY_PICKLES):
            # `genops` lists the instructions of one pickle without running them.
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":
                    # The argument is the module and the class, separated by a space.
                    class_names.add(str(argument).replace(" ", ".", 1))
                elif opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                    # These opcodes name classes in other ways.
                    raise pickle.UnpicklingError(f"the file uses the opcode {opcode.name}, which PyTorch never writes")
    return sorted(class_names)


def is_stored(tensor: torch.Tensor) -> bool:
    """Return whether a file contains all numbers of a tensor.

    A small file can claim to contain a huge tensor: a meta tensor has no numbers, and a tensor with stride 0 repeats
    the same numbers. Both are rejected.
    """
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def unwrap_stub(value: Any) -> Any:
    """Return the content of an `UnpickleStub`, or `value` itself if it is not a stub.

    A stub takes the place of an object whose class must not be loaded from a checkpoint.

    For example, the content of the stub of an `argparse.Namespace` is the dictionary of its settings.
    """
    if not isinstance(value, UnpickleStub):
        return value
    if value.state is not None:
        return value.state
    return value.arguments
