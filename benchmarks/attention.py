"""The attention benchmark: compare attention with ALiBi against plain attention without positions, by length.

The benchmark measures time, memory, numerical error and the share of the work that the kernel does not skip. The batch
size is 1 and the dtype is float32. Synthetic inputs have 8 heads of width 64. Recorded inputs have the shape of their
model. All implementations run once per round. A ratio is the median of the ratios within each round.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import SYNTHETIC, Inputs, make_inputs
from benchmarks.peers import DECAY, MAX_SLOW_PEER_LENGTH, PLAIN, Attend, make_implementation, select_implementations
from benchmarks.run import Benchmark, Progress, measure_matmul_rate, measure_peaks
from benchmarks.suites import AttentionPlan, is_memory_measured
from trainshort.attention import DecayBias, attend
from trainshort.attention.backends.windowed_torch import QUERY_TILE
from trainshort.attention.call import bias_kind_of
from trainshort.utils.bench_results import Case, Measure, Measurement, to_megabytes, to_percent, to_ratio
from trainshort.utils.timing import Timing, measure_peak_memory, time_interleaved

# The error is measured for this number of query rows at the end, because the float64 reference stores all scores.
CHECKED_ROWS = 64

# A process computes attention for this number of tokens before its memory is measured.
WARMUP_TOKENS = 256

# The kernel reads or skips this number of consecutive keys together. The same number is called KEY_GROUP in matmul.h.
KEY_BLOCK = 4

# The needed work is computed for one in this number of query tiles, because the float64 computation is slow.
TILE_SAMPLING_INTERVAL = 17

FORWARD = "forward"
FORWARD_BACKWARD = "forward + backward"


def make_benchmarks(plan: AttentionPlan, source: str) -> list[Benchmark]:
    """Return one benchmark for each length.

    Args:
        plan: The settings of the suite.
        source: The inputs: "normal", "scaled" or the path of a file with recorded inputs.

    Raises:
        InputError: If the recorded inputs are shorter than the longest length.
    """
    input_label = source if source in SYNTHETIC else "recorded"
    # Create the longest inputs now, so that inputs that are too short are reported before any measurement.
    make_inputs(source, max(plan.lengths))
    benchmarks = []
    for length in plan.lengths:
        title = f"attention at {length:,} tokens, {input_label} inputs"
        benchmarks.append(Benchmark(title, partial(measure, plan, source, input_label, length)))
    return benchmarks


def measure(plan: AttentionPlan, source: str, input_label: str, length: int, progress: Progress) -> list[Measurement]:
    """Measure all implementations of attention at one length.

    Args:
        plan: The settings of the suite.
        source: The inputs: "normal", "scaled" or the path of a file with recorded inputs.
        input_label: How the results call the inputs: "normal", "scaled" or "recorded".
        length: The number of queries and keys.
        progress: Where messages are printed.

    Returns:
        One measurement for each implementation.
    """
    inputs = make_inputs(source, length)
    causal = plan.sides == "left"
    if plan.measure == "work":
        # The work depends on the inputs only, so nothing is timed.
        case: Case = {"inputs": input_label, "engine": "windowed", "tokens": length}
        return [Measurement(case=case, measured=measure_work(inputs, plan.tolerance))]

    names = select_implementations(plan.backends, inputs, progress, causal)
    functions = {name: make_implementation(name, inputs, plan.tolerance, causal) for name in names}
    inputs_by_name = {name: adapt_inputs(inputs, name) for name in names}

    timings = _measure_times(plan, length, functions, inputs_by_name, progress)
    matmul_rate = measure_matmul_rate(seconds=0.5)
    memory = _measure_memory(plan, source, length, names, progress)

    progress.print_note("error against float64, and skipped work")
    windowed_work: dict[str, Measure] = {}
    if "windowed" in names and plan.tolerance and causal:
        windowed_work = measure_work(inputs, plan.tolerance)

    rows = []
    for name in names:
        measured = _time_measures(name, timings)
        if name in memory:
            measured["peak"] = to_megabytes(memory[name]["peak"])
            measured["peak to plain"] = to_ratio(memory[name]["peak"], memory[PLAIN]["peak"], "lower")
            measured["own memory"] = to_megabytes(memory[name]["own"])
        if name == "windowed":
            measured |= windowed_work
        operations_per_second = 1e3 * count_flops(inputs, causal) / measured[FORWARD].value
        measured["of matmul rate"] = to_percent(operations_per_second, matmul_rate, "higher")
        error = measure_error(functions[name], inputs_by_name[name], has_bias=name != PLAIN, causal=causal)
        measured["error"] = Measure(value=error, better="lower")

        case = {"inputs": input_label, "engine": name, "tokens": length}
        if not causal:
            case["sides"] = "both"
        seconds = {kind: timings_by_name[name].seconds for kind, timings_by_name in timings.items()}
        rows.append(Measurement(case=case, measured=measured, seconds=seconds))
    return rows


def adapt_inputs(inputs: Inputs, name: str) -> Inputs:
    """Return the inputs of an implementation. The implementation "clock" gets its slopes as a decay bias."""
    return inputs.with_decay_bias() if name == DECAY else inputs


def _measure_times(
    plan: AttentionPlan,
    length: int,
    functions: dict[str, Attend],
    inputs_by_name: dict[str, Inputs],
    progress: Progress,
) -> dict[str, dict[str, Timing]]:
    """Time all implementations without and with the backward pass.

    Returns:
        The timings by kind ("forward" and "forward + backward"), and then by the name of the implementation.
    """
    rounds = plan.rounds or _default_rounds(length)
    warmup = 1 if length <= MAX_SLOW_PEER_LENGTH else 0
    timings = {}
    for kind in (FORWARD, FORWARD_BACKWARD):
        progress.print_note(f"{kind}, {rounds} rounds of {', '.join(functions)}")
        with_backward = kind == FORWARD_BACKWARD
        tasks = {}
        for name, function in functions.items():
            tasks[name] = make_attention_task(function, inputs_by_name[name], backward=with_backward)
        timings[kind] = time_interleaved(tasks, rounds, warmup, progress.report_round)
    return timings


def _default_rounds(length: int) -> int:
    """Return how often each implementation is timed at a length, if `--rounds` is not given."""
    if length <= 4096:
        return 9
    if length <= MAX_SLOW_PEER_LENGTH:
        return 5
    return 3


def _measure_memory(
    plan: AttentionPlan, source: str, length: int, names: list[str], progress: Progress
) -> dict[str, dict[str, int]]:
    """Measure the peak memory of each implementation in a subprocess.

    Returns:
        The results of `peak` by the name of the implementation. The dictionary is empty if the plan excludes the
        memory at this length.
    """
    if not is_memory_measured(plan, length):
        return {}
    tasks = {}
    for name in names:
        tasks[name] = {
            "source": source,
            "length": length,
            "name": name,
            "tolerance": plan.tolerance,
            "causal": plan.sides == "left",
        }
    return measure_peaks("attention", tasks, progress)


def _time_measures(name: str, timings: dict[str, dict[str, Timing]]) -> dict[str, Measure]:
    """Return the times of one implementation in milliseconds, and their ratios to the times of plain attention."""
    forward = timings[FORWARD]
    forward_backward = timings[FORWARD_BACKWARD]
    return {
        FORWARD: forward[name].milliseconds_per(1),
        "to plain": forward[name].ratio_to(forward[PLAIN]),
        FORWARD_BACKWARD: forward_backward[name].milliseconds_per(1),
        "both to plain": forward_backward[name].ratio_to(forward_backward[PLAIN]),
    }


def make_attention_task(function: Attend, inputs: Inputs, *, backward: bool) -> Callable[[], Any]:
    """Return a function without arguments that computes attention once.

    Args:
        function: The implementation of attention.
        inputs: The queries, keys, values and the bias.
        backward: Whether the gradients of q, k and v are computed as well. The gradient of a decay bias is included.

    Returns:
        A function that returns the attention output, or the gradients if `backward` is true.
    """
    if not backward:
        return torch.no_grad()(lambda: function(inputs.q, inputs.k, inputs.v, inputs.bias))

    q = inputs.q.detach().requires_grad_()
    k = inputs.k.detach().requires_grad_()
    v = inputs.v.detach().requires_grad_()
    leaves = [q, k, v]
    bias = inputs.bias
    if isinstance(bias, DecayBias):
        bias = DecayBias(bias.cumulative.detach().requires_grad_())
        leaves.append(bias.cumulative)

    def compute_gradients() -> tuple[Tensor | None, ...]:
        # Plain attention ignores the bias, so the bias has no gradient there (`allow_unused`).
        return torch.autograd.grad(function(q, k, v, bias), leaves, inputs.grad_out, allow_unused=True)

    return compute_gradients


def count_flops(inputs: Inputs, causal: bool) -> int:
    """Return the floating-point operations of a forward pass that skips nothing.

    Attention consists of two matrix products over all pairs of queries and keys. Causal attention needs half of the
    pairs. An implementation that skips keys can exceed 100 % of the matrix-multiply rate by this count.
    """
    _, heads, length, dim = inputs.q.shape
    operations_per_pair = 2 if causal else 4
    return operations_per_pair * heads * length**2 * dim


def measure_error(function: Attend, inputs: Inputs, *, has_bias: bool, causal: bool) -> float:
    """Return the root mean square error of an implementation for the last rows, compared with float64.

    Args:
        function: The implementation of attention.
        inputs: The queries, keys, values and the bias.
        has_bias: Whether the implementation applies the bias. Plain attention does not.
        causal: Whether the attention is causal.
    """
    with torch.no_grad():
        out = function(inputs.q, inputs.k, inputs.v, inputs.bias)[:, :, -CHECKED_ROWS:]
        q = inputs.q[:, :, -CHECKED_ROWS:].double()
        k = inputs.k.double()
        v = inputs.v.double()
        bias = inputs.bias if has_bias else None
        exact = attend(q, k, v, bias=bias, backend="reference", causal=causal)
        assert isinstance(exact, Tensor)
    return (out.double() - exact).square().mean().sqrt().item()


def measure_work(inputs: Inputs, tolerance: float) -> dict[str, Measure]:
    """Compute how much of the causal attention the kernel computes, and compare this share with other bounds.

    The work is the number of pairs of a query and a key that are computed, as a share of all causal pairs.

    Args:
        inputs: The queries, keys, values and the bias.
        tolerance: The softmax mass that may be skipped per query.

    Returns:
        Shares in percent, and ratios between the shares:

        - `work`: what the kernel computes.
        - `work by ACP`: what adaptive computation pruning would compute (see `acp_work`).
        - `work needed` and `work needed in blocks`: what is needed at this tolerance (see `needed_work`).
        - `work to ...`: the share of the kernel divided by another share.
    """
    length = inputs.q.shape[2]
    scale = 1 / math.sqrt(inputs.q.shape[3])
    bias_kind = bias_kind_of(inputs.bias).value
    results = torch.ops.trainshort.attention(
        inputs.q, inputs.k, inputs.v, inputs.bias.values, bias_kind, None, None, scale, tolerance, True
    )
    # The first key that the kernel reads, for each head and each tile of queries.
    first_keys = results[2][0]

    rows = torch.arange(length)
    keys_per_row = rows - first_keys[:, rows // QUERY_TILE] + 1
    kernel_share = float(keys_per_row.double().sum() / _count_causal_pairs(inputs))
    acp_share = acp_work(inputs, tolerance, scale)
    needed_share, needed_block_share = needed_work(inputs, tolerance)
    return {
        "work": to_percent(kernel_share, 1, "lower"),
        "work by ACP": to_percent(acp_share, 1, "lower"),
        "work needed": to_percent(needed_share, 1, "lower"),
        "work needed in blocks": to_percent(needed_block_share, 1, "lower"),
        "work to ACP": to_ratio(kernel_share, acp_share, "lower"),
        "work to needed": to_ratio(kernel_share, needed_share, "lower"),
        "work to needed in blocks": to_ratio(kernel_share, needed_block_share, "lower"),
    }


def acp_work(inputs: Inputs, tolerance: float, scale: float) -> float:
    """Return the share of the causal work that adaptive computation pruning (ACP) would compute.

    ACP (Lin et al., COLM 2025) bounds all scores of a head by U = max‖q‖ · max‖k‖ · scale. Let c be the cumulative
    decay, so that the bias of query i and key j is c(i) - c(j). ACP skips a block of keys if

        c(first query of the tile) - c(last key of the block) < -(2U + ln length) + ln tolerance

    Args:
        inputs: The queries, keys, values and the bias.
        tolerance: The softmax mass that may be skipped per query.
        scale: The factor of the scores before the softmax.

    Returns:
        The share, between 0 and 1. Query tiles and key blocks have the sizes of the kernel of trainshort.
    """
    length = inputs.q.shape[2]
    cumulative_decay = inputs.with_decay_bias().bias.values[0]
    max_query_norm = inputs.q[0].norm(dim=-1).amax(-1)
    max_key_norm = inputs.k[0].norm(dim=-1).amax(-1)
    score_bound = max_query_norm * max_key_norm * scale
    threshold = -(2 * score_bound.double() + math.log(length)) + math.log(tolerance)

    block_starts = torch.arange(0, length, KEY_BLOCK)
    last_keys = block_starts.add(KEY_BLOCK - 1).clamp(max=length - 1)
    tile_decay = cumulative_decay[:, ::QUERY_TILE, None]
    block_decay = cumulative_decay[:, None, last_keys]
    is_computed = tile_decay - block_decay >= threshold[:, None, None]  # (heads, tiles, blocks)

    # The number of causal pairs of each row in each block of keys, and then of each tile in each block.
    rows = torch.arange(length)
    pairs_by_row = (rows[:, None] - block_starts + 1).clamp(0, KEY_BLOCK)
    pairs_by_tile = torch.zeros(is_computed.shape[1:], dtype=torch.int64)
    pairs_by_tile.index_add_(0, rows // QUERY_TILE, pairs_by_row)
    return float((is_computed * pairs_by_tile).double().sum() / _count_causal_pairs(inputs))


@torch.no_grad()
def needed_work(inputs: Inputs, tolerance: float) -> tuple[float, float]:
    """Return the smallest share of the causal work that keeps all but `tolerance` of the softmax mass.

    Each query needs its nearest keys until these keys carry the mass `1 - tolerance`. The numbers are computed in
    float64 for a sample of the query tiles.

    Args:
        inputs: The queries, keys, values and the bias.
        tolerance: The softmax mass that may be skipped per query.

    Returns:
        Two shares between 0 and 1. For the first share, each query reads only the keys that it needs. For the second
        share, all queries of a tile read the same blocks of keys, as in the kernel.
    """
    heads, length = inputs.q.shape[1:3]
    keys = torch.arange(length)
    cumulative_decay = inputs.with_decay_bias().bias.values
    scaled_keys = inputs.k.double().mT / math.sqrt(inputs.q.shape[3])

    needed_pairs = 0
    needed_block_pairs = 0
    sampled_pairs = 0
    for tile_start in range(0, length, TILE_SAMPLING_INTERVAL * QUERY_TILE):
        rows = torch.arange(tile_start, min(tile_start + QUERY_TILE, length))
        bias = cumulative_decay[:, :, rows, None] - cumulative_decay[:, :, None]
        scores = inputs.q[:, :, rows].double() @ scaled_keys + bias
        is_future = keys > rows[:, None]
        attention_weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
        mass_up_to_key = attention_weights.cumsum(-1)

        first_needed_key = (mass_up_to_key <= tolerance).sum(-1)
        # The row of the tile that needs most keys decides for the tile. Round down to the start of a block.
        first_needed_block = first_needed_key.amin(-1, keepdim=True) // KEY_BLOCK * KEY_BLOCK
        needed_pairs += int((rows + 1 - first_needed_key).sum())
        needed_block_pairs += int((rows + 1 - first_needed_block).sum())
        sampled_pairs += int((rows + 1).sum()) * heads
    return needed_pairs / sampled_pairs, needed_block_pairs / sampled_pairs


def _count_causal_pairs(inputs: Inputs) -> int:
    """Return the number of pairs of a query and a key that is not in its future, for all heads."""
    heads, length = inputs.q.shape[1:3]
    return heads * length * (length + 1) // 2


def peak(source: str, length: int, name: str, tolerance: float, causal: bool) -> dict[str, int]:
    """Measure the peak memory of forward and backward. `measure_peaks` calls this function in a subprocess.

    Args:
        source: The inputs: "normal", "scaled" or the path of a file with recorded inputs.
        length: The number of queries and keys.
        name: The implementation of attention.
        tolerance: The softmax mass that may be skipped per query.
        causal: Whether the attention is causal.

    Returns:
        `peak` is the peak memory in bytes. `own` is the part above the memory of the inputs.
    """

    def make_task(task_length: int) -> Callable[[], Any]:
        inputs = make_inputs(source, task_length)
        function = make_implementation(name, inputs, tolerance, causal)
        return make_attention_task(function, adapt_inputs(inputs, name), backward=True)

    # The first call loads libraries. Their memory does not belong to the measurement.
    warm_up = make_task(min(length, WARMUP_TOKENS))
    warm_up()
    return measure_peak_memory(make_task(length))
