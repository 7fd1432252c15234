"""Attention with position biases: the functions `attend` and `alibi_attention`, the biases and the backends."""

from trainshort.attention.backends.reference import merge_by_lse
from trainshort.attention.call import AttentionCall, Bias, BiasKind, DecayBias, DenseBias, DistanceBias, LinearBias
from trainshort.attention.functional import (
    AttentionOutput,
    Backend,
    alibi_attention,
    attend,
    attend_in_blocks,
    run_attention,
)
from trainshort.config.registries import backends as _backend_registry

# torch.compile cannot trace the import of a backend, so all backends are imported here.
_backend_registry.load()

__all__ = [
    "AttentionCall",
    "AttentionOutput",
    "Backend",
    "Bias",
    "BiasKind",
    "DecayBias",
    "DenseBias",
    "DistanceBias",
    "LinearBias",
    "alibi_attention",
    "attend",
    "attend_in_blocks",
    "merge_by_lse",
    "run_attention",
]
