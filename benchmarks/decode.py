"""Decoding: time per token and memory by context, against reading the weights once, against MPT, and without end.

One turn is several consecutive tokens of one contestant, as in real decoding: single tokens of different caches in
alternation would throw each other's data out of the processor's cache. A long context is not read but made: random keys
and values, the size that the model's own have, are put into the caches, which then cost what real ones cost.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.inputs import require_error_bound
from benchmarks.run import Benchmark, Progress
from benchmarks.suites import TRAINED, DecodePlan
from benchmarks.training import mpt_takes_part
from trainshort.config.presets import presets
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.evaluate.targets import RunTarget
from trainshort.generate.fast_decode import FastDecoder
from trainshort.generate.streaming import stream
from trainshort.model.cache import BoundedCache, Cache
from trainshort.model.transformer import TransformerLM
from trainshort.train.run_data import open_run_data
from trainshort.utils.bench_results import Case, Measure, Measurement, median_of, to_megabytes, to_percent, to_ratio
from trainshort.utils.machine import PeakMemory, resident_memory
from trainshort.utils.timing import time_interleaved

TOKENS_PER_ROUND = 16
"""Consecutive tokens of a turn."""
WARMUP = 3
"""Turns before the first that counts. In them a full cache doubles its room, which then lasts as many tokens as the
context has; a later doubling, at a very short context, is one turn of many, which a median does not feel."""
PREFILL_CHUNK = 1024
READ = 512
"""Tokens of real text that are read at a time."""
RING_WARMUP_TOKENS = 8192
"""Tokens after which the rings of these models have their final size."""


def benchmarks(plan: DecodePlan) -> list[Benchmark]:
    """One per part."""
    shortest, prompt = min(plan.contexts), max(plan.prompts)
    known = {
        "context": Benchmark("time per token and cache memory by context", partial(by_context, plan)),
        "weights": Benchmark(f"against reading the weights once, context {shortest:,}", partial(by_weights, plan)),
        "mpt": Benchmark(f"against MPT, context {prompt:,}", partial(against_mpt, plan)),
        TRAINED: Benchmark(f"what a bounded cache keeps of the text of {plan.run}", partial(measure_cache_size, plan)),
        "endless": Benchmark(
            f"endless, 1 layer, width 32: {plan.tokens:,} tokens", partial(measure_long_generation, plan)
        ),
    }
    if plan.run is not None:
        require_error_bound(Path(plan.run), "a bounded cache")
    return [step for name, step in known.items() if name in plan.parts or (name == TRAINED and plan.run)]


def make_model(preset: str) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(presets.get(preset)().replace(biases=False)).eval()


def compiled(model: TransformerLM) -> FastDecoder:
    made = FastDecoder.create(model)
    if made is None:
        raise InputError(
            "The decode benchmark measures the compiled path, and there is no C compiler here. "
            "Install one, or name the other suites."
        )
    return made


def both_caches(model: TransformerLM, plan: DecodePlan, context: int) -> dict[str, Cache]:
    empty = {"full": Cache(), "bounded": BoundedCache(tolerance=plan.tolerance)}
    return {kind: filled(model, cache, context) for kind, cache in empty.items()}


@torch.inference_mode()
def filled(model: TransformerLM, cache: Cache, context: int) -> Cache:
    """The cache after `context` made-up tokens: queries, keys and values of the model's own size, alike in all layers.

    A bounded cache reads no more of them than its rings take to fill; from there on it only counts.
    """
    layers = [cache.layer(index) for index in range(model.config.layers)]
    bias = model.position.score_bias(1)
    read = min(context, RING_WARMUP_TOKENS) if isinstance(cache, BoundedCache) else context
    sizes = own_sizes(model)
    for start in range(0, read, PREFILL_CHUNK):
        shape = (1, model.config.heads, min(PREFILL_CHUNK, read - start), model.config.head_width)
        q, k, v = (torch.randn(shape) * size for size in sizes)
        for layer in layers:
            if isinstance(cache, BoundedCache):
                layer.attend(q, k, v, bias=bias)
            else:
                layer.append(k, v)
    for layer in layers:
        layer.length = context
    return cache


@torch.inference_mode()
def own_sizes(model: TransformerLM) -> list[float]:
    """Deviations of the first layer's queries, keys and values."""
    x = model.vocabulary.embed(torch.randint(model.config.vocab_size, (1, 64)))
    block = model.layers[0]
    qkv = block.attention.qkv(block.attention_norm(x))  # pyright: ignore
    return [float(part.std()) for part in qkv.chunk(3, dim=-1)]


def make_decode_task(made: FastDecoder, cache: Cache, tokens: int = TOKENS_PER_ROUND) -> Callable[[], object]:
    @torch.inference_mode()
    def turn() -> None:
        for _ in range(tokens):
            made.logits(7, cache)

    return turn


def by_context(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    model = make_model(plan.preset)
    made = compiled(model)
    caches: dict[tuple[str, int], Cache] = {}
    for context in plan.contexts:
        progress.note(f"filling caches with {context:,} tokens")
        caches |= {(kind, context): cache for kind, cache in both_caches(model, plan, context).items()}
    size = {key: cache.bytes for key, cache in caches.items()}  # before the next token doubles the full one's room
    progress.note(f"{plan.rounds} rounds of {TOKENS_PER_ROUND} tokens with each of {len(caches)} caches")
    turns = {f"{kind} {context}": make_decode_task(made, cache) for (kind, context), cache in caches.items()}
    timings = time_interleaved(turns, plan.rounds, WARMUP, progress.round)
    shortest = min(plan.contexts)
    rows = []
    for (kind, context), cache in caches.items():
        own, short, full = (timings[name] for name in (f"{kind} {context}", f"{kind} {shortest}", f"full {context}"))
        measured = {
            "time per token": own.milliseconds_per(TOKENS_PER_ROUND),
            f"to {shortest:,}": own.ratio_to(short),
            "to full": own.ratio_to(full),
            "best": Measure(value=1e3 * own.best / TOKENS_PER_ROUND, unit="ms", better="lower"),
            f"best to {shortest:,}": to_ratio(own.best, short.best, "lower"),
            "cache": to_megabytes(size[kind, context]),
            "cache to full": to_percent(size[kind, context], size["full", context], "lower"),
        }
        case: Case = {"part": "context", "cache": kind, "context": context, "preset": plan.preset}
        note = str(cache.certificate) if isinstance(cache, BoundedCache) else ""
        rows.append(Measurement(case=case, measured=measured, seconds={"turns": own.seconds}, note=note))
    return rows


def by_weights(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """The limit is the time to sum as many float32 numbers as the model has, with all threads, in turns with tokens."""
    model = make_model(plan.preset)
    numbers = torch.ones(sum(weight.numel() for weight in model.parameters()))
    made, context = compiled(model), min(plan.contexts)

    def read() -> None:
        for _ in range(TOKENS_PER_ROUND):
            numbers.sum()

    rows = []
    for kind, cache in both_caches(model, plan, context).items():
        progress.note(
            f"{plan.rounds} rounds of {TOKENS_PER_ROUND} tokens and {TOKENS_PER_ROUND} readings, {kind} cache"
        )
        timings = time_interleaved(
            {"read": read, "token": make_decode_task(made, cache)}, plan.rounds, WARMUP, progress.round
        )
        once, token = timings["read"], timings["token"]
        measured = {
            "weights": Measure(value=4 * numbers.numel() / 2**20, unit="MB"),
            "read once": once.milliseconds_per(TOKENS_PER_ROUND),
            "time per token": token.milliseconds_per(TOKENS_PER_ROUND),
            "of the limit": token.speed_percent_of(once),
            "best of the limit": to_percent(once.best, token.best, "higher"),
        }
        case: Case = {"part": "weights", "cache": kind, "context": context, "preset": plan.preset}
        rows.append(Measurement(case=case, measured=measured, seconds={"turns": token.seconds}))
    return rows


def against_mpt(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """The same weights: the same greedy tokens after real prompts, and a token's time after a made-up past."""
    context, model = max(plan.prompts), make_model(plan.preset)
    if not mpt_takes_part(model.config, peers.PROMPT_COPIES, context, progress):
        return []
    room = peers.MPT_TOKENS_PER_ROUND * (plan.rounds + WARMUP) + peers.GREEDY
    theirs, ours = peers.pair(model, context + room)
    rows = []
    for prompt in plan.prompts:
        progress.note(f"greedy tokens after a prompt of {prompt:,}")
        same = peers.same_greedy_tokens(theirs, partial(peers.bounded_greedy, ours, plan.tolerance), prompt)
        measured = {"same greedy tokens": Measure(value=same, unit=f"of {peers.GREEDY}", better="higher")}
        case: Case = {"part": "greedy", "prompt": prompt, "preset": plan.preset}
        rows.append(Measurement(case=case, measured=measured))
    progress.note(f"{plan.rounds} rounds of {peers.MPT_TOKENS_PER_ROUND} tokens with each of mpt, full, bounded")
    made = compiled(ours)
    turns = {"mpt": peers.turn_of(theirs, context)}
    turns |= {
        kind: make_decode_task(made, cache, peers.MPT_TOKENS_PER_ROUND)
        for kind, cache in both_caches(ours, plan, context).items()
    }
    timings = time_interleaved(turns, plan.rounds, WARMUP, progress.round)
    for name, timing in timings.items():
        measured = {
            "time per token": timing.milliseconds_per(peers.MPT_TOKENS_PER_ROUND),
            "speed to mpt": timing.speed_ratio_to(timings["mpt"]),
            "best to mpt": to_ratio(timings["mpt"].best, timing.best, "higher"),
        }
        case = {"part": "mpt", "decoder": name, "context": context, "preset": plan.preset}
        rows.append(Measurement(case=case, measured=measured, seconds={"turns": timing.seconds}))
    return rows


@torch.inference_mode()
def measure_cache_size(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """How much of a full cache a trained model keeps of real text: the beginning of each split of its own data."""
    target = RunTarget(Path(str(plan.run)))
    data, rows = open_run_data(target.run, target.config.data), []
    for split in data.meta.splits:
        tokens = torch.from_numpy(data.split(split)[: max(plan.contexts)].astype("int64"))[None]
        contexts = sorted({min(context, tokens.shape[1]) for context in plan.contexts})
        progress.note(f"reading {contexts[-1]:,} tokens of {split}")
        cache = BoundedCache(tolerance=plan.tolerance, has_decay_bias=target.model.position.uses_cumulative_decay)
        for start, end in zip((0, *contexts), contexts, strict=False):
            for chunk in tokens[:, start:end].split(READ, dim=1):
                target.model.hidden(chunk, cache=cache)
            rows.append(_kept_row(cache, {"part": TRAINED, "run": target.name, "split": split, "context": end}))
    return rows


def _kept_row(cache: BoundedCache, case: Case) -> Measurement:
    rings = [keys for layer in cache.windows for keys in layer]
    measured = {
        "keys kept": to_percent(sum(rings), len(rings) * cache.length, "lower"),
        "longest ring": Measure(value=max(rings), unit="keys"),
        "shortest ring": Measure(value=min(rings), unit="keys"),
        "cache": to_megabytes(cache.bytes),
        "certificate": Measure(value=cache.certificate.mass, better="lower"),
        "rows above tolerance": Measure(value=cache.certificate.rows_above_tolerance, better="lower"),
    }
    return Measurement(case=case, measured=measured, note=str(cache.certificate))


def measure_long_generation(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """A very small model without end, one thread: memory, speed of the first and last stretch, certificate."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        return [_endless_row(plan, progress)]
    finally:
        torch.set_num_threads(threads)


def _endless_row(plan: DecodePlan, progress: Progress) -> Measurement:
    count = plan.tokens
    stretch, settled = max(1, min(10_000, count // 10)), max(1, min(20_000, count // 5))
    model = TransformerLM(ModelConfig(vocab_size=256, layers=1, width=32, heads=4))
    made = stream(model, [1], tokens=count, mode="bounded", tolerance=plan.tolerance)
    peak = PeakMemory(torch.device("cpu"))
    seconds, start, early = [], time.process_time(), resident_memory()
    for number, _ in enumerate(made, start=1):
        if number % stretch == 0:
            now = time.process_time()
            seconds.append(now - start)
            start = now
            progress.round(number // stretch, count // stretch)
        if number == settled:
            early = resident_memory()
    warm = seconds[min(1, len(seconds) - 1)]  # the first stretch warms up
    growth, most = resident_memory() - early, peak.bytes()
    cache = made.caches[0]
    assert isinstance(cache, BoundedCache)
    certificate = cache.certificate
    measured = {
        "speed": median_of([stretch / one for one in seconds], "tokens/s of processor time", "higher"),
        "last speed to first": to_ratio(warm, seconds[-1], "higher"),
        "memory growth": to_percent(growth, early, "lower"),
        "cache": Measure(value=cache.bytes / 1024, unit="KB", better="lower"),
        "certificate": Measure(value=certificate.mass, better="lower"),
        "rows above tolerance": Measure(value=certificate.rows_above_tolerance, better="lower"),
    }
    if most is not None:
        measured["peak"] = to_megabytes(most)
    case: Case = {"part": "endless", "tokens": count}
    return Measurement(case=case, measured=measured, seconds={"turns": tuple(seconds)}, note=str(certificate))
