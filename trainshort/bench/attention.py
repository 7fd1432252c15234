"""Attention with proven windows against plain causal attention without positions: time, memory, error, by length.

Batch 1, float32; 8 heads of 64 unless the inputs were recorded. Contestants take turns; ratios are medians over rounds
of the ratio within a round.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainshort.attention import LinearBias, attend
from trainshort.bench.measure import (
    Progress,
    Timing,
    Trial,
    alone,
    can_measure_memory,
    in_turns,
    matmul_rate,
    megabytes,
    peak_during,
)
from trainshort.bench.measurements import RATIO, Measure, Measurement
from trainshort.bench.peers import LIMIT, PLAIN, Attend, chosen, contestant
from trainshort.bench.recorded import Inputs, make_inputs
from trainshort.bench.suites import AttentionPlan, wants_memory
from trainshort.evaluate.memory import resident

CHECKED = 64
"""Last rows that are compared with float64, because the oracle writes scores out."""
WARM = 256
"""Tokens on which a process warms up before its memory is measured."""


def trials(plan: AttentionPlan, source: str, label: str) -> list[Trial]:
    """One per length. `source` is what `make_inputs` reads, `label` what the rows call it."""
    make_inputs(source, max(plan.lengths))  # inputs that are too short should not be noticed after an hour
    return [
        Trial(
            f"attention at {length:,} tokens, {label} inputs",
            lambda progress, length=length: measure(plan, source, label, length, progress),
        )
        for length in plan.lengths
    ]


def measure(plan: AttentionPlan, source: str, label: str, length: int, progress: Progress) -> list[Measurement]:
    inputs = make_inputs(source, length)
    heads, dim = inputs.q.shape[1], inputs.q.shape[3]
    names = chosen(plan.engines, inputs, progress)
    functions = {name: contestant(name, heads, dim, plan.tolerance) for name in names}
    rounds = plan.rounds or (9 if length <= 4096 else 5 if length <= LIMIT else 3)
    warmup = 1 if length <= LIMIT else 0
    timings: dict[str, dict[str, Timing]] = {}
    for kind, backward in (("forward", False), ("forward + backward", True)):
        progress.note(f"{kind}, {rounds} rounds of {', '.join(names)}")
        work = {name: passes(function, inputs, backward) for name, function in functions.items()}
        timings[kind] = in_turns(work, rounds, warmup, progress)
    rate = matmul_rate(0.5)
    memory = _memory(names, plan, source, length, progress)
    progress.note("error against float64")
    rows = []
    for name, function in functions.items():
        measured: dict[str, Measure] = {}
        for kind, short in (("forward", "to plain"), ("forward + backward", "both to plain")):
            measured[kind] = timings[kind][name].per(1)
            measured[short] = timings[kind][name].to(timings[kind][PLAIN])
        measured |= memory.get(name, {})
        work_share = 100 * causal_flops(inputs) * 1e3 / measured["forward"].value / rate
        measured["of matmul rate"] = Measure(value=work_share, unit="%", better="higher")
        measured["error"] = Measure(value=error(function, inputs, name == PLAIN), better="lower")
        seconds = {kind: tuple(by_name[name].seconds) for kind, by_name in timings.items()}
        rows.append(
            Measurement(case={"inputs": label, "engine": name, "tokens": length}, measured=measured, seconds=seconds)
        )
    return rows


def passes(function: Attend, inputs: Inputs, backward: bool) -> Callable[[], object]:
    """One pass, as a function without arguments."""
    if not backward:

        def forward_only() -> object:
            with torch.no_grad():
                return function(inputs.q, inputs.k, inputs.v, inputs.slopes)

        return forward_only

    q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return lambda: torch.autograd.grad(function(q, k, v, inputs.slopes), leaves, inputs.grad_out)


def causal_flops(inputs: Inputs) -> int:
    """Of a forward pass that skips nothing: two products over half the square. Skipping can pass 100 % of the rate."""
    _, heads, length, dim = inputs.q.shape
    return 2 * heads * length**2 * dim


def error(function: Attend, inputs: Inputs, plain: bool) -> float:
    """Root mean square against float64, on the last rows."""
    with torch.no_grad():
        out = function(inputs.q, inputs.k, inputs.v, inputs.slopes)[:, :, -CHECKED:]
        q, k, v = (x.double() for x in (inputs.q[:, :, -CHECKED:], inputs.k, inputs.v))
        exact = attend(q, k, v, bias=None if plain else LinearBias(inputs.slopes), backend="reference")
        assert isinstance(exact, Tensor)
    return (out.double() - exact).square().mean().sqrt().item()


def _memory(
    names: list[str], plan: AttentionPlan, source: str, length: int, progress: Progress
) -> dict[str, dict[str, Measure]]:
    """Peak of a process that does forward and backward, to plain's, and what came on top of the inputs."""
    if not wants_memory(plan, length) or not can_measure_memory(progress):
        return {}
    found: dict[str, dict[str, float]] = {}
    for number, name in enumerate(names, start=1):
        progress.note(f"memory of {name}, {number} of {len(names)}")
        found[name] = alone("attention", source=source, length=length, name=name, tolerance=plan.tolerance)
    plain = found[PLAIN]["peak"]
    return {
        name: {
            "peak": megabytes(one["peak"]),
            "peak to plain": Measure(value=one["peak"] / plain, unit=RATIO, better="lower"),
            "own memory": megabytes(one["own"]),
        }
        for name, one in found.items()
    }


def peak(source: str, length: int, name: str, tolerance: float) -> dict[str, float]:
    """Peak of forward and backward in this process, and how much of it came on top of the inputs."""
    small = make_inputs(source, min(length, WARM))
    function = contestant(name, small.q.shape[1], small.q.shape[3], tolerance)
    passes(function, small, True)()  # builds and loads what is loaded once
    work = passes(function, make_inputs(source, length), True)
    before = resident()
    most = peak_during(work)
    return {"peak": most, "own": max(0, most - before)}
