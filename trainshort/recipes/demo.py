"""The demo's models: one small transformer, trained at 128 tokens, once per position method.

Every method gets the same optimizer settings, chosen before anything was compared.
"""

from collections.abc import Callable

from trainshort.config import OptimConfig, RunConfig, TrainConfig
from trainshort.presets import presets
from trainshort.recipes import recipes

METHODS = ("alibi", "sinusoidal", "rotary", "t5", "none")


def demo_config(position: str) -> RunConfig:
    return RunConfig(
        model=presets.get("laptop")().replace(position=position, vocabulary=0),
        optim=OptimConfig(lr=2e-3, warmup=50),
        train=TrainConfig(length=128, batch=32, steps=300),
    )


def _add(position: str) -> None:
    def recipe() -> RunConfig:
        return demo_config(position)

    recipe.__doc__ = f"4 layers, width 128, {position} positions, trained at 128 tokens on the embedded corpus."
    entry: Callable[[], RunConfig] = recipe
    recipes.register(f"demo-{position}")(entry)


for _position in METHODS:
    _add(_position)
