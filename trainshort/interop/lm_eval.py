"""Run tasks of lm-evaluation-harness on a trainshort run or on a Hugging Face model.

A run is loaded as a Hugging Face model (see `trainshort.hf`), so that the harness computes all metrics itself.
A task definition may name Python functions, and the harness executes these functions. Use only task folders from people
whom you trust.
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

# The version of the result file.
HARNESS_FORMAT = 1

STORED_KEYS = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""The keys of the harness's result that are written to the result file."""

INSTALL = "lm-eval[hf]"
"""The package that `pip install` needs."""

# The harness estimates the standard error of some metrics by bootstrapping with this number of samples.
BOOTSTRAP_SAMPLES = 1000

MAX_FILE_NAME_LENGTH = 80


@dataclass(frozen=True)
class HarnessRequest:
    """The tasks to run and their settings.

    Attributes:
        tasks: The names of the tasks.
        include_path: A folder with additional task definitions.
        length: The maximum number of tokens in one forward pass. None means the training length.
        limit: The number of samples per task. None means all samples.
        num_fewshot: The number of few-shot examples. None means the default of each task.
        batch_size: The number of sequences in one forward pass.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    length: int | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8


def evaluate_tasks(target: Target, request: HarnessRequest) -> dict[str, Any]:
    """Run the tasks and return the results together with a description of the model.

    Args:
        target: A run or a Hugging Face model.
        request: The tasks and their settings.

    Returns:
        A dictionary that can be written as JSON.

    Raises:
        InputError: If lm-evaluation-harness is not installed, or if the harness cannot run the tasks.
    """
    simple_evaluate = import_optional("lm_eval", "Running lm-evaluation-harness tasks", INSTALL).simple_evaluate
    # The harness warns about every model that is passed as an object.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = load_harness_model(target, request)
    task_manager = _make_task_manager(request)
    try:
        harness_result = simple_evaluate(
            model=model,
            tasks=list(request.tasks),
            task_manager=task_manager,
            num_fewshot=request.num_fewshot,
            limit=request.limit,
            log_samples=False,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
        )
    except Exception as error:  # A task definition can fail with any exception.
        task_names = ", ".join(request.tasks)
        raise InputError(
            f"lm-evaluation-harness cannot run {task_names}: {type(error).__name__}: {first_sentence_of(error)}. "
            "`lm_eval ls tasks` lists all tasks; --include-path adds your own."
        ) from error

    settings = {
        "tasks": list(request.tasks),
        "length": model.max_length,
        "limit": request.limit,
        "shots": request.num_fewshot,
    }
    stored_results = {key: harness_result[key] for key in STORED_KEYS if key in harness_result}
    return {
        "format": HARNESS_FORMAT,
        "target": target.description(),
        "asked": settings,
        **stored_results,
        "provenance": collect_provenance(threads=torch.get_num_threads()),
    }


def _make_task_manager(request: HarnessRequest) -> Any:
    """Return a `TaskManager` of lm-evaluation-harness (the "harness") that knows the tasks of a request.

    Args:
        request: The names of the tasks, and optionally a folder with task definitions of the user.
    """
    tasks_module = import_optional("lm_eval.tasks", "Running lm-evaluation-harness tasks", INSTALL)
    task_manager_class = tasks_module.TaskManager
    include_path = None
    if request.include_path is not None:
        include_path = str(request.include_path)

    # Reading the harness's own task definitions takes half a minute. Try the user's folder alone first.
    task_manager = task_manager_class(include_path=include_path, include_defaults=False)
    knows_all_tasks = all(task in task_manager.all_tasks for task in request.tasks)
    if knows_all_tasks:
        return task_manager
    return task_manager_class(include_path=include_path)


def save(result: dict[str, Any], target: Target) -> Path:
    """Write a result of lm-evaluation-harness to the folder `harness` of the run. Return the path of the file.

    Args:
        result: The result that `evaluate_tasks` returned.
        target: The model that was evaluated.
    """
    # The file is named after the requested tasks, without characters that are not allowed in file names.
    task_names = "-".join(result["asked"]["tasks"])
    file_name = task_names[:MAX_FILE_NAME_LENGTH].replace("/", "-").replace("*", "all")
    path = make_folder(target.folder / "harness") / f"{file_name}.json"
    write_with_checksum(path, result)
    return path


def load_harness_model(target: Target, request: HarnessRequest) -> Any:
    """Return a model as an `lm_eval.models.huggingface.HFLM`, which the harness can evaluate.

    Args:
        target: A run or a Hugging Face model.
        request: The input length and the batch size.

    Raises:
        InputError: If neither the model nor the request states an input length.
    """
    length = request.length or target.trained_at
    if length is None:
        raise InputError(f"{target.name} does not state its training length. Give --length.")

    if isinstance(target, RunTarget):
        # This import needs transformers, which is an optional package.
        from trainshort.hf import TrainshortForCausalLM

        model: Any = TrainshortForCausalLM.from_trainshort(target.model, target.trained_at)
        tokenizer = _to_transformers_tokenizer(run_tokenizer(target.run), length)
    else:
        assert isinstance(target, HuggingFaceTarget)
        model = target.model
        wrapped_tokenizer: Any = target.tokenizer()
        tokenizer = wrapped_tokenizer.tokenizer
        # MPT builds its bias table for `max_seq_len` tokens.
        if hasattr(model.config, "max_seq_len"):
            model.config.max_seq_len = max(model.config.max_seq_len, length)

    harness_model_class: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    return harness_model_class(
        pretrained=model,
        backend="causal",
        tokenizer=tokenizer,
        max_length=length,
        batch_size=request.batch_size,
        prefix_token_id=target.bos,  # The token before the first token of each text.
    )


def _to_transformers_tokenizer(tokenizer: Tokenizer, length: int) -> Any:
    """Convert a tokenizer of trainshort to a tokenizer of transformers.

    The text of a special token inside a document stays text and does not become that token.

    Args:
        tokenizer: The tokenizer of a run.
        length: The maximum input length of the model.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    settings = tokenizer_config(tokenizer, length)
    if isinstance(tokenizer, ByteTokenizer):
        # The byte tokenizer has no special tokens, and the harness needs an end token and a padding token.
        zero_byte = byte_alphabet()[0]
        settings["bos_token"] = zero_byte
        settings["eos_token"] = zero_byte
    settings["pad_token"] = settings.get("eos_token")
    del settings["tokenizer_class"]  # The class is called directly below.
    fast_tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    return PreTrainedTokenizerFast(tokenizer_object=fast_tokenizer, **settings)
