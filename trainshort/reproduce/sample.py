"""A text that a model writes past its training length, stored with what it was asked."""

import json
from pathlib import Path

import numpy as np
import torch

from trainshort.evaluate.target import RunTarget
from trainshort.files import write_whole
from trainshort.generate import stream
from trainshort.runs import provenance

PROMPT, TIMES = 64, 4
"""Tokens of the validation text to begin with (at most half a training length), and how many lengths are reached."""
TEMPERATURE, TOP_K, SEED = 0.8, 40, 1


def write_sample(run: Path, path: Path) -> None:
    """Continue the beginning of the validation text, to four times the training length."""
    from trainshort.data import open_or_prepare

    target = RunTarget(run)
    prepared = open_or_prepare(target.config.data, progress=False)
    length = target.config.train.length
    prompt = np.asarray(prepared.split("valid")[: max(1, min(PROMPT, length // 2))]).astype(np.int64)
    # Without a tokenizer nothing stops the stream early: an end of text is a token like any other here.
    settings = {"temperature": TEMPERATURE, "top_k": min(TOP_K, target.vocabulary), "seed": SEED}
    made = [token.id for token in stream(target.model, prompt, tokens=TIMES * length - len(prompt), **settings)]
    speller = target.speller()
    inside = length - len(prompt)
    record = {
        "format": 1,
        "run": run.name,
        "trained_at": length,
        "settings": settings,
        "prompt": speller.decode(prompt),
        "within": speller.decode(made[:inside]),
        "past": speller.decode(made[inside:]),
        "tokens": {"prompt": len(prompt), "within": inside, "past": len(made) - inside},
        "provenance": provenance(threads=torch.get_num_threads()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
