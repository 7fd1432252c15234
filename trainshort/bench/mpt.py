"""Hugging Face's MPT as the peer of decoding: our model with its weights, its tokens, its turns.

It is called as its `generate` calls it, without generate's own work around it.
"""

from collections.abc import Callable
from typing import Any

import torch

from trainshort.bench import training
from trainshort.bench.measure import Progress, installed
from trainshort.config import ModelConfig
from trainshort.evaluate.memory import available
from trainshort.generate.streaming import stream
from trainshort.interop.formats import plan
from trainshort.interop.mpt import MPT
from trainshort.model import TransformerLM

TURN = 8
"""Consecutive tokens of a turn; fewer than elsewhere, because MPT copies its whole cache at each."""
GREEDY = 32
"""Greedy tokens that are compared after each prompt."""
COPIES = 4
"""Scores of all heads that it holds at once while it reads a prompt."""


def takes_part(config: ModelConfig, prompts: tuple[int, ...], progress: Progress) -> bool:
    room, longest = available(), max(prompts)
    reason = None
    if not installed("transformers"):
        reason = "transformers is not installed"
    elif config.adaptive is not None or config.key_heads != config.heads:
        reason = "it has no model of this shape"
    elif room is not None and COPIES * 4 * config.heads * longest**2 > room:
        reason = f"a prompt of {longest:,} tokens does not fit into the memory that is free"
    if reason:
        progress.once(f"without mpt: {reason}")
    return reason is None


def pair(ours: TransformerLM, longest: int) -> tuple[Any, TransformerLM]:
    """MPT with random weights, and our model with the same."""
    torch.manual_seed(0)
    theirs = training.mpt(ours.config, longest).eval()
    reading = plan(MPT, theirs.config.to_dict(), theirs.state_dict())
    weights = {name: reading.tensor(name) for name in reading.shapes}
    ours.load_state_dict(weights)
    return theirs, ours


def same_greedy_tokens(ours: TransformerLM, theirs: Any, prompt: int, tolerance: float) -> int:
    """How many of the first greedy tokens after a random prompt are the same, with a bounded cache on our side."""
    generator = torch.Generator().manual_seed(prompt)
    tokens = torch.randint(ours.config.vocabulary, (1, prompt), generator=generator)
    made = stream(ours, tokens[0], tokens=GREEDY, temperature=0, mode="bounded", tolerance=tolerance)
    mine = [token.id for token in made]
    asked = {"max_new_tokens": GREEDY, "min_new_tokens": GREEDY, "do_sample": False, "pad_token_id": 0}
    asked["use_cache"] = True  # off by default, and then every token reads the whole prompt anew
    with torch.inference_mode():
        out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **asked)[0, prompt:].tolist()
    same = [a == b for a, b in zip(mine, out, strict=True)]
    return same.index(False) if False in same else len(same)


def turn_of(theirs: Any, context: int) -> Callable[[], object]:
    """Some consecutive tokens after a made-up past."""
    from transformers import DynamicCache

    config, past, token = theirs.config, DynamicCache(), torch.tensor([[7]])
    with torch.inference_mode():
        for layer in range(config.n_layers):
            keys, values = torch.randn(2, 1, config.n_heads, context, config.d_model // config.n_heads)
            past.update(keys, values, layer)

    @torch.inference_mode()
    def turn() -> None:
        for _ in range(TURN):
            theirs(token, past_key_values=past, use_cache=True)

    return turn
