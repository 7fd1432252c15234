"""The demo's models: one small transformer, trained at 128 tokens, once per position method.

Every method gets the same optimizer settings, chosen before anything was compared.
"""

from collections.abc import Callable

from trainshort.config import RunConfig
from trainshort.recipes import recipes
from trainshort.recipes.scales import Variant, laptop

METHODS = ("alibi", "sinusoidal", "rotary", "t5", "none")


def demo_config(position: str) -> RunConfig:
    return laptop(Variant("wikitext103", position, 512))


def _add(position: str) -> None:
    def recipe() -> RunConfig:
        return demo_config(position)

    recipe.__doc__ = f"4 layers, width 128, {position} positions, trained at 128 tokens on the embedded corpus."
    entry: Callable[[], RunConfig] = recipe
    recipes.register(f"demo-{position}")(entry)


for _position in METHODS:
    _add(_position)
