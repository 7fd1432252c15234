"""`trainshort list` and `trainshort show`: show what can be chosen by name."""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

from trainshort.cli.parser import Arg
from trainshort.errors import InputError
from trainshort.utils.plugins import load_plugins
from trainshort.utils.registry import Registry, did_you_mean

# Every registry, and the module and variable that define the registry. None of these modules imports torch.
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

# Modules in the package of a registry that add entries to the registry when they are imported.
REGISTERING_MODULES = {"claims": ("extrapolation", "speed_and_memory")}


@dataclass(frozen=True)
class List:
    """List the names that can be chosen, with a description of each name

    Without KIND, the command lists the names of all kinds.

    Examples:
      trainshort list
      trainshort list positions
      trainshort list positions --plugin mine.py
    """

    kind: Annotated[str, Arg(positional=True)] = ""
    """List positions, backends, corpora, tokenizers, analyses, presets, recipes, experiments, scales, claims, formats
    (that `import` reads), convertible models or exports"""

    def run(self) -> None:
        """Print the names in one registry with their descriptions, or the names in all registries.

        A registry holds the objects of one kind that can be chosen by name, for example all position methods.
        """
        kind = self.kind
        if kind and kind not in LISTABLE_REGISTRIES:
            suggestion = did_you_mean(kind, LISTABLE_REGISTRIES)
            raise InputError(f"Cannot list '{kind}'.{suggestion} Choose one of: {', '.join(LISTABLE_REGISTRIES)}.")
        load_plugins()
        if not kind:
            for listed_kind in LISTABLE_REGISTRIES:
                names = load_registry(listed_kind).names()
                print(f"{listed_kind:<12}{', '.join(names)}")
            return

        registry = load_registry(kind)
        names = registry.names()
        name_width = max(len(name) for name in names)
        for name in names:
            print(f"{name:<{name_width}}  {registry.describe(name)}")


def load_registry(kind: str) -> Registry:
    """Import a registry and the modules that add entries to the registry.

    A registry holds the objects that can be chosen by name, for example all position methods.

    Args:
        kind: A name in `LISTABLE_REGISTRIES`, such as "positions".
    """
    # A value such as "trainshort.experiments.scales:scales" names a module, and a variable in the module.
    module_name, _, variable_name = LISTABLE_REGISTRIES[kind].partition(":")
    package_name = module_name.rpartition(".")[0]
    for registering_module in REGISTERING_MODULES.get(kind, ()):
        import_module(f"{package_name}.{registering_module}")
    return getattr(import_module(module_name), variable_name)


@dataclass(frozen=True)
class Show:
    """Show the settings of a recipe as JSON, as a run folder stores them in config.json

    Example:
      trainshort show demo-alibi
    """

    recipe: Annotated[str, Arg(positional=True)]
    """Show this recipe; `trainshort list recipes` lists all recipes"""

    def run(self) -> None:
        """Print the settings of the recipe as JSON. A recipe is a function that returns the settings of a run."""
        from trainshort.experiments.recipes import recipes

        make_config = recipes.get(self.recipe)
        print(make_config().model_dump_json(indent=2))
