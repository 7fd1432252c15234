"""Run `trainshort evaluate`: estimate the cost, evaluate all lengths, write the results, and print a table."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from trainshort.data.mlm import MASK_ROUNDS
from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate import results, significance
from trainshort.evaluate.plot import draw
from trainshort.evaluate.results import Evaluation, LengthScore, interval
from trainshort.evaluate.sweep import Sweep, make_duration_estimate, run_sweep
from trainshort.evaluate.targets import Target
from trainshort.evaluate.text import Text
from trainshort.utils.figures import can_draw_figures
from trainshort.utils.machine import collect_provenance
from trainshort.utils.terminal import (
    ProgressMeter,
    escape_control_characters,
    escape_for_output,
    format_duration,
    new_console,
    perplexity,
)


def new_evaluation(target: Target, text: Text, plan: Sweep, precision: str) -> Evaluation:
    """Return an evaluation that describes the model, the text and the settings, and has no results yet.

    Args:
        target: The model.
        text: The text on which the model is evaluated.
        plan: The input lengths, the stride, and the override (a change of the trained model) of the evaluation.
        precision: The dtype of the weights, such as "float32".
    """
    protocol = {
        "name": "non-overlapping" if plan.stride is None else "sliding",
        "stride": plan.stride,
        # This key contains overrides of all kinds, not only of the ALiBi slopes.
        "slopes": None if plan.override is None else str(plan.override),
        # The id of the token that the model reads before the first token of the text.
        "before": target.bos,
        "precision": precision,
        "device": target.device.type,
    }
    is_encoder = target.mask is not None
    if is_encoder:
        # An encoder predicts masked tokens. It reads the text in rounds, and each round masks another share of them.
        protocol["masked"] = f"1 in {MASK_ROUNDS}"
    return Evaluation(
        target=target.description(),
        corpus=text.description(),
        protocol=protocol,
        provenance=collect_provenance(threads=torch.get_num_threads()),
    )


def result_path(folder: Path, evaluation: Evaluation) -> Path:
    """Return the path of the result file of an evaluation, for example "eval/valid-stride64-1f2e3d4c.json".

    The name contains a hash of the weights, the text and the settings. Evaluations of other models or texts therefore
    have other files.

    Args:
        folder: The folder for results.
        evaluation: The evaluation.
    """
    hashed_values = [evaluation.target["weights"], evaluation.corpus["sha256"], evaluation.protocol]
    hashed_json = json.dumps(hashed_values, sort_keys=True)
    short_hash = hashlib.sha256(hashed_json.encode()).hexdigest()[:8]

    text_name = evaluation.corpus["split"] or Path(evaluation.corpus["name"]).stem
    stride = evaluation.protocol["stride"]
    name_parts = [text_name, f"stride{stride}" if stride else "nonoverlapping"]
    override = evaluation.protocol["slopes"]  # This key contains overrides of all kinds.
    if override:
        name_parts.append(override)
    name_parts.append(short_hash)
    # Characters that are not safe in file names are replaced by hyphens.
    safe_parts = [re.sub(r"[^\w.]+", "-", part) for part in name_parts]
    return folder / "eval" / f"{'-'.join(safe_parts)}.json"


def evaluate(
    target: Target,
    text: Text,
    plan: Sweep,
    *,
    precision: str = "float32",
    again: bool = False,
    dry_run: bool = False,
    picture: bool = True,
    console: Console | None = None,
) -> Evaluation:
    """Evaluate a model at all lengths of a plan, and write the results to the folder of the model.

    Lengths that were scored before are not evaluated again. Lengths that failed before are tried again.

    Args:
        target: The model.
        text: The text.
        plan: The plan of the evaluation.
        precision: The dtype of the weights, as a key of `trainshort.evaluate.targets.PRECISIONS`.
        again: Whether to evaluate lengths again that were scored before.
        dry_run: Whether to print the estimated cost only.
        picture: Whether to draw figures of the results.
        console: The console for the results. None prints nothing. The cost and the progress are printed on standard
            error.

    Returns:
        The evaluation with the results.

    Raises:
        InputError: If the plan is not possible for this model and this text.
    """
    console = console or new_console(quiet=True)
    status_console = new_console(stderr=True, quiet=console.quiet, highlight=False)
    _check_plan(target, plan)

    evaluation = new_evaluation(target, text, plan, precision)
    path = result_path(target.folder, evaluation)
    if path.exists() and not again:
        scored_rows = results.load(path).scored
        evaluation = evaluation.model_copy(update={"rows": tuple(scored_rows)})
    missing_lengths = [length for length in plan.lengths if evaluation.row(length) is None]
    missing_passes = [plan.passes(length) for length in missing_lengths]
    print_estimated_cost(target, plan, missing_passes, status_console)
    if dry_run:
        return evaluation

    with ProgressMeter(status_console) as meter:
        evaluation = run_sweep(target, plan, evaluation, path, meter)
    # If nothing was missing, the sweep did not write the file. The stored description of the text can differ in details
    # such as the name of the text.
    if not missing_passes and results.load(path).corpus != evaluation.corpus:
        results.save(evaluation, path)
    write_figures_and_summary(evaluation, target, path, console, picture=picture)
    console.print(result_table(evaluation, plan.lengths))
    return evaluation


def _check_plan(target: Target, plan: Sweep) -> None:
    """Raise `InputError` if the model cannot be evaluated at the lengths and with the settings of a plan.

    Args:
        target: The model.
        plan: The input lengths, the stride, and the override (a change of the trained model) of the evaluation.
    """
    is_encoder = target.mask is not None  # Only encoders (masked language models) have a mask token.
    if is_encoder and plan.stride is not None:
        raise InputError("Encoders are evaluated without overlap and do not support --stride. Leave out --stride.")
    if not plan.lengths:
        raise InputError("No length to evaluate. Give at least one length.")
    for length in plan.lengths:
        plan.passes(length)  # Raises InputError if the length or the stride is invalid.
    with target.for_length(plan.override, min(plan.lengths)):
        pass  # Entering the context raises InputError if the model does not support the override.


def print_estimated_cost(target: Target, plan: Sweep, missing_passes: list[Passes], console: Console) -> None:
    """Print how much work an evaluation is and how long it may take.

    Args:
        target: The model.
        plan: The plan of the evaluation.
        missing_passes: The passes of each length that is not scored yet.
        console: The console. If it is quiet, the duration is not measured.
    """
    num_tokens = len(plan.tokens)
    longest_length = max(plan.lengths)
    if longest_length > num_tokens:
        console.print(
            f"The text has only {num_tokens:,} tokens. At length {longest_length:,} it is evaluated in one pass. "
            f"This shows nothing about longer inputs, so the evaluation summary leaves out length {longest_length:,}.",
            soft_wrap=True,
        )
    num_scored = len(plan.lengths) - len(missing_passes)
    if num_scored:
        console.print(
            f"{num_scored} of {len(plan.lengths)} lengths are already scored. --overwrite evaluates them again."
        )
    if not missing_passes or console.quiet:
        return

    name = escape_control_characters(target.name)
    console.print(f"{name}: measuring the speed of a few passes.")
    estimate_seconds = make_duration_estimate(target, plan)
    if len(missing_passes) == 1:
        lengths = f"length {missing_passes[0].length:,}"
    else:
        lengths = f"{len(missing_passes)} lengths"
    num_passes = sum(len(passes) for passes in missing_passes)
    num_read_tokens = sum(passes.read for passes in missing_passes)
    duration = format_duration(sum(estimate_seconds(passes) for passes in missing_passes))
    console.print(
        f"{name}: {num_tokens:,} targets at {lengths}, {num_passes:,} passes over {num_read_tokens:,} tokens, "
        f"about {duration}."
    )


def write_figures_and_summary(
    evaluation: Evaluation, target: Target, path: Path, console: Console, *, picture: bool
) -> None:
    """Draw the results, write the evaluation summary, and print which files were written.

    The evaluation summary says up to which length a model works well (see `trainshort.evaluate.significance`). The
    summary describes the run, so an evaluation of a single checkpoint writes no summary.

    Args:
        evaluation: The evaluation.
        target: The model.
        path: The result file of the evaluation.
        console: The console.
        picture: Whether to draw figures.
    """
    written_paths = [path]
    if picture and can_draw_figures():
        evaluations = [evaluation, *find_related_evaluations(evaluation, path)]
        written_paths += draw(evaluations, path.with_suffix(""))

    summary = None
    if target.kind != "checkpoint":
        summary = significance.make_summary(evaluation, str(path.relative_to(target.folder)))
    training_length = evaluation.trained_at
    if summary is None:
        if training_length is not None and evaluation.row(training_length) is None:
            console.print(
                f"No evaluation summary was written. It requires the training length {training_length:,}.",
                highlight=False,
            )
    elif significance.save_summary(summary, target.folder):
        written_paths.append(target.folder / significance.SUMMARY_FILE)
        console.print(f"{escape_for_output(target.name)}: {summary['summary']}", highlight=False)
    names = ", ".join(escape_for_output(str(written_path)) for written_path in written_paths)
    console.print(f"Written: {names}", highlight=False, soft_wrap=True)


def find_related_evaluations(evaluation: Evaluation, path: Path) -> list[Evaluation]:
    """Return stored evaluations of the same weights on the same text, but with other settings.

    The figure of an evaluation also shows these related evaluations.

    Args:
        evaluation: The evaluation.
        path: The result file of the evaluation. The other files in its folder are searched.
    """
    related_evaluations = []
    for other_path in sorted(path.parent.glob("*.json")):
        if other_path == path:
            continue
        try:
            other_evaluation = results.load(other_path)
        except InputError:
            continue  # A damaged file of another evaluation is left out.
        has_same_weights = other_evaluation.target.get("weights") == evaluation.target["weights"]
        has_same_text = other_evaluation.corpus.get("sha256") == evaluation.corpus["sha256"]
        if has_same_weights and has_same_text:
            related_evaluations.append(other_evaluation)
    return related_evaluations


# ---- the table that is printed


def result_table(evaluation: Evaluation, lengths: Sequence[int]) -> Table:
    """Return a table of the results with one row per input length.

    Args:
        evaluation: The evaluation with the results.
        lengths: The input lengths to show. Other lengths in the evaluation are left out.
    """
    table = Table(title=escape_for_output(_table_title(evaluation)), title_justify="left", box=None, pad_edge=False)
    columns = ("length", evaluation.metric_name, "95 %", "per word", "bits/byte", "tokens/s", "memory")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in evaluation.rows:
        if row.length in lengths:
            table.add_row(*_table_cells(evaluation, row))
    return table


def _table_title(evaluation: Evaluation) -> str:
    """Return the title of the table: the model, the text and the settings."""
    corpus = evaluation.corpus
    protocol = evaluation.protocol
    text = corpus["name"]
    if corpus["split"]:
        text += f" ({corpus['split']})"
    settings = f"stride {protocol['stride']}" if protocol["stride"] else "non-overlapping"
    if protocol.get("masked"):  # for example "1 in 7", only for encoders
        settings += f", {protocol['masked']} tokens masked"
    if protocol["slopes"]:  # a change of the trained model, for example "ntk=4"
        settings += f", slopes {protocol['slopes']}"
    return f"{evaluation.target['name']} on {text}: {corpus['tokens']:,} targets, {settings}"


def _table_cells(evaluation: Evaluation, row: LengthScore) -> list[str]:
    """Return the cells of one row of the table. A length without a result shows its status instead of numbers."""
    length = f"{row.length:,}"
    if row.length == evaluation.trained_at:
        length += " = L"  # The ALiBi paper calls the training length L.
    if row.status != "scored":
        return [length, row.status, "", "", "", "", ""]

    loss_interval = interval(row)  # the 95 % confidence interval of the mean loss
    perplexity_interval = ""
    if loss_interval is not None:
        low, high = loss_interval
        perplexity_interval = f"{perplexity(low):.2f}-{perplexity(high):.2f}"
    memory = ""
    if row.memory is not None:
        megabytes = row.memory / 1e6
        memory = f"{megabytes:,.0f} MB"
    return [
        length,
        f"{row.perplexity:.3f}",
        perplexity_interval,
        _format_optional(evaluation.word_perplexity(row), ",.4g"),
        _format_optional(evaluation.bits_per_byte(row), ".4f"),
        _format_optional(row.speed, ",.0f"),
        memory,
    ]


def _format_optional(value: float | None, format_spec: str) -> str:
    """Return a formatted number, or an empty string for None."""
    return "" if value is None else format(value, format_spec)
