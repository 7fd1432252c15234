"""Evaluation's speed and memory by length: how much of its speed at 1,024 tokens a model keeps at 16,384.

The same 16,384 tokens are scored as sixteen blocks of 1,024, four of 4,096, one of 16,384. Lengths take turns; shares
are medians over rounds of the ratio within a round. The paper's GPU kept 24 % with ALiBi (Table 3: 16,951 words per
second at 1,024 tokens, 4,153 at 16,024). Memory is each length's own process: one block of 16,384 should need less than
twice what four of 4,096 need.

    python -m benchmarks.evaluate
    python -m benchmarks.evaluate --run runs/demo-alibi         # its weights: proven windows depend on them
    python -m benchmarks.evaluate --positions alibi --preset laptop --rounds 7
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import MEGABYTE, alone, in_turns, peak_during, resident, table
from trainshort.evaluate.sweep import score
from trainshort.evaluate.target import ModelTarget
from trainshort.model import TransformerLM
from trainshort.presets import presets
from trainshort.windows import Windows

TOKENS = 16_384
LENGTHS = (1024, 4096, 16_384)


def make_target(position: str, preset: str, run: str | None) -> ModelTarget:
    if run is not None:
        from trainshort.checkpoint import load_model

        return ModelTarget(load_model(Path(run)), trained_at=1024, name=run)
    torch.manual_seed(0)
    config = presets.get(preset)().replace(position=position)
    return ModelTarget(TransformerLM(config), trained_at=1024, name=position)


def read(target: ModelTarget, length: int) -> None:
    """Score all tokens in blocks of `length`, as `trainshort evaluate` does."""
    tokens = np.random.default_rng(0).integers(target.vocabulary, size=TOKENS)
    for _ in score(target, tokens, Windows(TOKENS, length, length), batch_tokens=TOKENS):
        pass


def measure_memory(arguments: argparse.Namespace) -> None:
    """Extra memory of one length, in this process alone; printed as JSON."""
    target = make_target(arguments.positions[0], arguments.preset, arguments.run)
    read(target, 64)  # libraries and thread pools are loaded, whatever the length
    before = resident()
    peak = peak_during(lambda: read(target, arguments.memory))
    print(json.dumps({"peak": peak, "extra": peak - before}))


def compare(position: str, arguments: argparse.Namespace) -> list[dict]:
    target = make_target(position, arguments.preset, arguments.run)
    timings = in_turns({str(length): lambda n=length: read(target, n) for length in LENGTHS}, arguments.rounds)
    first = timings[str(LENGTHS[0])]
    rows = []
    for length in LENGTHS:
        timing = timings[str(length)]
        kept = statistics.median(a / b for a, b in zip(first.seconds, timing.seconds, strict=True))
        given = ["--run", arguments.run] if arguments.run else ["--positions", position, "--preset", arguments.preset]
        memory = alone("benchmarks.evaluate", "--memory", str(length), *given)
        rows.append(
            {
                "position": target.name,
                "length": length,
                "tokens/s": round(TOKENS / timing.median),
                "spread": f"{timing.spread:.0%}",
                f"of {LENGTHS[0]:,}": f"{kept:.0%}",
                "extra MB": round(memory["extra"] / MEGABYTE),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", nargs="+", default=["alibi", "sinusoidal"])
    parser.add_argument("--preset", default="small", help="model shape, with random weights")
    parser.add_argument("--run", help="a run folder whose trained model to use instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, metavar="LENGTH", help="only measure the memory of one length, as JSON")
    arguments = parser.parse_args()
    if arguments.memory:
        measure_memory(arguments)
        return
    rows = [
        row for position in (["run"] if arguments.run else arguments.positions) for row in compare(position, arguments)
    ]
    table(rows, f"Scoring {TOKENS:,} tokens, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
