"""Settings of whole runs by name: functions that return a `RunConfig`. No torch here.

@recipes.register("my-recipe")
def my_recipe() -> RunConfig:
    \"\"\"One line that `trainshort list recipes` shows.\"\"\"
    return RunConfig(...)

Reading order: experiments (what a table needs, and a scale), scales (which text, which model, how long), paper (its
tables and figures). Here is a recipe for every model that one of them needs, at every scale:

    trainshort train paper-wikitext103-alibi-512

The demo's models are the laptop's that stand for the paper's 512 tokens, and are called by the demo: `demo-alibi`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from trainshort import presets
from trainshort.config.run_config import RunConfig
from trainshort.experiments.experiments import Scale, Variant, experiments, method_name
from trainshort.experiments.scales import scales
from trainshort.utils.registry import Registry

recipes: Registry[Callable[[], RunConfig]] = Registry("recipe")
DEMO_LENGTH = 512
"""The paper's training length that the demo stands for."""
EXTRA_DEMO_METHODS = ("none",)
"""Methods that no experiment asks for, but which the demo's model can be trained with by name."""


def recipe_name(scale: Scale, variant: Variant) -> str:
    """paper-wikitext103-alibi-512; where one corpus stands for all, without its name: gpu-alibi-512.

    The length is the one that is trained at: what stands for the paper's 256 at the laptop is laptop-alibi-64.
    """
    if scale.name == "laptop" and variant.length == DEMO_LENGTH:
        return f"demo-{variant.position}"
    setup = "" if scale.uses_single_corpus else f"{variant.setup}-"
    return f"{scale.name}-{setup}{variant.position}-{scale.scale_length(variant.length)}"


def _add(name: str, about: str, config: Callable[..., RunConfig], *of: Any) -> None:
    recipe = partial(config, *of)
    recipe.__doc__ = about
    recipes.add(name, recipe)


def _demo(position: str) -> Variant:
    return Variant("wikitext103", position, DEMO_LENGTH)


def _encoder(position: str) -> RunConfig:
    config = scales.get("laptop").make_config(_demo(position))
    return config.replace(model={"causal": False}, train={"valid_tokens": 65_536})


_wanted = [
    (scale, one)
    for _, scale in scales.items()
    for _, build in experiments.items()
    for one in build().variants_to_train(scale)
]
_wanted += [(scales.get("laptop"), _demo(position)) for position in EXTRA_DEMO_METHODS]
for _name, (_scale, _one) in {recipe_name(*both): both for both in _wanted}.items():
    _told = f"{method_name(_one.position)} trained at {_scale.scale_length(_one.length):,} tokens; {_scale.summary}."
    _add(_name, _told, _scale.make_config, _one)
for _position in ("alibi", "sinusoidal", "rotary"):
    _told = f"A masked language model with {method_name(_position)}, on the demo's text and length."
    _add(f"laptop-mlm-{_position}-{_encoder(_position).train.length}", _told, _encoder, _position)


def portable() -> RunConfig:
    """The preset of this name, trained as the demo: transformers, llama.cpp and CTranslate2 take it as it is."""
    config = scales.get("laptop").make_config(_demo("alibi"))
    return config.model_copy(update={"model": presets.get("portable")().replace(vocab_size=0)})


recipes.add("portable-128", portable)
