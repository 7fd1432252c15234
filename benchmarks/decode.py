"""Decoding: time per token and memory by context, against MPT, against reading the weights once, and without end.

6 layers, width 512, 8 heads, vocabulary 8,192, float32. A long context is not read but made: random keys and values,
the size that the model's own have, are put into the caches, which then cost what real ones cost.

    python -m benchmarks.decode [--part context|mpt|weights|endless] [--tokens 100000]
"""

import argparse
import resource
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


def against_mpt(context: int, repeats: int) -> None:
    """The same weights: the same greedy tokens after a real prompt, and a token's time after a made-up past. MPT is
    called as its `generate` calls it, without generate's own work around it."""
    from transformers import DynamicCache, MptConfig, MptForCausalLM

    torch.manual_seed(0)
    shape = {"d_model": 512, "n_heads": 8, "n_layers": 6, "vocab_size": 8192}
    theirs, ours = MptForCausalLM(MptConfig(**shape, max_seq_len=context + 1024)).eval(), make_model()
    copy_mpt(ours, theirs)
    prompt = torch.randint(8192, (1, 512))
    ids = [token.id for token in stream(ours, prompt[0], tokens=16, temperature=0, mode="bounded")]
    past = DynamicCache()
    with torch.inference_mode():
        out = theirs.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0)
        for layer in range(6):
            past.update(*torch.randn(2, 1, 8, context, 64), layer)

    @torch.inference_mode()
    def their_step() -> None:
        theirs(torch.tensor([[7]]), past_key_values=past, use_cache=True)

    steps = {"MPT": their_step}
    steps |= {kind.__name__: step_of(decoder(ours), filled(ours, kind(), context)) for kind in (Cache, BoundedCache)}
    timings = in_turns(steps, repeats, warmup=3)
    rows = [
        {
            "decoder": name,
            "ms/token": 1e3 * timing.median,
            "speed to MPT": timings["MPT"].median / timing.median,
            "best to best": min(timings["MPT"].seconds) / min(timing.seconds),
        }
        for name, timing in timings.items()
    ]
    table(rows, f"Against MPT, context {context:,}")
    print(f"the same greedy tokens after a prompt of {prompt.shape[1]}: {out[0, 512:].tolist() == ids}")


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
        "mpt": lambda: against_mpt(8192, arguments.repeats),
        "endless": lambda: endless(arguments.tokens),
    }
    for name, part in parts.items():
        if arguments.part in (None, name):
            part()


if __name__ == "__main__":
    main()
