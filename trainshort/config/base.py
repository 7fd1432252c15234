"""`StrictConfig`, the base class of all configs, and the error messages for invalid settings. Does not import torch."""

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from trainshort.errors import InputError
from trainshort.utils.registry import did_you_mean

Location = tuple[int | str, ...]
"""The path of a setting inside nested configs, as pydantic reports the path, for example `("train", "steps")`."""

_UNION_MEMBER_NAMES = ("str", "int", "float", "bool")
"""Type names that pydantic appends to the location of an error if the setting allows several types."""


class StrictConfig(BaseModel):
    """Base class of all configs.

    Configs are frozen and reject unknown settings. The docstring of a field is also the help text of the
    command-line option with the same name.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )

    @classmethod
    def parse(cls, values: dict[str, Any], *, origin_path: Path | None = None) -> Self:
        """Create a config from a dictionary and validate all values.

        Args:
            values: The settings by name, for example the content of a JSON file.
            origin_path: The file that `values` was read from. Error messages name this file.

        Returns:
            The validated config.

        Raises:
            InputError: If a setting is unknown or has an invalid value.

        Example:
            >>> TrainConfig.parse({"stepz": 3})
            Traceback (most recent call last):
            InputError: Unknown setting 'stepz'. Did you mean 'steps'?
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            message = format_validation_error(cls, error)
            if origin_path is not None:
                message = f"In {origin_path}: {message}"
            # `from None` hides the pydantic traceback, because the message is written for users.
            raise InputError(message) from None

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy of the config with some settings changed.

        A nested config can be given as a dictionary. Its settings are merged with the current settings:

            config.replace(train={"steps": 100}, model={"position": "t5"})

        Raises:
            InputError: If a setting is unknown or has an invalid value.
        """
        return type(self).parse(self.with_overrides(changes))

    def with_overrides(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the settings as a dictionary, with `changes` applied and not yet validated.

        Args:
            changes: New values by the name of the setting. A dictionary for a nested config changes only the
                settings that the dictionary names.
        """
        values = self.model_dump()
        for name, change in changes.items():
            current_value = getattr(self, name, None)
            if isinstance(change, dict) and isinstance(current_value, StrictConfig):
                values[name] = current_value.with_overrides(change)
            else:
                values[name] = change
        return values


def format_validation_error(config_class: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """Return a message for the first invalid setting of a pydantic validation error.

    Args:
        config_class: The config class that was validated.
        error: The error that pydantic raised.
        prefix: Text that is put before the name of the setting, for example "model.position_settings.".

    Returns:
        One or two sentences that name the setting.
    """
    # Further errors are often caused by the first error, so only the first error is reported.
    first_error = error.errors(include_url=False)[0]

    # A validator of this package may raise an InputError, whose message is already complete.
    original_error = first_error.get("ctx", {}).get("error")
    if isinstance(original_error, InputError):
        return str(original_error)

    location = first_error["loc"]  # such as ("train", "steps")
    # For a setting with several possible types, pydantic appends the name of a type to the location.
    if location and location[-1] in _UNION_MEMBER_NAMES:
        location = location[:-1]
    setting = prefix + ".".join(str(part) for part in location)

    if first_error["type"] == "extra_forbidden":
        return _format_unknown_setting(setting, known=_field_names(config_class, first_error["loc"][:-1]))
    return _format_invalid_value(setting, first_error)


def _format_unknown_setting(setting: str, known: list[str]) -> str:
    """Return the error message for an unknown setting.

    Args:
        setting: The dotted name of the setting, for example "train.stepz".
        known: The names of the settings in the same section, for example of the section "train".
    """
    section, _, name = setting.rpartition(".")
    suggestion = did_you_mean(name, known)
    if section:
        # Add the section to the suggestion: " Did you mean 'steps'?" becomes " Did you mean 'train.steps'?"
        suggestion = suggestion.replace("'", f"'{section}.", 1)
    return f"Unknown setting '{setting}'.{suggestion}"


def _format_invalid_value(setting: str, error: ErrorDetails) -> str:
    """Return the error message for a setting with an invalid value.

    Args:
        setting: The dotted name of the setting. The name is empty if the error concerns the whole config.
        error: The details that pydantic reports.
    """
    # pydantic puts "Value error, " before the message of a ValueError. Users write lists instead of tuples.
    reason = error["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if error["type"] == "model_type":
        reason = "it is a group of settings"

    if not setting:
        return f"{reason}."
    # The message of a ValueError comes from a validator of this package and names the invalid value itself.
    if error["type"] == "value_error":
        return f"In '{setting}': {reason}."
    lowercase_reason = reason[0].lower() + reason[1:]
    return f"Setting '{setting}' cannot be {error['input']!r}: {lowercase_reason}."


def _field_names(config_class: type[BaseModel], location: Location) -> list[str]:
    """Return the names of all settings in the nested config at `location`.

    Args:
        config_class: The config class in which `location` starts.
        location: The names of the nested configs, from the outer to the inner config.

    Raises:
        LookupError: If `location` contains a setting that is not a nested config.

    Example:
        >>> _field_names(RunConfig, ("model", "adaptive"))
        ['cutoffs', 'factor']
    """
    for field_name in location:
        annotation = config_class.model_fields[str(field_name)].annotation
        # The annotation of an optional nested config is a union, such as `AdaptiveConfig | None`.
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                config_class = candidate
                break
        else:
            raise LookupError(f"The setting {field_name} is not a nested config.")
    return list(config_class.model_fields)
