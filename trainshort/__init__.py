"""trainshort: language models that are trained on short sequences and run on long ones.

The names below are public. docs/reference.md has an example of each.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from trainshort import alibi
    from trainshort.attention import DecayBias, DenseBias, DistanceBias, LinearBias, alibi_attention, attend
    from trainshort.config import presets
    from trainshort.config.position_config import PositionConfig
    from trainshort.config.registries import analyses, backends, corpora, formats, positions, tokenizers
    from trainshort.config.run_config import ModelConfig, RunConfig
    from trainshort.data.tokenizers.base import load_tokenizer
    from trainshort.errors import InputError
    from trainshort.generate.streaming import stream
    from trainshort.interop.doctor import doctor
    from trainshort.interop.patch import patch, unpatch
    from trainshort.model.cache import Cache
    from trainshort.model.positions import LayerInput, PositionMethod
    from trainshort.model.transformer import TransformerLM
    from trainshort.train.checkpoint import load_model

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

# The module of each public name, except for modules and decorators.
_MODULES = {
    "Cache": "trainshort.model.cache",
    "DecayBias": "trainshort.attention",
    "DenseBias": "trainshort.attention",
    "DistanceBias": "trainshort.attention",
    "InputError": "trainshort.errors",
    "LayerInput": "trainshort.model.positions",
    "LinearBias": "trainshort.attention",
    "ModelConfig": "trainshort.config.run_config",
    "PositionConfig": "trainshort.config.position_config",
    "PositionMethod": "trainshort.model.positions",
    "RunConfig": "trainshort.config.run_config",
    "TransformerLM": "trainshort.model.transformer",
    "alibi_attention": "trainshort.attention",
    "attend": "trainshort.attention",
    "doctor": "trainshort.interop.doctor",
    "load_model": "trainshort.train.checkpoint",
    "load_tokenizer": "trainshort.data.tokenizers.base",
    "patch": "trainshort.interop.patch",
    "stream": "trainshort.generate.streaming",
    "unpatch": "trainshort.interop.patch",
}

# The registry in trainshort.config.registries to which each public decorator adds entries.
_DECORATORS = {
    "register_analysis": "analyses",
    "register_backend": "backends",
    "register_corpus": "corpora",
    "register_format": "formats",
    "register_position": "positions",
    "register_tokenizer": "tokenizers",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. `import trainshort` alone therefore does not import torch."""
    from importlib import import_module

    if name == "alibi":
        return import_module("trainshort.alibi")
    if name == "presets":
        return import_module("trainshort.config.presets")
    if name in _DECORATORS:
        registries = import_module("trainshort.config.registries")
        return getattr(registries, _DECORATORS[name]).register
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'trainshort' has no attribute {name!r}")
