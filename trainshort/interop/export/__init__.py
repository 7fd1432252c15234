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
from trainshort.data.tokenizers.base import TOKENIZER_FILE as TOKENIZER
from trainshort.data.tokenizers.base import Tokenizer
from trainshort.errors import InputError
from trainshort.evaluate import significance
from trainshort.evaluate.targets import EXPORTED as RECORD
from trainshort.interop.export.base import ExportSource
from trainshort.interop.export.transforms import ExportModel, check_supported
from trainshort.train import run_data
from trainshort.train.checkpoint import find_checkpoint, hash_tensors, load_model
from trainshort.utils.io import atomic_folder, write_atomic


def open_run(path: Path, dtype: str = "f32") -> ExportSource:
    checkpoint = find_checkpoint(path)
    config = load_config(checkpoint / "config.json")
    config.model.require_causal("Export")
    model = load_model(checkpoint)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    reach = significance.load_summary(checkpoint.parent.parent)
    if reach is not None and reach["target"]["weights"] != hash_tensors(weights):
        reach = None
    return ExportSource(
        path, ExportModel(model.config, weights), config.train.length, run_tokenizer(path), dtype, reach
    )


def run_tokenizer(path: Path) -> Tokenizer | None:
    """Load the tokenizer of a run or checkpoint. Return None for an imported model without a tokenizer."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    was_trained_here = (run / run_data.RUN_DATA_FILE).exists()
    if was_trained_here or (run / TOKENIZER).exists():
        return run_data.run_tokenizer(run)
    return None


def export(path: Path, to: str, out: Path, dtype: str | None = None) -> tuple[str, ...]:
    """Write a run for another program; returns what had to be rewritten, in words."""
    target = targets.get(to)
    dtype = dtype or target.dtypes[0]
    if dtype not in target.dtypes:
        raise InputError(f"--to {to} writes {', '.join(target.dtypes)}, not '{dtype}'.")
    run = open_run(path, dtype)
    check_supported(to, run.model.config, target.requirements)
    if problem := target.tokenizer_unsupported_reason(run.tokenizer):
        raise InputError(f"{to} cannot carry {problem}")
    run = replace(run, model=target.transform(run.model))
    with atomic_folder(out) as folder:
        target.write(folder, run)
        if run.tokenizer is not None:
            write_atomic(folder / TOKENIZER, run.tokenizer.to_json())
        record = {"to": to, "run": str(path.resolve()), "dtype": dtype, "rewritten": list(run.model.applied_transforms)}
        record |= {"trained_at": run.length, "trainshort": trainshort.__version__}
        write_atomic(folder / RECORD, json.dumps(record, indent=2) + "\n")
        write_atomic(folder / "README.md", _card(run, to))
    return run.model.applied_transforms


def _card(run: ExportSource, to: str) -> str:
    """What a reader of the folder should know."""
    config, reach = run.model.config, run.card
    count = sum(weight.numel() for weight in run.model.weights.values())
    lines = [
        "---\nlibrary_name: trainshort\ntags: [alibi, length-extrapolation]\n---",
        f"# {run.name}",
        f"A language model trained with trainshort {trainshort.__version__}: {config.layers} layers, width "
        f"{config.width}, {config.heads} heads, {count:,} parameters, positions: {config.position}.",
        f"Trained at {run.length:,} tokens. " + ("" if reach else "Longer inputs: not measured."),
        *([] if reach is None else _extrapolation(reach)),
        f"Load with: {targets.get(to).loading}.",
        *(f"Rewritten for this format: {note}." for note in run.model.applied_transforms),
    ]
    return "\n\n".join(lines) + "\n"


def _extrapolation(reach: dict[str, Any]) -> list[str]:
    """The extrapolation card: what was measured, on which text, length by length."""
    text, base = reach["corpus"], reach["base"]["length"]
    split = f", split {text['split']}" if text.get("split") else ""
    rows = ["| tokens read at once | perplexity | |", "|--:|--:|---|"]
    for one in reach["lengths"]:
        found = f"{one['perplexity']:.2f}" if one["status"] == "scored" else one["status"]
        rows.append(f"| {one['length']:,} | {found} | {'training length' if one['length'] == base else ''} |")
    marks = (("no worse than at the training length", "no_worse"), ("within 2 % of it", "within_2_percent"))
    far = [f"{words} to {reach[mark]['length']:,}{'+' if reach[mark]['open'] else ''}" for words, mark in marks]
    return [
        "## How far it is good",
        f"Measured: {reach['summary']}; {', '.join(far)}.",
        f"On {text['name']}{split}: {reach['base']['tokens']:,} tokens, each scored once at every length, passes "
        f"without overlap. Weights sha256 {str(reach['target']['weights'])[:16]}.",
        "\n".join(rows),
    ]
