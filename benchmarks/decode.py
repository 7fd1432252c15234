"""The decode benchmark: time and memory per generated token, by context length and kind of KV cache.

One round generates several consecutive tokens with one cache, as real decoding does. If the caches took turns after
each token, they would displace each other from the processor's cache.

A long context is not read by the model. The caches are filled with random keys and values of realistic size. Such a
cache needs the same time and memory as a cache with real keys and values.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.inputs import require_error_bound
from benchmarks.run import Benchmark, Progress
from benchmarks.suites import TRAINED_PART, DecodePlan
from benchmarks.training import can_run_mpt
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

# The number of consecutive tokens in a round.
TOKENS_PER_ROUND = 16

# The number of rounds that are not measured. In these rounds, the buffers of a full cache grow to twice the context.
WARMUP = 3

# The number of random tokens with which a cache is filled at once.
FILL_CHUNK = 1024

# The number of tokens of a real text that a trained model reads at once.
READ_CHUNK = 512

# After this number of tokens, the ring buffers of the models in this benchmark have reached their final size.
RING_WARMUP_TOKENS = 8192

# The token that is decoded again and again. The time of a token does not depend on the token.
DECODED_TOKEN = 7


def make_benchmarks(plan: DecodePlan) -> list[Benchmark]:
    """Return one benchmark for each part of the plan. A plan with a run also measures the part "trained".

    Raises:
        InputError: If the position method of the run does not allow a bounded cache.
    """
    shortest_context = min(plan.contexts)
    longest_prompt = max(plan.prompts)
    titles_and_functions = {
        "context": ("time per token and cache memory by context", measure_contexts),
        "weights": (f"against reading the weights once, context {shortest_context:,}", measure_against_weights),
        "mpt": (f"against MPT, context {longest_prompt:,}", measure_against_mpt),
        TRAINED_PART: (f"what a bounded cache keeps of the text of {plan.run}", measure_cache_size),
        "endless": (f"endless, 1 layer, width 32: {plan.tokens:,} tokens", measure_long_generation),
    }
    if plan.run is not None:
        require_error_bound(Path(plan.run), "a bounded cache")

    benchmarks = []
    for part, (title, function) in titles_and_functions.items():
        is_trained_part_of_run = part == TRAINED_PART and plan.run is not None
        if part in plan.parts or is_trained_part_of_run:
            benchmarks.append(Benchmark(title, partial(function, plan)))
    return benchmarks


def make_model(preset: str) -> TransformerLM:
    """Return a model with random weights and without biases of the linear layers, as MPT has none."""
    torch.manual_seed(0)
    return TransformerLM(presets.get(preset)().replace(biases=False)).eval()


def make_decoder(model: TransformerLM) -> FastDecoder:
    """Return the compiled decoder of a model.

    Raises:
        InputError: If the decoder cannot be compiled on this machine.
    """
    decoder = FastDecoder.create(model)
    if decoder is None:
        raise InputError(
            "The decode benchmark requires a C compiler, and no compiler was found. "
            "Install a C compiler, or choose other suites."
        )
    return decoder


def make_caches(model: TransformerLM, plan: DecodePlan, context: int) -> dict[str, Cache]:
    """Return a full cache and a bounded cache that both hold `context` random tokens, by their names."""
    empty_caches = {"full": Cache(), "bounded": BoundedCache(tolerance=plan.tolerance)}
    return {name: fill_cache(model, cache, context) for name, cache in empty_caches.items()}


@torch.inference_mode()
def fill_cache(model: TransformerLM, cache: Cache, context: int) -> Cache:
    """Fill a cache with random queries, keys and values, as if the model had read a text.

    A bounded cache reads only as many tokens as its ring buffers need to reach their final size. Afterwards, only the
    length of the cache is set.

    Args:
        model: The model. The random values have the same standard deviations as its queries, keys and values.
        cache: An empty cache.
        context: The number of tokens that the cache holds afterwards.

    Returns:
        The same cache.
    """
    layers = [cache.layer(index) for index in range(model.config.layers)]
    bias = model.position.score_bias(1)
    is_bounded = isinstance(cache, BoundedCache)
    token_count = min(context, RING_WARMUP_TOKENS) if is_bounded else context
    q_std, k_std, v_std = qkv_standard_deviations(model)
    for start in range(0, token_count, FILL_CHUNK):
        chunk_length = min(FILL_CHUNK, token_count - start)
        shape = (1, model.config.heads, chunk_length, model.config.head_width)
        q = torch.randn(shape) * q_std
        k = torch.randn(shape) * k_std
        v = torch.randn(shape) * v_std
        for layer in layers:
            if is_bounded:
                layer.attend(q, k, v, bias=bias)
            else:
                layer.append(k, v)
    for layer in layers:
        layer.length = context
    return cache


@torch.inference_mode()
def qkv_standard_deviations(model: TransformerLM) -> list[float]:
    """Return the standard deviations of the first layer's queries, keys and values for random tokens."""
    tokens = torch.randint(model.config.vocab_size, (1, 64))
    x = model.vocabulary.embed(tokens)
    block = model.layers[0]
    qkv = block.attention.qkv(block.attention_norm(x))  # pyright: ignore
    return [float(part.std()) for part in qkv.chunk(3, dim=-1)]


def make_decode_task(decoder: FastDecoder, cache: Cache, token_count: int = TOKENS_PER_ROUND) -> Callable[[], object]:
    """Return a function without arguments that decodes some tokens with a cache."""

    @torch.inference_mode()
    def decode() -> None:
        for _ in range(token_count):
            decoder.logits(DECODED_TOKEN, cache)

    return decode


def measure_contexts(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """Measure the time per token and the memory of both caches at all context lengths.

    Returns:
        One measurement for each cache and context length.
    """
    model = make_model(plan.preset)
    decoder = make_decoder(model)
    caches: dict[tuple[str, int], Cache] = {}
    for context in plan.contexts:
        progress.print_note(f"filling caches with {context:,} tokens")
        for cache_name, cache in make_caches(model, plan, context).items():
            caches[cache_name, context] = cache
    # The sizes are read now, because the next token doubles the buffers of a full cache.
    cache_bytes = {key: cache.bytes for key, cache in caches.items()}

    progress.print_note(f"{plan.rounds} rounds of {TOKENS_PER_ROUND} tokens with each of {len(caches)} caches")
    tasks = {}
    for (cache_name, context), cache in caches.items():
        tasks[f"{cache_name} {context}"] = make_decode_task(decoder, cache)
    timings = time_interleaved(tasks, plan.rounds, WARMUP, progress.report_round)

    shortest = min(plan.contexts)
    rows = []
    for (cache_name, context), cache in caches.items():
        timing = timings[f"{cache_name} {context}"]
        timing_at_shortest = timings[f"{cache_name} {shortest}"]
        size = cache_bytes[cache_name, context]
        measured = {
            "time per token": timing.milliseconds_per(TOKENS_PER_ROUND),
            f"to {shortest:,}": timing.ratio_to(timing_at_shortest),
            "to full": timing.ratio_to(timings[f"full {context}"]),
            "best": Measure(value=1e3 * timing.best / TOKENS_PER_ROUND, unit="ms", better="lower"),
            f"best to {shortest:,}": to_ratio(timing.best, timing_at_shortest.best, "lower"),
            "cache": to_megabytes(size),
            "cache to full": to_percent(size, cache_bytes["full", context], "lower"),
        }
        case: Case = {"part": "context", "cache": cache_name, "context": context, "preset": plan.preset}
        note = str(cache.certificate) if isinstance(cache, BoundedCache) else ""
        rows.append(Measurement(case=case, measured=measured, seconds={"turns": timing.seconds}, note=note))
    return rows


def measure_against_weights(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """Compare the time per token with the time to read all weights once, which is a lower limit.

    The limit is measured as the time to sum as many float32 numbers as the model has, with all threads.

    Returns:
        One measurement for each cache.
    """
    model = make_model(plan.preset)
    weight_count = sum(weight.numel() for weight in model.parameters())
    numbers = torch.ones(weight_count)
    decoder = make_decoder(model)
    context = min(plan.contexts)

    def read_weights() -> None:
        for _ in range(TOKENS_PER_ROUND):
            numbers.sum()

    rows = []
    for cache_name, cache in make_caches(model, plan, context).items():
        progress.print_note(
            f"{plan.rounds} rounds of {TOKENS_PER_ROUND} tokens and {TOKENS_PER_ROUND} readings, {cache_name} cache"
        )
        tasks = {"read": read_weights, "token": make_decode_task(decoder, cache)}
        timings = time_interleaved(tasks, plan.rounds, WARMUP, progress.report_round)
        read_timing = timings["read"]
        token_timing = timings["token"]
        measured = {
            "weights": Measure(value=4 * weight_count / 2**20, unit="MB"),
            "read once": read_timing.milliseconds_per(TOKENS_PER_ROUND),
            "time per token": token_timing.milliseconds_per(TOKENS_PER_ROUND),
            "of the limit": token_timing.speed_percent_of(read_timing),
            "best of the limit": to_percent(read_timing.best, token_timing.best, "higher"),
        }
        case: Case = {"part": "weights", "cache": cache_name, "context": context, "preset": plan.preset}
        rows.append(Measurement(case=case, measured=measured, seconds={"turns": token_timing.seconds}))
    return rows


def measure_against_mpt(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """Compare decoding with Hugging Face's MPT that has the same weights.

    Returns:
        One measurement for each prompt length, with the number of equal greedy tokens. Then one measurement for MPT
        and for each cache, with the time per token. The list is empty if MPT cannot run on this machine.
    """
    context = max(plan.prompts)
    model = make_model(plan.preset)
    if not can_run_mpt(model.config, peers.PROMPT_SCORE_COPIES, context, progress):
        return []
    generated_tokens = peers.MPT_TOKENS_PER_ROUND * (plan.rounds + WARMUP) + peers.GREEDY_TOKENS
    mpt, model = peers.make_model_pair(model, context + generated_tokens)

    rows = []
    generate = partial(peers.generate_with_bounded_cache, model, plan.tolerance)
    for prompt_length in plan.prompts:
        progress.print_note(f"greedy tokens after a prompt of {prompt_length:,}")
        same_count = peers.count_same_greedy_tokens(mpt, generate, prompt_length)
        measured = {"same greedy tokens": Measure(value=same_count, unit=f"of {peers.GREEDY_TOKENS}", better="higher")}
        case: Case = {"part": "greedy", "prompt": prompt_length, "preset": plan.preset}
        rows.append(Measurement(case=case, measured=measured))

    progress.print_note(f"{plan.rounds} rounds of {peers.MPT_TOKENS_PER_ROUND} tokens with each of mpt, full, bounded")
    decoder = make_decoder(model)
    tasks = {"mpt": peers.make_mpt_decode_task(mpt, context)}
    for cache_name, cache in make_caches(model, plan, context).items():
        tasks[cache_name] = make_decode_task(decoder, cache, peers.MPT_TOKENS_PER_ROUND)
    timings = time_interleaved(tasks, plan.rounds, WARMUP, progress.report_round)
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
    """Measure how many keys a bounded cache keeps while a trained model reads the text it was trained on.

    The model reads the beginning of each split. Splits that are shorter than a context are read to their end.

    Returns:
        One measurement for each split and context length.
    """
    target = RunTarget(Path(str(plan.run)))
    data = open_run_data(target.run, target.config.data)
    rows = []
    for split in data.meta.splits:
        split_tokens = data.split(split)[: max(plan.contexts)]
        tokens = torch.from_numpy(split_tokens.astype("int64"))[None]
        contexts = sorted({min(context, tokens.shape[1]) for context in plan.contexts})
        progress.print_note(f"reading {contexts[-1]:,} tokens of {split}")
        cache = BoundedCache(tolerance=plan.tolerance, has_decay_bias=target.model.position.uses_cumulative_decay)
        start = 0
        for context in contexts:
            for chunk in tokens[:, start:context].split(READ_CHUNK, dim=1):
                target.model.hidden(chunk, cache=cache)
            case: Case = {"part": TRAINED_PART, "run": target.name, "split": split, "context": context}
            rows.append(_describe_bounded_cache(cache, case))
            start = context
    return rows


def _describe_bounded_cache(cache: BoundedCache, case: Case) -> Measurement:
    """Return a measurement with the size of a bounded cache and its certificate.

    The certificate is an upper bound on the softmax mass of the keys that the cache has evicted.
    """
    # The number of keys in each ring buffer. Every key head of every layer has its own ring buffer.
    ring_sizes = []
    for layer_windows in cache.windows:
        ring_sizes.extend(layer_windows)
    measured = {
        "keys kept": to_percent(sum(ring_sizes), len(ring_sizes) * cache.length, "lower"),
        "longest ring": Measure(value=max(ring_sizes), unit="keys"),
        "shortest ring": Measure(value=min(ring_sizes), unit="keys"),
        "cache": to_megabytes(cache.bytes),
        "certificate": Measure(value=cache.certificate.mass, better="lower"),
        "rows above tolerance": Measure(value=cache.certificate.rows_above_tolerance, better="lower"),
    }
    return Measurement(case=case, measured=measured, note=str(cache.certificate))


def measure_long_generation(plan: DecodePlan, progress: Progress) -> list[Measurement]:
    """Generate a long text with a very small model and a bounded cache, on one thread.

    Returns:
        One measurement with the speed, the growth of the memory and the certificate (an upper bound on the softmax
        mass that was dropped).
    """
    previous_threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        return [_measure_stream(plan.tokens, plan.tolerance, progress)]
    finally:
        torch.set_num_threads(previous_threads)


def _measure_stream(token_count: int, tolerance: float, progress: Progress) -> Measurement:
    """Generate tokens with a model of one layer, and measure the speed of each section of the text and the memory.

    Args:
        token_count: The number of tokens to generate.
        tolerance: The softmax mass that the bounded cache may drop per query.
        progress: Where messages are printed.
    """
    section_length = max(1, min(10_000, token_count // 10))
    # The growth of the memory counts from this token on, when the ring buffers have their final size.
    warmup_tokens = max(1, min(20_000, token_count // 5))

    model = TransformerLM(ModelConfig(vocab_size=256, layers=1, width=32, heads=4))
    token_stream = stream(model, [1], tokens=token_count, mode="bounded", tolerance=tolerance)
    peak_memory = PeakMemory(torch.device("cpu"))
    section_seconds = []
    section_start = time.process_time()
    memory_after_warmup = resident_memory()
    for number, _ in enumerate(token_stream, start=1):
        if number % section_length == 0:
            now = time.process_time()
            section_seconds.append(now - section_start)
            section_start = now
            progress.report_round(number // section_length, token_count // section_length)
        if number == warmup_tokens:
            memory_after_warmup = resident_memory()
    memory_growth = resident_memory() - memory_after_warmup
    peak_bytes = peak_memory.bytes()

    cache = token_stream.caches[0]
    assert isinstance(cache, BoundedCache)
    certificate = cache.certificate
    speeds = [section_length / seconds for seconds in section_seconds]
    # The first section is slow because of the warmup, so the second section is the reference.
    reference_section = min(1, len(section_seconds) - 1)
    measured = {
        "speed": median_of(speeds, "tokens/s of processor time", "higher"),
        "last speed to first": to_ratio(section_seconds[reference_section], section_seconds[-1], "higher"),
        "memory growth": to_percent(memory_growth, memory_after_warmup, "lower"),
        "cache": Measure(value=cache.bytes / 1024, unit="KB", better="lower"),
        "certificate": Measure(value=certificate.mass, better="lower"),
        "rows above tolerance": Measure(value=certificate.rows_above_tolerance, better="lower"),
    }
    if peak_bytes is not None:
        measured["peak"] = to_megabytes(peak_bytes)
    case: Case = {"part": "endless", "tokens": token_count}
    return Measurement(case=case, measured=measured, seconds={"turns": tuple(section_seconds)}, note=str(certificate))
