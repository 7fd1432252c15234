"""Describe the model formats of other programs, and map their weights to trainshort models.

A `Format` names, for each module of a trainshort model, the module of the source model that holds its weights. `{}` is
the index of a layer. Some weights are also rearranged (see `Transform`):

    "layers.{}.ffn.wide": map_weight("transformer.h.{}.mlp.c_fc", transform="transpose")

Every tensor of a source model must be used, or be listed as ignored by the format. Any other tensor is an error.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.transformer import TransformerLM
from trainshort.utils.terminal import first_sentence_of

Transform = Literal["identity", "transpose", "deinterleave_qkv", "first_half", "second_half", "normalize_rows"]
"""How a tensor of the source model becomes a tensor of the trainshort model.

- `identity`: the tensor is used as it is.
- `transpose`: a matrix is transposed. GPT-2's Conv1D stores the transpose of the matrix of a linear layer.
- `deinterleave_qkv`: the rows of a QKV projection are reordered. The source stores q, k and v of the first head, then
  q, k and v of the second head, and so on. A trainshort model stores q of all heads, then k, then v.
- `first_half`, `second_half`: only the first or the second half of the rows is used.
- `normalize_rows`: each row is divided by its Euclidean norm.
"""

Weights = Mapping[str, Tensor]
"""The tensors of a source model by name. A mapping may read each tensor from a file when the tensor is requested."""


@dataclass(frozen=True)
class TensorSource:
    """Where the weights of a trainshort tensor come from.

    Attributes:
        names: The names in the source model. The rows of several tensors are concatenated in this order. If there are
            no names, the trainshort tensor is filled with zeros.
        transform: How the source tensor is rearranged.
    """

    names: tuple[str, ...]
    transform: Transform = "identity"


def map_weight(*source_modules: str, transform: Transform = "identity") -> TensorSource:
    """Describe which modules of a source model (such as a Hugging Face model) hold the weights of one of our modules.

    The result is a value of `Format.module_map`, whose keys are the names of our modules.

    Args:
        source_modules: The modules of the source model that hold the weights. `{}` is the index of the layer.
        transform: How the weights are rearranged, such as "transpose".
    """
    return TensorSource(source_modules, transform)


@dataclass(frozen=True)
class ImportedModel:
    """The description of a source model, translated to trainshort.

    Attributes:
        config: The config of the trainshort model.
        training_length: The training length, or None if the source does not state the training length.
        notes: Changes and differences that users should know. Each note is a clause without a period.
        transforms: Transforms that depend on the config of the source model, by trainshort module. They replace the
            transforms of the format.
        zero_biases: Modules that have a bias in trainshort, but no bias in the source model. The bias becomes zero.
        added_means: For each trainshort tensor, the source tensor whose mean row is added to all rows.
    """

    config: ModelConfig
    training_length: int | None
    notes: tuple[str, ...] = ()
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    zero_biases: tuple[str, ...] = ()
    added_means: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A model format of another program.

    Attributes:
        name: The name of the format in messages.
        summary: A description of one line for `trainshort list`.
        read_config: Translates the config of a source model. It raises `InputError` for unsupported settings.
        module_map: The source of each trainshort module. `{}` is the index of the layer.
        ignored_tensors: Name patterns of source tensors that are not weights, such as masks and computed tables.
        tied_tensors: Source tensors that must be equal to another source tensor, because trainshort stores the weights
            only once.
        name_replacements: Regular expressions and replacements that turn alternative tensor names into the names of
            `module_map`.
        position: The position method of the source model.
        rotary_halves: Whether rotary embeddings of the source model rotate dimension i of a head together with
            dimension i + n/2. A trainshort model rotates neighboring dimensions together.
    """

    name: str
    summary: str
    read_config: Callable[[dict[str, Any], Weights], ImportedModel]
    module_map: Mapping[str, TensorSource]
    ignored_tensors: tuple[str, ...] = ()
    tied_tensors: Mapping[str, str] = field(default_factory=dict)
    name_replacements: tuple[tuple[str, str], ...] = ()
    position: str = "alibi"
    rotary_halves: bool = False


class RenamedWeights(Mapping[str, Tensor]):
    """Weights whose names are replaced by the names that a format uses.

    Args:
        weights: The weights under their original names.
        replacements: Regular expressions and their replacements, which are applied to each name in this order.
    """

    def __init__(self, weights: Weights, replacements: tuple[tuple[str, str], ...]) -> None:
        """Store the weights, and apply all replacements (a regular expression and a text each) to their names."""
        self._weights = weights
        self._original_names: dict[str, str] = {}  # The original name of each weight, by its new name.
        for original_name in weights:
            name = original_name
            for pattern, replacement in replacements:
                name = re.sub(pattern, replacement, name)
            self._original_names[name] = original_name

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._original_names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._original_names)

    def __len__(self) -> int:
        return len(self._original_names)


@dataclass(frozen=True)
class WeightMap:
    """The weights of a source model as trainshort tensors. Each tensor is created when it is requested.

    Attributes:
        model: The description of the source model.
        weights: The tensors of the source model.
        shapes: The name and the shape of each trainshort tensor.
        sources: The source of each trainshort tensor.
        dropped_names: The names of the source tensors that are not used.
    """

    model: ImportedModel
    weights: Weights
    shapes: dict[str, tuple[int, ...]]
    sources: dict[str, TensorSource]
    dropped_names: tuple[str, ...]

    def tensor(self, name: str) -> Tensor:
        """Return a trainshort tensor in float32.

        Args:
            name: The name of the tensor in the trainshort model.

        Raises:
            InputError: If the source tensors have the wrong dtype or shape, or contain NaN or infinity.
        """
        source = self.sources[name]
        shape = self.shapes[name]
        if not source.names:
            return torch.zeros(shape)

        parts = []
        for source_name in source.names:
            part = self.weights[source_name]
            _check_floating_point(source_name, part)
            parts.append(part.float())
        # `torch.cat` would copy a single tensor.
        source_tensor = torch.cat(parts) if len(parts) > 1 else parts[0]

        tensor = to_trainshort(source_tensor, source.transform, self.model.config)
        source_names = " and ".join(source.names)
        if tensor.shape != shape:
            raise InputError(
                f"Shape mismatch: {source_names} has shape {tuple(tensor.shape)}, but the config requires {shape}. "
                "The config and the weights belong to different models."
            )
        if not torch.isfinite(tensor).all():
            raise InputError(f"Invalid weights: {source_names} contains NaN or infinity.")
        # For example, the mean of GPT-2's learned positions is added to the embeddings.
        if name in self.model.added_means:
            added_tensor = self.weights[self.model.added_means[name]]
            tensor = tensor + added_tensor.float().mean(0)
        return tensor.contiguous()


def _check_floating_point(name: str, tensor: Tensor) -> None:
    """Raise `InputError` if a tensor of the source model does not hold plain floating-point numbers."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    if not tensor.is_floating_point() or not is_plain:
        raise InputError(f"Unsupported weights: expected floating-point numbers in {name}, got {tensor.dtype}.")


def map_weights(model_format: Format, source_config: dict[str, Any], weights: Weights) -> WeightMap:
    """Find the source of each tensor of a trainshort model.

    Args:
        model_format: The format of the source model.
        source_config: The config of the source model.
        weights: The tensors of the source model.

    Returns:
        The weights as trainshort tensors.

    Raises:
        InputError: If a setting is not supported, if a tensor is missing, or if the format does not know a tensor.
    """
    if model_format.name_replacements:
        weights = RenamedWeights(weights, model_format.name_replacements)
    for name in weights:
        # A name with control characters could control the terminal.
        if not name.isprintable():
            raise InputError(f"A tensor of the model is called {name!r}, which no {model_format.name} model has.")

    model = model_format.read_config(source_config, weights)
    num_layers = model.config.layers
    # Every layer has tensors of its own. This check comes first, because a huge number of layers would take very long.
    if num_layers > len(weights):
        raise InputError(
            f"The config requires {num_layers:,} layers, but the model has only {len(weights):,} tensors. "
            "Check that no weight file is missing and that the config belongs to this model."
        )

    shapes = parameter_shapes(model.config)
    sources = {}
    for name in shapes:
        source = _find_source(model_format, model, name)
        for source_name in source.names:
            if source_name not in weights:
                raise InputError(
                    f"The model has no tensor {source_name}. "
                    "Check that no weight file is missing and that the config belongs to this model."
                )
        sources[name] = source

    used_names = set()
    for source in sources.values():
        used_names.update(source.names)
    dropped_names = sorted(weights.keys() - used_names)
    for name in dropped_names:
        _check_may_drop(model_format, weights, name)
    return WeightMap(model, weights, shapes, sources, tuple(dropped_names))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and the shape of each parameter of a trainshort model. No memory is allocated.

    Raises:
        InputError: If the sizes are too large for PyTorch.
    """
    try:
        # Tensors on the device "meta" have shapes, but no values.
        with torch.device("meta"):
            model = TransformerLM(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise InputError(f"The config describes a model that is too large ({first_sentence_of(error)}).") from None
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def _find_source(model_format: Format, model: ImportedModel, name: str) -> TensorSource:
    """Return the source tensors of a trainshort tensor.

    Args:
        model_format: The format of the source model.
        model: The description of the source model.
        name: The name of the trainshort tensor, such as `layers.3.ffn.wide.weight`.

    Raises:
        InputError: If the format has no tensor for this name.
    """
    module, _, parameter = name.rpartition(".")  # for example "layers.3.ffn.wide" and "weight"
    # The module map of a format has one entry for all layers. Replace the index of the layer by {}.
    pattern = module
    layer_index = ""
    index_match = re.search(r"\.(\d+)(\.|$)", module)
    if index_match is not None:
        layer_index = index_match[1]
        pattern = module[: index_match.start(1)] + "{}" + module[index_match.end(1) :]  # "layers.{}.ffn.wide"

    if pattern not in model_format.module_map:
        raise InputError(f"The format {model_format.name} has no tensor for {name}.")
    if parameter == "bias" and pattern in model.zero_biases:
        return TensorSource(names=())  # A tensor without a source tensor is filled with zeros.
    module_source = model_format.module_map[pattern]
    source_names = [f"{source_module.format(layer_index)}.{parameter}" for source_module in module_source.names]
    transform = model.transforms.get(pattern, module_source.transform)
    return TensorSource(tuple(source_names), transform)


def _check_may_drop(model_format: Format, weights: Weights, name: str) -> None:
    """Raise `InputError` if an unused source tensor holds weights that the trainshort model would not have.

    Args:
        model_format: The format of the source model.
        weights: The tensors of the source model.
        name: The name of the unused source tensor.
    """
    # A tied tensor is stored twice under two names, and must be equal to its counterpart.
    tied_name = model_format.tied_tensors.get(name)
    if tied_name is not None and tied_name in weights:
        if not torch.equal(weights[name], weights[tied_name]):
            raise InputError(f"{name} differs from {tied_name}, but the config says that these tensors are tied.")
        return
    # The other tensors that may be dropped match a pattern such as "*.masked_bias". The trainshort
    # model does not need them.
    is_ignored = any(fnmatchcase(name, pattern) for pattern in model_format.ignored_tensors)
    if not is_ignored:
        raise InputError(
            f"Unexpected tensor {name}: "
            f"models of the format {model_format.name} with this config do not have this tensor."
        )


def to_trainshort(source_tensor: Tensor, transform: Transform, config: ModelConfig) -> Tensor:
    """Rearrange a tensor of a source model for a trainshort model.

    Args:
        source_tensor: The tensor of the source model.
        transform: How the tensor is rearranged.
        config: The config of the trainshort model.
    """
    match transform:
        case "identity":
            return source_tensor
        case "transpose":
            is_matrix = source_tensor.dim() == 2  # Biases are vectors and stay as they are.
            return source_tensor.T if is_matrix else source_tensor
        case "deinterleave_qkv":
            # The source stores q, k and v of the first head, then those of the next head. trainshort stores q of all
            # heads, then k of all heads, then v of all heads.
            heads = source_tensor.unflatten(0, (config.heads, 3, -1))  # (heads, 3, head width, ...)
            return heads.transpose(0, 1).flatten(0, 2)
        case "first_half":
            return source_tensor[: len(source_tensor) // 2]
        case "second_half":
            return source_tensor[len(source_tensor) // 2 :]
        case "normalize_rows":
            return torch.nn.functional.normalize(source_tensor)


def from_trainshort(tensor: Tensor, transform: Transform, config: ModelConfig) -> Tensor:
    """Undo `to_trainshort`: rearrange a tensor of a trainshort model for another program.

    Args:
        tensor: The tensor of the trainshort model.
        transform: The transform of the import. Only transforms that keep all numbers can be undone.
        config: The config of the trainshort model.

    Raises:
        InputError: If the transform cannot be undone.
    """
    match transform:
        case "identity":
            return tensor
        case "transpose":
            is_matrix = tensor.dim() == 2  # Biases are vectors and stay as they are.
            return tensor.T if is_matrix else tensor
        case "deinterleave_qkv":
            # The rows of q, k and v of each head follow each other in the result.
            heads = tensor.unflatten(0, (3, config.heads, -1))  # (3, heads, head width, ...)
            return heads.transpose(0, 1).flatten(0, 2)
        case _:
            raise InputError(f"The transform '{transform}' cannot be undone.")
