"""lm-evaluation-harness on our models: its tasks, its metrics, our weights and tokenizers as they are.

A run is put into our Hugging Face class (trainshort.hf) in memory, so that everything else is the harness's own. Task
definitions of one's own are YAML files in a folder, which may point at files here; a definition may name Python
functions beside it, and those are executed: take task folders only from people you trust.
"""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainshort.data.hub import hub_answers
from trainshort.data.of_run import run_tokenizer
from trainshort.data.tokenizer import Tokenizer, byte_alphabet
from trainshort.errors import InputError
from trainshort.evaluate.hugging_face import HuggingFaceTarget
from trainshort.evaluate.target import RunTarget, Target
from trainshort.files import make_folder, read_text, write_sealed
from trainshort.interop.exporting import tokenizer_config
from trainshort.interop.gguf_file import is_bytes
from trainshort.interop.task_names import unknown_task
from trainshort.machine import provenance
from trainshort.terminal import first_sentence, waiting

FORMAT = 2
KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""What is stored of the harness's answer."""


@dataclass(frozen=True)
class Asked:
    """What the harness is to do."""

    tasks: tuple[str, ...]
    include: Path | None = None
    """A folder of task definitions beside the harness's own."""
    length: int | None = None
    """Tokens that a pass may read; None: the training length."""
    limit: int | None = None
    """Samples of each task; None: all."""
    shots: int | None = None
    batch: int = 8


def evaluate_tasks(target: Target, asked: Asked) -> dict[str, Any]:
    """The harness's results, with what they are of."""
    try:
        run: Any = importlib.import_module("lm_eval").simple_evaluate  # whose names are found at run time only
    except ImportError:
        raise InputError("The harness needs a package: pip install 'trainshort[harness]'.") from None
    from jinja2 import TemplateError

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _tasks(asked)
    model = language_model(target, asked)
    with _no_waiting(), _heard() as told:
        try:
            tasks: Any = manager.load(list(asked.tasks))["tasks"]
        except Exception as error:  # a definition, and the functions it names, can fail in any way they like
            raise InputError(_unloadable(asked, RuntimeError(told[-1]) if told else error)) from None
    evaluator: Any = importlib.import_module("lm_eval.evaluator")
    evaluator.get_git_commit_hash = lambda: None  # it asks git for the folder one stands in, and git complains
    try:
        found: Any = run(
            model=model,
            tasks=list(tasks.values()),
            task_manager=manager,
            num_fewshot=asked.shots,
            limit=asked.limit,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except TemplateError as error:  # of a text that a definition makes of a record
        raise InputError(_unloadable(asked, error)) from None
    return {
        "format": FORMAT,
        "target": target.description(),
        "asked": {"tasks": list(asked.tasks), "length": model.max_length, "limit": asked.limit, "shots": asked.shots},
        **{name: found[name] for name in KEPT if name in found},
        "provenance": provenance(threads=torch.get_num_threads()),
    }


def save(result: dict[str, Any], target: Target) -> Path:
    """Beside the model's other results, by the tasks' names."""
    name = "-".join(result["asked"]["tasks"])[:80].replace("/", "-").replace("*", "all")
    path = make_folder(target.folder / "harness") / f"{name}.json"
    write_sealed(path, result)
    return path


def language_model(target: Target, asked: Asked) -> Any:
    """The model as the harness wants one."""
    made: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    length = asked.length or target.trained_at
    if length is None:
        raise InputError(f"{target.name} does not say at which length it was trained. Give --length.")
    if isinstance(target, RunTarget):
        from trainshort.hf import TrainshortForCausalLM

        model: Any = TrainshortForCausalLM.of(target.model, target.trained_at)
        tokenizer = _as_theirs(run_tokenizer(target.run), length)
    elif isinstance(target, HuggingFaceTarget):
        wrapped: Any = target.tokenizer()
        model, tokenizer = target.model, wrapped.tokenizer
        if hasattr(model.config, "max_seq_len"):  # MPT's table is as long as this says
            model.config.max_seq_len = max(model.config.max_seq_len, length)
    else:
        raise InputError(f"{target.name} is a bare model without a tokenizer; the harness needs a run.")
    return made(
        pretrained=model,
        backend="causal",
        tokenizer=tokenizer,
        max_length=length,
        batch_size=asked.batch,
        prefix_token_id=target.bos,
    )


def _as_theirs(tokenizer: Tokenizer, length: int) -> Any:
    """Our tokenizer as one of transformers; a text's spelling of a special token stays text."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    settings = tokenizer_config(tokenizer, length)
    if is_bytes(tokenizer):  # it has no special token, and the harness wants an end and something to fill rows with
        settings |= dict.fromkeys(("bos_token", "eos_token"), byte_alphabet()[0])
    settings["pad_token"] = settings.get("eos_token")
    settings.pop("tokenizer_class")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.to_json()), **settings)


def _tasks(asked: Asked) -> Any:
    """The task definitions; those of the harness are read only for a task that the user's folder does not have."""
    from lm_eval.tasks import TaskManager

    if asked.include is not None and not asked.include.is_dir():
        raise InputError(f"--include is a folder of task definitions (YAML); {asked.include} is none.")
    if asked.include is not None:
        own = TaskManager(include_path=str(asked.include), include_defaults=False)
        if all(task in own.all_tasks for task in asked.tasks):
            return own
        _check_syntax(asked.include)
    with waiting("reading the harness's own task definitions, which takes a while"):
        every = TaskManager(include_path=None if asked.include is None else str(asked.include))
    for task in asked.tasks:
        if task not in every.all_tasks:
            raise InputError(unknown_task(task, every.all_tasks))
    return every


def _check_syntax(include: Path) -> None:
    """The harness passes over definitions that it cannot read; name the first."""
    import yaml

    for path in sorted(include.rglob("*.yaml")):
        try:
            yaml.compose(read_text(path))
        except yaml.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}," if error.problem_mark else ""
            raise InputError(f"{path}{line} is not YAML ({error.problem}). Mend it, or take it away.") from None
        except yaml.YAMLError as error:
            raise InputError(f"{path} is not YAML ({first_sentence(error)}). Mend it, or take it away.") from None


def _unloadable(asked: Asked, error: Exception) -> str:
    mend = f"Mend its definition in {asked.include}." if asked.include else _FETCHED
    what = ", ".join(asked.tasks)
    return f"The data of {what} cannot be loaded ({type(error).__name__}: {first_sentence(error)}). {mend}"


_FETCHED = (
    "Most tasks fetch theirs from the hub; without a network define a task over files here and give its folder: "
    "--include FOLDER."
)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the harness says of its errors, in place of showing it: the exception that follows says less."""
    log, told = logging.getLogger("lm_eval"), list[str]()
    handler, before = logging.Handler(), log.propagate
    handler.emit = lambda record: told.append(record.getMessage())
    log.addHandler(handler)
    log.propagate = False
    try:
        yield told
    finally:
        log.removeHandler(handler)
        log.propagate = before


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Without a network the hub is not asked again and again; what was fetched before is still found. Where there is no
    terminal, bars are not shown either: they would stand before a refusal."""
    settings: list[Any] = [importlib.import_module(name) for name in ("huggingface_hub.constants", "datasets.config")]
    before = [one.HF_HUB_OFFLINE for one in settings]
    offline = not hub_answers()
    bars: Any = importlib.import_module("datasets.utils")
    quiet = not (sys.stderr.isatty() or bars.are_progress_bars_disabled())
    try:
        if quiet:
            bars.disable_progress_bars()
        for one in settings:
            one.HF_HUB_OFFLINE = one.HF_HUB_OFFLINE or offline
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            one.HF_HUB_OFFLINE = value
        if quiet:
            bars.enable_progress_bars()
