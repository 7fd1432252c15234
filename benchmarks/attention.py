"""Attention with proven windows against plain attention without positions: time, memory, error, by length.

Batch 1, float32; 8 heads of 64 unless the inputs were recorded. Contestants take turns; ratios are medians over rounds
of the ratio within a round.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.inputs import SYNTHETIC, Inputs, make_inputs
from benchmarks.peers import CLOCK, MAX_SLOW_PEER_LENGTH, PLAIN, Attend, chosen, make_implementation
from benchmarks.run import Benchmark, Progress, matmul_rate, peaks
from benchmarks.suites import AttentionPlan, wants_memory
from trainshort.attention import DecayBias, attend
from trainshort.attention.backends.windowed_torch import QUERY_TILE
from trainshort.attention.call import bias_kind_of
from trainshort.utils.bench_results import Case, Measure, Measurement, to_megabytes, to_percent, to_ratio
from trainshort.utils.timing import measure_peak_memory, time_interleaved

CHECKED = 64
"""Last rows that are compared with float64, because the oracle writes scores out."""
WARM = 256
"""Tokens on which a process warms up before its memory is measured."""
KEYS = 4
"""Keys that the kernel reads or leaves out together; the same number as KEY_GROUP in matmul.h."""
EVERY = 17
"""One panel in so many is asked what it needs."""


def benchmarks(plan: AttentionPlan, source: str) -> list[Benchmark]:
    """One per length. `source` is what `make_inputs` reads."""
    label = source if source in SYNTHETIC else "recorded"
    make_inputs(source, max(plan.lengths))  # inputs that are too short should not be noticed after an hour
    return [
        Benchmark(f"attention at {length:,} tokens, {label} inputs", partial(measure, plan, source, label, length))
        for length in plan.lengths
    ]


def measure(plan: AttentionPlan, source: str, label: str, length: int, progress: Progress) -> list[Measurement]:
    inputs, causal = make_inputs(source, length), plan.sides == "left"
    if plan.measure == "work":  # what depends on the inputs alone, on however busy a machine
        case: Case = {"inputs": label, "engine": "windowed", "tokens": length}
        return [Measurement(case=case, measured=work(inputs, plan.tolerance))]
    names = chosen(plan.engines, inputs, progress, causal)
    functions = {name: make_implementation(name, inputs, plan.tolerance, causal) for name in names}
    given = {name: inputs.with_clock() if name == CLOCK else inputs for name in names}
    rounds = plan.rounds or (9 if length <= 4096 else 5 if length <= MAX_SLOW_PEER_LENGTH else 3)
    warmup = 1 if length <= MAX_SLOW_PEER_LENGTH else 0
    timings = {}
    for kind in ("forward", "forward + backward"):
        progress.note(f"{kind}, {rounds} rounds of {', '.join(names)}")
        turns = {name: passes(functions[name], given[name], kind != "forward") for name in names}
        timings[kind] = time_interleaved(turns, rounds, warmup, progress.round)
    rate = matmul_rate(0.5)
    asked = {"source": source, "length": length, "tolerance": plan.tolerance, "causal": causal}
    tasks = {name: asked | {"name": name} for name in names if wants_memory(plan, length)}
    memory = peaks("attention", tasks, progress)
    progress.note("error against float64, and work against other bounds")
    work_left = work(inputs, plan.tolerance) if "windowed" in names and plan.tolerance and causal else {}
    rows = []
    for name in names:
        measured: dict[str, Measure] = {}
        for kind, short in (("forward", "to plain"), ("forward + backward", "both to plain")):
            measured |= {
                kind: timings[kind][name].milliseconds_per(1),
                short: timings[kind][name].ratio_to(timings[kind][PLAIN]),
            }
        if name in memory:
            measured["peak"] = to_megabytes(memory[name]["peak"])
            measured["peak to plain"] = to_ratio(memory[name]["peak"], memory[PLAIN]["peak"], "lower")
            measured["own memory"] = to_megabytes(memory[name]["own"])
        measured |= work_left if name == "windowed" else {}
        measured["of matmul rate"] = to_percent(1e3 * flops(inputs, causal) / measured["forward"].value, rate, "higher")
        measured["error"] = Measure(value=error(functions[name], given[name], name == PLAIN, causal), better="lower")
        case = {"inputs": label, "engine": name, "tokens": length} | ({} if causal else {"sides": "both"})
        seconds = {kind: by_name[name].seconds for kind, by_name in timings.items()}
        rows.append(Measurement(case=case, measured=measured, seconds=seconds))
    return rows


def passes(function: Attend, inputs: Inputs, backward: bool) -> Callable[[], object]:
    """One pass, as a function without arguments."""
    if not backward:
        return torch.no_grad()(lambda: function(inputs.q, inputs.k, inputs.v, inputs.bias))
    q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    bias = inputs.bias
    if isinstance(bias, DecayBias):
        bias = DecayBias(bias.cumulative.detach().requires_grad_())
        leaves.append(bias.cumulative)
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
    kind = bias_kind_of(inputs.bias).value
    results = torch.ops.trainshort.attention(
        inputs.q, inputs.k, inputs.v, bias, kind, None, None, scale, tolerance, True
    )
    first = results[2]
    ours = (rows - first[0][:, rows // QUERY_TILE] + 1).double().sum() / _causal_pairs(inputs)
    theirs, (needed, in_blocks) = acp_work(inputs, tolerance, scale), needed_work(inputs, tolerance)
    shares = {"work": float(ours), "work by ACP": theirs, "work needed": needed, "work needed in blocks": in_blocks}
    found = {name: to_percent(share, 1, "lower") for name, share in shares.items()}
    for name, other in (("work to ACP", theirs), ("work to needed", needed), ("work to needed in blocks", in_blocks)):
        found[name] = to_ratio(float(ours), other, "lower")
    return found


def acp_work(inputs: Inputs, tolerance: float, scale: float) -> float:
    """What adaptive computation pruning (Lin et al., COLM 2025) leaves, in blocks of our kernel's sizes. Keys are out
    where c(first query of a block) − c(last key of a block) < −(2U + ln N) + ln tolerance, U = max‖q‖ · max‖k‖ · scale,
    one number a head."""
    clock, length = inputs.with_clock().bias.values[0], inputs.q.shape[2]
    most = inputs.q[0].norm(dim=-1).amax(-1) * inputs.k[0].norm(dim=-1).amax(-1) * scale
    threshold = -(2 * most.double() + math.log(length)) + math.log(tolerance)
    last = torch.arange(0, length, KEYS).add(KEYS - 1).clamp(max=length - 1)
    kept = clock[:, ::QUERY_TILE, None] - clock[:, None, last] >= threshold[:, None, None]
    rows = torch.arange(length)
    pairs = (rows[:, None] - torch.arange(0, length, KEYS) + 1).clamp(0, KEYS)  # of each row in each block of keys
    by_panel = torch.zeros(kept.shape[1:], dtype=torch.int64).index_add_(0, rows // QUERY_TILE, pairs)
    return float((kept * by_panel).double().sum() / _causal_pairs(inputs))


@torch.no_grad()
def needed_work(inputs: Inputs, tolerance: float) -> tuple[float, float]:
    """The nearest keys that carry all but `tolerance` of a row's mass, in float64, on a sample of the kernel's panels:
    row by row, and in blocks that a panel reads together, for its row that needs most."""
    length, heads = inputs.q.shape[2], inputs.q.shape[1]
    keys, totals = torch.arange(length), torch.zeros(3, dtype=torch.int64)
    clock, all_keys = inputs.with_clock().bias.values, inputs.k.double().mT / math.sqrt(inputs.q.shape[3])
    for start in range(0, length, EVERY * QUERY_TILE):
        rows = torch.arange(start, min(start + QUERY_TILE, length))
        scores = inputs.q[:, :, rows].double() @ all_keys + clock[:, :, rows, None] - clock[:, :, None]
        masses = scores.masked_fill(keys > rows[:, None], -torch.inf).softmax(-1).cumsum(-1)
        first = (masses <= tolerance).sum(-1)
        together = first.amin(-1, keepdim=True) // KEYS * KEYS
        totals += torch.stack([(rows + 1 - first).sum(), (rows + 1 - together).sum(), (rows + 1).sum() * heads])
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])


def _causal_pairs(inputs: Inputs) -> int:
    heads, length = inputs.q.shape[1:3]
    return heads * length * (length + 1) // 2


def peak(source: str, length: int, name: str, tolerance: float, causal: bool) -> dict[str, int]:
    """Peak of forward and backward in this process, and how much of it came on top of the inputs."""

    def both(length: int) -> Callable[[], object]:
        inputs = make_inputs(source, length)
        function = make_implementation(name, inputs, tolerance, causal)
        return passes(function, inputs.with_clock() if name == CLOCK else inputs, True)

    both(min(length, WARM))()  # builds and loads what is loaded once
    return measure_peak_memory(both(length))
