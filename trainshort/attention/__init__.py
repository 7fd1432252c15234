"""Attention engines behind one call, `attend`."""

from trainshort.attention import compiled, flex, formula, sdpa, windowed
from trainshort.attention.call import Bias, Call, ClockBias, DenseBias, DistanceBias, LinearBias
from trainshort.attention.formula import merge
from trainshort.attention.op import Engine, Result, alibi_attention, attend, attend_in_blocks, engines

engines.load()  # torch.compile cannot trace the import of an engine at its first call.

__all__ = [
    "Bias",
    "Call",
    "ClockBias",
    "DenseBias",
    "DistanceBias",
    "Engine",
    "LinearBias",
    "Result",
    "alibi_attention",
    "attend",
    "attend_in_blocks",
    "compiled",
    "engines",
    "flex",
    "formula",
    "merge",
    "sdpa",
    "windowed",
]
