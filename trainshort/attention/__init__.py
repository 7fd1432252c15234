"""The function `attend`, its biases and its backends. Importing this package registers all backends."""

from trainshort.attention import compiled, flex, formula, sdpa, windowed
from trainshort.attention.call import AttentionCall, Bias, BiasKind, DecayBias, DenseBias, DistanceBias, LinearBias
from trainshort.attention.formula import merge_by_lse
from trainshort.attention.op import (
    AttentionOutput,
    Backend,
    alibi_attention,
    attend,
    attend_in_blocks,
    backends,
    run_attention,
)

backends.load()  # torch.compile cannot trace the import of an engine at its first call.

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
    "backends",
    "compiled",
    "flex",
    "formula",
    "merge_by_lse",
    "run_attention",
    "sdpa",
    "windowed",
]
