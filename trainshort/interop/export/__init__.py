"""Export a run to a folder that another program loads: weights, tokenizer, generation settings and model card.

Each export target is one module of this package. A target first transforms the weights into an equal model that the
other program supports. A model that cannot be transformed exactly is not exported. The file `trainshort.json` in the
folder names the run, and `verify` reads this file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import trainshort
from trainshort.config.registries import targets
from trainshort.config.run_config import load_config
from trainshort.data.tokenizers.base import TOKENIZER_FILE, Tokenizer
from trainshort.errors import InputError
from trainshort.evaluate import significance
from trainshort.evaluate.targets import EXPORTED
from trainshort.interop.export.base import ExportSource
from trainshort.interop.export.transforms import ExportModel, check_supported
from trainshort.train import run_data
from trainshort.train.checkpoint import find_checkpoint, hash_tensors, load_model
from trainshort.utils.io import atomic_folder, write_atomic


def open_run(path: Path, dtype: str = "f32") -> ExportSource:
    """Load the checkpoint of a run that will be exported.

    Args:
        path: The run folder, whose best checkpoint is loaded, or one of its checkpoints.
        dtype: The dtype of the exported weights.

    Returns:
        The model with its tokenizer, and the stored evaluation of longer inputs if there is one.

    Raises:
        InputError: If there is no valid checkpoint, or if the model is an encoder.
    """
    checkpoint = find_checkpoint(path)
    config = load_config(checkpoint / "config.json")
    config.model.require_causal("Export")
    model = load_model(checkpoint)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    # The extrapolation card states the perplexity at each evaluated input length.
    run_folder = checkpoint.parent.parent
    extrapolation_card = significance.load_summary(run_folder)
    if extrapolation_card is not None:
        # The card may describe the weights of another checkpoint.
        hash_of_evaluated_weights = extrapolation_card["target"]["weights"]
        if hash_of_evaluated_weights != hash_tensors(weights):
            extrapolation_card = None
    return ExportSource(
        path=path,
        model=ExportModel(model.config, weights),
        training_length=config.train.length,
        tokenizer=run_tokenizer(path),
        dtype=dtype,
        card=extrapolation_card,
    )


def run_tokenizer(path: Path) -> Tokenizer | None:
    """Load the tokenizer of a run. Return None for an imported model without a tokenizer.

    Args:
        path: The run folder or one of its checkpoints.
    """
    # The path of a checkpoint is RUN/checkpoints/step-000000200.
    is_checkpoint = path.parent.name == "checkpoints"
    run_folder = path.parent.parent if is_checkpoint else path
    # A training run without a tokenizer file has a built-in tokenizer. An imported model may have no tokenizer at all.
    was_trained_here = (run_folder / run_data.RUN_DATA_FILE).exists()
    if was_trained_here or (run_folder / TOKENIZER_FILE).exists():
        return run_data.run_tokenizer(run_folder)
    return None


def export(path: Path, to: str, out: Path, dtype: str | None = None) -> tuple[str, ...]:
    """Export a run for another program.

    Args:
        path: The run folder or one of its checkpoints.
        to: The name of the export target, such as "gguf".
        out: The folder to write. It must not exist, or must be empty.
        dtype: The dtype of the exported weights. None means the default of the target.

    Returns:
        A clause for each transform that changed the weights, for users. Transforms do not change the logits.

    Raises:
        InputError: If the target does not support the model or the tokenizer, or if the folder cannot be written.
    """
    target = targets.get(to)
    dtype = dtype or target.dtypes[0]
    if dtype not in target.dtypes:
        raise InputError(f"--to {to} supports the dtypes {', '.join(target.dtypes)}, got '{dtype}'.")
    run = open_run(path, dtype)
    check_supported(to, run.model.config, target.requirements)
    tokenizer_problem = target.tokenizer_unsupported_reason(run.tokenizer)
    if tokenizer_problem is not None:
        raise InputError(f"Export to {to} does not support {tokenizer_problem}")

    # Transforms change the weights, so that the target supports the model. The logits stay the same.
    run = replace(run, model=target.transform(run.model))
    record = {
        "to": to,
        "run": str(path.resolve()),
        "dtype": dtype,
        "rewritten": list(run.model.applied_transforms),
        "trained_at": run.training_length,
        "trainshort": trainshort.__version__,
    }
    with atomic_folder(out) as folder:
        target.write(folder, run)
        if run.tokenizer is not None:
            write_atomic(folder / TOKENIZER_FILE, run.tokenizer.to_json())
        write_atomic(folder / EXPORTED, json.dumps(record, indent=2) + "\n")
        write_atomic(folder / "README.md", _make_model_card(run, to))
    return run.model.applied_transforms


def _make_model_card(run: ExportSource, to: str) -> str:
    """Return the text of the model card (README.md) of an export.

    Args:
        run: The exported model.
        to: The name of the export target.
    """
    config = run.model.config
    num_parameters = sum(weight.numel() for weight in run.model.weights.values())
    paragraphs = [
        "---\nlibrary_name: trainshort\ntags: [alibi, length-extrapolation]\n---",
        f"# {run.name}",
        f"A language model that was trained with trainshort {trainshort.__version__}. The model has {config.layers} "
        f"layers, width {config.width}, {config.heads} attention heads and {num_parameters:,} parameters. Its position "
        f"method is {config.position}.",
        f"The model was trained on sequences of {run.training_length:,} tokens.",
    ]
    if run.card is None:
        paragraphs.append("Longer inputs were not evaluated.")
    else:
        paragraphs += _describe_extrapolation(run.card)
    paragraphs.append(f"Load with: {targets.get(to).loading}.")
    for note in run.model.applied_transforms:
        paragraphs.append(f"Change for this format: {note}.")
    return "\n\n".join(paragraphs) + "\n"


def _describe_extrapolation(card: dict[str, Any]) -> list[str]:
    """Return the paragraphs of a model card that describe the evaluation of longer inputs.

    Args:
        card: The extrapolation card of the run, which is the content of a JSON file. It states the perplexity at each
            evaluated input length. `corpus` is the text, and `target` is the model that was evaluated.
    """
    text = card["corpus"]
    split = f", split {text['split']}" if text.get("split") else ""  # the part of the text, such as "valid"
    weights_hash = str(card["target"]["weights"])[:16]
    limits = [
        _describe_limit(card["no_worse"], "The perplexity is no worse than at the training length"),
        _describe_limit(card["within_2_percent"], "The perplexity is at most 2 % above that of the training length"),
    ]
    return [
        "## Evaluation of longer inputs",
        f"Summary: {card['summary']}.",
        "\n".join(f"- {limit}" for limit in limits),
        f"The model was evaluated on {card['base']['tokens']:,} tokens of {text['name']}{split}. Each token was scored "
        f"once at each length, in windows without overlap. The SHA-256 of the weights begins with {weights_hash}.",
        _make_perplexity_table(card),
    ]


def _describe_limit(limit: dict[str, Any], statement: str) -> str:
    """Return a sentence that says up to which input length a statement is true.

    Args:
        limit: A dictionary with two entries. `length` is the largest input length for which the statement is true.
            `open` is True if this length is also the largest length that was evaluated.
        statement: The statement without a period.
    """
    sentence = f"{statement} up to {limit['length']:,} tokens"
    if limit["open"]:
        sentence += ", the longest evaluated length"
    return sentence + "."


def _make_perplexity_table(card: dict[str, Any]) -> str:
    """Return a Markdown table of the perplexity at each input length.

    Args:
        card: The extrapolation card of the run. `base` is the evaluation at the training length. `lengths` has one
            entry for each evaluated length.
    """
    training_length = card["base"]["length"]
    rows = ["| input length in tokens | perplexity | |", "|--:|--:|---|"]
    for entry in card["lengths"]:
        length = entry["length"]
        # If the length could not be evaluated, the status says why.
        is_scored = entry["status"] == "scored"
        value = f"{entry['perplexity']:.2f}" if is_scored else entry["status"]
        remark = "training length" if length == training_length else ""
        rows.append(f"| {length:,} | {value} | {remark} |")
    return "\n".join(rows)
