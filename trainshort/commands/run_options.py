"""A `RunConfig` on the command line: every setting is an option, with the recipe's value as its default.

The parser reads the words, the config judges the values, so that a mistake reads the same wherever it was made.
"""

from typing import Any

from trainshort.commands.parser import Option, Parser, UsageError, of_settings
from trainshort.config import RunConfig
from trainshort.errors import InputError
from trainshort.methods import MOVED, methods, not_chosen

SECTIONS = ("model", "data", "optim", "train")


def options(config: RunConfig) -> list[Option]:
    """All settings of a run, by dotted names."""
    return [one for section in SECTIONS for one in of_settings(getattr(config, section), f"{section}.")]


def with_method(base: RunConfig, words: list[str]) -> RunConfig:
    """The recipe with the position method that the words choose, since it decides which settings there are."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        position = value if equals else following
        if option in ("--model.position", "--position") and position and not position.startswith("--"):
            methods.get(position)
            base = base.replace(model={"position": position})
    return base


class RunParser(Parser):
    """A parser that knows the settings of position methods: those that had other names in 0.1.0 are still found, and
    one of a method that is not chosen is told with its method."""

    position = ""

    def _find(self, word: str) -> tuple[Option, bool, str | None]:
        typed, equals, value = word.removeprefix("--").partition("=")
        head, _, tail = typed.replace("-", "_").rpartition(".")
        negated, name = ("no-", tail.removeprefix("no_")) if tail.startswith("no_") else ("", tail)
        if head in ("", "model") and MOVED.get(name, ("",))[0] == self.position:
            word = f"--model.position_settings.{negated}{MOVED[name][1]}{equals}{value}"
        try:
            return super()._find(word)
        except UsageError:
            owners = [owner for owner, method in methods.items() if name in method.settings.model_fields]
            of_a_method = head in ("", "model", "position_settings", "model.position_settings")
            if of_a_method and self.position not in owners and (owners or name in MOVED):
                raise InputError(not_chosen(name, self.position)) from None
            raise


def chosen_config(base: RunConfig, chosen: dict[str, Any]) -> RunConfig:
    """The recipe's config with the chosen values, by dotted names, validated."""
    values = base.model_dump()
    for name, value in chosen.items():
        *groups, last = name.split(".")
        place = values
        for group in groups:
            place = place[group]
        place[last] = value
    return RunConfig.read(values)
