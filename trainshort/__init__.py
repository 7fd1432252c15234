"""trainshort: language models that are trained on short sequences and run on long ones.

Reading order: alibi (the mathematics), attention/op (the one attention call), positions/base (the three doors), model.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trainshort.attention import DenseBias, DistanceBias, LinearBias, alibi_attention, attend
    from trainshort.cache import Cache
    from trainshort.config import ModelConfig, RunConfig
    from trainshort.errors import InputError
    from trainshort.generate import stream
    from trainshort.model import TransformerLM

__all__ = [
    "Cache",
    "DenseBias",
    "DistanceBias",
    "InputError",
    "LinearBias",
    "ModelConfig",
    "RunConfig",
    "TransformerLM",
    "alibi_attention",
    "attend",
    "stream",
]

_HOME = {
    "Cache": "cache",
    "DenseBias": "attention",
    "DistanceBias": "attention",
    "InputError": "errors",
    "LinearBias": "attention",
    "ModelConfig": "config",
    "RunConfig": "config",
    "TransformerLM": "model",
    "alibi_attention": "attention",
    "attend": "attention",
    "stream": "generate",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `trainshort --help` should not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'trainshort' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"trainshort.{_HOME[name]}"), name)
