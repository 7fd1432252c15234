"""Who takes part in the attention benchmark: our engines, plain causal attention, and other libraries' ALiBi.

Each is a function of (q, k, v, slopes); all but the plain one compute the same, which a test checks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.operator import unavailable
from trainshort.bench.measure import Progress, installed
from trainshort.bench.plan import ENGINES
from trainshort.bench.recorded import Inputs
from trainshort.evaluate.memory import available

PLAIN = "plain"
LIMIT = 8192
"""Longest input that the slow ones get unless they are asked for by name."""
SLOW = ("windowed-torch",)
WRITTEN = ("written-mask", "mpt", "x-transformers")
"""Those that write out scores or masks of length by length."""
COPIES = 6
"""Scores of all heads that they hold at once, forward and backward: 12 GB at 8,192 tokens and 8 heads."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def chosen(names: tuple[str, ...], inputs: Inputs, progress: Progress) -> list[str]:
    """Names of those that run on these inputs: the asked ones (none: all that fit), the plain one always."""
    kept = [name for name in ENGINES if name == PLAIN or not names or name in names]
    heads, length = inputs.q.shape[1:3]
    room = available()
    left_out: dict[str, str] = {}
    for name in kept:
        package = {"mpt": "transformers", "x-transformers": "x_transformers"}.get(name)
        if package and not installed(package):
            left_out[name] = f"{package} is not installed"
        elif name == "windowed" and (reason := unavailable(False)):
            left_out[name] = reason
        elif name in (*SLOW, *WRITTEN) and not names and length > LIMIT:
            left_out[name] = f"slow beyond {LIMIT:,} tokens; --engines {name} measures it all the same"
        elif name in WRITTEN and room is not None and COPIES * 4 * heads * length**2 > room:
            left_out[name] = f"its {length:,} x {length:,} scores do not fit into the memory that is free"
        elif name in WRITTEN[1:] and not torch.equal(inputs.slopes, alibi.slopes(heads)):
            left_out[name] = "it knows only the paper's slopes"
    for name, reason in left_out.items():
        progress.once(f"without {name}: {reason}")
    return [name for name in kept if name not in left_out]


def contestant(name: str, heads: int, dim: int, tolerance: float) -> Attend:
    """The function behind a name."""
    match name:
        case "plain":
            return lambda q, k, v, slopes: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        case "windowed" | "windowed-torch":
            return _ours(name, tolerance)
        case "written-mask":
            return _written_mask
        case "mpt":
            return _mpt(heads, dim)
        case "x-transformers":
            return _x_transformers(heads)
    raise ValueError(name)


def _ours(engine: str, tolerance: float) -> Attend:
    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        out = attend(q, k, v, bias=LinearBias(slopes), backend=engine, tolerance=tolerance)
        assert isinstance(out, Tensor)
        return out

    return run


def _written_mask(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=alibi.bias(slopes, q.shape[2], k.shape[2])[None])


def _mpt(heads: int, dim: int) -> Attend:
    """Hugging Face's MptAttention with its projections taken out, so that it gets the same q, k and v."""
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    module = MptAttention(MptConfig(d_model=heads * dim, n_heads=heads), layer_idx=0)
    module.Wqkv, module.out_proj = torch.nn.Identity(), torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        length = q.shape[2]
        joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], dim=-1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        out = module(joined, position_bias=build_mpt_alibi_tensor(heads, length), attention_mask=future)[0]
        return out.unflatten(-1, (heads, dim)).transpose(1, 2)

    return run


def _x_transformers(heads: int) -> Attend:
    from x_transformers.attend import Attend as Module
    from x_transformers.x_transformers import AlibiPositionalBias

    bias, module = AlibiPositionalBias(heads=heads, total_heads=heads), Module(causal=True, flash=True)
    return lambda q, k, v, slopes: module(q, k, v, attn_bias=bias(q.shape[2], k.shape[2]))[0]
