"""Run folders are named by what the run is, so that no run is trained twice and none is mistaken for another."""

import hashlib
import json

from trainshort.config import RunConfig
from trainshort.runs import flatten, is_harmless


def run_name(config: RunConfig) -> str:
    """A name to read, and a digest of everything that moves a result: alibi-128-1f2e3d4c."""
    flat = flatten(config.identity())
    settings = {name: value for name, value in flat.items() if not is_harmless(name, value)}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.model.position}-{config.train.length}-{digest}"
