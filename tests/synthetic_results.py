"""Run folders with made-up numbers, written as evaluations write them; nothing is trained."""

import math
from pathlib import Path

from trainshort.config.run_config import RunConfig, save_config
from trainshort.evaluate.results import Evaluation, LengthScore, save
from trainshort.experiments.claims.collection import COST_FORMAT
from trainshort.experiments.scales import Scale, Variant, scales
from trainshort.train.metrics_log import append_line
from trainshort.train.run_folder import run_name
from trainshort.utils.io import write_with_checksum

LAPTOP: Scale = scales.get("laptop")
TOKENS = 1000
ORIGIN = {
    "time": "2030-01-01T00:00:00+00:00",
    "commit": "0123abc",
    "versions": {"trainshort": "0.2.0", "torch": "2.13.0"},
    "machine": {"system": "Linux x86_64", "cpu": "a processor", "cores": 2},
    "threads": 2,
}


def row(length: int, perplexity: float, stride: int | None = None) -> LengthScore:
    nll = TOKENS * math.log(perplexity)
    half = TOKENS // 2
    return LengthScore(
        length=length,
        stride=stride or length,
        status="scored",
        tokens=TOKENS,
        nll=nll,
        timed=TOKENS,
        seconds=0.5,
        blocks=((half, nll / 2), (half, nll / 2)),
        positions=((0, 1, half, nll * 0.6), (1, length, half, nll * 0.4)),
        position_squares=(nll**2, nll**2),
    )


def write_evaluation(
    folder: Path, config: RunConfig, perplexities: dict[int, float], *, tokens: int, **protocol
) -> Path:
    """One evaluation of a run; `step` makes it one of a checkpoint."""
    stride, split, step = protocol.get("stride"), protocol.get("split", LAPTOP.default_split), protocol.get("step")
    evaluation = Evaluation(
        target={
            "name": folder.name,
            "kind": "run" if step is None else "checkpoint",
            "trained_at": config.train.length,
            "weights": "0" * 8,
            "step": step or config.train.steps,
        },
        corpus={"name": "sotu", "split": split, "sha256": "0", "tokenizer": "bpe", "tokens": tokens, "whole": 10**6},
        protocol={"name": "x", "stride": stride, "slopes": None, "before": 0, "precision": "float32", "device": "cpu"},
        provenance=ORIGIN,
        rows=tuple(row(length, value, stride) for length, value in sorted(perplexities.items())),
    )
    path = folder / "eval" / f"{split}-{stride or 'plain'}-{tokens}-{step or 'best'}.json"
    save(evaluation, path)
    return path


def make_run(
    root: Path, position: str, plain: dict[int, float], sliding: dict[int, float] | None = None, **options
) -> Path:
    """A run of the laptop scale: perplexities without overlap, and with a sliding window."""
    variant = Variant("wikitext103", position, options.get("length", 512), options.get("seed", 1))
    config = LAPTOP.make_config(variant)
    folder = root / options.get("name", run_name(config))
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    append_line(folder / "metrics.jsonl", {"step": 1, "seconds": 60.0, "tokens": 10_000})
    append_line(folder / "sessions.jsonl", {"step": 0, **ORIGIN})
    write_evaluation(folder, config, plain, tokens=LAPTOP.eval_tokens or 0)
    (folder / "analysis").mkdir()
    heads = [{"window": window, "proven": 2 * window if position == "alibi" else None} for window in (90, 30, 60)]
    write_with_checksum(folder / "analysis" / "reach.json", {"result": {"rows": heads, "mass": 0.99, "length": 1024}})
    if sliding:
        write_evaluation(folder, config, sliding, tokens=4096, stride=32)
        write_evaluation(folder, config, {at: value + 2 / at for at, value in plain.items()}, tokens=4096)
    return folder


def make_demo(root: Path) -> None:
    """Four methods that behave as in the paper, and their costs."""
    lengths = (128, 160, 192, 256, 512, 768, 1024, 2048)
    shapes = {
        "alibi": (50, 49.5, 49, 48.5, 48, 48, 48, 48),
        "t5": (50, 49.5, 49, 49, 55, 60, 70, 90),
        "rotary": (51, 50.8, 53, 60, 80, 90, 95, 110),
        "sinusoidal": (52, 54, 60, 75, 110, 130, 150, 190),
    }
    for position, values in shapes.items():
        sliding = {128: 45.0, 256: 45.2, 512: 45.5} if position == "alibi" else {128: 45.0, 256: 80.0, 512: 120.0}
        make_run(root, position, dict(zip(lengths, values, strict=True)), sliding)
    entries = {}
    for position, seconds, memory in (
        ("alibi", 1.0, 500),
        ("sinusoidal", 1.0, 500),
        ("rotary", 1.2, 520),
        ("t5", 1.5, 600),
    ):
        config = LAPTOP.make_config(Variant("wikitext103", position, 512))
        entries[run_name(config)] = {
            "position": position,
            "length": 128,
            "tokens": 3072,
            "train_seconds": [*[seconds] * 6, 2 * seconds],  # one round was disturbed
            "read_seconds": [seconds / 3] * 3,
            "train_memory": memory * 10**6,
            "train_memories": [memory * 10**6],
            "session": "one session",
            "provenance": ORIGIN,
        }
    write_with_checksum(root / "cost.json", {"format": COST_FORMAT, "entries": entries})
