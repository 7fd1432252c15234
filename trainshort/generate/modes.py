"""Which cache a mode means, and which models it fits: a mode that cannot keep its promise is refused, with why."""

import torch

from trainshort.cache import BoundedCache, Cache, WindowCache
from trainshort.errors import InputError
from trainshort.generate.settings import GenerateConfig
from trainshort.model import TransformerLM


def new_cache(model: TransformerLM, config: GenerateConfig) -> Cache:
    """An empty cache for one sequence."""
    check_mode(model, config)
    match config.mode:
        case "full":
            return Cache()
        case "bounded":
            return BoundedCache(tolerance=config.tolerance, clocked=model.position.keeps_clock)
        case "window":
            assert config.window is not None
            return WindowCache(window=config.window, sinks=config.sinks)


def check_mode(model: TransformerLM, config: GenerateConfig) -> None:
    position, name = model.position, model.config.position
    if config.mode == "bounded" and not position.bounds_the_past():
        raise InputError(
            f"mode 'bounded' needs ALiBi or FoX: {name} gives no bound on what far tokens can weigh, so nothing can be "
            "forgotten with a promise. Use mode 'full', or mode 'window' with a window."
        )
    if config.mode == "bounded" and model.config.plain_every is not None:
        raise InputError(
            "mode 'bounded' needs ALiBi in every layer: layers without positions (plain_every) look back without end. "
            "Use mode 'full', or mode 'window' with a window."
        )
    if config.mode == "window" and position.reads_text():
        raise InputError(f"mode 'window' forgets keys that {name} goes on counting. Use mode 'full'.")
    if config.sinks and position.rotates():
        raise InputError(
            f"sinks count distances inside the cache, and {name} keys are stored turned by their true position. "
            "Use mode 'window' without sinks, or mode 'full'."
        )
    if config.sinks and model.config.window is not None:
        raise InputError(
            f"this model was trained with a window of {model.config.window}, and never looks back to the first tokens; "
            "use mode 'window' without sinks."
        )


def describe(caches: list[Cache], tolerance: float) -> str:
    """One line on what was forgotten or left out, over all samples; `tolerance` is the model's own."""
    bounded = [cache.certificate for cache in caches if isinstance(cache, BoundedCache)]
    if bounded:
        return str(sum(bounded[1:], bounded[0]))
    if any(isinstance(cache, WindowCache) for cache in caches):
        return "error certificate: none, a window forgets without proof (mode bounded proves)"
    left_out = [layer.left_out for cache in caches for layer in cache.layers if layer.left_out is not None]
    mass = float(torch.stack(left_out).max()) if left_out else 0.0
    if mass == 0:
        return "error certificate: 0, nothing was forgotten or left out"
    return f"error certificate: {mass:.1e}, left out while reading (tolerance {tolerance:.0e}); nothing was forgotten"
