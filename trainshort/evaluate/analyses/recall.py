"""Analysis `recall`: can the model use something that appeared d tokens earlier?

There are two tasks. Both repeat a sequence of 16 tokens: 8 tokens of cue and 8 tokens of value.

    copy      The sequence is text. It appears, then d tokens later it appears again.
    recall    The sequence is random tokens, so the model cannot guess the value from the language.

    lead  C C C C V V V V  other text ...  C C C C V V V V
          |<------------- d ------------->|        scored: the value after the second cue

Each sample is scored twice: with the sequence, and with another sequence in its first place (the control). The gain is
the loss of the control minus the loss with the sequence.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Int
from rich.console import Group

from trainshort.errors import InputError
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, compare, format_interval, new_table, with_title
from trainshort.evaluate.significance import format_range, is_significant_increase

Task = Literal["copy", "recall"]

RECALL_TASKS: tuple[Task, ...] = ("copy", "recall")

# The number of tokens of the cue. The model reads the cue and predicts the value.
CUE = 8

# The number of tokens of the value, which is scored.
VALUE = 8

# At shorter distances, the sequence and its repetition would be too close together.
MIN_RECALL_DISTANCE = 2 * (CUE + VALUE)


def choose_distances(context: AnalysisContext) -> list[int]:
    """Return the distances between a sequence and its repetition, in tokens.

    The analysis "recall" shows a sequence to the model twice, and measures how well the model predicts the repetition.
    The user chooses the distances with the option `--lengths`. The default distances are multiples of the training
    length. Default distances that do not fit into the text or into the longest input of the model are left out.

    Raises:
        InputError: If no distance fits, or if the largest distance that the user chose does not fit.
    """
    requested = context.choose_lengths(1, 2, 4, 8, 16, 32)
    num_tokens = len(context.tokens)
    max_sample_length = min(num_tokens - 1, context.target.max_length or num_tokens)
    is_user_choice = len(context.lengths) > 0
    largest = requested[-1]
    largest_sample_length = sample_length(context, largest)
    if is_user_choice and largest_sample_length > max_sample_length:
        raise InputError(
            f"The analysis 'recall' at a distance of {largest:,} tokens requires an input of "
            f"{largest_sample_length:,} tokens, but the text and the model allow "
            f"{max_sample_length:,}. Use a longer text or shorter --lengths."
        )
    distances = []
    for distance in requested:
        fits = sample_length(context, distance) <= max_sample_length
        if fits and distance >= MIN_RECALL_DISTANCE:
            distances.append(distance)
    if not distances:
        raise InputError(
            f"The analysis 'recall' requires a distance of at least {MIN_RECALL_DISTANCE} tokens. None of "
            f"{', '.join(map(str, requested))} fits. Use longer --lengths or a longer text."
        )
    return distances


def run(context: AnalysisContext) -> dict[str, Any]:
    """Measure for both tasks and each distance how much the loss falls if the sequence appeared before.

    The sequences are pieces of text in the task "copy", and random tokens in the task "recall". In a control sample,
    another sequence appeared before. The gain is the loss of the control samples minus the loss of the samples with the
    sequence.
    """
    distances = choose_distances(context)
    # The model does not read the last token of a sample, because that token is only predicted.
    inputs_per_sample = sum(sample_length(context, distance) - 1 for distance in distances)
    num_scorings = 2 * len(RECALL_TASKS)  # with the sequence and with the control
    context.meter.start(num_scorings * context.samples * inputs_per_sample)

    rows = []
    for distance in distances:
        for task in RECALL_TASKS:
            windows, control_windows = make_samples(context, task, distance)
            # `VALUE` is the number of tokens at the end of a sequence that the model must predict.
            losses = context.score(windows, num_scored=VALUE)
            control_losses = context.score(control_windows, num_scored=VALUE)
            comparison = compare(losses, control_losses)
            rows.append(
                {
                    "kind": task,
                    "distance": distance,
                    "loss": float(losses.mean()),
                    "control": comparison["loss"],
                    "gain": comparison["rise"],
                    "interval": comparison["interval"],
                }
            )
    return {"summary": summary(rows), "probes": context.samples, "scored": VALUE, "cue": CUE, "rows": rows}


def sample_length(context: AnalysisContext, distance: int) -> int:
    """Return the number of tokens in a sample.

    A sample consists of the lead, a sequence, other text, and the repetition of the sequence. The lead is text that has
    half of the training length. The distance is measured from the start of the sequence to the start of its repetition,
    so it includes the sequence and the other text. A sequence has `CUE` + `VALUE` tokens.
    """
    lead = context.trained_at // 2
    sequence_length = CUE + VALUE
    return lead + distance + sequence_length


def make_samples(
    context: AnalysisContext, task: Task, distance: int
) -> tuple[Int[np.ndarray, "samples length"], Int[np.ndarray, "samples length"]]:
    """Create samples for one task at one distance.

    Args:
        context: The text and the settings.
        task: The task.
        distance: The distance from the start of the sequence to the start of its repetition.

    Returns:
        Two arrays of samples. A sample of the first array contains a sequence and later its repetition. A control
        sample of the second array has another sequence instead of the first one. In the task "recall", the other
        sequence has the same cue, so only its value differs.
    """
    # The length of the task's name differs between the tasks, so each task draws other samples.
    rng = np.random.default_rng((context.seed, distance, len(task)))
    length = sample_length(context, distance)
    lead = context.trained_at // 2
    sequence_length = CUE + VALUE
    first_sequence = slice(lead, lead + sequence_length)  # the positions of the first sequence in a sample

    starts = rng.integers(len(context.tokens) - length, size=context.samples)
    windows = context.windows_at(starts, length)
    sequences = _draw_sequences(context, task, rng)
    windows[:, first_sequence] = sequences
    windows[:, -sequence_length:] = sequences

    control_windows = windows.copy()
    control_windows[:, first_sequence] = _draw_sequences(context, task, rng)
    if task == "recall":
        control_windows[:, lead : lead + CUE] = sequences[:, :CUE]
    return windows, control_windows


def _draw_sequences(
    context: AnalysisContext, task: Task, rng: np.random.Generator
) -> Int[np.ndarray, "samples tokens"]:
    """Draw a sequence for each sample: a piece of the text for "copy", and random tokens for "recall".

    The first half of a sequence is the cue that the model reads. The second half is the value that the model predicts.
    """
    sequence_length = CUE + VALUE
    if task == "copy":
        starts = rng.integers(len(context.tokens) - sequence_length, size=context.samples)
        return context.windows_at(starts, sequence_length)
    # Token types that do not occur in the text may be untrained.
    known_tokens = np.unique(np.asarray(context.tokens))
    return rng.choice(known_tokens, size=(context.samples, sequence_length)).astype(np.int64)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a sentence that says for each task up to which distance the model solves the task.

    In the task "copy", the model repeats a piece of text, and in the task "recall", random tokens. The model solves a
    task at a distance if the gain is significant. The gain is how much the loss falls because the tokens appeared
    before.

    Args:
        rows: The measurements of `run`.
    """
    statements = []
    for task in RECALL_TASKS:
        results = []
        for row in rows:
            if row["kind"] == task:
                is_solved = is_significant_increase(row["gain"], row["interval"])
                results.append((row["distance"], is_solved))
        statements.append(format_range(task, results))
    return "; ".join(statements)


def table(result: dict[str, Any]) -> Group:
    """Return the table of the gains for each task and each distance.

    The gain is the loss of the control (another sequence appeared before) minus the loss (the same sequence appeared).
    """
    title = f"Loss of {result['scored']} repeated tokens that follow a cue of {result['cue']} tokens"
    rows_table = new_table("task", "distance", "loss", "control", "gain", "95 %")
    for row in result["rows"]:
        rows_table.add_row(
            row["kind"],
            f"{row['distance']:,}",
            f"{row['loss']:.3f}",
            f"{row['control']:.3f}",
            f"{row['gain']:+.3f}",
            format_interval(row["interval"]),
        )
    return with_title(title, rows_table)


RECALL = Analysis("does the model find something that appeared d tokens earlier?", run, table, check=choose_distances)
