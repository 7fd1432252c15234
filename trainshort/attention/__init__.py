"""Attention engines behind one call, `attend`. Importing this package registers them all."""

from trainshort.attention import compiled, flex, reference, sdpa, windowed
from trainshort.attention.op import (
    Bias,
    Call,
    DenseBias,
    DistanceBias,
    Engine,
    LinearBias,
    alibi_attention,
    attend,
    engines,
    merge,
)

__all__ = [
    "Bias",
    "Call",
    "DenseBias",
    "DistanceBias",
    "Engine",
    "LinearBias",
    "alibi_attention",
    "attend",
    "compiled",
    "engines",
    "flex",
    "merge",
    "reference",
    "sdpa",
    "windowed",
]
