"""Run folders are named by what the run is, so that no run is trained twice and none is mistaken for another."""

import hashlib
import json

from trainshort.config import RunConfig
from trainshort.runs import flatten

FREE = frozenset(
    {
        "data.folder",
        "model.backend",
        "train.checkpoint_activations",
        "train.compile",
        "train.keep",
        "train.log_every",
        "train.micro_batch",
        "train.parallel",
        "train.save_every",
        "train.tensorboard",
    }
)
"""Settings that move no result, so that they are no part of a run's name."""


def run_name(config: RunConfig) -> str:
    """A name to read, and a digest of everything that matters: alibi-128-1f2e3d4c."""
    settings = {name: value for name, value in flatten(config.model_dump(mode="json")).items() if name not in FREE}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.model.position}-{config.train.length}-{digest}"
