"""Attention with proven windows against plain attention without positions: time, memory, error, by length.

Batch 1, float32; 8 heads of 64 unless the inputs were recorded. Contestants take turns; ratios are medians over rounds
of the ratio within a round.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention import ClockBias, attend
from trainshort.attention.windowed_torch import PANEL
from trainshort.bench.measure import (
    Benchmark,
    Progress,
    Timing,
    alone,
    can_measure_memory,
    in_turns,
    matmul_rate,
    megabytes,
    peak_during,
)
from trainshort.bench.measurements import RATIO, Measure, Measurement
from trainshort.bench.peers import CLOCK, LIMIT, PLAIN, Attend, chosen, contestant
from trainshort.bench.recorded import Inputs, make_inputs
from trainshort.bench.suites import AttentionPlan, wants_memory
from trainshort.machine import resident_memory

CHECKED = 64
"""Last rows that are compared with float64, because the oracle writes scores out."""
WARM = 256
"""Tokens on which a process warms up before its memory is measured."""
KEYS = 4
"""Keys that the kernel reads or leaves out together; the same number as STEP in tile.h."""
EVERY = 17
"""One panel in so many is asked what it needs."""


def benchmarks(plan: AttentionPlan, source: str, label: str) -> list[Benchmark]:
    """One per length. `source` is what `make_inputs` reads, `label` what the rows call it."""
    make_inputs(source, max(plan.lengths))  # inputs that are too short should not be noticed after an hour
    return [
        Benchmark(
            f"attention at {length:,} tokens, {label} inputs",
            lambda progress, length=length: measure(plan, source, label, length, progress),
        )
        for length in plan.lengths
    ]


def measure(plan: AttentionPlan, source: str, label: str, length: int, progress: Progress) -> list[Measurement]:
    inputs = make_inputs(source, length)
    heads, dim = inputs.q.shape[1], inputs.q.shape[3]
    causal = plan.sides == "left"
    if plan.measure == "work":  # what depends on the inputs alone, on however busy a machine
        case: dict[str, str | int] = {"inputs": label, "engine": "windowed", "tokens": length}
        return [Measurement(case=case, measured=work(inputs, plan.tolerance))]
    names = chosen(plan.engines, inputs, progress, causal)
    functions = {name: contestant(name, heads, dim, plan.tolerance, causal) for name in names}
    given = {name: inputs.with_clock() if name == CLOCK else inputs for name in names}
    rounds = plan.rounds or (9 if length <= 4096 else 5 if length <= LIMIT else 3)
    warmup = 1 if length <= LIMIT else 0
    timings: dict[str, dict[str, Timing]] = {}
    for kind, backward in (("forward", False), ("forward + backward", True)):
        progress.note(f"{kind}, {rounds} rounds of {', '.join(names)}")
        turns = {name: passes(function, given[name], backward) for name, function in functions.items()}
        timings[kind] = in_turns(turns, rounds, warmup, progress)
    rate = matmul_rate(0.5)
    memory = _memory(names, plan, source, length, progress)
    progress.note("error against float64, and work against other bounds")
    work_left = work(inputs, plan.tolerance) if "windowed" in names and plan.tolerance and causal else {}
    rows = []
    for name, function in functions.items():
        measured: dict[str, Measure] = {}
        for kind, short in (("forward", "to plain"), ("forward + backward", "both to plain")):
            measured[kind] = timings[kind][name].per(1)
            measured[short] = timings[kind][name].to(timings[kind][PLAIN])
        measured |= memory.get(name, {})
        measured |= work_left if name == "windowed" else {}
        work_share = 100 * flops(inputs, causal) * 1e3 / measured["forward"].value / rate
        measured["of matmul rate"] = Measure(value=work_share, unit="%", better="higher")
        measured["error"] = Measure(value=error(function, given[name], name == PLAIN, causal), better="lower")
        seconds = {kind: tuple(by_name[name].seconds) for kind, by_name in timings.items()}
        rows.append(
            Measurement(
                case={"inputs": label, "engine": name, "tokens": length} | ({} if causal else {"sides": "both"}),
                measured=measured,
                seconds=seconds,
            )
        )
    return rows


def passes(function: Attend, inputs: Inputs, backward: bool) -> Callable[[], object]:
    """One pass, as a function without arguments."""
    if not backward:

        def forward_only() -> object:
            with torch.no_grad():
                return function(inputs.q, inputs.k, inputs.v, inputs.bias)

        return forward_only

    q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    bias = inputs.bias
    if isinstance(bias, ClockBias):
        bias = ClockBias(bias.clock.detach().requires_grad_())
        leaves.append(bias.clock)
    # The plain one has no bias to give a gradient to.
    return lambda: torch.autograd.grad(function(q, k, v, bias), leaves, inputs.grad_out, allow_unused=True)


def flops(inputs: Inputs, causal: bool) -> int:
    """Of a forward pass that skips nothing: two products over the square, or half of it. Skipping can pass 100 % of the
    rate."""
    _, heads, length, dim = inputs.q.shape
    return (2 if causal else 4) * heads * length**2 * dim


def error(function: Attend, inputs: Inputs, plain: bool, causal: bool) -> float:
    """Root mean square against float64, on the last rows."""
    with torch.no_grad():
        out = function(inputs.q, inputs.k, inputs.v, inputs.bias)[:, :, -CHECKED:]
        q, k, v = (x.double() for x in (inputs.q[:, :, -CHECKED:], inputs.k, inputs.v))
        bias = None if plain else inputs.bias
        exact = attend(q, k, v, bias=bias, backend="reference", causal=causal)
        assert isinstance(exact, Tensor)
    return (out.double() - exact).square().mean().sqrt().item()


def work(inputs: Inputs, tolerance: float) -> dict[str, Measure]:
    """Shares of the causal work: what the kernel reads, what it would read by ACP's bound at the same tolerance, and
    what that much of the mass needs, whoever finds it out."""
    length, bias = inputs.q.shape[2], inputs.bias.values
    scale, rows = 1 / math.sqrt(inputs.q.shape[3]), torch.arange(length)
    first = torch.ops.trainshort.attention(inputs.q, inputs.k, inputs.v, bias, None, None, scale, tolerance, True)[2]
    ours = (rows - first[0][:, rows // PANEL] + 1).double().sum() / _causal_pairs(inputs)
    theirs, (needed, in_blocks) = acp_work(inputs, tolerance, scale), needed_work(inputs, tolerance)
    shares = {"work": float(ours), "work by ACP": theirs, "work needed": needed, "work needed in blocks": in_blocks}
    found = {name: Measure(value=100 * share, unit="%", better="lower") for name, share in shares.items()}
    for name, other in (("work to ACP", theirs), ("work to needed", needed), ("work to needed in blocks", in_blocks)):
        found[name] = Measure(value=float(ours) / other, unit=RATIO, better="lower")
    return found


def acp_work(inputs: Inputs, tolerance: float, scale: float) -> float:
    """What adaptive computation pruning (Lin et al., COLM 2025) leaves, in blocks of our kernel's sizes. Keys are out
    where c(first query of a block) − c(last key of a block) < −(2U + ln N) + ln tolerance, U = max‖q‖ · max‖k‖ · scale,
    one number a head."""
    clock, length = _clock(inputs)[0], inputs.q.shape[2]
    most = inputs.q[0].norm(dim=-1).amax(-1) * inputs.k[0].norm(dim=-1).amax(-1) * scale
    threshold = -(2 * most.double() + math.log(length)) + math.log(tolerance)
    last = torch.arange(0, length, KEYS).add(KEYS - 1).clamp(max=length - 1)
    kept = clock[:, ::PANEL, None] - clock[:, None, last] >= threshold[:, None, None]
    rows = torch.arange(length)
    pairs = (rows[:, None] - torch.arange(0, length, KEYS) + 1).clamp(0, KEYS)  # of each row in each block of keys
    by_panel = torch.zeros(kept.shape[1:], dtype=torch.int64).index_add_(0, rows // PANEL, pairs)
    return float((kept * by_panel).double().sum() / _causal_pairs(inputs))


@torch.no_grad()
def needed_work(inputs: Inputs, tolerance: float) -> tuple[float, float]:
    """The nearest keys that carry all but `tolerance` of a row's mass, in float64, on a sample of the kernel's panels:
    row by row, and in blocks that a panel reads together, for its row that needs most."""
    length, heads = inputs.q.shape[2], inputs.q.shape[1]
    keys, totals = torch.arange(length), torch.zeros(3, dtype=torch.int64)
    all_keys, clock = inputs.k.double().transpose(-1, -2) / math.sqrt(inputs.q.shape[3]), _clock(inputs)
    for start in range(0, length, EVERY * PANEL):
        rows = torch.arange(start, min(start + PANEL, length))
        scores = inputs.q[:, :, rows].double() @ all_keys + clock[:, :, rows, None] - clock[:, :, None]
        masses = scores.masked_fill(keys > rows[:, None], -torch.inf).softmax(-1).cumsum(-1)
        first = (masses <= tolerance).sum(-1)
        together = first.amin(-1, keepdim=True) // KEYS * KEYS
        totals += torch.stack([(rows + 1 - first).sum(), (rows + 1 - together).sum(), (rows + 1).sum() * heads])
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])


def _clock(inputs: Inputs) -> Float[Tensor, "1 heads length"]:
    bias = inputs.with_clock().bias
    assert isinstance(bias, ClockBias)
    return bias.clock


def _causal_pairs(inputs: Inputs) -> int:
    heads, length = inputs.q.shape[1:3]
    return heads * length * (length + 1) // 2


def _memory(
    names: list[str], plan: AttentionPlan, source: str, length: int, progress: Progress
) -> dict[str, dict[str, Measure]]:
    """Peak of a process that does forward and backward, to plain's, and what came on top of the inputs."""
    if not wants_memory(plan, length) or not can_measure_memory(progress):
        return {}
    found: dict[str, dict[str, float]] = {}
    for number, name in enumerate(names, start=1):
        progress.note(f"memory of {name}, {number} of {len(names)}")
        settings = {"tolerance": plan.tolerance, "causal": plan.sides == "left"}
        found[name] = alone("attention", source=source, length=length, name=name, **settings)
    plain = found[PLAIN]["peak"]
    return {
        name: {
            "peak": megabytes(one["peak"]),
            "peak to plain": Measure(value=one["peak"] / plain, unit=RATIO, better="lower"),
            "own memory": megabytes(one["own"]),
        }
        for name, one in found.items()
    }


def peak(source: str, length: int, name: str, tolerance: float, causal: bool = True) -> dict[str, float]:
    """Peak of forward and backward in this process, and how much of it came on top of the inputs."""
    small = make_inputs(source, min(length, WARM))
    function = contestant(name, small.q.shape[1], small.q.shape[3], tolerance, causal)
    passes(function, small.with_clock() if name == CLOCK else small, True)()  # builds and loads what is loaded once
    inputs = make_inputs(source, length)
    work = passes(function, inputs.with_clock() if name == CLOCK else inputs, True)
    before = resident_memory()
    most = peak_during(work)
    return {"peak": most, "own": max(0, most - before)}
