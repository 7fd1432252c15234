"""Attention with proven windows against plain causal attention without positions: time, memory, error, by length.

Batch 1, 8 heads of 64, float32. Contestants take turns; ratios are medians over rounds of the ratio within a round.

    python -m benchmarks.attention                              # the whole table; minutes, because of plain attention
    python -m benchmarks.attention --lengths 1024 4096
    python -m benchmarks.attention --inputs layer3.safetensors  # q, k, v recorded from a model, (batch, heads, L, dim)
    python -m benchmarks.attention --lengths 2048 --peers       # also a written mask, MPT and x-transformers
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import MEGABYTE, Timing, alone, in_turns, matmul_rate, peak_during, resident, table
from trainshort import alibi
from trainshort.attention import LinearBias, attend
from trainshort.attention.kernel.library import Problem
from trainshort.attention.windowed import TOLERANCE, attend_windowed

LENGTHS = (1024, 4096, 8192, 16_384, 32_768)
HEADS, DIM = 8, 64
PLAIN = "plain causal"
PEER_LIMIT = 8192
"""Peers write out length x length scores or masks: 2 GB at this length, 8 GB at the next."""


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    grad_out: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[2]


def make_inputs(source: str, length: int) -> Inputs:
    """Random normal, random normal with sharper heads ("scaled"), or the first tokens of a recorded file."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(4))
    if source == "scaled":
        q *= torch.linspace(0.5, 3, HEADS)[:, None, None]
    elif source != "normal":
        recorded = read_recording(Path(source), length)
        q, k, v = (recorded[name] for name in "qkv")
        grad_out = torch.randn(q.shape, generator=generator)
    return Inputs(q, k, v, alibi.slopes(q.shape[1]), grad_out)


def read_recording(path: Path, length: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    recorded = load_file(path)
    if recorded["q"].shape[2] < length:
        raise SystemExit(f"{path} holds {recorded['q'].shape[2]} tokens; asked for {length}. Give shorter --lengths.")
    return {name: recorded[name][:1, :, :length].float().contiguous() for name in "qkv"}


def contestants(peers: bool, length: int) -> dict[str, Callable[..., Tensor]]:
    """Name → function of (q, k, v, slopes)."""

    def windowed(implementation: str) -> Callable[..., Tensor]:
        return lambda q, k, v, slopes: attend_windowed(Problem(q, k, v, slopes, None, None), TOLERANCE, implementation)[
            0
        ]

    chosen: dict[str, Callable[..., Tensor]] = {
        PLAIN: lambda q, k, v, slopes: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "windowed": windowed("compiled"),
        "windowed in PyTorch": windowed("torch"),
        "squares": squares,
    }
    if peers and length <= PEER_LIMIT:
        chosen |= {"written mask": written_mask, "MPT": mpt(), "x-transformers": x_transformers()}
    return chosen


def squares(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    out = attend(q, k, v, bias=LinearBias(slopes), backend="squares")
    assert isinstance(out, Tensor)
    return out


def written_mask(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=alibi.bias(slopes, q.shape[2], k.shape[2])[None])


def mpt() -> Callable[..., Tensor]:
    """Hugging Face's MptAttention with its projections taken out, so that it gets the same q, k and v."""
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    module = MptAttention(MptConfig(d_model=HEADS * DIM, n_heads=HEADS), layer_idx=0)
    module.Wqkv, module.out_proj = torch.nn.Identity(), torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        heads, length, dim = q.shape[1:]
        joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], dim=-1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        out = module(joined, position_bias=build_mpt_alibi_tensor(heads, length), attention_mask=future)[0]
        return out.unflatten(-1, (heads, dim)).transpose(1, 2)

    return run


def x_transformers() -> Callable[..., Tensor]:
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import AlibiPositionalBias

    bias, module = AlibiPositionalBias(heads=HEADS, total_heads=HEADS), Attend(causal=True, flash=True)
    return lambda q, k, v, slopes: module(q, k, v, attn_bias=bias(q.shape[2], k.shape[2]))[0]


def runs(function: Callable[..., Tensor], inputs: Inputs, backward: bool) -> Callable[[], object]:
    """One pass, as a function without arguments."""
    if not backward:

        def forward_only() -> object:
            with torch.no_grad():
                return function(inputs.q, inputs.k, inputs.v, inputs.slopes)

        return forward_only

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return lambda: torch.autograd.grad(function(*leaves, inputs.slopes), leaves, inputs.grad_out)


def ratio(timings: dict[str, Timing], name: str) -> float:
    pairs = zip(timings[name].seconds, timings[PLAIN].seconds, strict=True)
    return statistics.median(own / plain for own, plain in pairs)


def error(function: Callable[..., Tensor], inputs: Inputs) -> float:
    """Root mean square against float64, on the last 64 rows (the oracle writes scores out)."""
    with torch.no_grad():
        out = function(inputs.q, inputs.k, inputs.v, inputs.slopes)[:, :, -64:]
        wide = (x.double() for x in (inputs.q[:, :, -64:], inputs.k, inputs.v))
        exact = attend(*wide, bias=LinearBias(inputs.slopes), backend="reference")
        assert isinstance(exact, Tensor)
    return (out.double() - exact).square().mean().sqrt().item()


def measure(source: str, length: int, rounds: int, peers: bool) -> list[dict]:
    inputs = make_inputs(source, length)
    chosen = contestants(peers, length)
    warmup = 1 if length <= PEER_LIMIT else 0
    forward = in_turns({name: runs(f, inputs, False) for name, f in chosen.items()}, rounds, warmup)
    both = in_turns({name: runs(f, inputs, True) for name, f in chosen.items()}, rounds, warmup)
    asked = ("--lengths", str(length), "--inputs", source, *(("--peers",) if peers else ()))
    memory = {name: alone("benchmarks.attention", "--peak", name, *asked) for name in chosen}
    rate = matmul_rate()
    causal_flops = 2 * HEADS * length**2 * DIM  # two products over half the square
    return [
        {
            "tokens": length,
            "engine": name,
            "forward ms": 1e3 * forward[name].median,
            "± %": 100 * forward[name].spread,
            "to plain": ratio(forward, name),
            "both ms": 1e3 * both[name].median,
            "both to plain": ratio(both, name),
            "peak MB": round(memory[name]["peak"] / MEGABYTE),
            "memory to plain": memory[name]["peak"] / memory[PLAIN]["peak"],
            "MB of its own": round(memory[name]["own"] / MEGABYTE, 1),
            "causal work, % of matmul rate": 100 * causal_flops / forward[name].median / rate,
            "error": error(function, inputs) if name != PLAIN else 0.0,
        }
        for name, function in chosen.items()
    ]


def peak(source: str, length: int, name: str, peers: bool) -> dict:
    """Peak of forward and backward in this process, and how much of it came on top of the inputs."""
    work = runs(contestants(peers, length)[name], make_inputs(source, min(length, 256)), True)
    work()  # builds and loads what is loaded once
    inputs = make_inputs(source, length)
    work = runs(contestants(peers, length)[name], inputs, True)
    before = resident()
    most = peak_during(work)
    return {"peak": most, "own": most - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--inputs", default="normal", help="normal, scaled, or a .safetensors file with q, k, v")
    parser.add_argument("--rounds", type=int, help="default: 9 up to 4,096 tokens, 5 at 8,192, 3 beyond")
    parser.add_argument("--peers", action="store_true", help="also a written mask, MPT and x-transformers, up to 8,192")
    parser.add_argument("--peak", help="measure this contestant's peak memory and print it as JSON")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(peak(arguments.inputs, arguments.lengths[0], arguments.peak, arguments.peers)))
        return
    rows = []
    for length in arguments.lengths:
        rounds = arguments.rounds or (9 if length <= 4096 else 5 if length <= PEER_LIMIT else 3)
        found = measure(arguments.inputs, length, rounds, arguments.peers)
        table(found, f"Attention at {length:,} tokens, {arguments.inputs} inputs")
        rows += found
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
