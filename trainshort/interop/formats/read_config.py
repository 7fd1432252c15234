"""Read values from the `config.json` of another program. An unsupported value raises `InputError` with its name."""

from typing import Any

from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError


def model_config(*, max_bias: float = 8.0, slopes: tuple[float, ...] | None = None, **settings: Any) -> ModelConfig:
    """A model of ours with ALiBi; a contradiction in the source's settings is one sentence."""
    return ModelConfig.parse({**settings, "position_settings": {"max_bias": max_bias, "slopes": slopes}})


def read_section(theirs: dict[str, Any], name: str) -> dict[str, Any]:
    """Settings inside the settings."""
    value = theirs.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"The config's {name} should be an object of settings; it is {value!r}.")
    return value


def number(theirs: dict[str, Any], *names: str, default: Any = None) -> Any:
    """The first of these settings that is there: a positive whole number."""
    value = next((theirs[name] for name in names if theirs.get(name) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise InputError(f"The config should say {names[0]}, a positive whole number; it says {value!r}.")
    return value


def length_of(value: object) -> int | None:
    """A training length, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def read_float(theirs: dict[str, Any], *names: str, default: float) -> float:
    value = next((theirs[name] for name in names if theirs.get(name) is not None), default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise InputError(f"The config's {names[0]} should be a number; it is {value!r}.")
    return float(value)


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's names of what we have."""


def activation(theirs: dict[str, Any], name: str, *, default: str) -> str:
    value = theirs.get(name) or default
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise InputError(f"The model has {name} {value!r}, and these are known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


def scaled_rotation(theirs: dict[str, Any]) -> tuple[str, ...]:
    """A note for a model whose rotary positions were stretched: that goes with them."""
    settings = read_section(theirs, "rope_scaling") or read_section(theirs, "rope_parameters")
    kind = settings.get("rope_type", settings.get("type", "default"))
    return () if kind == "default" else (f"its rotary positions were stretched ({kind}); that goes with them",)


def require_value(theirs: dict[str, Any], name: str, *allowed: Any, default: Any, why: str) -> None:
    """Refuse a setting that our model cannot follow."""
    value = theirs.get(name, default)
    if not any(value is one or value == one for one in allowed):
        raise InputError(f"The model has {name} {value!r}, and {why}.")
