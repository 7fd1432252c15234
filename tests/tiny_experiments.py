"""A scale for tests: the paper's lengths divided by 32, one layer of width 16, a few training steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from trainshort.config.run_config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from trainshort.data.preparation import prepare
from trainshort.experiments.experiments import Experiment, select_experiments
from trainshort.experiments.scales import Scale, Variant

METHODS = ("alibi", "sinusoidal")


def tiny_scale(folder: Path, steps: int = 4) -> Scale:
    """Return a scale whose corpus is a file of random words.

    Args:
        folder: The folder of the text file and of the prepared dataset.
        steps: The number of training steps.
    """
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(_random_text(), encoding="utf-8")
    data = DataConfig(corpus=str(text), tokenizer="bytes", folder=folder / "data")
    prepare(data, progress=False)

    def make_config(variant: Variant) -> RunConfig:
        return RunConfig(
            model=ModelConfig(layers=1, width=16, heads=2, position=variant.position),
            data=data,
            optim=OptimConfig(warmup=1),
            train=TrainConfig(
                length=max(1, variant.length // 32),
                batch=4,
                steps=steps,
                seed=variant.seed,
                log_every=1,
                valid_every=2,
                valid_tokens=64,
                save_every=2,
            ),
        )

    return Scale(
        name="tiny",
        summary="a scale for tests",
        length_divisor=32,
        training_lengths=(512, 1024),
        excluded_lengths={},
        stride_one=4,
        sliding_tokens=256,
        eval_tokens=512,
        max_eval_length=256,
        build=make_config,
        uses_single_corpus=True,
    )


def _random_text() -> str:
    """Return 300 paragraphs of 30 random words."""
    words = np.random.default_rng(0).choice(["red", "green", "blue", "tree", "river", "stone"], size=9000)
    paragraphs = [" ".join(words[start : start + 30]) for start in range(0, len(words), 30)]
    return "\n\n".join(paragraphs)


def two_methods() -> Experiment:
    """Return the demo with only two methods, ALiBi and sinusoidal."""
    demo = select_experiments(["demo"])[0]
    cells = [cell for cell in demo.cells if cell.variant is not None and cell.variant.position in METHODS]
    return replace(demo, cells=tuple(cells))
