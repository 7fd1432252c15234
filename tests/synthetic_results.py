"""Create run folders with invented numbers, in the format of real evaluations. Nothing is trained."""

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

# The number of scored tokens in each result.
SCORED_TOKENS = 1000

ORIGIN = {
    "time": "2030-01-01T00:00:00+00:00",
    "commit": "0123abc",
    "versions": {"trainshort": "0.2.0", "torch": "2.13.0"},
    "machine": {"system": "Linux x86_64", "cpu": "a processor", "cores": 2},
    "threads": 2,
}
"""The provenance of all results."""


def make_score(length: int, perplexity: float, stride: int | None = None) -> LengthScore:
    """Return a result at one evaluation length. Both halves of the text have the same mean loss."""
    nll = SCORED_TOKENS * math.log(perplexity)
    half_of_tokens = SCORED_TOKENS // 2
    return LengthScore(
        length=length,
        stride=stride or length,
        status="scored",
        tokens=SCORED_TOKENS,
        nll=nll,
        timed=SCORED_TOKENS,
        seconds=0.5,
        blocks=((half_of_tokens, nll / 2), (half_of_tokens, nll / 2)),
        positions=((0, 1, half_of_tokens, nll * 0.6), (1, length, half_of_tokens, nll * 0.4)),
        position_squares=(nll**2, nll**2),
    )


def write_evaluation(
    folder: Path,
    config: RunConfig,
    perplexities: dict[int, float],
    *,
    tokens: int,
    stride: int | None = None,
    split: str = LAPTOP.default_split,
    step: int | None = None,
) -> Path:
    """Write an evaluation into a run folder.

    Args:
        folder: The run folder.
        config: The config of the run.
        perplexities: The perplexity at each evaluation length.
        tokens: The number of tokens of the text.
        stride: The stride of a sliding window. None means no overlap.
        split: The split of the text.
        step: The training step of a checkpoint. None means the best checkpoint of the run.

    Returns:
        The path of the file.
    """
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
        rows=tuple(make_score(length, perplexity, stride) for length, perplexity in sorted(perplexities.items())),
    )
    path = folder / "eval" / f"{split}-{stride or 'plain'}-{tokens}-{step or 'best'}.json"
    save(evaluation, path)
    return path


def make_run(
    root: Path,
    position: str,
    plain: dict[int, float],
    sliding: dict[int, float] | None = None,
    *,
    length: int = 512,
    seed: int = 1,
    name: str | None = None,
) -> Path:
    """Create a run folder of the laptop scale with evaluations.

    Args:
        root: The folder in which the run folder is created.
        position: The position method.
        plain: The perplexities without overlap, by evaluation length.
        sliding: The perplexities with a sliding window, by evaluation length.
        length: The training length in the paper's numbers.
        seed: The seed of the run.
        name: The name of the run folder. None means the name that the training command chooses.

    Returns:
        The run folder.
    """
    config = LAPTOP.make_config(Variant("wikitext103", position, length, seed))
    folder = root / (name or run_name(config))
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    append_line(folder / "metrics.jsonl", {"step": 1, "seconds": 60.0, "tokens": 10_000})
    append_line(folder / "sessions.jsonl", {"step": 0, **ORIGIN})
    write_evaluation(folder, config, plain, tokens=LAPTOP.eval_tokens or 0)
    _write_reach_result(folder, position)
    if sliding:
        # A sliding-window evaluation and an evaluation without overlap of the same short text.
        short_text_plain = {eval_length: value + 2 / eval_length for eval_length, value in plain.items()}
        write_evaluation(folder, config, sliding, tokens=4096, stride=32)
        write_evaluation(folder, config, short_text_plain, tokens=4096)
    return folder


def _write_reach_result(folder: Path, position: str) -> None:
    """Write the attention windows of three heads. Only ALiBi has proven windows."""
    heads = [{"window": window, "proven": 2 * window if position == "alibi" else None} for window in (90, 30, 60)]
    (folder / "analysis").mkdir()
    write_with_checksum(folder / "analysis" / "reach.json", {"result": {"rows": heads, "mass": 0.99, "length": 1024}})


def make_demo(root: Path) -> None:
    """Create the runs of four methods that behave as in the paper, and their costs."""
    lengths = (128, 160, 192, 256, 512, 768, 1024, 2048)
    plain_perplexities = {
        "alibi": (50, 49.5, 49, 48.5, 48, 48, 48, 48),
        "t5": (50, 49.5, 49, 49, 55, 60, 70, 90),
        "rotary": (51, 50.8, 53, 60, 80, 90, 95, 110),
        "sinusoidal": (52, 54, 60, 75, 110, 130, 150, 190),
    }
    for position, perplexities in plain_perplexities.items():
        sliding = {128: 45.0, 256: 80.0, 512: 120.0}
        if position == "alibi":
            sliding = {128: 45.0, 256: 45.2, 512: 45.5}
        make_run(root, position, dict(zip(lengths, perplexities, strict=True)), sliding)

    entries = {}
    for position, seconds, megabytes in (
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
            "train_seconds": [*[seconds] * 6, 2 * seconds],  # Other load on the machine disturbed the last round.
            "read_seconds": [seconds / 3] * 3,
            "train_memory": megabytes * 10**6,
            "train_memories": [megabytes * 10**6],
            "session": "one session",
            "provenance": ORIGIN,
        }
    write_with_checksum(root / "cost.json", {"format": COST_FORMAT, "entries": entries})
