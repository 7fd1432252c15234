"""What a position method is: a module with three doors, of which it opens one.

The transformer calls all of them for every method and so has no branches. A method is one class, in this package or in
a file of the user's own (registry.py):

    class Settings(MethodSettings):
        steepness: float = Field(default=1.0, gt=0)
        \"\"\"The line that `trainshort train --help` shows.\"\"\"

    @positions.register("mine")
    class Mine(PositionMethod):
        \"\"\"The line that `trainshort list positions` shows.\"\"\"

        Settings = Settings

        def __init__(self, config: ModelConfig, settings: Settings) -> None: ...

        def score_bias(self, length):
            return DistanceBias(-self.steepness * torch.arange(length).sqrt().expand(self.heads, -1))

Nobody asks a method for its name. What others want to know are its abilities: `rotates`, `reads_text`,
`linear_slopes`, `longest`; all follow from the doors it opens.

Positions are given as a tensor rather than as a starting number, so that packed documents count from their own
beginning and the rows of a batch can stand at different places.
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
"""Lengths at which a bias is looked at beside that of one token, to see whether its slopes depend on them."""


class LayerInput(NamedTuple):
    """What a layer reads: all that a bias may depend on which depends on the text."""

    layer: int
    x: Float[Tensor, "batch new width"]
    """The attention's input, after its norm: of the tokens that are new."""
    length: int
    """Keys in all: those a cache holds, and the new ones."""
    position_ids: Int[Tensor, "batch new"]
    """Position of each new token in its own document."""
    method_cache: dict[str, Tensor]
    """The method's place in this layer's cache: what it leaves there is there next time. Empty at the beginning of a
    text; without a cache, of no effect."""


def collapse_equal_rows(where: Int[Tensor, "batch length"]) -> Int[Tensor, "rows length"]:
    """One row where all rows of a batch stand at the same places: what follows from places is computed once."""
    return where[:1] if where.stride(0) == 0 else where


class Gate(NamedTuple):
    """A clock goes on by log σ(sign · (weight · x + shift)) at each token; those of plain heads, the last, stand."""

    weight: Float[Tensor, "heads width"] | None
    bias: Float[Tensor, " heads"]
    sign: float


class PositionMethod(nn.Module):
    """Does nothing at each door; methods override the one they use."""

    Config: ClassVar[type[PositionConfig]] = EmptyPositionConfig
    """Type of the method's settings: typed, frozen, in config.json, on the command line and in its help."""
    float32: ClassVar[tuple[str, ...]] = ()
    """Names of parameters and buffers that stay float32 whatever the model becomes: half precision has no room for
    fine slopes."""
    uses_cumulative_decay: ClassVar[bool] = False
    """Whether the bias is a DecayBias whose readings lie in the cache's place under "clock". A bounded
    cache drops those of keys that it forgot."""
    causal_only: ClassVar[bool] = False
    """Whether it means something only where a token sees nothing after it."""
    max_length: int | None = None
    """Longest input the method can read; None: any."""

    def __init__(self, config: ModelConfig, settings: Any) -> None:
        super().__init__()
        self.name = config.position

    def embed(
        self, x: Float[Tensor, "batch length width"], where: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length width"]:
        """Door 1: added to the embeddings, once."""
        return x

    def rotate(
        self,
        q: Float[Tensor, "batch heads length dim"],
        k: Float[Tensor, "batch kv_heads length dim"],
        where: Int[Tensor, "batch length"],
    ) -> tuple[Tensor, Tensor]:
        """Door 2: turns queries and keys, in every layer."""
        return q, k

    def score_bias(self, length: int) -> Bias | None:
        """Door 3: a bias on the scores over `length` keys, once for all layers."""
        return None

    def content_bias(self, given: LayerInput) -> Bias | None:
        """Door 3, for a bias that looks at the text: asked in every layer, in place of `score_bias`."""
        return self.score_bias(given.length)

    def gate(self, layer: int) -> "Gate | None":
        """Of a clock: what moves it on in a layer, where that is a gate; compiled layers know no other clocks."""
        return None

    def init_float32_tensors(self) -> None:
        """Give the tensors of `float32` their first values; asked again when a model built on the meta device gets its
        memory."""

    @classmethod
    def rotates(cls) -> bool:
        return cls.rotate is not PositionMethod.rotate

    @classmethod
    def is_content_dependent(cls) -> bool:
        return cls.content_bias is not PositionMethod.content_bias

    @classmethod
    def adds_bias(cls) -> bool:
        """Whether it opens the third door without looking at the text."""
        return cls.score_bias is not PositionMethod.score_bias and not cls.is_content_dependent()

    def has_error_bound(self) -> bool:
        """Whether its bias bounds what far tokens can weigh, so that they can be forgotten with a promise."""
        return self.uses_cumulative_decay or (self.linear_slopes() is not None and not self.rotates())

    def linear_slopes(self) -> Float[Tensor, " heads"] | None:
        """The slopes of a bias that falls linearly with distance, by the same slopes however long the text is; None for
        any other, and for no bias.

        They are the method's own tensor where it keeps one, so that changing it changes the bias.
        """
        bias = self.score_bias(1) if self.adds_bias() else None
        if not isinstance(bias, LinearBias):
            return None
        for length in PROBE_LENGTHS if self.max_length is None else (self.max_length,):
            far = self.score_bias(length)
            if not isinstance(far, LinearBias) or not (
                far.slopes is bias.slopes or torch.equal(far.slopes, bias.slopes)
            ):
                return None
        return bias.slopes

    def check_length(self, length: int) -> None:
        """Refuse an input past the longest; a method with no limit has nothing to check."""
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"{self.name} positions stop at {self.max_length}, but this input reaches {length}. "
                "Train with a longer table, or use position='alibi'."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PositionMethod":
        before = {name: getattr(self, name).detach() for name in self.float32}
        super()._apply(fn, recurse)
        for name, old in before.items():
            now = getattr(self, name)
            if old.is_meta and not now.is_meta:
                now.data = torch.empty_like(now, dtype=torch.float32)
                self.init_float32_tensors()
            elif now.dtype != torch.float32:
                now.data = old.to(now.device)
        return self


def zero_bias_for_nope_heads(bias: Bias | None, config: ModelConfig) -> Bias | None:
    """A bias with nothing in it for the heads that shall know no positions, the last ones."""
    if bias is None or not config.nope_heads:
        return bias
    if not isinstance(bias, Bias):
        raise unknown_bias_error(bias)
    # How many dimensions lie behind that of the heads.
    after = 0 if isinstance(bias, LinearBias) else 2 if isinstance(bias, DenseBias) else 1
    knows = torch.arange(config.heads, device=bias.values.device) < config.heads - config.nope_heads
    knows = knows.view(-1, *[1] * after)
    sides = {field.name: getattr(bias, field.name) for field in fields(bias)}
    return replace(bias, **{name: torch.where(knows, x, 0) for name, x in sides.items() if isinstance(x, Tensor)})


def register_settings(name: str, method: Any) -> None:
    """Check a position method from outside this package, and register its settings under `name`.

    Raises:
        InputError: If `method` is not a usable subclass of `PositionMethod`, or the name is taken.
    """
    if not (isinstance(method, type) and issubclass(method, PositionMethod)):
        raise InputError(f"position method '{name}' must be a class that extends PositionMethod.")
    hooks = ("embed", "rotate", "score_bias", "content_bias")
    if all(getattr(method, hook) is getattr(PositionMethod, hook) for hook in hooks):
        raise InputError(f"position method '{name}' does nothing: it lacks {', '.join(hooks[:-1])} alike.")
    if not (isinstance(method.Config, type) and issubclass(method.Config, PositionConfig)):
        raise InputError(f"position method '{name}': its Settings must extend MethodSettings.")
    required = [field for field, info in method.Config.model_fields.items() if info.is_required()]
    if required:
        raise InputError(f"position method '{name}': its setting '{required[0]}' needs a default.")
    summary = (method.__doc__ or "").strip().partition("\n")[0]
    methods.register(name)(MethodInfo(summary, method.Config))


def build_position(config: ModelConfig) -> PositionMethod:
    """The method that a model's settings name, with its own settings."""
    method = positions.get(config.position)
    if method.embed is not PositionMethod.embed and (config.nope_heads or config.nope_every is not None):
        raise InputError(
            f"{config.position} adds its positions to the embeddings, before any head or layer; nope_heads and "
            "nope_every need a method that works inside the layers, such as alibi or rotary."
        )
    if method.causal_only and not config.causal:
        raise InputError(f"{config.position} is defined for causal models; an encoder can use alibi, t5 or rotary.")
    with plugin_errors((positions.kind, config.position)):
        return method(config, parse_method_config(config.position, config.position_settings))
