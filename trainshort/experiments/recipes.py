"""Recipes: named run configs. A recipe is a function without arguments that returns a `RunConfig`.

This module registers one recipe for each model of each experiment, at every scale:

    trainshort train paper-wikitext103-alibi-512

The laptop models with the paper's training length 512 are called `demo-alibi` and so on. A plug-in adds a recipe with
`@recipes.register("my-recipe")`. This module does not import torch.
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
"""The training length in the paper of the demo's models. The scale "laptop" divides it by 4."""

EXTRA_DEMO_METHODS = ("none",)
"""Position methods that no experiment uses, but for which a demo recipe exists."""

ENCODER_METHODS = ("alibi", "sinusoidal", "rotary")
"""Position methods for which a recipe of a masked language model exists."""


def recipe_name(scale: Scale, variant: Variant) -> str:
    """Return the name of the recipe that trains a model at a scale.

    The length in the name is the actual training length. The dataset (`variant.setup`) is left out if the scale has
    only one dataset. At the scale `laptop`, the models of the demo have short names such as "demo-alibi".

    Example:
        >>> recipe_name(scales.get("paper"), Variant("wikitext103", "alibi", 512))
        'paper-wikitext103-alibi-512'
        >>> recipe_name(scales.get("laptop"), Variant("wikitext103", "alibi", 256))
        'laptop-alibi-64'
    """
    if scale.name == "laptop" and variant.length == DEMO_LENGTH:
        return f"demo-{variant.position}"
    length = scale.scale_length(variant.length)
    if scale.uses_single_corpus:
        return f"{scale.name}-{variant.position}-{length}"
    return f"{scale.name}-{variant.setup}-{variant.position}-{length}"


def demo_variant(position: str) -> Variant:
    """Return the model of the demo with a position method."""
    return Variant("wikitext103", position, DEMO_LENGTH)


def masked_lm_config(position: str) -> RunConfig:
    """Return the config of a masked language model with the size, the text and the training length of the demo."""
    config = scales.get("laptop").make_config(demo_variant(position))
    return config.replace(model={"causal": False}, train={"valid_tokens": 65_536})


def portable() -> RunConfig:
    """The preset "portable", trained as the demo. It can be exported to transformers, llama.cpp and CTranslate2."""
    config = scales.get("laptop").make_config(demo_variant("alibi"))
    model = presets.get("portable")().replace(vocab_size=0)  # 0 takes the size from the dataset.
    return config.model_copy(update={"model": model})


# ---- registration


def _add_recipe(name: str, description: str, make_config: Callable[..., RunConfig], *arguments: Any) -> None:
    """Register a recipe that calls `make_config(*arguments)`. `trainshort list recipes` shows the description."""
    recipe = partial(make_config, *arguments)
    recipe.__doc__ = description
    recipes.add(name, recipe)


def _experiment_models() -> dict[str, tuple[Scale, Variant]]:
    """Return the models of all experiments at all scales, by the name of their recipe.

    A recipe is a config with a name that the user can train. The scales are the sizes laptop, gpu and paper.

    Returns:
        The scale of each model and the model of the paper that it corresponds to.
    """
    models: dict[str, tuple[Scale, Variant]] = {}
    for _, scale in scales.items():
        for _, make_experiment in experiments.items():
            for variant in make_experiment().variants_to_train(scale):
                models[recipe_name(scale, variant)] = (scale, variant)
    # These position methods are in no experiment, but the user can train them as in the demo.
    for position in EXTRA_DEMO_METHODS:
        laptop = scales.get("laptop")
        variant = demo_variant(position)
        models[recipe_name(laptop, variant)] = (laptop, variant)
    return models


def _register_recipes() -> None:
    """Register the recipes of this package. A recipe is a config with a name that the user can train.

    There are recipes for the models of the paper, for masked language models, and for a model that can be exported.
    """
    for name, (scale, variant) in _experiment_models().items():
        length = scale.scale_length(variant.length)
        description = f"{method_name(variant.position)} trained at {length:,} tokens; {scale.summary}."
        _add_recipe(name, description, scale.make_config, variant)

    for position in ENCODER_METHODS:
        length = masked_lm_config(position).train.length
        description = f"A masked language model with {method_name(position)}, with the text and length of the demo."
        _add_recipe(f"laptop-mlm-{position}-{length}", description, masked_lm_config, position)

    recipes.add("portable-128", portable)  # The model that can be exported.


_register_recipes()
