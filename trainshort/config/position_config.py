"""The settings of each position method, and the table of all position methods. Does not import torch.

The built-in position methods have their settings here and their code in `trainshort.model.positions`. A plug-in defines
the settings and the code of its position method in one file, and the method is added to the table on registration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from trainshort.config.base import StrictConfig, format_validation_error
from trainshort.errors import InputError
from trainshort.utils.registry import Registry, did_you_mean

PAPER_METHODS = ("sinusoidal", "rotary", "t5", "alibi")
"""The position methods that the ALiBi paper compares, from the weakest to the strongest extrapolation."""

FINITE_FLOAT = ConfigDict(allow_inf_nan=False)
"""The pydantic configuration of classes whose numbers must not be infinite or NaN."""


class PositionConfig(StrictConfig):
    """Base class of the settings of a position method."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        """Return why these settings do not fit a model, or None if the settings fit.

        Args:
            width: The hidden size of the model.
            heads: The number of attention heads.
        """
        return None

    def with_max_length(self, length: int) -> Self:
        """Return settings for a model that accepts inputs of at least `length` tokens.

        Most position methods have no maximum length. The base class therefore returns the settings unchanged.
        """
        return self


class EmptyPositionConfig(PositionConfig):
    """The settings of a position method that has no settings."""


class UnknownPositionConfig(PositionConfig):
    """The settings of a position method that is not registered, for example because its plug-in is missing.

    All settings are accepted and kept, so that the config of an existing run can still be read.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")


class AlibiConfig(PositionConfig):
    """Settings of ALiBi (Attention with Linear Biases)."""

    model_config = FINITE_FLOAT

    max_bias: float = Field(default=8.0, gt=0)
    """The smallest slope is 2 to the power of minus this number."""
    learned_slopes: bool = False
    """Train the slopes. In the ALiBi paper, trained slopes extrapolated worse."""
    slopes: tuple[float, ...] | None = None
    """One slope for each head. Default: computed from max_bias."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        """Return why these settings do not fit a model of this width and number of heads, or None if they fit."""
        if self.slopes is not None and len(self.slopes) != heads:
            return f"slopes must contain one number per head, {heads} in total; got {len(self.slopes)}"
        return None


class T5Config(PositionConfig):
    """Settings of T5's relative position bias."""

    buckets: int = Field(default=32, ge=2)
    """Number of distance buckets. All distances in a bucket have the same bias."""
    max_distance: int = Field(default=128, ge=2)
    """Distances of this size and larger are in the last bucket."""


class LearnedConfig(PositionConfig):
    """Settings of learned absolute positions."""

    max_length: int = Field(default=1024, ge=1)
    """Number of learned positions, and the maximum length of an input."""

    def with_max_length(self, length: int) -> Self:
        """Return settings with at least `length` learned positions."""
        return self.replace(max_length=max(length, self.max_length))


class RotaryConfig(PositionConfig):
    """Settings of rotary position embeddings."""

    model_config = FINITE_FLOAT

    base: float = Field(default=10_000.0, gt=1)
    """Base of the rotation frequencies, called theta in other libraries."""
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the dimensions of each head that are rotated. GPT-NeoX uses 0.25."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        """Return why these settings do not fit a model of this width and number of heads, or None if they fit."""
        head_width = width // heads
        if head_width % 2 != 0:
            return f"rotary rotates pairs of dimensions, so width / heads must be even; got {width} / {heads}"
        rotary_dims = self.rotary_dims(head_width)
        if rotary_dims < 2 or rotary_dims % 2 != 0:
            return (
                "rotary rotates pairs of dimensions, so rotary_fraction * width / heads must be even; "
                f"got {self.rotary_fraction:g} * {width} / {heads}"
            )
        return None

    def rotary_dims(self, head_width: int) -> int:
        """Return the number of dimensions of each head that are rotated."""
        return int(self.rotary_fraction * head_width)


class XposConfig(RotaryConfig):
    """Settings of xPos, which adds a decay to rotary position embeddings."""

    scale_base: float = Field(default=512.0, gt=0, le=1e15)
    """Number of tokens over which each dimension decays by its decay factor."""


class FoxConfig(PositionConfig):
    """Settings of the Forgetting Transformer."""

    model_config = FINITE_FLOAT

    gate: Literal["full", "bias_only", "fixed"] = "full"
    """Forget gate: computed from the text (full), a trained number (bias_only), or a fixed number (fixed)."""
    init: Literal["half", "alibi", "decay_times"] | None = None
    """Initial gates: 0.5 (half), from ALiBi's slopes, or from decay times. Default: half for full, else decay_times."""
    min_decay_time: float = Field(default=2.0, gt=0)
    """Decay time of the first head, in tokens."""
    max_decay_time: float = Field(default=256.0, gt=0)
    """Decay time of the last head, in tokens. The heads between are spaced logarithmically."""
    negate_gate: bool = False
    """Compute gates as sigmoid(-w.x - b), as CABLE does, instead of sigmoid(w.x + b)."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        """Return why these settings do not fit a model of this width and number of heads, or None if they fit."""
        if self.min_decay_time > self.max_decay_time:
            return (
                f"min_decay_time must not be larger than max_decay_time, got {self.min_decay_time:g} "
                f"and {self.max_decay_time:g}"
            )
        return None


class KerpleConfig(PositionConfig):
    """Settings of KERPLE."""

    form: Literal["log", "power"] = "log"
    """Penalty at distance d with trained a and p: p ln(1 + a d) for log, a d^p for power."""


class SandwichConfig(PositionConfig):
    """Settings of Sandwich."""

    width: int = Field(default=128, ge=2, multiple_of=2)
    """Size of the sinusoidal position vectors. The bias is the inner product of two of these vectors."""


class FireConfig(PositionConfig):
    """Settings of FIRE."""

    model_config = FINITE_FLOAT

    hidden: int = Field(default=32, ge=1)
    """Hidden size of the network that computes the biases."""
    threshold: float = Field(default=512.0, gt=0)
    """Initial minimum of the length by which distances are divided. A trained factor multiplies this length."""


@dataclass(frozen=True)
class MethodInfo:
    """The description of a position method that is available without importing torch.

    Attributes:
        summary: One sentence that `trainshort list positions` prints.
        config_class: The class of the method's settings.
    """

    summary: str
    config_class: type[PositionConfig] = EmptyPositionConfig


methods: Registry[MethodInfo] = Registry("position method")
"""The descriptions of all position methods by name."""

for _name, _summary, _config_class in (
    ("alibi", "ALiBi: a bias that falls linearly with the distance, with one fixed slope per head.", AlibiConfig),
    ("t5", "T5's bias: one trained number per head and distance bucket, shared by all layers.", T5Config),
    ("none", "No positions (NoPE). Only the causal mask depends on the order of the tokens.", EmptyPositionConfig),
    ("sinusoidal", "Fixed sines and cosines that are added to the embeddings.", EmptyPositionConfig),
    ("learned", "Trained vectors that are added to the embeddings. Inputs have a maximum length.", LearnedConfig),
    ("rotary", "Rotates queries and keys by their position, so that scores depend on distances only.", RotaryConfig),
    ("xpos", "xPos: rotary with scores that decay with the distance.", XposConfig),
    ("fox", "Forgetting Transformer: gates computed from the text reduce attention to earlier tokens.", FoxConfig),
    ("kerple", "KERPLE: a bias by the logarithm or a power of the distance, trained for each head.", KerpleConfig),
    ("log-alibi", "ALiBi with the logarithm of the distance and fixed slopes.", EmptyPositionConfig),
    ("bam", "BAM: a bias by a trained power of the distance. The initial bias is ALiBi's.", EmptyPositionConfig),
    ("sandwich", "Sandwich: the inner product of sinusoidal positions as a fixed bias.", SandwichConfig),
    ("fire", "FIRE: a small network computes the bias from the normalized distance.", FireConfig),
):
    methods.add(_name, MethodInfo(_summary, _config_class))


def parse_method_config(position: str, values: Mapping[str, Any] | StrictConfig | None) -> StrictConfig:
    """Create the settings of a position method and validate all values.

    Args:
        position: The name of the position method. If no method is registered under this name, for example because its
            plug-in is missing, all settings are accepted.
        values: The settings by name, or a config. None means the default settings.

    Returns:
        The validated settings.

    Raises:
        InputError: If a setting is unknown or has an invalid value.
    """
    config_class: type[PositionConfig] = UnknownPositionConfig
    if position in methods:
        config_class = methods.get(position).config_class

    if isinstance(values, config_class):
        return values
    if isinstance(values, StrictConfig):
        values = values.model_dump()
    settings = dict(values or {})

    if config_class is not UnknownPositionConfig:
        for name in settings:
            if name not in config_class.model_fields:
                raise InputError(setting_of_other_method_message(name, position))
    try:
        return config_class.model_validate(settings)
    except ValidationError as error:
        raise InputError(format_validation_error(config_class, error, "model.position_settings.")) from None


def setting_of_other_method_message(name: str, position: str) -> str:
    """Return the error message for a setting that a position method does not have.

    The message lists the settings of the method. It also names the methods that have the setting, or suggests a
    setting with a similar name.

    Args:
        name: The name of the unknown setting.
        position: The name of the position method.
    """
    known_settings = list(methods.get(position).config_class.model_fields)
    methods_with_setting = []
    for method_name, method in methods.items():
        if name in method.config_class.model_fields:
            methods_with_setting.append(method_name)

    if methods_with_setting:
        suggestion = f" It belongs to {' and '.join(methods_with_setting)}."
    else:
        suggestion = did_you_mean(name, known_settings)
    settings_text = f"has {', '.join(known_settings)}" if known_settings else "has none"
    return f"Position method '{position}' has no setting '{name}'; it {settings_text}.{suggestion}"
