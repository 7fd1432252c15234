"""Settings that are typed, frozen, given by name, and refuse what they do not know; and those that each position method
has for itself. No torch.

Everything that can be set in this package, by a config, a command line or a plug-in, is a class of this kind. Help
texts, reports and `trainshort list` know position methods from here alone: a method of the package has its settings
here and its module in positions/; one from outside has both in its own file (docs/positions.md), and is filed here as
it is registered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainshort.errors import InputError
from trainshort.utils.registry import Registry, did_you_mean


class StrictConfig(BaseModel):
    """Base of every config: frozen, no unknown keys, field docstrings double as help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @classmethod
    def parse(cls, values: dict[str, Any], *, origin: Path | None = None) -> Self:
        """Validate plain data; a mistake becomes one sentence that names the setting, and the file it came from.

        >>> TrainConfig.read({"stepz": 3})
        InputError: Unknown setting 'stepz'. Did you mean 'steps'?
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(
                f"In {origin}: {format_validation_error(cls, error)}" if origin else format_validation_error(cls, error)
            ) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed, validated again. Sections are given as dicts and merged."""
        return type(self).parse(self.with_overrides(changes))

    def with_overrides(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The values of a copy, not validated yet."""
        values = self.model_dump()
        for name, change in changes.items():
            section = getattr(self, name, None)
            if isinstance(change, dict) and isinstance(section, StrictConfig):
                values[name] = section.with_overrides(change)
            else:
                values[name] = change
        return values


_ALTERNATIVES = (("str",), ("int",), ("float",), ("bool",))
"""Where pydantic says which type of several did not fit; no setting has such a name."""


def format_validation_error(cls: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """The first mistake of a pydantic error as one sentence; the others follow from mending it."""
    first = error.errors(include_url=False)[0]
    if isinstance(told := first.get("ctx", {}).get("error"), InputError):
        return str(told)  # a sentence already
    path = first["loc"][:-1] if first["loc"][-1:] in _ALTERNATIVES else first["loc"]
    where = prefix + ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        section, _, key = where.rpartition(".")
        close = did_you_mean(key, _fields_at(cls, first["loc"][:-1]))
        return f"Unknown setting '{where}'.{close.replace(chr(39), chr(39) + section + '.', 1) if section else close}"
    reason = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if first["type"] == "model_type":
        reason = "it is a group of settings"
    if not where:
        return reason + "."
    if first["type"] == "value_error":
        return f"In '{where}': {reason}."
    return f"Setting '{where}' cannot be {first['input']!r}: {reason[0].lower() + reason[1:]}."


def _fields_at(cls: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Names of the settings in the section that `loc` leads to."""
    for part in loc:
        annotation = cls.model_fields[str(part)].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        cls = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(cls.model_fields)


# ---- position methods

PAPER_METHODS = ("sinusoidal", "rotary", "t5", "alibi")
"""The methods that the paper compares, in the order in which it found them to extrapolate."""


FINITE_FLOAT = ConfigDict(allow_inf_nan=False)
"""Of settings whose numbers have no use as infinite ones; a method from outside may have such."""


class PositionConfig(StrictConfig):
    """Base of a method's settings."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        """Why a model of this shape cannot have these settings, in words; None when it can."""
        return None

    def with_max_length(self, length: int) -> Self:
        """The same settings for a model that has to read inputs of this length; only a table has to grow for that."""
        return self


class EmptyPositionConfig(PositionConfig):
    """Of a method with nothing to set."""


class UnknownPositionConfig(PositionConfig):
    """Of a method that is not here: kept as they were written, so that a report can read the run all the same."""

    model_config = ConfigDict(extra="allow")


class AlibiConfig(PositionConfig):
    """ALiBi's slopes."""

    model_config = FINITE_FLOAT

    max_bias: float = Field(default=8.0, gt=0)
    """The flattest slope is 2 to the minus this."""
    learned_slopes: bool = False
    """Train the slopes (the paper found this extrapolates worse)."""
    slopes: tuple[float, ...] | None = None
    """One slope per head, for models that were trained with others. Default: those of max_bias."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        if self.slopes is not None and len(self.slopes) != heads:
            return f"slopes must be one per head, {heads}; got {len(self.slopes)}"
        return None


class T5Config(PositionConfig):
    """T5's buckets of distances."""

    buckets: int = Field(default=32, ge=2)
    """Number of distance buckets."""
    max_distance: int = Field(default=128, ge=2)
    """Distances from here on share the last bucket."""


class LearnedConfig(PositionConfig):
    """The table of learned positions."""

    max_length: int = Field(default=1024, ge=1)
    """Length of the table, and so the longest input."""

    def with_max_length(self, length: int) -> Self:
        return self.replace(max_length=max(length, self.max_length))


class RotaryConfig(PositionConfig):
    """Rotary's angles."""

    model_config = FINITE_FLOAT

    base: float = Field(default=10_000.0, gt=1)
    """Wavelengths grow up to this many radians."""
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of each head that turns, its first numbers; the others stay as they are (GPT-NeoX: 0.25)."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        if width // heads % 2:
            return f"rotary turns pairs, so width / heads must be even; got {width} / {heads}"
        if self.rotary_dims(width // heads) < 2 or self.rotary_dims(width // heads) % 2:
            return f"rotary turns pairs, so share · width / heads must be even; got {self.rotary_fraction:g} · {width} / {heads}"
        return None

    def rotary_dims(self, head_width: int) -> int:
        """Numbers of a head that turn."""
        return int(self.rotary_fraction * head_width)


class XposConfig(RotaryConfig):
    """xPos's angles and decay."""

    scale_base: float = Field(default=512.0, gt=0, le=1e15)
    """Tokens over which a pair shrinks by its factor once."""


class FoxConfig(PositionConfig):
    """The Forgetting Transformer's gates."""

    model_config = FINITE_FLOAT

    gate: Literal["full", "bias_only", "fixed"] = "full"
    """What a gate is: of the text (full), a trained number (bias_only), or a number that stays (fixed)."""
    init: Literal["half", "alibi", "decay_times"] | None = None
    """First gates: 0.5 (half), ALiBi's slopes, or decay times. Default: half for full, else times."""
    min_decay_time: float = Field(default=2.0, gt=0)
    """Decay time of the first head, in tokens."""
    max_decay_time: float = Field(default=256.0, gt=0)
    """Decay time of the last head, in tokens; those between are spaced by their logarithms."""
    negate_gate: bool = False
    """Gates are sigma(-w.x - b): CABLE's sign."""

    def unsupported_reason(self, width: int, heads: int) -> str | None:
        if self.min_decay_time > self.max_decay_time:
            return f"decay times go from shortest to longest; got {self.min_decay_time:g} and {self.max_decay_time:g}"
        return None


class KerpleConfig(PositionConfig):
    """KERPLE's kernel."""

    form: Literal["log", "power"] = "log"
    """The penalty at distance d: p ln(1 + a d), or a d^p."""


class SandwichConfig(PositionConfig):
    """Sandwich's sinusoids."""

    width: int = Field(default=128, ge=2, multiple_of=2)
    """Width of the sinusoidal positions whose inner product it is."""


class FireConfig(PositionConfig):
    """FIRE's network."""

    model_config = FINITE_FLOAT

    hidden: int = Field(default=32, ge=1)
    """Hidden units of the network from shares of distance to biases."""
    threshold: float = Field(default=512.0, gt=0)
    """Queries before this position are treated as if they stood there; times a trained factor."""


@dataclass(frozen=True)
class MethodInfo:
    """A position method as far as it can be told without torch."""

    summary: str
    settings: type[PositionConfig] = EmptyPositionConfig


methods: Registry[MethodInfo] = Registry("position method")
for _name, _summary, _settings in (
    ("alibi", "linear biases: a penalty that grows with distance, one fixed slope per head.", AlibiConfig),
    ("t5", "T5's bias: one trained number per head and bucket of distances, shared by all layers.", T5Config),
    ("none", "no positions at all; the causal mask is the only hint of order.", EmptyPositionConfig),
    ("sinusoidal", "fixed sines and cosines added to the embeddings; any length.", EmptyPositionConfig),
    ("learned", "one trained vector per position added to the embeddings; ends with its table.", LearnedConfig),
    ("rotary", "queries and keys turn with their position, so that scores see only distances.", RotaryConfig),
    ("xpos", "xPos: rotary, and pairs shrink with distance, those that turn fast the most.", XposConfig),
    ("fox", "Forgetting Transformer: a gate at each token says how much of the past is kept.", FoxConfig),
    ("kerple", "KERPLE: a logarithm or power of the distance, trained for each head.", KerpleConfig),
    ("log-alibi", "ALiBi of the logarithm of the distance, slopes fixed.", EmptyPositionConfig),
    ("bam", "BAM: a trained power of the distance; ALiBi at first.", EmptyPositionConfig),
    ("sandwich", "Sandwich: the inner product of sinusoidal positions as a bias; fixed.", SandwichConfig),
    ("fire", "FIRE: a small network of the distance as a share of what there is to see.", FireConfig),
):
    methods.add(_name, MethodInfo(_summary, _settings))


def parse_method_config(position: str, given: Mapping[str, Any] | StrictConfig | None) -> StrictConfig:
    """A method's settings from plain data; a mistake is one sentence."""
    kind = methods.get(position).settings if position in methods else UnknownPositionConfig
    if isinstance(given, kind):
        return given
    values = given.model_dump() if isinstance(given, StrictConfig) else dict(given or {})
    if unknown := [name for name in values if name not in kind.model_fields and kind is not UnknownPositionConfig]:
        raise InputError(setting_of_other_method_message(unknown[0], position))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InputError(format_validation_error(kind, error, "model.position_settings.")) from None


def setting_of_other_method_message(name: str, position: str) -> str:
    """A sentence on a setting that the position method does not have."""
    known = list(methods.get(position).settings.model_fields)
    owners = [other for other, method in methods.items() if name in method.settings.model_fields]
    whose = f" It belongs to {' and '.join(owners)}." if owners else did_you_mean(name, known)
    has = f"has {', '.join(known)}" if known else "has none"
    return f"Position method '{position}' has no setting '{name}'; it {has}.{whose}"
