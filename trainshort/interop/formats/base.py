"""What a foreign format is: settings that become ours, and tensors that are ours under other names.

A format's names are data, a table from our module to theirs; `{}` stands for the layer. What differs besides the name
is one of a few turns, exact both ways:

    same          the same numbers
    transposed    GPT-2's Conv1D keeps its matrix the other way round
    by head       rows q0 k0 v0 q1 k1 v1 ... of a BLOOM are q0 q1 ... k0 k1 ... v0 v1 ... of ours

Every tensor of the source is used, known to be superfluous, or named in a refusal; none is passed over in silence.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from trainshort.config.registries import convertible, formats  # noqa: F401  (other modules take them from here)
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.transformer import TransformerLM
from trainshort.utils.terminal import first_sentence_of

Turn = Literal["same", "transposed", "by head", "first half", "second half", "unit rows"]
Weights = Mapping[str, Tensor]
"""Tensors by name; one from a file is read when it is asked for."""


@dataclass(frozen=True)
class TensorSource:
    """Where a tensor of ours comes from: one module of theirs, or several whose rows follow each other."""

    names: tuple[str, ...]
    transform: Turn = "same"


def map_weight(*theirs: str, turn: Turn = "same") -> TensorSource:
    return TensorSource(theirs, turn)


@dataclass(frozen=True)
class ImportedModel:
    """What a source says of its model, in our words."""

    config: ModelConfig
    training_length: int | None
    """The length it was trained at, if it tells."""
    notes: tuple[str, ...] = ()
    """What was left out or folded, and what a user should know."""
    turned: Mapping[str, Turn] = field(default_factory=dict)
    """Modules of ours whose turn these settings decide."""
    zeros: tuple[str, ...] = ()
    """Modules of ours that have a bias where theirs has none."""
    means: Mapping[str, str] = field(default_factory=dict)
    """Tensors of ours to whose rows the mean row of one of theirs is added."""


@dataclass(frozen=True)
class Format:
    """One kind of foreign model."""

    name: str
    summary: str
    """One line for `trainshort list`."""
    read: Callable[[dict[str, Any], Weights], ImportedModel]
    """Its settings in ours; what does not fit is refused with the setting's name."""
    lines: Mapping[str, TensorSource]
    superfluous: tuple[str, ...] = ()
    """Tensors that hold nothing of the model: masks, versions, tables that can be computed."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that must equal another one of theirs, where ours has one for both."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of other names that the same tensors had, and what they are called here."""
    position: str = "alibi"
    """How it knows where a token stands."""
    rotary_halves: bool = False
    """The rows of each head's q and k lie as a rotation in halves wants them; ours turns pairs side by side."""


class Renamed(Mapping[str, Tensor]):
    """Weights under the format's own names."""

    def __init__(self, weights: Weights, patterns: tuple[tuple[str, str], ...]) -> None:
        self._weights, self._names = weights, {}
        for name in weights:
            now = name
            for pattern, replacement in patterns:
                now = re.sub(pattern, replacement, now)
            self._names[now] = name

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class WeightMap:
    """A source's tensors as ours, each made when it is asked for."""

    model: ImportedModel
    weights: Weights
    shapes: dict[str, tuple[int, ...]]
    """Our tensors and their shapes."""
    sources: dict[str, TensorSource]
    dropped_names: tuple[str, ...]

    def tensor(self, name: str) -> Tensor:
        """One tensor of ours, in float32."""
        origin = self.sources[name]
        if not origin.names:
            return torch.zeros(self.shapes[name])
        parts = [self.weights[source] for source in origin.names]
        for source, part in zip(origin.names, parts, strict=True):
            if not part.is_floating_point() or part.layout != torch.strided or part.is_quantized:
                raise InputError(f"{source} holds {part.dtype} numbers, and weights are floating-point numbers.")
        made = torch.cat([part.float() for part in parts]) if len(parts) > 1 else parts[0].float()
        made = to_trainshort(made, origin.transform, self.model.config)
        if made.shape != self.shapes[name]:
            raise InputError(
                f"{' and '.join(origin.names)} make a tensor of shape {tuple(made.shape)}, and its settings ask for "
                f"{self.shapes[name]}; config and weights are of different models."
            )
        if not torch.isfinite(made).all():
            raise InputError(f"{' and '.join(origin.names)} hold numbers that are not finite.")
        if name in self.model.means:
            made = made + self.weights[self.model.means[name]].float().mean(0)
        return made.contiguous()


def map_weights(kind: Format, settings: dict[str, Any], weights: Weights) -> WeightMap:
    """Which tensor of theirs becomes which of ours; a missing or unknown one is named."""
    weights = Renamed(weights, kind.renamed) if kind.renamed else weights
    if strange := next((name for name in weights if not name.isprintable()), None):
        raise InputError(f"A tensor of the model is called {strange!r}, which no {kind.name} model has.")
    model = kind.read(settings, weights)
    if model.config.layers > len(weights):  # each has some; building them all would take for ever
        raise InputError(
            f"The config tells of {model.config.layers:,} layers, and the model has {len(weights):,} tensors in all. "
            "Is a file of it missing, or its config of another?"
        )
    shapes, origin = parameter_shapes(model.config), {}
    for name in shapes:
        origin[name] = _origin(kind, model, name)
        for source in origin[name].names:
            if source not in weights:
                raise InputError(
                    f"The model has no tensor {source}. Is a file of it missing, or its config of another?"
                )
    used = {source for one in origin.values() for source in one.names}
    dropped = []
    for name in sorted(weights.keys() - used):
        if name in kind.copies and kind.copies[name] in weights:
            if not torch.equal(weights[name], weights[kind.copies[name]]):
                raise InputError(f"{name} differs from {kind.copies[name]}, and this model says they are one.")
        elif not any(fnmatchcase(name, pattern) for pattern in kind.superfluous):
            raise InputError(f"The tensor {name} has no place in a {kind.name} model as its config describes it.")
        dropped.append(name)
    return WeightMap(model, weights, shapes, origin, tuple(dropped))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, without making them."""
    try:
        with torch.device("meta"):
            return {name: tuple(weight.shape) for name, weight in TransformerLM(config).named_parameters()}
    except (RuntimeError, TypeError, OverflowError) as error:  # of numbers that no machine counts to
        raise InputError(f"No model is as large as these settings say ({first_sentence_of(error)}).") from None


def _origin(kind: Format, model: ImportedModel, name: str) -> TensorSource:
    module, _, ending = name.rpartition(".")
    number = re.search(r"\.(\d+)(\.|$)", module)
    general = module if number is None else module[: number.start(1)] + "{}" + module[number.end(1) :]
    if general not in kind.lines:
        raise InputError(f"A {kind.name} model has nothing for our {name}.")
    if ending == "bias" and general in model.zeros:
        return TensorSource(())
    found = kind.lines[general]
    names = tuple(f"{one.format(number[1] if number else '')}.{ending}" for one in found.names)
    return TensorSource(names, model.turned.get(general, found.transform))


def to_trainshort(theirs: Tensor, turn: Turn, config: ModelConfig) -> Tensor:
    """A tensor of theirs as ours."""
    match turn:
        case "same":
            return theirs
        case "transposed":
            return theirs.T if theirs.dim() == 2 else theirs
        case "by head":
            return theirs.unflatten(0, (config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        case "first half":
            return theirs[: len(theirs) // 2]
        case "second half":
            return theirs[len(theirs) // 2 :]
        case "unit rows":
            return torch.nn.functional.normalize(theirs)


def from_trainshort(ours: Tensor, turn: Turn, config: ModelConfig) -> Tensor:
    """A tensor of ours as theirs, where that is one tensor."""
    match turn:
        case "same":
            return ours
        case "transposed":
            return ours.T if ours.dim() == 2 else ours
        case "by head":
            return ours.unflatten(0, (3, config.heads, -1)).transpose(0, 1).flatten(0, 2)
        case _:
            raise InputError(f"a turn of {turn} cannot be undone.")
