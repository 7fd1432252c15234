"""`trainshort list` and `trainshort show`: what can be chosen, by name."""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

from trainshort.cli.parser import Arg
from trainshort.errors import InputError
from trainshort.utils.plugins import load_plugins
from trainshort.utils.registry import Registry, did_you_mean

LISTABLE_REGISTRIES = {
    "positions": "trainshort.config.registries:positions",
    "backends": "trainshort.config.registries:backends",
    "corpora": "trainshort.config.registries:corpora",
    "tokenizers": "trainshort.config.registries:tokenizers",
    "analyses": "trainshort.config.registries:analyses",
    "presets": "trainshort.config.registries:presets",
    "recipes": "trainshort.experiments.recipes:recipes",
    "experiments": "trainshort.experiments.experiments:experiments",
    "scales": "trainshort.experiments.scales:scales",
    "claims": "trainshort.experiments.claims.verdicts:claims",
    "formats": "trainshort.config.registries:formats",
    "convertible": "trainshort.config.registries:convertible",
    "exports": "trainshort.config.registries:targets",
}
"""Every registry, and where the registry is defined. None of these modules imports torch."""

REGISTERING_MODULES = {"claims": ("extrapolation", "speed_and_memory")}
"""Modules beside a registry that fill it."""


@dataclass(frozen=True)
class List:
    """Names that can be chosen, each with a line that says what it is. Without a KIND: all kinds, and their names.

    Examples:
      trainshort list
      trainshort list positions
      trainshort list positions --plugin mine.py
    """

    kind: Annotated[str, Arg(positional=True)] = ""
    """positions, backends, corpora, tokenizers, analyses, presets, recipes, experiments, scales, claims, formats (that
    `import` reads), convertible or exports."""

    def run(self) -> None:
        kind = self.kind
        if kind and kind not in LISTABLE_REGISTRIES:
            raise InputError(
                f"Cannot list '{kind}'.{did_you_mean(kind, LISTABLE_REGISTRIES)} "
                f"Choose: {', '.join(LISTABLE_REGISTRIES)}."
            )
        load_plugins()
        if not kind:
            for each in LISTABLE_REGISTRIES:
                print(f"{each:<12}{', '.join(_registry(each).names())}")
            return
        chosen = _registry(kind)
        names = chosen.names()
        width = max(map(len, names))
        for name in names:
            print(f"{name:<{width}}  {chosen.describe(name)}")


def _registry(kind: str) -> Registry:
    module, _, name = LISTABLE_REGISTRIES[kind].partition(":")
    for beside in REGISTERING_MODULES.get(kind, ()):
        import_module(f"{module.rpartition('.')[0]}.{beside}")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Show:
    """A recipe's settings as JSON, the same that its run folder will hold.

    Example:
      trainshort show demo-alibi
    """

    recipe: Annotated[str, Arg(positional=True)]
    """Name of the recipe; `trainshort list recipes` names them."""

    def run(self) -> None:
        from trainshort.experiments.recipes import recipes

        print(recipes.get(self.recipe)().model_dump_json(indent=2))
