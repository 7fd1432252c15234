"""`trainshort list` and `trainshort show`: what can be chosen, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro

from trainshort.errors import InputError
from trainshort.registry import Registry, did_you_mean


def _positions() -> Registry:
    from trainshort.positions import positions

    return positions


def _backends() -> Registry:
    from trainshort.attention import engines

    return engines


def _presets() -> Registry:
    from trainshort.presets import presets

    return presets


def _recipes() -> Registry:
    from trainshort.recipes import recipes

    return recipes


def _corpora() -> Registry:
    from trainshort.data.corpus import corpora

    return corpora


KINDS: dict[str, Callable[[], Registry]] = {
    "positions": _positions,
    "backends": _backends,
    "corpora": _corpora,
    "recipes": _recipes,
    "presets": _presets,
}


@dataclass(frozen=True)
class List:
    """Names that can be chosen, each with a line that says what it is.

    Examples:
      trainshort list positions
      trainshort list backends
    """

    kind: Annotated[str, tyro.conf.Positional]
    """positions, backends, corpora, recipes or presets."""

    def run(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"Cannot list '{self.kind}'.{did_you_mean(self.kind, KINDS)} Choose: {', '.join(KINDS)}.")
        entries = dict(KINDS[self.kind]().items())
        width = max(map(len, entries))
        for name, entry in entries.items():
            print(f"{name:<{width}}  {first_line(entry)}")


@dataclass(frozen=True)
class Show:
    """A recipe's settings as JSON, the same that its run folder will hold.

    Example:
      trainshort show demo-alibi
    """

    recipe: Annotated[str, tyro.conf.Positional]
    """Name of the recipe; `trainshort list recipes` names them."""

    def run(self) -> None:
        from trainshort.recipes import recipes

        print(recipes.get(self.recipe)().model_dump_json(indent=2))


def first_line(entry: object) -> str:
    """First line of an entry's docstring."""
    return (entry.__doc__ or "").strip().partition("\n")[0]
