"""A `RunConfig` as command-line options: every setting is one, with the recipe's value as its default.

tyro reads the words, the config judges the values: the options are plain dataclasses with the config's fields, and what
they collect is validated as any config is, so that a mistake reads the same wherever it was made.
"""

from dataclasses import asdict, field, make_dataclass
from typing import Annotated, Any

import tyro
from pydantic import BaseModel

from trainshort.config import RunConfig, Settings
from trainshort.errors import InputError
from trainshort.methods import MOVED, methods, not_chosen
from trainshort.registry import did_you_mean

OWN = ("format",)
"""Settings that the program writes, not the user."""


def options(settings: Settings) -> Any:
    """An instance of a plain dataclass with the fields, help texts and present values of `settings`."""
    fields = []
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name in OWN or (value is None and _is_section(info.annotation)):
            continue
        if isinstance(value, Settings) and not type(value).model_fields:
            continue
        if isinstance(value, Settings):
            value = options(value)
        kind = Annotated[
            type(value) if isinstance(getattr(settings, name), Settings) else info.annotation,
            tyro.conf.arg(help=info.description),
        ]
        fields.append((name, kind, field(default_factory=lambda value=value: value)))
    made = make_dataclass(type(settings).__name__, fields, frozen=True)
    made.__doc__ = type(settings).__doc__
    return made()


def _is_section(annotation: Any) -> bool:
    """Whether a setting is a group of settings that may be absent, as `AdaptiveConfig | None`."""
    return any(isinstance(part, type) and issubclass(part, BaseModel) for part in getattr(annotation, "__args__", ()))


def names(chosen: Any, prefix: str = "") -> list[str]:
    """Dotted names of all options."""
    found = []
    for name, value in vars(chosen).items():
        found += names(value, f"{prefix}{name}.") if hasattr(value, "__dataclass_fields__") else [prefix + name]
    return found


def with_method(base: RunConfig, words: list[str]) -> RunConfig:
    """The recipe with the position method that the words choose, since it decides which settings there are."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        position = value if equals else following
        if option in ("--model.position", "--position") and position and not position.startswith("--"):
            methods.get(position)
            base = base.replace(model={"position": position})
    return base


def spelled_out(words: list[str], known: list[str], position: str = "") -> list[str]:
    """The words with short names replaced by full ones: `--steps 3` is `--train.steps 3` where no other setting is
    called steps. A name that no setting has is refused with the one it resembles, or with the position method that has
    it; the names that settings of position methods had in 0.1.0 still work."""
    return [_spell(word, known, position) if word.startswith("--") and word != "--help" else word for word in words]


def _spell(word: str, known: list[str], position: str) -> str:
    typed, equals, value = word.removeprefix("--").partition("=")
    head, dot, tail = typed.replace("-", "_").rpartition(".")
    negated = tail.startswith("no_") and head + dot + tail not in known
    tail = tail.removeprefix("no_") if negated else tail
    if head in ("", "model") and MOVED.get(tail, ("",))[0] == position:
        head, dot, tail = "model.position_settings", ".", MOVED[tail][1]
    name = head + dot + tail
    matches = [full for full in known if full == name or full.endswith("." + name)]
    if len(matches) > 1 and name not in matches:
        raise InputError(f"'{typed}' could be {' or '.join(matches)}; write one of them.")
    elsewhere = tail in MOVED or any(tail in method.settings.model_fields for _, method in methods.items())
    if not matches and position and elsewhere:
        raise InputError(not_chosen(tail, position))
    if not matches:
        close = did_you_mean(name, known) or did_you_mean(name, [full.rpartition(".")[2] for full in known])
        raise InputError(f"Unknown setting '{typed}'.{close} See trainshort train --help.")
    full = name if name in matches else matches[0]
    head, dot, tail = full.rpartition(".")
    return f"--{head}{dot}{'no_' if negated else ''}{tail}{equals}{value}"


def chosen_config(base: RunConfig, chosen: dict[str, Any]) -> RunConfig:
    """The recipe's config with the chosen values, validated."""
    values = base.model_dump()
    for section, settings in chosen.items():
        _merge(values[section], asdict(settings))
    return RunConfig.read(values)


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, change in changes.items():
        if isinstance(change, dict):
            _merge(values[name], change)
        else:
            values[name] = change
