"""Read values from the `config.json` of another program. An unsupported value raises `InputError` with its name."""

from collections.abc import Mapping
from typing import Any

from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""The activation functions of Hugging Face transformers, and their names in trainshort."""

# Larger numbers are errors in a config file, and could overflow in later computations.
MAX_INT = 2**31 - 1
MAX_FLOAT = 1e30


def make_alibi_config(
    *, max_bias: float = 8.0, slopes: tuple[float, ...] | None = None, **settings: Any
) -> ModelConfig:
    """Create the config of a trainshort model with ALiBi.

    Args:
        max_bias: The exponent of the smallest ALiBi slope. For example, 8 makes the smallest slope 2^-8.
        slopes: One slope for each head. None computes the slopes from `max_bias`.
        settings: The other fields of `ModelConfig`.

    Raises:
        InputError: If the settings are invalid or contradict each other.
    """
    return ModelConfig.parse({**settings, "position_settings": {"max_bias": max_bias, "slopes": slopes}})


def read_section(source_config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of a nested section of a config, such as `attn_config`. A missing section is empty.

    Raises:
        InputError: If the section is not a JSON object.
    """
    section = source_config.get(name) or {}
    if not isinstance(section, dict):
        raise InputError(f"Invalid config: expected an object of settings for {name}, got {section!r}.")
    return section


def read_int(source_config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """Return a setting that must be a positive integer.

    Args:
        source_config: The config of the source model.
        names: The possible names of the setting. The first name with a value is used.
        default: The value if none of the names has a value. None means that the setting is required.

    Raises:
        InputError: If the value is missing, or is not an integer between 1 and 2^31 - 1.
    """
    value = _first_value(source_config, names, default)
    number = parse_length(value)
    if number is None:
        raise InputError(f"Invalid config: {names[0]} must be a positive integer, got {value!r}.")
    return number


def read_float(source_config: dict[str, Any], *names: str, default: float) -> float:
    """Return a setting that must be a number.

    Args:
        source_config: The config of the source model.
        names: The possible names of the setting. The first name with a value is used.
        default: The value if none of the names has a value.

    Raises:
        InputError: If the value is not a finite number.
    """
    value = _first_value(source_config, names, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The comparison is False for NaN.
    if not is_number or not abs(value) < MAX_FLOAT:
        raise InputError(f"Invalid config: {names[0]} must be a number, got {value!r}.")
    return float(value)


def _first_value(source_config: dict[str, Any], names: tuple[str, ...], default: Any) -> Any:
    """Return the value of the first name that is in the config and is not null, or else the default."""
    for name in names:
        value = source_config.get(name)
        if value is not None:
            return value
    return default


def parse_length(value: object) -> int | None:
    """Return `value` if it is a positive integer, or else None.

    A config may state an invalid training length. The user can then give the training length on the command line.
    """
    # In Python, True is an integer.
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_INT:
        return value
    return None


def read_activation(source_config: dict[str, Any], name: str, *, default: str) -> str:
    """Return the trainshort name of an activation function of Hugging Face transformers.

    Args:
        source_config: The config of the source model.
        name: The name of the setting, such as `hidden_act`.
        default: The value if the setting is missing.

    Raises:
        InputError: If the activation function is not supported.
    """
    value = source_config.get(name) or default
    return translate_activation(name, value, ACTIVATIONS)


def translate_activation(name: str, value: object, activations: Mapping[str, str]) -> str:
    """Return the trainshort name of an activation function.

    Args:
        name: The name of the setting, for the error message.
        value: The activation function in the config of the source model.
        activations: The supported activation functions, and their names in trainshort.

    Raises:
        InputError: If the activation function is not supported.
    """
    if not isinstance(value, str) or value not in activations:
        raise InputError(f"Unsupported setting {name}={value!r}. Supported values: {', '.join(activations)}.")
    return activations[value]


def rope_scaling_type(source_config: dict[str, Any]) -> str | None:
    """Return how rotary embeddings are scaled for long inputs, such as "yarn", or None if they are not scaled."""
    # The section has another name in newer versions of transformers. Older configs call the entry "type".
    rope_settings = read_section(source_config, "rope_scaling") or read_section(source_config, "rope_parameters")
    scaling_type = rope_settings.get("rope_type", rope_settings.get("type", "default"))
    if scaling_type == "default":
        return None
    return scaling_type


def rope_scaling_notes(source_config: dict[str, Any]) -> tuple[str, ...]:
    """Return a note for users if the rotary embeddings of a model are scaled for long inputs."""
    scaling_type = rope_scaling_type(source_config)
    if scaling_type is None:
        return ()
    return (f"the rotary positions were scaled ({scaling_type}), and this scaling is dropped with the positions",)


def require_value(
    source_config: dict[str, Any], name: str, *, allowed: tuple[Any, ...], default: Any, reason: str
) -> None:
    """Check that a setting has a value that trainshort supports.

    Args:
        source_config: The config of the source model.
        name: The name of the setting.
        allowed: The supported values.
        default: The value if the setting is missing.
        reason: Why other values are not supported. The error message ends with this clause.

    Raises:
        InputError: If the setting has another value.
    """
    value = source_config.get(name, default)
    if value not in allowed:
        raise InputError(f"Unsupported setting {name}={value!r}: {reason}.")
