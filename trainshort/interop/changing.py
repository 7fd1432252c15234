"""The changes of evaluate/changes.py for a loaded Hugging Face model: `evaluate --slopes`, `--rotary` and `--scores`.

Rotary positions are stretched by transformers' own rope scaling, as its `rope_parameters` would have it; ALiBi's slopes
are changed through `patch`. The model is as before when the context ends.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from trainshort import alibi
from trainshort.errors import InputError
from trainshort.evaluate.changes import Change, changed, new_slopes, set_until
from trainshort.interop.families import FAMILIES
from trainshort.interop.patch import patched_as, put_in, unpatch
from trainshort.interop.seen import SETTINGS
from trainshort.model import TransformerLM


@contextmanager
def changed_elsewhere(model: Any, change: Change, trained_at: int | None, length: int) -> Iterator[None]:
    """Inside, a Hugging Face model runs with a change, for inputs of this length."""
    if trained_at is None:
        raise InputError(f"--{change.option} needs the length the model was trained at; give --trained-at.")
    apply: dict[str, Callable[..., None]] = {"slopes": _slopes, "rotary": _rotation, "scores": _scores}
    ours = next((module for module in model.modules() if isinstance(module, TransformerLM)), None)
    with ExitStack() as held:
        if ours is not None:  # a folder of `export --to hf`
            held.enter_context(changed(ours, change, trained_at, length))
        else:
            apply[change.option](held, model, change, (trained_at, length))
        yield


def _slopes(held: ExitStack, model: Any, change: Change, lengths: tuple[int, int]) -> None:
    if (family := _family(model)) is None:
        raise InputError(
            f"--slopes needs a model with ALiBi positions: an MPT, a BLOOM or a Falcon with ALiBi; this is a "
            f"{type(model).__name__}."
        )
    body = _patched(held, model)
    settings = vars(body)[SETTINGS]
    slopes = new_slopes(settings.slopes, change, *lengths)
    if family == "falcon" and change.kind == "max_bias":  # whose slopes are divided by the root of the heads' width
        slopes = slopes * settings.slopes / alibi.slopes(len(slopes))
    limits = {change.kind: int(change.value)} if change.kind in ("clamp", "window") else {}
    held.callback(vars(body).__setitem__, SETTINGS, settings)
    vars(body)[SETTINGS] = replace(settings, slopes=slopes, **limits)


def _rotation(held: ExitStack, model: Any, change: Change, lengths: tuple[int, int]) -> None:
    if change.kind == "blocks":
        raise InputError("--rotary blocks is for runs of trainshort's own; transformers has no such attention.")
    turning = [module for module in model.modules() if hasattr(module, "inv_freq") and hasattr(module, "rope_type")]
    if not turning:
        raise InputError(
            "--rotary needs a model that turns by one rope_parameters of transformers (Llama, Mistral, Qwen2, GPT-NeoX "
            f"and their like); this is a {type(model).__name__}."
        )
    for module in turning:
        if module.rope_type != "default":
            raise InputError(
                f"This {type(model).__name__} is stretched already, by rope_type '{module.rope_type}' of its config."
            )
        speed, size = _stretched(module, change, *lengths)
        set_until(held, module, "inv_freq", speed.to(module.inv_freq))
        set_until(held, module, "attention_scaling", size)


def _stretched(module: Any, change: Change, trained_at: int, length: int) -> tuple[Any, float]:
    """What transformers computes from such `rope_parameters`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(module.config)
    rope = {**config.rope_parameters, "factor": change.value, "original_max_position_embeddings": trained_at}
    config.max_position_embeddings = trained_at
    if change.kind == "ntk":  # a larger base, which is all there is to it
        dim = 2 * len(module.inv_freq)
        rope["rope_theta"] *= change.value ** (dim / (dim - 2) if dim > 2 else 1.0)
        config.rope_parameters = rope
        return module.compute_default_rope_parameters(config)
    config.rope_parameters = rope | {"rope_type": change.kind}
    return ROPE_INIT_FUNCTIONS[change.kind](config, module.inv_freq.device, seq_len=length)


def _scores(held: ExitStack, model: Any, change: Change, lengths: tuple[int, int]) -> None:
    if _family(model) is not None:
        _patched(held, model)
    names = ("scaling", "softmax_scale", "inv_norm_factor")
    scaled = [(module, name) for module in model.modules() for name in names if _is_number(module, name)]
    if not scaled:
        raise InputError(f"--scores does not know where a {type(model).__name__} scales its scores.")
    for module, name in scaled:
        set_until(held, module, name, getattr(module, name) * change.value)


def _is_number(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), float)


def _family(model: nn.Module) -> str | None:
    """Which of the ALiBi families a model is of."""
    for module in model.modules():
        for name, family in FAMILIES.items():
            if family.part(module) == "body" and family.has_alibi(module.config):
                return name
    return None


def _patched(held: ExitStack, model: nn.Module) -> nn.Module:
    """The body of a model that is patched now, and is not any more at the end if it was not before."""
    if patched_as(model) is None:
        put_in(model)
        held.callback(unpatch, model)
    return next(module for module in model.modules() if SETTINGS in vars(module))
