"""`doctor(model)`: what a Hugging Face model of ALiBi's gets wrong, found by running a tiny copy of it.

Takes a loaded model, a folder, or a name on the hub; of the latter two only the settings and the names of the tensors
are read. Nothing that comes with a model is executed.
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
from trainshort.interop.doctor.tiny_model import TinyModel
from trainshort.interop.import_model import download_snapshot, read_model_type
from trainshort.interop.patch import get_patch_report
from trainshort.interop.patch.families import FAMILIES, original_class
from trainshort.interop.safetensors_io import StoredWeights
from trainshort.utils.io import read_json_object
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import first_sentence_of

SETTINGS = ("config.json", "*.index.json")
"""What is fetched of a model on the hub."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    model: str
    dtype: str
    transformers: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What is worth knowing and not wrong."""

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_json(self) -> str:
        return json.dumps({"healthy": self.ok, **asdict(self)}, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        count = len(self.findings)
        verdict = "healthy" if self.ok else f"{count} finding{'s' if count > 1 else ''}"
        head = f"{self.model} in {self.dtype}, transformers {self.transformers}: {verdict}."
        return "\n".join([head, *map(str, self.findings), *(f"Note: {note}." for note in self.notes)])


def doctor(model: nn.Module | str | Path) -> Diagnosis:
    """Examine a model: a loaded one, the folder of a saved one, or a name on the hub."""
    require_package("transformers", "Examining Hugging Face models", "trainshort[hf]")
    with _quiet():
        case = _loaded(model) if isinstance(model, nn.Module) else _stored(str(model))
        try:
            findings = tuple(finding for probe in PROBES for finding in probe(case))
        except InputError:
            raise
        except (TypeError, ValueError, AttributeError, LookupError, ImportError, OSError, RuntimeError) as error:
            why = f"{type(error).__name__}: {first_sentence_of(error)}"
            raise InputError(f"No copy of this {case.model_class.__name__} could be examined ({why}).") from error
    name = str(case.dtype).removeprefix("torch.")
    return Diagnosis(case.model_class.__name__, name, metadata.version("transformers"), findings, _notes(case))


def _notes(case: TinyModel) -> tuple[str, ...]:
    notes = []
    if case.patched is not None:
        notes.append("the model is patched")
    if case.kind == "falcon" and case.config.alibi:
        notes.append("Falcon's slopes are ALiBi's divided by the root of the heads' width, as it was trained")
    elif case.kind in FAMILIES and not FAMILIES[case.kind].has_alibi(case.config):
        notes.append("what concerns ALiBi was not examined: its settings have none")
    elif case.kind not in FAMILIES and case.kind != "trainshort":
        notes.append("what concerns ALiBi was not examined: transformers' class has none")
    return tuple(notes)


def _loaded(model: nn.Module) -> TinyModel:
    """A model in memory; a wrapper such as peft's is looked through."""
    from transformers import PreTrainedModel

    whole = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if whole is None:
        raise InputError(
            f"doctor takes a model of transformers, its folder or its name; this is a {type(model).__name__}."
        )
    kind = original_class(whole)
    if not whole.can_generate():
        raise InputError(f"{kind.__name__} has no logits for every token; give the causal language model.")
    slopes = {name: value.detach().cpu() for name, value in whole.named_buffers() if name.endswith("slopes")}
    return TinyModel(
        whole.config.model_type,
        kind,
        whole.config,
        dtype=whole.dtype,
        implementation=whole.config._attn_implementation,
        patched=get_patch_report(whole),
        slopes=slopes,
    )


def _stored(name: str) -> TinyModel:
    """A folder, or a name on the hub: its settings and the names of its tensors."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    path = Path(name).expanduser()
    if path.is_file():
        raise InputError(f"{name} is a file; give the folder of a saved Hugging Face model, or its name on the hub.")
    folder = path if path.is_dir() else download_snapshot(name, SETTINGS)
    settings = read_json_object(folder / "config.json", hint="Give the folder of a saved Hugging Face model.")
    kind = read_model_type(settings, folder)
    if kind is None:
        raise InputError(f"{folder} is a run folder of trainshort; doctor examines models of Hugging Face.")
    check_settings(name, settings)
    if kind == "trainshort":
        import trainshort.hf  # noqa: F401  (registers the class)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of its many checks of a config, each with an exception of its own
        if kind in CONFIG_MAPPING:
            raise InputError(
                f"transformers cannot read {folder / 'config.json'} ({first_sentence_of(error)}). "
                "Fix the file or save it again."
            ) from None
        raise InputError(
            f"{name} is a model of type {kind!r}, for which transformers gives no class of its own "
            f"({first_sentence_of(error)}). `trainshort import` may know it."
        ) from None
    known: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise InputError(
            f"{name} is a model of type {kind!r}, of which transformers has no causal language model; doctor examines "
            "those alone."
        )
    _refuse_impossible(folder / "config.json", config)
    model_class: Any = known[type(config)]
    weights = frozenset(StoredWeights(folder)) if any(folder.glob("*.safetensors")) else frozenset()
    return TinyModel(str(kind), model_class, config, dtype=config.dtype or torch.float32, weights=weights)


def _refuse_impossible(path: Path, config: Any) -> None:
    """Sizes that no model has; the tiny copy would not have them either, and look healthy."""
    sizes = {name: getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    for name, size in sizes.items():
        if isinstance(size, int) and size < 1:
            raise InputError(f"{path} says that {name} is {size}. Mend it, or save the model anew.")
    _, heads, width = sizes.values()
    if heads and width and getattr(config, "head_dim", None) is None and width % heads:
        raise InputError(f"{path} says that {heads} heads share a width of {width}. Mend it, or save the model anew.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers tells of the copies."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
