"""A recipe for every model that a table or figure needs, at every scale.

`trainshort train paper-wikitext103-alibi-512`
"""

from collections.abc import Callable

from trainshort.config import RunConfig
from trainshort.recipes import recipes
from trainshort.recipes.experiments import NAMES, experiments
from trainshort.recipes.scales import Scale, Variant, scales


def recipe_name(scale: Scale, variant: Variant) -> str:
    """paper-wikitext103-alibi-512; where one corpus stands for all, without its name: gpu-alibi-512.

    The length is the paper's at every scale, since it is the paper's model that is meant.
    """
    setup = "" if scale.stand_in else f"{variant.setup}-"
    return f"{scale.name}-{setup}{variant.position}-{variant.length}"


def _add(scale: Scale, variant: Variant) -> None:
    def recipe() -> RunConfig:
        return scale.config(variant)

    length = scale.length(variant.length)
    recipe.__doc__ = f"{NAMES[variant.position]} trained at {length} tokens; {scale.summary}."
    entry: Callable[[], RunConfig] = recipe
    name = recipe_name(scale, variant)
    if name not in recipes:
        recipes.register(name)(entry)


for _, _scale in scales.items():
    for _, _build in experiments.items():
        for _variant in _build().variants(_scale):
            _add(_scale, _variant)
