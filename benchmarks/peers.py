"""Who takes part in the attention benchmark: our engines, plain attention, and other libraries' ALiBi.

Each is a function of (q, k, v, bias); all but the plain one compute the same, which a test checks. MPT also takes
part in decoding, called as its `generate` calls it, without generate's own work around it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import training
from benchmarks.inputs import Inputs
from benchmarks.run import Progress
from benchmarks.suites import CONTENDERS
from trainshort import alibi
from trainshort.attention import AttentionCall, DecayBias, LinearBias, attend
from trainshort.attention.backends.ctypes_call import kernel_unavailable_reason
from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.config.registries import backends
from trainshort.generate.streaming import stream
from trainshort.interop.formats.base import map_weights
from trainshort.interop.formats.mpt import MPT
from trainshort.model.transformer import TransformerLM
from trainshort.utils.machine import free_memory, package_version

PLAIN = "plain"
CLOCK = "clock"
"""`windowed` with the slopes told as a clock, whose gradient is made as well: what FoX and trained slopes pay."""
MAX_SLOW_PEER_LENGTH = 8192
"""Longest input that the slow ones get unless they are asked for by name."""
SLOW = ("windowed-torch",)
WRITTEN = ("written-mask", "mpt", "x-transformers")
"""Those that write out scores or masks of length by length."""
SCORE_COPIES = 6
"""Scores of all heads that they hold at once, forward and backward: 12 GB at 8,192 tokens and 8 heads."""

Attend = Callable[[Tensor, Tensor, Tensor, LinearBias | DecayBias], Tensor]


def chosen(names: tuple[str, ...], inputs: Inputs, progress: Progress, causal: bool = True) -> list[str]:
    """Names of those that run on these inputs: the asked ones (none: all that fit), the plain one always."""
    kept = [name for name in CONTENDERS if name == PLAIN or not names or name in names]
    others = [name for name in dict.fromkeys(names) if name not in CONTENDERS]
    heads, length = inputs.q.shape[1:3]
    room = free_memory()
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    call = AttentionCall(q, k, v, inputs.bias, causal=causal)
    left_out = {name: reason for name in others if (reason := backends.get(name).unsupported_reason(call))}
    for name in (*kept, *others):
        package = {"mpt": "transformers", "x-transformers": "x-transformers"}.get(name)
        if name in WRITTEN and not causal:
            left_out[name] = "it is causal"
        elif package and package_version(package) is None:
            left_out[name] = f"{package} is not installed"
        elif name in ("windowed", CLOCK) and (reason := kernel_unavailable_reason(False)):
            left_out[name] = reason
        elif name in (*SLOW, *WRITTEN) and not names and length > MAX_SLOW_PEER_LENGTH:
            left_out[name] = f"slow beyond {MAX_SLOW_PEER_LENGTH:,} tokens; --engines {name} measures it all the same"
        elif name in (*WRITTEN, "reference") and room is not None and SCORE_COPIES * 4 * heads * length**2 > room:
            left_out[name] = f"its {length:,} x {length:,} scores do not fit into the memory that is free"
        elif isinstance(inputs.bias, DecayBias):
            if name == CLOCK:
                left_out[name] = "the inputs have a clock already, and so has windowed"
            elif name in WRITTEN[1:]:
                left_out[name] = "it knows no clocks"
        elif name in WRITTEN[1:] and not torch.equal(inputs.bias.slopes, alibi.slopes(heads)):
            left_out[name] = "it knows only the paper's slopes"
    for name, reason in left_out.items():
        progress.once(f"without {name}: {reason}")
    return [name for name in (*kept, *others) if name not in left_out]


def make_implementation(name: str, inputs: Inputs, tolerance: float, causal: bool = True) -> Attend:
    """The function behind a name, for inputs of this shape."""
    heads, dim = inputs.q.shape[1], inputs.q.shape[3]
    match name:
        case "plain":
            return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        case "written-mask":
            return _written_mask
        case "mpt":
            return _mpt(heads, dim)
        case "x-transformers":
            return _x_transformers(heads)
        case _:
            return _ours("windowed" if name == CLOCK else name, tolerance, causal)


def _ours(engine: str, tolerance: float, causal: bool) -> Attend:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: LinearBias | DecayBias) -> Tensor:
        out = attend(q, k, v, bias=bias, backend=engine, tolerance=tolerance, causal=causal)
        assert isinstance(out, Tensor)
        return out

    return run


def _written_mask(q: Tensor, k: Tensor, v: Tensor, bias: LinearBias | DecayBias) -> Tensor:
    if isinstance(bias, LinearBias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=alibi.bias(bias.slopes, q.shape[2], k.shape[2])[None])
    call, everything = AttentionCall(q, k, v, bias), slice(0, q.shape[2])
    written = materialize_bias(call, everything, everything)
    assert written is not None, "a clock is a bias"
    mask = written.to(q.dtype).masked_fill(~visibility_mask(call, everything, everything), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _mpt(heads: int, dim: int) -> Attend:
    """Hugging Face's MptAttention with its projections taken out, so that it gets the same q, k and v."""
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    module = MptAttention(MptConfig(d_model=heads * dim, n_heads=heads), layer_idx=0)
    module.Wqkv, module.out_proj = torch.nn.Identity(), torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]

    def run(q: Tensor, k: Tensor, v: Tensor, bias: LinearBias | DecayBias) -> Tensor:
        length = q.shape[2]
        joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], dim=-1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        out = module(joined, position_bias=build_mpt_alibi_tensor(heads, length), attention_mask=future)[0]
        return out.unflatten(-1, (heads, dim)).transpose(1, 2)

    return run


def _x_transformers(heads: int) -> Attend:
    from x_transformers.attend import Attend as Module
    from x_transformers.x_transformers import AlibiPositionalBias

    theirs, module = AlibiPositionalBias(heads=heads, total_heads=heads), Module(causal=True, flash=True)
    return lambda q, k, v, bias: module(q, k, v, attn_bias=theirs(q.shape[2], k.shape[2]))[0]


# ---- MPT as the peer of decoding: our model with its weights, its tokens, its turns

MPT_TOKENS_PER_ROUND = 8
"""Consecutive tokens of a turn; fewer than elsewhere, because MPT copies its whole cache at each."""
GREEDY = 32
"""Greedy tokens that are compared after each prompt."""
PROMPT_COPIES = 4
"""Scores of all heads that it holds at once while it reads a prompt."""


def pair(ours: TransformerLM, longest: int) -> tuple[Any, TransformerLM]:
    """MPT with random weights, and our model with the same."""
    torch.manual_seed(0)
    theirs = training.mpt(ours.config, longest).eval()
    reading = map_weights(MPT, theirs.config.to_dict(), theirs.state_dict())
    ours.load_state_dict({name: reading.tensor(name) for name in reading.shapes})
    return theirs, ours


def same_greedy_tokens(theirs: Any, write: Callable[[Tensor], list[int]], prompt: int) -> int:
    """How many of the first greedy tokens after a random prompt are those that `write` continues it with."""
    generator = torch.Generator().manual_seed(prompt)
    tokens = torch.randint(theirs.config.vocab_size, (1, prompt), generator=generator)
    same = [a == b for a, b in zip(write(tokens), greedy(theirs, tokens), strict=True)]
    return [*same, False].index(False)


def bounded_greedy(ours: TransformerLM, tolerance: float, tokens: Tensor) -> list[int]:
    made = stream(ours, tokens[0], tokens=GREEDY, temperature=0, mode="bounded", tolerance=tolerance)
    return [token.id for token in made]


@torch.inference_mode()
def greedy(theirs: Any, tokens: Tensor) -> list[int]:
    asked = {"max_new_tokens": GREEDY, "min_new_tokens": GREEDY, "do_sample": False, "pad_token_id": 0}
    asked["use_cache"] = True  # off by default, and then every token reads the whole prompt anew
    return theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **asked)[0, tokens.shape[1] :].tolist()


def turn_of(theirs: Any, context: int) -> Callable[[], object]:
    """Some consecutive tokens after a made-up past."""
    from transformers import DynamicCache

    config, past, token = theirs.config, DynamicCache(), torch.tensor([[7]])
    with torch.inference_mode():
        for layer in range(config.n_layers):
            keys, values = torch.randn(2, 1, config.n_heads, context, config.d_model // config.n_heads)
            past.update(keys, values, layer)

    @torch.inference_mode()
    def turn() -> None:
        for _ in range(MPT_TOKENS_PER_ROUND):
            theirs(token, past_key_values=past, use_cache=True)

    return turn
