"""Analysis `reach`: how far does each attention head look?

For each head, the analysis measures the mean distance of the attention weights, and the window that contains 99 % of
them. For ALiBi and other linear biases, it also computes a proven window: no query of this text can have more than 1 %
of its attention weights outside of it. The proof uses the norms of the queries and the keys of this text.

A head can look far away without using what it finds. Therefore the analysis also corrupts the context beyond the
training length (see `far_context`), and reports whether the loss rises.

The attention weights are computed for a few queries at a time and summed by distance, so that a long text does not need
a matrix with one row and one column per token.
"""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Group
from torch import Tensor

from trainshort import alibi
from trainshort.attention import AttentionCall, DecayBias, LinearBias, decay
from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.evaluate.analyses.base import (
    SCORED_TOKENS,
    Analysis,
    AnalysisContext,
    compare,
    format_effect,
    new_table,
    with_title,
)
from trainshort.evaluate.analyses.far_context import CORRUPTIONS, corrupt_far_context
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.evaluate.significance import is_significant_increase
from trainshort.model.transformer import TransformerLM

# The share of the attention weights that a window contains.
MASS = 0.99

# The number of attention weights that are computed at once. In float32 they need 64 MB.
ROW_ELEMENTS = 1 << 24

# Cumulative sums are compared with this tolerance, because of rounding.
ROUNDING_TOLERANCE = 1e-12


def choose_model_and_length(context: AnalysisContext) -> tuple[TransformerLM, int]:
    """Return the model and the length of the text that the model reads.

    The default length is the largest of 8, 4, 2 or 1 times the training length that is possible.

    Raises:
        InputError: If the model is a Hugging Face model, or if no length is possible.
    """
    return context.require_model("reach"), max(context.choose_lengths(8, 4, 2, 1))


def run(context: AnalysisContext) -> dict[str, Any]:
    """Measure the window of each head, and the use of context beyond the training length."""
    model, length = choose_model_and_length(context)
    first_tokens = torch.from_numpy(context.tokens[:length].astype("int64"))
    tokens = first_tokens[None].to(context.target.device)  # shape (1, length)
    ends = context.sample_ends(length)
    # Each sample is read without corruption, with two corruptions that keep the length, and with a cut to about the
    # training length.
    tokens_per_sample = 3 * length + context.trained_at
    context.meter.start(length * model.config.layers + len(ends) * tokens_per_sample)

    windows = context.sample_windows(ends, length)
    beyond_training = loss_increase_beyond_training(context, windows)
    rows = []
    for layer, call in enumerate(attention_calls(model, tokens)):
        rows += _measure_heads(layer, call)
        context.meter.advance(length, f"layer {layer}")
    return {
        "summary": summary(rows, context.trained_at, beyond_training),
        "length": length,
        "mass": MASS,
        "beyond_training": beyond_training,
        "rows": rows,
    }


def _measure_heads(layer: int, call: AttentionCall) -> list[dict[str, Any]]:
    """Return the measurements of all heads of one layer.

    Args:
        layer: The index of the layer.
        call: The attention call of the layer, with the queries, keys and bias for the text.

    Returns:
        One dictionary per head: its slope, the mean distance to the tokens it attends to, the smallest window of
        nearest tokens with the share `MASS` of its attention, and a window that provably contains this share.
    """
    mass = mass_by_distance(call)  # the mean attention weight at each distance, for each head
    proven_windows = compute_proven_windows(call)
    rows = []
    for head in range(len(mass)):
        # Only ALiBi and other linear biases have slopes.
        slope = float(call.bias.slopes[head]) if isinstance(call.bias, LinearBias) else None
        proven_window = None if proven_windows is None else proven_windows[head]
        rows.append(
            {
                "layer": layer,
                "head": head,
                "slope": slope,
                "mean_distance": mean_distance(mass[head]),
                "window": window_for_share(mass[head], MASS),
                "proven": proven_window,
            }
        )
    return rows


def loss_increase_beyond_training(
    context: AnalysisContext, windows: Int[np.ndarray, "samples length"]
) -> list[dict[str, Any]]:
    """Measure how much the loss rises if the context beyond the training length is shuffled, replaced or removed.

    Args:
        context: The model and the text.
        windows: Windows of the text. The last `SCORED_TOKENS` tokens of each window are scored.

    Returns:
        The comparison for each corruption, as `compare` returns it. The list is empty if the windows contain no text
        beyond the training length.
    """
    input_length = windows.shape[1] - 1
    if input_length <= context.trained_at + SCORED_TOKENS:
        return []
    intact_losses = context.score(windows, SCORED_TOKENS)
    results = []
    for corruption in CORRUPTIONS:
        corrupted_windows = corrupt_far_context(windows, context.trained_at, corruption, context)
        corrupted_losses = context.score(corrupted_windows, SCORED_TOKENS)
        results.append({"way": corruption, **compare(intact_losses, corrupted_losses)})
    return results


# ---- attention weights


def mass_by_distance(call: AttentionCall) -> Float[Tensor, "heads distances"]:
    """Return the mean attention weight at each distance 0, 1, 2, ..., for each head.

    The distance is the number of tokens from the key to the query. The mean is taken over the queries in the second
    half of the text, which have a long context. To save memory, only a few queries are computed at a time.
    """
    num_heads = call.q.shape[1]
    length = call.k.shape[2]
    total = torch.zeros(num_heads, length, dtype=torch.float64)
    queries_per_chunk = max(1, ROW_ELEMENTS // (num_heads * length))
    first_query = length // 2
    for chunk_start in range(first_query, length, queries_per_chunk):
        chunk_end = min(chunk_start + queries_per_chunk, length)
        weights = attention_weights(call, slice(chunk_start, chunk_end))[0]  # shape (heads, rows, keys)
        for row, query in enumerate(range(chunk_start, chunk_end)):
            weights_of_query = weights[:, row, : query + 1]  # Later keys are in the future of the query.
            # Reversed, the weights start with the query's own token, which has distance 0.
            total[:, : query + 1] += weights_of_query.flip(-1).double().cpu()
    return total / (length - first_query)


def attention_weights(call: AttentionCall, rows: slice) -> Float[Tensor, "batch heads rows keys"]:
    """Return the attention weights (after the softmax) of some queries for all keys.

    Args:
        call: The queries, keys and bias of one layer.
        rows: Which queries are computed. Each query is a row of the matrix of attention weights.
    """
    all_keys = slice(0, call.k.shape[2])
    # With grouped-query attention, several query heads share a key head. The keys are repeated for each query head.
    k = call.k.repeat_interleave(call.heads_per_kv_head, dim=1).float()
    scores = call.q[:, :, rows].float() @ k.transpose(-1, -2) * call.softmax_scale
    bias = materialize_bias(call, rows, all_keys)
    if bias is not None:
        scores = scores + bias
    is_visible = visibility_mask(call, rows, all_keys)
    return scores.masked_fill(~is_visible, -math.inf).softmax(-1)


def mean_distance(mass: Float[Tensor, " distances"]) -> float:
    """Return the mean distance between queries and keys, weighted with the attention weights.

    Args:
        mass: The mean attention weight at each distance 0, 1, 2, ... of one head.
    """
    distances = torch.arange(len(mass))
    return float((mass * distances).sum() / mass.sum())


def window_for_share(mass: Float[Tensor, " distances"], share: float) -> int:
    """Return the smallest window of nearest tokens that contains a given share of the attention weights.

    Args:
        mass: The mean attention weight at each distance 0, 1, 2, ... of one head.
        share: The share, between 0 and 1.

    Returns:
        The number of nearest tokens in the window.

    Example:
        >>> window_for_share(torch.tensor([0.5, 0.3, 0.2]), share=0.8)
        2
    """
    cumulative_share = mass.cumsum(0) / mass.sum()
    is_reached = cumulative_share >= share - ROUNDING_TOLERANCE
    # `argmax` returns the position of the first 1.
    first_reached_distance = int(is_reached.int().argmax())
    return first_reached_distance + 1


def compute_proven_windows(call: AttentionCall) -> list[int] | None:
    """Return the proven window of each head.

    A proven window provably contains the share `MASS` of the attention weights of a query. The proof uses the bias and
    the norms of the queries and keys. The result is the largest proven window of all queries in the second half of the
    text.

    Args:
        call: The queries, keys and bias of one layer.

    Returns:
        The number of tokens in the window for each head. None if the bias allows no proof.
    """
    tolerance = 1 - MASS
    match call.bias:
        case LinearBias(slopes):
            windows = alibi.proven_windows(call.q, call.k, slopes, tolerance=tolerance, block=1)[0]
        case DecayBias(cumulative_decay):
            # By how much the score of another key (without the bias) can at most exceed that of the query's own key.
            excess = alibi.max_excess(call.q, call.k)
            first_keys = decay.proven_first_keys(excess, cumulative_decay, tolerance)[0]
            # The last query has the position of the last key.
            num_queries = call.q.shape[2]
            query_positions = torch.arange(call.k.shape[2])[-num_queries:]
            windows = query_positions - first_keys.cpu() + 1
        case _:
            return None
    # `windows` has the shape (heads, queries). Queries in the first half of the text have a short context and are left
    # out.
    first_query = windows.shape[1] // 2
    return windows[:, first_query:].amax(dim=1).tolist()


# ---- conclusion


def summary(rows: list[dict[str, Any]], trained_at: int, beyond_training: list[dict[str, Any]]) -> str:
    """Return a sentence that says which head looks farthest, and whether the model uses context beyond its training.

    The model uses context beyond the training length if every corruption of that context raises the loss significantly.

    Args:
        rows: The measurements of all heads.
        trained_at: The training length.
        beyond_training: The rise of the loss for each corruption, as `loss_increase_beyond_training` returns it.
    """
    widest = max(rows, key=lambda row: row["window"])
    num_far_heads = sum(row["window"] > trained_at for row in rows)
    reach = (
        f"The head with the longest reach (layer {widest['layer']}, head {widest['head']}) has {MASS:.0%} of its "
        f"attention within {widest['window']:,} tokens; {num_far_heads} of {len(rows)} heads look beyond the training "
        f"length of {trained_at:,} tokens"
    )
    if num_far_heads == 0 or not beyond_training:
        return reach
    smallest = min(beyond_training, key=lambda result: result["rise"])
    effect = format_effect(smallest["rise"], smallest["interval"])
    if all(is_significant_increase(result["rise"], result["interval"]) for result in beyond_training):
        return f"{reach}; supported: use of that context (corrupting it raises the loss by at least {effect})"
    return f"{reach}; not supported: use of that context ('{smallest['way']}' changes the loss by {effect})"


def table(result: dict[str, Any]) -> Group:
    """Return the table of the windows of all heads."""
    title = f"Windows that contain {result['mass']:.0%} of the attention, measured over {result['length']:,} tokens"
    rows_table = new_table("layer", "head", "slope", "mean distance", "window", "proven window")
    for row in result["rows"]:
        rows_table.add_row(
            str(row["layer"]),
            str(row["head"]),
            "" if row["slope"] is None else f"{row['slope']:.5f}",
            f"{row['mean_distance']:,.1f}",
            f"{row['window']:,}",
            "" if row["proven"] is None else f"{row['proven']:,}",
        )
    return with_title(title, rows_table)


REACH = Analysis(
    "how far does each attention head look, and how far could it look?", run, table, check=choose_model_and_length
)
