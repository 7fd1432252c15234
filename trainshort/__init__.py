"""trainshort: language models that are trained on short sequences and run on long ones.

Reading order: docs/core.md. The names below are the public ones, each with an example in docs/api.md.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from trainshort import alibi, presets
    from trainshort.attention import ClockBias, DenseBias, DistanceBias, LinearBias, alibi_attention, attend
    from trainshort.cache import Cache
    from trainshort.checkpoint import load_model
    from trainshort.config import ModelConfig, RunConfig
    from trainshort.data import load_tokenizer
    from trainshort.errors import InputError
    from trainshort.generate import stream
    from trainshort.interop.doctor import doctor
    from trainshort.interop.patch import patch, unpatch
    from trainshort.methods import MethodSettings
    from trainshort.model import TransformerLM
    from trainshort.positions import LayerInput, PositionMethod

__all__ = [
    "Cache",
    "ClockBias",
    "DenseBias",
    "DistanceBias",
    "InputError",
    "LayerInput",
    "LinearBias",
    "MethodSettings",
    "ModelConfig",
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
    "stream",
    "unpatch",
]

_HOME = {
    "Cache": "cache",
    "ClockBias": "attention",
    "DenseBias": "attention",
    "DistanceBias": "attention",
    "InputError": "errors",
    "LayerInput": "positions",
    "LinearBias": "attention",
    "MethodSettings": "methods",
    "ModelConfig": "config",
    "PositionMethod": "positions",
    "RunConfig": "config",
    "TransformerLM": "model",
    "alibi_attention": "attention",
    "attend": "attention",
    "doctor": "interop.doctor",
    "load_model": "checkpoint",
    "load_tokenizer": "data",
    "patch": "interop.patch",
    "stream": "generate",
    "unpatch": "interop.patch",
}
_MODULES = ("alibi", "presets")


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `trainshort --help` should not wait for torch."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"trainshort.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'trainshort' has no attribute {name!r}")
    return getattr(import_module(f"trainshort.{_HOME[name]}"), name)
