"""Run tasks of lm-evaluation-harness on a trainshort run or on a Hugging Face model.

A run is loaded as a Hugging Face model (see `trainshort.hf`), so that the harness computes all metrics itself.
A task definition may name Python functions, and the harness executes these functions.
Use task folders from people you trust only.
"""

import importlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainshort.data.tokenizers.base import Tokenizer, byte_alphabet
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.errors import InputError
from trainshort.evaluate.hf_target import HuggingFaceTarget
from trainshort.evaluate.targets import RunTarget, Target
from trainshort.interop.export.hf import tokenizer_config
from trainshort.train.run_data import run_tokenizer
from trainshort.utils.io import make_folder, write_with_checksum
from trainshort.utils.machine import collect_provenance
from trainshort.utils.optional import import_optional
from trainshort.utils.terminal import first_sentence_of

FORMAT = 1
STORED_KEYS = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""The keys of the harness's result that are written to the result file."""


@dataclass(frozen=True)
class HarnessRequest:
    """The tasks to run and their settings."""

    tasks: tuple[str, ...]
    include: Path | None = None
    """A folder with additional task definitions."""
    length: int | None = None
    """The maximum number of tokens in one forward pass. None means the training length."""
    limit: int | None = None
    """The number of samples per task. None means all samples."""
    shots: int | None = None
    """The number of few-shot examples. None means the default of each task."""
    batch: int = 8


def evaluate_tasks(target: Target, asked: HarnessRequest) -> dict[str, Any]:
    """Run the tasks and return the results together with a description of the model.

    Args:
        target: A run or a Hugging Face model.
        asked: The tasks and their settings.

    Returns:
        A dictionary that can be written as JSON.

    Raises:
        InputError: If lm-evaluation-harness is not installed, or if the harness cannot run the tasks.
    """
    feature = "Running lm-evaluation-harness tasks"
    simple_evaluate = import_optional("lm_eval", feature, "lm-eval[hf]").simple_evaluate
    task_manager_class = import_optional("lm_eval.tasks", feature, "lm-eval[hf]").TaskManager
    # The harness warns about every model that is passed as an object.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = load_harness_model(target, asked)
    include_path = None if asked.include is None else str(asked.include)
    # Reading the harness's own task definitions takes half a minute. Try the user's folder alone first.
    task_manager = task_manager_class(include_path=include_path, include_defaults=False)
    if not all(task in task_manager.all_tasks for task in asked.tasks):
        task_manager = task_manager_class(include_path=include_path)
    try:
        harness_result = simple_evaluate(
            model=model,
            tasks=list(asked.tasks),
            task_manager=task_manager,
            num_fewshot=asked.shots,
            limit=asked.limit,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except Exception as error:  # A task definition can fail with any exception.
        tasks = ", ".join(asked.tasks)
        message = f"lm-evaluation-harness cannot run {tasks}: {type(error).__name__}: {first_sentence_of(error)}."
        raise InputError(f"{message} `lm_eval ls tasks` lists all tasks; --include adds your own.") from error
    return {
        "format": FORMAT,
        "target": target.description(),
        "asked": {"tasks": list(asked.tasks), "length": model.max_length, "limit": asked.limit, "shots": asked.shots},
        **{key: harness_result[key] for key in STORED_KEYS if key in harness_result},
        "provenance": collect_provenance(threads=torch.get_num_threads()),
    }


def save(result: dict[str, Any], target: Target) -> Path:
    """Write a result to the folder `harness` of the run. Return the path of the file."""
    tasks = "-".join(result["asked"]["tasks"])
    name = tasks[:80].replace("/", "-").replace("*", "all")
    path = make_folder(target.folder / "harness") / f"{name}.json"
    write_with_checksum(path, result)
    return path


def load_harness_model(target: Target, asked: HarnessRequest) -> Any:
    """Return the model as an `lm_eval.models.huggingface.HFLM`."""
    length = asked.length or target.trained_at
    if length is None:
        raise InputError(f"{target.name} does not say at which length it was trained. Give --length.")
    if isinstance(target, RunTarget):
        from trainshort.hf import TrainshortForCausalLM

        model: Any = TrainshortForCausalLM.from_trainshort(target.model, target.trained_at)
        tokenizer = _to_transformers_tokenizer(run_tokenizer(target.run), length)
    else:
        assert isinstance(target, HuggingFaceTarget)
        wrapped_tokenizer: Any = target.tokenizer()
        model, tokenizer = target.model, wrapped_tokenizer.tokenizer
        # MPT builds its bias table for `max_seq_len` tokens.
        if hasattr(model.config, "max_seq_len"):
            model.config.max_seq_len = max(model.config.max_seq_len, length)
    harness_model_class: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    return harness_model_class(
        pretrained=model,
        backend="causal",
        tokenizer=tokenizer,
        max_length=length,
        batch_size=asked.batch,
        prefix_token_id=target.bos,
    )


def _to_transformers_tokenizer(tokenizer: Tokenizer, length: int) -> Any:
    """Return a transformers tokenizer. The text of a special token stays text and does not become that token."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    settings = tokenizer_config(tokenizer, length)
    if isinstance(tokenizer, ByteTokenizer):
        # The byte tokenizer has no special tokens, and the harness needs an end token and a padding token.
        settings |= dict.fromkeys(("bos_token", "eos_token"), byte_alphabet()[0])
    settings["pad_token"] = settings.get("eos_token")
    settings.pop("tokenizer_class")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.to_json()), **settings)
