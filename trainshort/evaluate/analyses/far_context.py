"""Analysis `far-context`: does the model use context that is farther away than d tokens?

All tokens that are more than d tokens before the scored tokens are corrupted. If the loss of the scored tokens rises,
the model uses the far context. An example with 12 tokens of context, 2 scored tokens and d = 4:

    far far far far far far far far  near near near near  scored scored

There are three corruptions: `shuffle` changes the order of the far tokens, `replace` puts other text of the same corpus
there, and `cut` removes the far tokens. Replaced text can mislead the model, and a cut also shortens the input.
Therefore the use of far context counts as supported only if the loss rises with all three corruptions.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Int
from rich.console import Group

from trainshort.errors import InputError
from trainshort.evaluate.analyses.base import (
    SCORED_TOKENS,
    Analysis,
    AnalysisContext,
    compare,
    format_effect,
    format_interval,
    new_table,
    with_title,
)
from trainshort.evaluate.significance import MIN_EFFECT_NATS, is_significant_increase, longest_contiguous
from trainshort.utils.terminal import join_words

Corruption = Literal["shuffle", "replace", "cut"]

CORRUPTIONS: tuple[Corruption, ...] = ("shuffle", "replace", "cut")

# The tested distances are doubled at most this often.
MAX_DOUBLINGS = 20


def choose_length_and_distances(context: AnalysisContext) -> tuple[int, list[int]]:
    """Return the input length and the distances beyond which the context is corrupted.

    Corrupted context is shuffled, replaced or removed. The default input length is the largest of 8, 4, 2 or 1 times
    the training length that is possible.

    Raises:
        InputError: If the input length leaves no context to corrupt.
    """
    length = max(context.choose_lengths(8, 4, 2, 1))
    distances = near_distances(context.trained_at, length)
    if not distances:
        raise InputError(
            f"The analysis 'far-context' scores the last {SCORED_TOKENS} tokens and corrupts the text that is at least "
            f"{first_distance(context.trained_at):,} tokens earlier. No text is that far away at length {length:,}. "
            "Use longer --lengths or a longer text."
        )
    return length, distances


def run(context: AnalysisContext) -> dict[str, Any]:
    """Measure how much the loss rises if the context farther away than each distance is corrupted."""
    length, distances = choose_length_and_distances(context)
    ends = context.sample_ends(length)
    intact_windows = context.sample_windows(ends, length)

    # Each sample is read without corruption, and then with three corruptions for each distance. The corruptions
    # "shuffle" and "replace" keep the input length. The corruption "cut" shortens the input.
    tokens_per_sample = length
    for distance in distances:
        # The near context and the scored tokens remain. The model does not read the last token.
        cut_length = distance + SCORED_TOKENS - 1
        tokens_per_sample += 2 * length + cut_length
    context.meter.start(len(ends) * tokens_per_sample)

    intact_losses = context.score(intact_windows, SCORED_TOKENS)
    rows = []
    for distance in distances:
        for corruption in CORRUPTIONS:
            corrupted_windows = corrupt_far_context(intact_windows, distance, corruption, context)
            corrupted_losses = context.score(corrupted_windows, SCORED_TOKENS)
            rows.append({"near": distance, "way": corruption, **compare(intact_losses, corrupted_losses)})
    return {
        "summary": summary(rows, length),
        "length": length,
        "probes": len(ends),
        "scored": int(intact_losses.size),
        "loss": float(intact_losses.mean()),
        "rows": rows,
    }


def near_distances(trained_at: int, length: int) -> list[int]:
    """Return the tested distances: an eighth of the training length, and its doublings.

    The longest distance is at most half of the input length, and leaves at least one token to corrupt.

    Args:
        trained_at: The training length.
        length: The input length.

    Example:
        >>> near_distances(128, 1024)
        [16, 32, 64, 128, 256, 512]
        >>> near_distances(16, 40)
        [2, 4, 8]
    """
    max_distance = min(length // 2, length - SCORED_TOKENS)
    distances = []
    for doublings in range(MAX_DOUBLINGS):
        distance = first_distance(trained_at) * 2**doublings
        if distance <= max_distance:
            distances.append(distance)
    return distances


def first_distance(trained_at: int) -> int:
    """Return the shortest tested distance, an eighth of the training length."""
    return max(1, trained_at // 8)


def corrupt_far_context(
    windows: Int[np.ndarray, "windows length"], near: int, corruption: Corruption, context: AnalysisContext
) -> Int[np.ndarray, "windows new_length"]:
    """Return windows in which the context far away from the scored tokens is corrupted.

    Each row of the result is a window. The corruption "cut" makes the windows shorter.

    Args:
        windows: Windows of the text. The last `SCORED_TOKENS` tokens of each window are scored.
        near: The number of tokens before the scored tokens that are kept.
        corruption: How the earlier tokens are corrupted. "shuffle" changes their order, "replace" puts other text of
            the same corpus in their place, and "cut" removes them.
        context: The text and the random seed.
    """
    # A window consists of the far tokens, the near tokens and the scored tokens.
    num_far_tokens = windows.shape[1] - SCORED_TOKENS - near
    if corruption == "cut":
        return windows[:, num_far_tokens:]
    rng = context.rng()
    corrupted = windows.copy()
    if corruption == "shuffle":
        corrupted[:, :num_far_tokens] = rng.permuted(windows[:, :num_far_tokens], axis=1)
    else:
        starts = rng.integers(len(context.tokens) - num_far_tokens + 1, size=len(windows))
        corrupted[:, :num_far_tokens] = context.windows_at(starts, num_far_tokens)
    return corrupted


def summary(rows: list[dict[str, Any]], length: int) -> str:
    """Return the conclusion with its verdict.

    - "supported" up to a distance: there and at all shorter distances, the loss rises with all corruptions.
    - "inconclusive": farther away, the loss rises with some corruptions, or not at all shorter distances.
    - "not supported": the loss does not rise with any corruption.

    Args:
        rows: The measurements of `run`.
        length: The input length.
    """
    # The corruptions that raise the loss, for each distance.
    significant: dict[int, list[str]] = {row["near"]: [] for row in rows}
    for row in rows:
        if is_significant_increase(row["rise"], row["interval"]):
            significant[row["near"]].append(row["way"])

    results = [(distance, len(corruptions) == len(CORRUPTIONS)) for distance, corruptions in significant.items()]
    used_distance = longest_contiguous(results)
    disputed_distances = []
    for distance, corruptions in significant.items():
        is_beyond = used_distance is None or distance > used_distance
        if corruptions and is_beyond:
            disputed_distances.append(distance)

    statements = []
    if used_distance is not None:
        rows_at_distance = [row for row in rows if row["near"] == used_distance]
        smallest = min(rows_at_distance, key=lambda row: row["rise"])
        effect = format_effect(smallest["rise"], smallest["interval"])
        statements.append(
            f"supported: use of context farther away than {used_distance:,} tokens (corrupting it raises the loss by "
            f"at least {effect})"
        )
    elif not disputed_distances:
        statements.append(
            "not supported: use of far context (no corruption raises the loss significantly, by at least "
            f"{MIN_EFFECT_NATS} nats)"
        )
    if disputed_distances:
        farthest = max(disputed_distances)
        corruptions = significant[farthest]
        if len(corruptions) == len(CORRUPTIONS):
            reason = "all corruptions raise the loss there, but not at all shorter distances"
        else:
            verb = "raises" if len(corruptions) == 1 else "raise"
            reason = f"only {join_words(corruptions)} {verb} the loss significantly"
        statements.append(f"inconclusive: use of context farther away than {farthest:,} tokens ({reason})")
    return f"At {length:,} tokens, {'; '.join(statements)}"


def table(result: dict[str, Any]) -> Group:
    """Return the table of the losses for each distance and each corruption."""
    title = (
        f"Loss of the last {SCORED_TOKENS} of {result['length']:,} tokens if the far context is corrupted "
        f"(intact: {result['loss']:.4f})"
    )
    rows_table = new_table("farther than", "corruption", "loss", "rise", "95 %")
    for row in result["rows"]:
        rows_table.add_row(
            f"{row['near']:,}",
            row["way"],
            f"{row['loss']:.4f}",
            f"{row['rise']:+.4f}",
            format_interval(row["interval"]),
        )
    return with_title(title, rows_table)


FAR_CONTEXT = Analysis(
    "does the model use context that is farther away than d tokens?", run, table, check=choose_length_and_distances
)
