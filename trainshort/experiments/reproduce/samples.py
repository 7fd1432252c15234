"""Generate text samples beyond the training length, and measure how far attention heads look."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainshort.evaluate.analyses.base import AnalysisContext, analyze
from trainshort.evaluate.targets import RunTarget
from trainshort.evaluate.text import open_text
from trainshort.experiments.claims.collection import SAMPLE_FORMAT
from trainshort.generate.streaming import stream
from trainshort.train.run_data import open_run_data
from trainshort.utils.io import make_folder, write_with_checksum
from trainshort.utils.machine import collect_provenance
from trainshort.utils.terminal import new_console

# The largest number of tokens that are generated for one passage.
MAX_GENERATED_TOKENS = 64

# Each passage ends at one of these multiples of the training length.
PASSAGE_ENDS = (1, 4, 16)

# Settings of the random sampling.
TEMPERATURE = 0.8
TOP_K = 40
SEED = 1


def write_sample(run: Path, path: Path) -> None:
    """Generate text with a trained model and store it.

    The model continues the test split at three places, so that the generated text ends at 1, 4 and 16 times the
    training length. A place beyond the end of the test split is skipped.

    Args:
        run: The run folder.
        path: The JSON file to write. For each generated token the file contains the text of the token and its negative
            log-likelihood in nats.
    """
    target = RunTarget(run)
    text = open_run_data(run, target.config.data).split("test")
    training_length = target.config.train.length
    settings = {"temperature": TEMPERATURE, "top_k": min(TOP_K, target.vocab_size), "seed": SEED}

    passages = []
    for multiple in PASSAGE_ENDS:
        end = multiple * training_length
        if end <= len(text):
            passages.append(_generate_passage(target, text, end, settings))

    record = {
        "format": SAMPLE_FORMAT,
        "run": run.name,
        "trained_at": training_length,
        "settings": settings,
        "passages": passages,
        "provenance": collect_provenance(threads=torch.get_num_threads()),
    }
    make_folder(path.parent)
    write_with_checksum(path, record)


def _generate_passage(target: RunTarget, text: np.ndarray, end: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Continue a text so that the last generated token is at position `end`.

    Args:
        target: The trained model.
        text: The token ids of the test split.
        end: The number of tokens of the prompt and the generated text together.
        settings: The settings of the random sampling.

    Returns:
        `end`, the last part of the prompt (`given`), and the generated tokens (`written`). Each generated token is a
        list of its text and its negative log-likelihood.
    """
    # The first passage ends at the training length. At least half of this passage must be the prompt.
    token_count = max(1, min(MAX_GENERATED_TOKENS, target.config.train.length // 2))
    prompt = np.asarray(text[: end - token_count]).astype(np.int64)
    # `stream` gets no tokenizer. It then does not stop at the end-of-text token.
    tokens = list(stream(target.model, prompt, tokens=token_count, **settings))
    ids = [token.id for token in tokens]

    # A token may be a part of a character. Its text is therefore the difference between two decoded prefixes.
    tokenizer = target.tokenizer()
    written = []
    previous_text = tokenizer.decode(ids[:0])
    for count, token in enumerate(tokens, start=1):
        generated_text = tokenizer.decode(ids[:count])
        new_text = generated_text[len(previous_text) :]
        written.append([new_text, -token.logprob])
        previous_text = generated_text

    return {"end": end, "given": tokenizer.decode(prompt[-token_count:]), "written": written}


def measure_reach(folder: Path) -> None:
    """Measure how far each attention head of a trained model looks, and store the result in the run folder.

    The analysis is called "reach". It writes the file `analysis/reach.json`.

    Args:
        folder: The run folder.
    """
    target = RunTarget(folder)
    text = open_text(target, data=())  # The empty tuple chooses the dataset that the model was trained on.
    context = AnalysisContext(target, text.tokens, target.config.train.length)
    analyze(context, text, ["reach"], new_console(quiet=True))
