"""Find bugs of Hugging Face model classes with ALiBi by running small copies of them.

`doctor` accepts a loaded model, a folder, or a name on the Hugging Face hub. For a folder or a name, it reads only the
config and the names of the tensors. It never executes code that comes with a model.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainshort.errors import InputError
from trainshort.evaluate.hf_target import check_settings
from trainshort.interop.doctor.probes import PROBES, Finding
from trainshort.interop.doctor.tiny_model import TinyModelBuilder
from trainshort.interop.import_model import download_snapshot, read_model_type
from trainshort.interop.patch import get_patch_report
from trainshort.interop.patch.families import FAMILIES, original_class
from trainshort.interop.safetensors_io import StoredWeights
from trainshort.utils.io import read_json_object
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import first_sentence_of

DOWNLOADED_FILES = ("config.json", "*.index.json")
"""The files that are downloaded for a model on the Hugging Face hub."""

EXAMINATION_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ImportError, OSError, RuntimeError)
"""The exceptions that a model class may raise for a config that it does not support."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        model: The class name of the model.
        dtype: The data type of the weights.
        transformers: The installed version of transformers.
        findings: The bugs that were found.
        notes: Remarks that do not report a bug.
    """

    model: str
    dtype: str
    transformers: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no bug was found."""
        return not self.findings

    def to_json(self) -> str:
        """Return the diagnosis as a JSON object."""
        return json.dumps({"healthy": self.ok, **asdict(self)}, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """Return a title with the number of findings (bugs), then one line for each finding and for each note."""
        if self.ok:
            result = "no problems found"
        elif len(self.findings) == 1:
            result = "1 problem found"
        else:
            result = f"{len(self.findings)} problems found"
        title = f"{self.model} in {self.dtype}, transformers {self.transformers}: {result}."
        findings = [str(finding) for finding in self.findings]
        notes = [f"Note: {note}." for note in self.notes]
        return "\n".join([title, *findings, *notes])


def doctor(model: nn.Module | str | Path) -> Diagnosis:
    """Examine whether a Hugging Face model class computes ALiBi correctly.

    A small copy of the model with random weights is run. The model itself is not run and not changed.

    Args:
        model: A loaded model of transformers, the folder of a saved model, or the name of a model on the hub.

    Returns:
        The bugs that were found, each with a fix. `print(diagnosis)` shows one line for each.

    Raises:
        InputError: If the model is not a causal language model of transformers, or if no copy of it can be run.

    Example:
        >>> print(trainshort.doctor("bigscience/bloom-560m"))
    """
    require_package("transformers", "Examining Hugging Face models", "trainshort[hf]")
    with _quiet_transformers():
        if isinstance(model, nn.Module):
            builder = _make_builder_of_loaded_model(model)
        else:
            builder = _make_builder_of_saved_model(str(model))
        findings = _run_probes(builder)
    dtype_name = str(builder.dtype).removeprefix("torch.")
    version = metadata.version("transformers")
    return Diagnosis(builder.model_class.__name__, dtype_name, version, findings, _make_notes(builder))


def _run_probes(builder: TinyModelBuilder) -> tuple[Finding, ...]:
    """Run all checks on small copies of a model and return the findings, which are the bugs of its class.

    Args:
        builder: Builds small copies of the examined model, with random weights.

    Raises:
        InputError: If a copy cannot be built or run.
    """
    findings: list[Finding] = []
    try:
        for probe in PROBES:  # A probe is a function that checks for one kind of bug.
            findings.extend(probe(builder))
    except InputError:
        raise  # InputError is a subclass of ValueError. Its message is already complete.
    except EXAMINATION_ERRORS as error:
        reason = f"{type(error).__name__}: {first_sentence_of(error)}"
        raise InputError(f"Cannot run a small copy of this {builder.model_class.__name__} ({reason}).") from error
    return tuple(findings)


def _make_notes(builder: TinyModelBuilder) -> tuple[str, ...]:
    """Return remarks about a model that do not report a bug. Each remark is a clause without a period.

    Args:
        builder: Holds the config of the examined model, and its patch report if `trainshort.patch` changed the model.
    """
    notes = []
    if builder.patch_report is not None:
        notes.append("the model is patched")
    if builder.model_type == "falcon" and builder.config.alibi:
        notes.append("Falcon divides the ALiBi slopes by the square root of the head width, in training as well")
    elif builder.model_type in FAMILIES and not builder.has_known_alibi:
        notes.append("the checks of ALiBi were skipped, because the config disables ALiBi")
    elif builder.model_type not in FAMILIES and builder.model_type != "trainshort":
        notes.append("the checks of ALiBi were skipped, because this class of transformers has no ALiBi")
    return tuple(notes)


def _make_builder_of_loaded_model(model: nn.Module) -> TinyModelBuilder:
    """Return a builder of small copies of a model in memory.

    Args:
        model: The model of transformers, or a wrapper of it such as a peft model.

    Raises:
        InputError: If there is no model of transformers, or if the model is not a causal language model.
    """
    from transformers import PreTrainedModel

    pretrained_model = None
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            pretrained_model = module
            break
    if pretrained_model is None:
        raise InputError(f"Expected a model of transformers, its folder or its name, got {type(model).__name__}.")
    model_class = original_class(pretrained_model)
    if not pretrained_model.can_generate():
        raise InputError(f"{model_class.__name__} is not a causal language model. Pass the model with its head.")
    slope_buffers = {}
    for name, buffer in pretrained_model.named_buffers():
        if name.endswith("slopes"):
            slope_buffers[name] = buffer.detach().cpu()
    return TinyModelBuilder(
        model_type=pretrained_model.config.model_type,
        model_class=model_class,
        config=pretrained_model.config,
        dtype=pretrained_model.dtype,
        implementation=pretrained_model.config._attn_implementation,
        patch_report=get_patch_report(pretrained_model),
        slope_buffers=slope_buffers,
    )


def _make_builder_of_saved_model(name: str) -> TinyModelBuilder:
    """Return a builder of small copies of a saved model. Only its config and the names of its tensors are read.

    Args:
        name: The folder of the model, or its name on the Hugging Face hub.

    Raises:
        InputError: If transformers has no causal language model for the config, or if the config is invalid.
    """
    from transformers import AutoModelForCausalLM

    path = Path(name).expanduser()
    if path.is_file():
        raise InputError(f"Expected the folder of a Hugging Face model or its name on the hub, got the file {name}.")
    folder = path if path.is_dir() else download_snapshot(name, DOWNLOADED_FILES)
    settings = read_json_object(folder / "config.json", hint="Give the folder of a saved Hugging Face model.")
    model_type = read_model_type(settings, folder)
    if model_type is None:
        raise InputError(f"{folder} is a run folder of trainshort. doctor examines Hugging Face models.")
    check_settings(name, settings)
    if model_type == "trainshort":
        import trainshort.hf  # noqa: F401  (registers the class with transformers)

    config = _load_config(name, folder, model_type)
    model_classes: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in model_classes:
        raise InputError(f"transformers has no causal language model of type {model_type!r}. doctor requires one.")
    _check_sizes(folder / "config.json", config)

    weight_names: frozenset[str] = frozenset()
    if any(folder.glob("*.safetensors")):
        weight_names = frozenset(StoredWeights(folder))
    return TinyModelBuilder(
        model_type=str(model_type),
        model_class=model_classes[type(config)],
        config=config,
        dtype=config.dtype or torch.float32,
        weight_names=weight_names,
    )


def _load_config(name: str, folder: Path, model_type: str) -> Any:
    """Load the config of a model with transformers, without executing code from the folder.

    Args:
        name: The folder or the hub name as the user gave it, for the error message.
        folder: The folder of the model.
        model_type: The `model_type` in its `config.json`.

    Raises:
        InputError: If transformers does not support the model type or the config is invalid.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # The checks of transformers raise many kinds of exceptions.
        reason = first_sentence_of(error)
        if model_type in CONFIG_MAPPING:
            raise InputError(
                f"transformers cannot read {folder / 'config.json'} ({reason}). Fix the file or save it again."
            ) from None
        raise InputError(
            f"transformers does not support {name}, a model of type {model_type!r} ({reason}). "
            "`trainshort import` may support it."
        ) from None


def _check_sizes(path: Path, config: Any) -> None:
    """Raise `InputError` if a size in a config is invalid. A small copy would hide such an error.

    Args:
        path: The config file, for the error message.
        config: The loaded config.
    """
    hint = "Fix the file or save the model again."
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise InputError(f"Invalid config {path}: {name} must be positive, got {size}. {hint}")

    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    has_head_dim = getattr(config, "head_dim", None) is not None
    if heads and width and not has_head_dim and width % heads != 0:
        raise InputError(f"Invalid config {path}: {heads} heads do not divide the width {width}. {hint}")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Context manager: disable the warnings and progress bars of transformers. At the end, restore the settings."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    has_progress_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bars:
            logging.enable_progress_bar()
