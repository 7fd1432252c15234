"""Training speed and memory: our model against Hugging Face's MPT of the same shape, and the position methods.

6 layers, width 512, 8 heads, vocabulary 8,192; 2,048 tokens an update; the same fused AdamW for all.

    python -m benchmarks.training [--repeats 5]
"""

import argparse
import json
from collections.abc import Callable

import torch

from benchmarks.measure import MEGABYTE, alone, in_turns, matmul_rate, peak_during, table
from trainshort import TransformerLM
from trainshort.presets import presets

TOKENS = 2048
LENGTHS = (512, 2048)
METHODS = ("alibi", "none", "sinusoidal", "rotary", "t5")


def step_of(contestant: str, length: int) -> Callable[[], object]:
    """One update on random tokens, as a function without arguments."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(8192, (2, TOKENS // length, length))
    model = mpt(length) if contestant == "mpt" else TransformerLM(presets.get("small")().replace(position=contestant))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss() -> torch.Tensor:
        if contestant == "mpt":
            return model(input_ids=tokens, labels=targets).loss
        total, count = model(tokens, targets)
        return total / count

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def mpt(length: int) -> torch.nn.Module:
    from transformers import MptConfig, MptForCausalLM

    return MptForCausalLM(MptConfig(d_model=512, n_heads=8, n_layers=6, vocab_size=8192, max_seq_len=length))


def flops(length: int) -> float:
    """Of one update: six per weight and token, plus the causal half of the attention, forward and backward."""
    config = presets.get("small")()
    weights = sum(p.numel() for p in TransformerLM(config).parameters())  # the tied matrix works as the output layer
    attention = 12 * config.layers * config.width * length / 2
    return TOKENS * (6 * weights + attention)


def measure(repeats: int) -> list[dict]:
    rows = []
    for length in LENGTHS:
        names = ["mpt", *METHODS]
        timings = in_turns({name: step_of(name, length) for name in names}, repeats)
        memory = {name: alone("benchmarks.training", "--peak", name, "--length", str(length))["peak"] for name in names}
        rate = matmul_rate()
        for name in names:
            rows.append(
                {
                    "model": name,
                    "length": length,
                    "tokens/s": round(TOKENS / timings[name].median),
                    "± %": 100 * timings[name].spread,
                    "speed to MPT": timings["mpt"].median / timings[name].median,
                    "speed to none": timings["none"].median / timings[name].median,
                    "peak MB": round(memory[name] / MEGABYTE),
                    "memory to MPT": memory[name] / memory["mpt"],
                    "% of matmul rate": 100 * flops(length) / timings[name].median / rate,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", help="measure this contestant's peak memory and print it as JSON")
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.peak:
        step = step_of(arguments.peak, arguments.length)
        print(json.dumps({"peak": peak_during(lambda: [step() for _ in range(3)])}))
        return
    table(measure(arguments.repeats), "Training, 6 layers, width 512, 8 heads, 2,048 tokens an update")


if __name__ == "__main__":
    main()
