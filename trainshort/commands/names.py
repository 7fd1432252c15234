"""`trainshort list` and `trainshort show`: what can be chosen, by name."""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

from trainshort import registry
from trainshort.commands.parser import Arg
from trainshort.errors import InputError
from trainshort.registry import Registry, did_you_mean

KINDS = {
    "positions": "trainshort.settings:methods",
    "engines": "trainshort.attention:engines",
    "corpora": "trainshort.data.corpus:corpora",
    "tokenizers": "trainshort.data.tokenizer:tokenizers",
    "analyses": "trainshort.analyze.lab:analyses",
    "presets": "trainshort.presets:presets",
    "recipes": "trainshort.recipes:recipes",
    "experiments": "trainshort.recipes.experiments:experiments",
    "scales": "trainshort.recipes.scales:scales",
    "claims": "trainshort.claims.verdicts:claims",
    "formats": "trainshort.interop.importing:formats",
    "convertible": "trainshort.interop.importing:convertible",
    "exports": "trainshort.interop.exporting:targets",
}
"""Every registry, and where it is full. Only the one that is asked for is imported: positions need no torch."""

FILLED_BY = {"claims": ("extrapolation", "speed_and_memory", "oddities")}
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
    """positions, engines, corpora, tokenizers, analyses, presets, recipes, experiments, scales, claims, formats (that
    `import` reads), convertible or exports."""

    def run(self) -> None:
        kind = self.kind
        if kind and kind not in KINDS:
            raise InputError(f"Cannot list '{kind}'.{did_you_mean(kind, KINDS)} Choose: {', '.join(KINDS)}.")
        registry.load_plugins()
        if not kind:
            for each in KINDS:
                print(f"{each:<12}{', '.join(_registry(each).names())}")
            return
        entries = dict(_registry(kind).items())
        width = max(map(len, entries))
        for name, entry in entries.items():
            print(f"{name:<{width}}  {first_line(entry)}")


def _registry(kind: str) -> Registry:
    module, _, name = KINDS[kind].partition(":")
    for beside in FILLED_BY.get(kind, ()):
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
        from trainshort.recipes import recipes

        print(recipes.get(self.recipe)().model_dump_json(indent=2))


def first_line(entry: object) -> str:
    """What an entry says of itself in one line: its summary, question, statement or full name, else its docstring."""
    own = (getattr(entry, name, None) for name in ("summary", "question", "statement", "name"))
    text = next((text for text in own if isinstance(text, str)), entry.__doc__ or "")
    return text.strip().partition("\n")[0]
