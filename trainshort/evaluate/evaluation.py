"""One `trainshort evaluate`: what it will cost, the sweep with its progress, and what is written and shown."""

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
from trainshort.evaluate.sweep import Sweep, calibrate, sweep
from trainshort.evaluate.targets import Target, Text
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
    """An evaluation with everything but rows."""
    return Evaluation(
        target=target.description(),
        corpus=text.description(),
        protocol={
            "name": "non-overlapping" if plan.stride is None else "sliding",
            "stride": plan.stride,
            "slopes": None if plan.change is None else str(plan.change),
            "before": target.bos,
            "precision": precision,
            "device": target.device.type,
            **({} if target.mask is None else {"masked": f"1 in {MASK_ROUNDS}"}),
        },
        provenance=collect_provenance(threads=torch.get_num_threads()),
    )


def result_path(folder: Path, evaluation: Evaluation) -> Path:
    """Where an evaluation lies: a name to read, and a digest of all that it depends on, so that nothing is overwritten
    by another model, text or protocol: valid-stride64-1f2e3d4c.json"""
    depends = [evaluation.target["weights"], evaluation.corpus["sha256"], evaluation.protocol]
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:8]
    stride, slopes = evaluation.protocol["stride"], evaluation.protocol["slopes"]
    text = evaluation.corpus["split"] or Path(evaluation.corpus["name"]).stem
    parts = [text, f"stride{stride}" if stride else "nonoverlapping", slopes, digest]
    name = "-".join(re.sub(r"[^\w.]+", "-", part) for part in parts if part)
    return folder / "eval" / f"{name}.json"


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
    """Measure all lengths of a plan; returns the evaluation, which then lies in the target's folder. Results are shown
    on `console` (default: nowhere); cost and progress go to standard error beside it."""
    console = console or new_console(quiet=True)
    notes = new_console(stderr=True, quiet=console.quiet, highlight=False)
    if target.mask is not None and plan.stride is not None:
        raise InputError("an encoder is evaluated in blocks that do not overlap; leave out --stride.")
    if not plan.lengths:
        raise InputError("nothing was evaluated; give at least one length.")
    for length in plan.lengths:
        plan.passes(length)  # refuses impossible lengths before anything is computed
    with target.for_length(plan.change, min(plan.lengths)):
        pass  # a change that does not fit the model is refused before anything is computed
    evaluation = new_evaluation(target, text, plan, precision)
    path = result_path(target.folder, evaluation)
    if not again and path.exists():  # only numbers are kept: a length that ran out of memory or failed is tried again
        evaluation = evaluation.model_copy(update={"rows": tuple(results.load(path).scored)})
    todo = [plan.passes(length) for length in plan.lengths if evaluation.row(length) is None]
    print_estimated_cost(target, plan, todo, notes)
    if dry_run:
        return evaluation
    with ProgressMeter(notes) as meter:
        evaluation = sweep(target, plan, evaluation, path, meter)
    if not todo and results.load(path).corpus != evaluation.corpus:
        results.save(evaluation, path)  # an older version said less of the text
    finish(evaluation, target, path, console, picture=picture)
    console.print(result_table(evaluation, plan.lengths))
    return evaluation


def print_estimated_cost(target: Target, plan: Sweep, todo: list[Passes], console: Console) -> None:
    """Say what is about to be computed, how long that may take, and what it cannot tell."""
    if (longest := max(plan.lengths)) > len(plan.tokens):
        console.print(
            f"The text has {len(plan.tokens):,} tokens: at length {longest:,} it is read whole, which says nothing "
            f"about inputs of {longest:,} tokens. The extrapolation card leaves that length out.",
            soft_wrap=True,
        )
    if known := len(plan.lengths) - len(todo):
        console.print(f"{known} of {len(plan.lengths)} lengths were scored before; --again scores them anew.")
    if not todo or console.quiet:
        return
    console.print(f"{escape_control_characters(target.name)}: timing a few passes first.")
    seconds = calibrate(target, plan)
    at = f"length {todo[0].length:,}" if len(todo) == 1 else f"{len(todo)} lengths"
    passes, read = sum(len(passes) for passes in todo), sum(passes.read for passes in todo)
    console.print(
        f"{escape_control_characters(target.name)}: {len(plan.tokens):,} targets at {at}, {passes:,} passes "
        f"over {read:,} tokens, about {format_duration(sum(seconds(passes) for passes in todo))}."
    )


def finish(evaluation: Evaluation, target: Target, path: Path, console: Console, *, picture: bool) -> None:
    """The picture if it is wanted, and the card where this evaluation makes one."""
    written = [path]
    if picture and can_draw_figures():
        written += draw([evaluation, *siblings(evaluation, path)], path.with_suffix(""))
    made = (
        significance.make_summary(evaluation, str(path.relative_to(target.folder)))
        if target.kind != "checkpoint"
        else None
    )
    if made and significance.save_summary(made, target.folder):
        written.append(target.folder / significance.CARD)
        console.print(f"{escape_for_output(target.name)}: {made['summary']}", highlight=False)
    elif made is None and (base := evaluation.trained_at) is not None and evaluation.row(base) is None:
        console.print(
            f"No extrapolation card: it needs the training length {base:,} among the lengths.", highlight=False
        )
    console.print(
        "Written: " + ", ".join(escape_for_output(str(file)) for file in written), highlight=False, soft_wrap=True
    )


def siblings(evaluation: Evaluation, path: Path) -> list[Evaluation]:
    """Other protocols' evaluations of the same weights on the same text, for the same picture."""
    found = []
    for other in sorted(set(path.parent.glob("*.json")) - {path}):
        try:
            one = results.load(other)
        except InputError:
            continue  # a damaged neighbour is no reason to fail now
        same_weights = one.target.get("weights") == evaluation.target["weights"]
        if same_weights and one.corpus.get("sha256") == evaluation.corpus["sha256"]:
            found.append(one)
    return found


def result_table(evaluation: Evaluation, lengths: Sequence[int]) -> Table:
    """One line per length; the training length is marked."""
    table = Table(title=escape_for_output(_title(evaluation)), title_justify="left", box=None, pad_edge=False)
    for name in ("length", evaluation.measure, "95 %", "per word", "bits/byte", "tokens/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in evaluation.rows:
        if row.length in lengths:
            table.add_row(*_cells(evaluation, row))
    return table


def _title(evaluation: Evaluation) -> str:
    corpus, protocol = evaluation.corpus, evaluation.protocol
    split = f" ({corpus['split']})" if corpus["split"] else ""
    how = f"stride {protocol['stride']}" if protocol["stride"] else "non-overlapping"
    how += f", each token scored while {masked} are masked" if (masked := protocol.get("masked")) else ""
    slopes = f", slopes {protocol['slopes']}" if protocol["slopes"] else ""
    return f"{evaluation.target['name']} on {corpus['name']}{split}: {corpus['tokens']:,} targets, {how}{slopes}"


def _cells(evaluation: Evaluation, row: LengthScore) -> list[str]:
    mark = " = L" if row.length == evaluation.trained_at else ""
    first = f"{row.length:,}{mark}"
    if row.status != "scored":
        return [first, row.status, *([""] * 5)]
    bounds = interval(row)
    return [
        first,
        f"{row.perplexity:.3f}",
        f"{perplexity(bounds[0]):.2f}-{perplexity(bounds[1]):.2f}" if bounds else "",
        _number(evaluation.word_perplexity(row), ",.4g"),
        _number(evaluation.bits_per_byte(row), ".4f"),
        _number(row.speed, ",.0f"),
        "" if row.memory is None else f"{row.memory / 1e6:,.0f} MB",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
