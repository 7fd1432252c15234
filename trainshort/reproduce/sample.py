"""A text that a model writes past its training length, stored with what it was asked."""

import json
from pathlib import Path

import numpy as np
import torch

from trainshort.cache import Cache
from trainshort.evaluate.target import RunTarget
from trainshort.model import TransformerLM
from trainshort.runs import provenance, write_whole

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
    made = extend(target.model, prompt, TIMES * length - len(prompt))
    speller = target.speller()
    inside = length - len(prompt)
    record = {
        "format": 1,
        "run": run.name,
        "trained_at": length,
        "settings": {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": SEED},
        "prompt": speller.decode(prompt),
        "within": speller.decode(made[:inside]),
        "past": speller.decode(made[inside:]),
        "tokens": {"prompt": len(prompt), "within": inside, "past": len(made) - inside},
        "provenance": provenance(threads=torch.get_num_threads()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


@torch.no_grad()
def extend(model: TransformerLM, prompt: np.ndarray, count: int) -> list[int]:
    """`count` tokens drawn one after the other."""
    generator = torch.Generator().manual_seed(SEED)
    cache, made = Cache(), []
    tokens = torch.from_numpy(prompt)[None]
    for _ in range(count):
        logits = model(tokens, cache=cache)
        assert isinstance(logits, torch.Tensor)
        best = (logits[0, -1].float() / TEMPERATURE).topk(min(TOP_K, logits.shape[-1]))
        drawn = best.indices[torch.multinomial(best.values.softmax(0), 1, generator=generator)]
        made.append(int(drawn))
        tokens = drawn[None]
    return made
