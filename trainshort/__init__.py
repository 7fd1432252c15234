"""trainshort: language models that are trained on short sequences and run on long ones.

The names below are public. docs/reference.md has an example of each.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from trainshort import alibi, presets
    from trainshort.attention import DecayBias, DenseBias, DistanceBias, LinearBias, alibi_attention, attend
    from trainshort.cache import Cache
    from trainshort.checkpoint import load_model
    from trainshort.config import ModelConfig, RunConfig
    from trainshort.data import load_tokenizer
    from trainshort.errors import InputError
    from trainshort.generate import stream
    from trainshort.interop.doctor import doctor
    from trainshort.interop.patch import patch, unpatch
    from trainshort.model import TransformerLM
    from trainshort.positions import LayerInput, PositionMethod
    from trainshort.registries import analyses, backends, corpora, formats, positions, tokenizers
    from trainshort.settings import PositionConfig

    register_analysis = analyses.register
    register_backend = backends.register
    register_corpus = corpora.register
    register_format = formats.register
    register_position = positions.register
    register_tokenizer = tokenizers.register

__all__ = [
    "Cache",
    "DecayBias",
    "DenseBias",
    "DistanceBias",
    "InputError",
    "LayerInput",
    "LinearBias",
    "ModelConfig",
    "PositionConfig",
    "PositionMethod",
    "RunConfig",
    "TransformerLM",
    "alibi",
    "alibi_attention",
    "attend",
    "doctor",
    "load_model",
    "load_tokenizer",
    "patch",
    "presets",
    "register_analysis",
    "register_backend",
    "register_corpus",
    "register_format",
    "register_position",
    "register_tokenizer",
    "stream",
    "unpatch",
]

_HOMES = {
    "attention": ("DecayBias", "DenseBias", "DistanceBias", "LinearBias", "alibi_attention", "attend"),
    "cache": ("Cache",),
    "checkpoint": ("load_model",),
    "config": ("ModelConfig", "RunConfig"),
    "data": ("load_tokenizer",),
    "errors": ("InputError",),
    "generate": ("stream",),
    "interop.doctor": ("doctor",),
    "interop.patch": ("patch", "unpatch"),
    "model": ("TransformerLM",),
    "positions": ("LayerInput", "PositionMethod"),
    "settings": ("MethodSettings",),
}


_DECORATORS = {
    "register_analysis": "analyses",
    "register_backend": "backends",
    "register_corpus": "corpora",
    "register_format": "formats",
    "register_position": "positions",
    "register_tokenizer": "tokenizers",
}
"""The public decorators of plug-ins, and the registry in registries.py that each one adds to."""


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `trainshort --help` should not wait for torch."""
    from importlib import import_module

    if name in ("alibi", "presets"):
        return import_module(f"trainshort.{name}")
    if name in _DECORATORS:
        return getattr(import_module("trainshort.registries"), _DECORATORS[name]).register
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"trainshort.{home}"), name)
    raise AttributeError(f"module 'trainshort' has no attribute {name!r}")
