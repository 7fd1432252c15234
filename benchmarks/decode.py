"""Decoding: time per token and memory by context, against MPT, against reading the weights once, and without end.

6 layers, width 512, 8 heads, vocabulary 8,192, float32. A long context is not read but made: random keys and values,
the size that the model's own have, are put into the caches, which then cost what real ones cost.

    python -m benchmarks.decode [--part context|mpt|weights|endless] [--tokens 100000]
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.measure import MEGABYTE, in_turns, resident, table
from trainshort import Cache, ModelConfig, TransformerLM, stream
from trainshort.cache import BoundedCache
from trainshort.generate.compiled import Decoder, decoder_of
from trainshort.presets import presets

CONTEXTS = (1024, 65_536)
CHUNK = 1024
SETTLED = 8192
"""Tokens after which the rings of this model have their final size."""


def make_model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(presets.get("small")().replace(biases=False)).eval()


def decoder(model: TransformerLM) -> Decoder:
    made = decoder_of(model)
    if made is None:
        raise SystemExit("this benchmark measures the compiled path, and there is no C compiler here")
    return made


@torch.inference_mode()
def filled(model: TransformerLM, cache: Cache, context: int) -> Cache:
    """The cache after `context` made-up tokens: queries, keys and values of the model's own size, alike in all layers.

    A bounded cache reads no more of them than its rings take to fill; from there on it only counts.
    """
    first, bias = cache.layer(0), model.position.score_bias()
    read = min(context, SETTLED) if isinstance(cache, BoundedCache) else context
    for _ in range(read // CHUNK):
        shape = (1, model.config.heads, CHUNK, model.config.head_width)
        q, k, v = (torch.randn(shape) * size for size in own_sizes(model))
        if isinstance(cache, BoundedCache):
            first.attend(q, k, v, bias=bias)
        else:
            first.append(k, v)
    first.length = context
    for index in range(1, model.config.layers):
        tensors, facts = first.save()
        cache.layer(index).restore({name: tensor.clone() for name, tensor in tensors.items()}, facts)
    return cache


@torch.inference_mode()
def own_sizes(model: TransformerLM) -> list[float]:
    """Deviations of the first layer's queries, keys and values."""
    x = model.vocabulary.embed(torch.randint(model.config.vocabulary, (1, 64)))
    block = model.layers[0]
    qkv = block.attention.qkv(block.attention_norm(x))  # pyright: ignore
    return [float(part.std()) for part in qkv.chunk(3, dim=-1)]


def step_of(made: Decoder, cache: Cache) -> Callable[[], object]:
    token = torch.tensor([[7]])

    @torch.inference_mode()
    def step() -> None:
        made.scores(token, cache)

    return step


def by_context(repeats: int) -> None:
    model = make_model()
    made = decoder(model)
    caches: dict[str, Cache] = {}
    for context in CONTEXTS:
        caches[f"full {context}"] = filled(model, Cache(), context)
        caches[f"bounded {context}"] = filled(model, BoundedCache(), context)
    size = {name: cache.bytes for name, cache in caches.items()}  # before the next token doubles the full one's room
    timings = in_turns({name: step_of(made, cache) for name, cache in caches.items()}, repeats, warmup=3)
    rows = []
    for name in caches:
        kind, context = name.split()
        short, whole = f"{kind} {CONTEXTS[0]}", f"full {context}"
        rows.append(
            {
                "cache": kind,
                "context": int(context),
                "ms/token": 1e3 * timings[name].median,
                "best ms": 1e3 * min(timings[name].seconds),
                "time to 1,024": timings[name].median / timings[short].median,
                "best to best": min(timings[name].seconds) / min(timings[short].seconds),
                "MB": size[name] / MEGABYTE,
                "% of full": 100 * size[name] / size[whole],
            }
        )
    table(rows, "Time per token and cache memory by context")
    print(caches[f"bounded {CONTEXTS[1]}"].certificate)  # pyright: ignore[reportAttributeAccessIssue]


def by_weights(repeats: int) -> None:
    """The limit is the time to sum as many float32 numbers as the model has, with all threads, in turns with tokens."""
    model = make_model()
    weights = sum(weight.numel() for weight in model.parameters())
    made = decoder(model)
    caches = {"full": filled(model, Cache(), CONTEXTS[0]), "bounded": filled(model, BoundedCache(), CONTEXTS[0])}
    rows = []
    for name, cache in caches.items():
        numbers = torch.ones(weights)
        timings = in_turns({"read": numbers.sum, "token": step_of(made, cache)}, repeats, warmup=3)
        rows.append(
            {
                "cache": name,
                "weights MB": 4 * weights / MEGABYTE,
                "read once ms": 1e3 * timings["read"].median,
                "token ms": 1e3 * timings["token"].median,
                "% of limit": 100 * timings["read"].median / timings["token"].median,
                "best to best %": 100 * min(timings["read"].seconds) / min(timings["token"].seconds),
            }
        )
    table(rows, f"Against reading the weights once, context {CONTEXTS[0]:,}")


def against_mpt(context: int, tokens: int) -> None:
    """The same weights, the same prompt, greedy: the same tokens, and how fast after the prompt."""
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    config = MptConfig(d_model=512, n_heads=8, n_layers=6, vocab_size=8192, max_seq_len=context + tokens)
    theirs = MptForCausalLM(config).eval()
    ours = make_model()
    copy_mpt(ours, theirs)
    prompt = torch.randint(8192, (1, context))
    made = stream(ours, prompt[0], tokens=tokens, temperature=0, mode="bounded")
    our_ids, our_seconds = [next(made).id], []
    for _ in range(tokens - 1):
        start = time.perf_counter()
        our_ids.append(next(made).id)
        our_seconds.append(time.perf_counter() - start)
    their_ids, their_seconds = greedy_mpt(theirs, prompt, tokens)
    our_speed, their_speed = 1 / statistics.median(our_seconds), 1 / statistics.median(their_seconds)
    rows = [
        {"model": "MPT", "tokens/s": their_speed, "to MPT": 1.0, "same tokens": "-"},
        {
            "model": "trainshort bounded",
            "tokens/s": our_speed,
            "to MPT": our_speed / their_speed,
            "same tokens": str(our_ids == their_ids),
        },
    ]
    table(rows, f"Greedy decoding after a prompt of {context:,} tokens")


@torch.inference_mode()
def greedy_mpt(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> tuple[list[int], list[float]]:
    """What its `generate` does, without generate's own work around it; the prompt in chunks, since at once its scores
    alone take 2 GB a layer. Tokens, and the seconds of each after the first."""
    from transformers import DynamicCache

    past, ids, seconds = DynamicCache(), [], []
    for chunk in prompt.split(512, dim=1):
        scores = model(chunk, past_key_values=past, use_cache=True).logits
    ids.append(int(scores[0, -1].argmax()))
    for _ in range(tokens - 1):
        start = time.perf_counter()
        scores = model(torch.tensor([ids[-1:]]), past_key_values=past, use_cache=True).logits
        ids.append(int(scores[0, -1].argmax()))
        seconds.append(time.perf_counter() - start)
    return ids, seconds


def copy_mpt(ours: TransformerLM, theirs: torch.nn.Module) -> None:
    """MPT's weights under our names."""
    source = theirs.state_dict()
    names = {"attention_norm": "norm_1", "attention.qkv": "attn.Wqkv", "attention.out": "attn.out_proj"}
    names |= {"ffn_norm": "norm_2", "ffn.wide": "ffn.up_proj", "ffn.narrow": "ffn.down_proj"}
    weights = {"vocabulary.embedding.weight": source["transformer.wte.weight"]}
    weights["final_norm.weight"] = source["transformer.norm_f.weight"]
    for index in range(len(ours.layers)):
        for mine, other in names.items():
            weights[f"layers.{index}.{mine}.weight"] = source[f"transformer.blocks.{index}.{other}.weight"]
    ours.load_state_dict(weights)


def endless(tokens: int) -> None:
    """A very small model without end: memory, speed of the first and last tenth, certificate."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = TransformerLM(ModelConfig(vocabulary=256, layers=1, width=32, heads=4))
    made = stream(model, [1], tokens=tokens, mode="bounded")
    marks, rows = {tokens // 5, tokens}, []
    part, start = tokens // 10, time.process_time()
    speeds = []
    for count, _ in enumerate(made, start=1):
        if count % part == 0:
            now = time.process_time()
            speeds.append(part / (now - start))
            start = now
        if count in marks:
            rows.append(
                {
                    "tokens": count,
                    "resident MB": resident() / MEGABYTE,
                    "cache KB": made.caches[0].bytes / 1024,
                    "tokens per CPU second": speeds[-1],
                }
            )
    table(rows, f"Endless, 1 layer, width 32: {tokens:,} tokens")
    print(f"speed of each tenth (tokens per CPU second): {', '.join(f'{speed:,.0f}' for speed in speeds)}")
    print(f"memory at the end to that at a fifth: {rows[-1]['resident MB'] / rows[0]['resident MB']:.4f}")
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB; {made.certificate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("context", "weights", "mpt", "endless"), help="only this")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the endless run")
    arguments = parser.parse_args()
    parts = {
        "context": lambda: by_context(arguments.repeats),
        "weights": lambda: by_weights(arguments.repeats),
        "mpt": lambda: against_mpt(8192, 24),
        "endless": lambda: endless(arguments.tokens),
    }
    for name, part in parts.items():
        if arguments.part in (None, name):
            part()


if __name__ == "__main__":
    main()
