"""The base class of position methods, and the registry that plug-ins add their methods to.

A position method overrides at least one of four hooks. The Transformer calls all hooks for every method:

- `embed` adds vectors to the token embeddings.
- `rotate` rotates queries and keys in every layer.
- `score_bias` (or `content_bias`, if the bias depends on the text) adds a bias to the attention scores.

A plug-in defines a position method in one file:

    class MyConfig(PositionConfig):
        steepness: float = Field(default=1.0, gt=0)
        \"\"\"The help text of the command-line option.\"\"\"

    @positions.register("mine")
    class MyPosition(PositionMethod):
        \"\"\"The description that `trainshort list positions` shows.\"\"\"

        Config = MyConfig

        def __init__(self, config: ModelConfig, settings: MyConfig) -> None:
            super().__init__(config, settings)
            self.heads = config.heads
            self.steepness = settings.steepness

        def score_bias(self, length: int) -> DistanceBias:
            return DistanceBias(-self.steepness * torch.arange(length).sqrt().expand(self.heads, -1))
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.attention import Bias, DenseBias, LinearBias
from trainshort.attention.call import unknown_bias_error
from trainshort.config.position_config import (
    EmptyPositionConfig,
    MethodInfo,
    PositionConfig,
    methods,
    parse_method_config,
)
from trainshort.config.registries import positions
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.utils.plugins import plugin_errors

PROBE_LENGTHS = (4099, 2**24 + 1)
"""`PositionMethod.linear_slopes` compares the slopes at these lengths with the slopes at length 1."""

CUMULATIVE_DECAY_KEY = "clock"
"""The key in `LayerInput.method_cache` under which a method with a `DecayBias` stores its cumulative log decays."""


class LayerInput(NamedTuple):
    """The input of one attention layer, from which `PositionMethod.content_bias` computes a bias.

    Attributes:
        layer: The index of the layer.
        x: The input of the attention for the new tokens, after the norm.
        length: The number of keys: the keys in the KV cache and the new keys.
        position_ids: The position of each new token in its own document.
        method_cache: Tensors that the method keeps for the next call with the same layer and text. The dictionary is
            empty at the start of a text. Without a KV cache, it is empty in every call.
    """

    layer: int
    x: Float[Tensor, "batch new width"]
    length: int
    position_ids: Int[Tensor, "batch new"]
    method_cache: dict[str, Tensor]


class Gate(NamedTuple):
    """A forget gate: `sigmoid(sign * (weight @ x + bias))` for each head and token.

    NoPE heads (heads without positions) have no gate and are not in the tensors.

    Attributes:
        weight: The weight of the gate, or None if the gate does not depend on the text.
        bias: The bias of the gate.
        sign: 1 or -1.
    """

    weight: Float[Tensor, "heads width"] | None
    bias: Float[Tensor, " heads"]
    sign: float


class PositionMethod(nn.Module):
    """Base class of position methods. A subclass overrides the hook that it uses.

    Args:
        config: The settings of the model.
        settings: The settings of the position method, an instance of `Config`.
    """

    Config: ClassVar[type[PositionConfig]] = EmptyPositionConfig
    """The class of the method's settings."""
    float32: ClassVar[tuple[str, ...]] = ()
    """The names of parameters and buffers that stay in float32 when the model is converted to another dtype."""
    uses_cumulative_decay: ClassVar[bool] = False
    """Whether the bias is a `DecayBias` whose cumulative log decays are stored in `LayerInput.method_cache`.

    The decays are stored under `CUMULATIVE_DECAY_KEY`. A bounded cache removes the decays of keys that it evicts.
    """
    causal_only: ClassVar[bool] = False
    """Whether the method requires a causal model."""
    max_length: int | None = None
    """The maximum number of input tokens, or None if there is no maximum."""

    def __init__(self, config: ModelConfig, settings: Any) -> None:
        super().__init__()
        self.name: str = config.position

    def embed(
        self, x: Float[Tensor, "batch length width"], position_ids: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length width"]:
        """Hook: add positions to the token embeddings.

        Args:
            x: The token embeddings.
            position_ids: The position of each token in its own document.

        Returns:
            The input of the first layer. The default returns `x` unchanged.
        """
        return x

    def rotate(
        self,
        q: Float[Tensor, "batch heads length dim"],
        k: Float[Tensor, "batch kv_heads length dim"],
        position_ids: Int[Tensor, "batch length"],
    ) -> tuple[Tensor, Tensor]:
        """Hook: rotate queries and keys. Every layer calls this hook.

        Args:
            q: The queries.
            k: The keys.
            position_ids: The position of each token in its own document.

        Returns:
            The rotated queries and keys. The default returns `q` and `k` unchanged.
        """
        return q, k

    def score_bias(self, length: int) -> Bias | None:
        """Hook: return the bias that is added to the attention scores. All layers share this bias.

        Args:
            length: The number of keys.

        Returns:
            The bias, or None for no bias. The default returns None.
        """
        return None

    def content_bias(self, layer_input: LayerInput) -> Bias | None:
        """Hook: return the bias of the attention scores of one layer.

        Override this hook instead of `score_bias` if the bias depends on the text.

        Args:
            layer_input: The input of the attention layer.

        Returns:
            The bias, or None for no bias. The default returns the bias of `score_bias`.
        """
        return self.score_bias(layer_input.length)

    def gate(self, layer: int) -> "Gate | None":
        """Return the forget gate from which the bias of a layer is computed.

        Position methods with a `DecayBias` (such as FoX) override this method, so that text generation can use the
        compiled decoder.

        Args:
            layer: The index of the layer.

        Returns:
            The gate, or None if the bias is not computed from a forget gate.
        """
        return None

    def init_float32_tensors(self) -> None:
        """Set the initial values of the tensors named in `float32`.

        The function is called again if a model was built on the meta device and then receives its memory.
        """

    @classmethod
    def rotates(cls) -> bool:
        """Return whether the method rotates queries and keys."""
        return cls.rotate is not PositionMethod.rotate

    @classmethod
    def is_content_dependent(cls) -> bool:
        """Return whether the bias of the method depends on the text."""
        return cls.content_bias is not PositionMethod.content_bias

    @classmethod
    def adds_bias(cls) -> bool:
        """Return whether the method adds a bias that does not depend on the text."""
        return cls.score_bias is not PositionMethod.score_bias and not cls.is_content_dependent()

    def has_error_bound(self) -> bool:
        """Return whether a bounded KV cache can evict distant keys and prove an upper bound on the error.

        The proof requires a bias that falls with the distance: linear slopes (ALiBi) or a cumulative decay (FoX).
        """
        if self.uses_cumulative_decay:
            return True
        return self.linear_slopes() is not None and not self.rotates()

    def linear_slopes(self) -> Float[Tensor, " heads"] | None:
        """Return the slopes of a bias that falls linearly with the distance.

        Returns:
            One slope per head. If the method stores its slopes, the result is the stored tensor and not a copy.
            None if the method adds no bias or another bias, or if the slopes depend on the length of the text.
        """
        if not self.adds_bias():
            return None
        bias = self.score_bias(1)
        if not isinstance(bias, LinearBias):
            return None

        # The slopes must not depend on the length of the text, so they are compared at different lengths.
        # A model with a maximum length is compared at this length only.
        probe_lengths = PROBE_LENGTHS if self.max_length is None else (self.max_length,)
        for length in probe_lengths:
            bias_at_length = self.score_bias(length)
            if not isinstance(bias_at_length, LinearBias):
                return None
            is_same_tensor = bias_at_length.slopes is bias.slopes
            if not is_same_tensor and not torch.equal(bias_at_length.slopes, bias.slopes):
                return None
        return bias.slopes

    def check_length(self, length: int) -> None:
        """Raise `InputError` if an input of `length` tokens is longer than `max_length`."""
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"{self.name} positions stop at {self.max_length}, but this input reaches {length}. "
                "Train with a longer table, or use position='alibi'."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PositionMethod":
        """Apply a conversion such as `.to(torch.bfloat16)`, but keep the tensors named in `float32` in float32.

        PyTorch calls this function for every change of dtype or device.
        """
        tensors_before = {name: getattr(self, name).detach() for name in self.float32}
        super()._apply(fn, recurse)
        for name, tensor_before in tensors_before.items():
            tensor = getattr(self, name)
            if tensor_before.is_meta and not tensor.is_meta:
                # The model was built on the meta device, so there are no old values to keep.
                tensor.data = torch.empty_like(tensor, dtype=torch.float32)
                self.init_float32_tensors()
            elif tensor.dtype != torch.float32:
                tensor.data = tensor_before.to(tensor.device)
        return self


# ---- helpers for position methods


def collapse_equal_rows(position_ids: Int[Tensor, "batch length"]) -> Int[Tensor, "rows length"]:
    """Return only the first row if `position_ids` was expanded from one row with `Tensor.expand`.

    All rows of an expanded tensor are equal, so the caller can compute its values for one row only. The stride of an
    expanded dimension is 0. The values of the rows are not compared.
    """
    is_expanded = position_ids.stride(0) == 0
    return position_ids[:1] if is_expanded else position_ids


def distance_range(length: int, device: torch.device) -> Float[Tensor, " length"]:
    """Return the distances 0, 1, ..., length - 1 in float32."""
    return torch.arange(length, device=device, dtype=torch.float32)


def exact_float_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on MPS devices, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def zero_bias_for_nope_heads(bias: Bias | None, config: ModelConfig) -> Bias | None:
    """Set the bias of the NoPE heads (heads without positions) to zero.

    Args:
        bias: The bias of all heads, or None.
        config: The settings of the model. The last `config.nope_heads` heads are NoPE heads.

    Returns:
        The changed bias, or `bias` itself if there are no NoPE heads.

    Raises:
        InputError: If the type of the bias is unknown.
    """
    if bias is None or config.nope_heads == 0:
        return bias
    if not isinstance(bias, Bias):
        raise unknown_bias_error(bias)

    # The number of dimensions that follow the dimension of the heads in the tensors of the bias.
    if isinstance(bias, LinearBias):
        trailing_dims = 0
    elif isinstance(bias, DenseBias):
        trailing_dims = 2
    else:
        trailing_dims = 1
    num_position_heads = config.heads - config.nope_heads
    uses_positions = torch.arange(config.heads, device=bias.values.device) < num_position_heads
    # With trailing dimensions of size 1, the mask can be broadcast to the bias tensor.
    mask_shape = [-1] + [1] * trailing_dims
    uses_positions = uses_positions.view(mask_shape)

    # The fields are the tensors of the bias, such as `slopes` and `right` of a `LinearBias`. `right` may be None.
    changed_tensors = {}
    for field in fields(bias):
        value = getattr(bias, field.name)
        if isinstance(value, Tensor):
            changed_tensors[field.name] = torch.where(uses_positions, value, 0)
    return replace(bias, **changed_tensors)


# ---- registration and construction


def register_settings(name: str, method: Any) -> None:
    """Check the position method of a plug-in, and register its settings under `name`.

    Args:
        name: The name of the position method.
        method: The object that the plug-in registered.

    Raises:
        InputError: If `method` is not a usable subclass of `PositionMethod`, or the name is taken.
    """
    if not (isinstance(method, type) and issubclass(method, PositionMethod)):
        raise InputError(f"position method '{name}' must be a class that extends PositionMethod.")
    hooks = ("embed", "rotate", "score_bias", "content_bias")
    overrides_a_hook = any(getattr(method, hook) is not getattr(PositionMethod, hook) for hook in hooks)
    if not overrides_a_hook:
        raise InputError(f"position method '{name}' must define at least one of {', '.join(hooks)}.")
    if not (isinstance(method.Config, type) and issubclass(method.Config, PositionConfig)):
        raise InputError(f"position method '{name}': its Config must extend PositionConfig.")
    for setting, field in method.Config.model_fields.items():
        if field.is_required():
            raise InputError(f"position method '{name}': its setting '{setting}' needs a default.")
    # `trainshort list positions` shows the first line of the docstring.
    summary = (method.__doc__ or "").strip().partition("\n")[0]
    methods.register(name)(MethodInfo(summary, method.Config))


def build_position(config: ModelConfig) -> PositionMethod:
    """Create the position method that a model config names.

    Args:
        config: The settings of the model, including the settings of the position method.

    Returns:
        The position method with newly initialized parameters.

    Raises:
        InputError: If the position method is unknown, or cannot be combined with other settings of the model.
    """
    method_class = positions.get(config.position)
    adds_to_embeddings = method_class.embed is not PositionMethod.embed
    has_nope_parts = config.nope_heads > 0 or config.nope_every is not None
    if adds_to_embeddings and has_nope_parts:
        raise InputError(
            f"{config.position} adds its positions to the embeddings, which all heads and layers share. "
            "nope_heads and nope_every require a method that works inside the layers, such as alibi or rotary."
        )
    if method_class.causal_only and not config.causal:
        raise InputError(f"{config.position} requires a causal model. An encoder can use alibi, t5 or rotary.")
    # If the code of a plug-in fails, the error message names the plug-in.
    with plugin_errors((positions.kind, config.position)):
        settings = parse_method_config(config.position, config.position_settings)
        return method_class(config, settings)
