"""Attention reach: how far each head looks, and how far it could with queries and keys of the sizes it met here.

For every layer and head, over the later half of the queries: the mean distance of the attention mass, the window that
holds 99 % of it, and beside it the window that provably holds 99 % of every row's (ALiBi: alibi.proven_windows). The
proof knows the norms of this text's queries and keys and nothing else of them: whatever their directions, no row looks
farther. Another text may have larger ones, and so a wider window; it is a bound for this text, not for all.

Looking is not using: a model that was never trained spreads its attention over all it sees. So the last tokens of some
probes are also scored with everything beyond the training length spoiled (see far_context), and the sentence says
whether that is noticed.

Weights are computed a few query rows at a time from the layer's own queries and keys, and only their sum by distance is
kept, so that a long text needs no length × length matrix.
"""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Group
from torch import Tensor

from trainshort import alibi
from trainshort.attention import AttentionCall, DecayBias, LinearBias, decay
from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.evaluate.analyses.base import SCORED_TOKENS, Analysis, AnalysisContext, compare, new_table, with_title
from trainshort.evaluate.analyses.far_context import CORRUPTIONS, corrupt_far_context
from trainshort.evaluate.attention_inputs import attention_calls
from trainshort.evaluate.significance import is_significant_increase
from trainshort.model.transformer import TransformerLM

MASS = 0.99
ROW_ELEMENTS = 1 << 24
"""Attention weights computed at once: 64 MB in float32."""


def scope(lab: AnalysisContext) -> tuple[TransformerLM, int]:
    """The model, which must be one to look inside, and the length of the text it looks at."""
    return lab.model("the reach analysis"), max(lab.multiples(8, 4, 2, 1))


def run(lab: AnalysisContext) -> dict[str, Any]:
    model, length = scope(lab)
    tokens = torch.from_numpy(lab.tokens[:length].astype("int64"))[None].to(lab.target.device)
    ends = lab.sample_ends(length)
    lab.meter.start(length * model.config.layers + len(ends) * (3 * length + lab.trained_at))
    beyond = loss_increase_beyond_training(lab, lab.sample_windows(ends, length))
    rows = []
    for layer, call in enumerate(attention_calls(model, tokens)):
        mass = mass_by_distance(call)
        lab.meter.advance(length, f"layer {layer}")
        proven = proven_window(call)
        rows += [
            {
                "layer": layer,
                "head": head,
                "slope": float(call.bias.slopes[head]) if isinstance(call.bias, LinearBias) else None,
                "mean_distance": mean_distance(mass[head]),
                "window": window_of(mass[head], MASS),
                "proven": None if proven is None else proven[head],
            }
            for head in range(len(mass))
        ]
    return {
        "summary": summary(rows, lab.trained_at, beyond),
        "length": length,
        "mass": MASS,
        "beyond_training": beyond,
        "rows": rows,
    }


def loss_increase_beyond_training(lab: AnalysisContext, whole: np.ndarray) -> list[dict[str, Any]]:
    """How much the loss rises when what lies beyond the training length is spoiled, in each way; empty where nothing
    lies there."""
    if whole.shape[1] - 1 <= lab.trained_at + SCORED_TOKENS:
        return []
    losses = lab.score(whole, SCORED_TOKENS)
    return [
        {"way": way, **compare(losses, lab.score(corrupt_far_context(whole, lab.trained_at, way, lab), SCORED_TOKENS))}
        for way in CORRUPTIONS
    ]


def mass_by_distance(call: AttentionCall) -> Float[Tensor, "heads distances"]:
    """Mean share of attention at each distance 0, 1, 2, …, over the later half of the queries."""
    heads, length = call.q.shape[1], call.k.shape[2]
    total = torch.zeros(heads, length, dtype=torch.float64)
    size = max(1, ROW_ELEMENTS // (heads * length))
    first = length // 2
    for start in range(first, length, size):
        rows = slice(start, min(start + size, length))
        weights = attention_weights(call, rows)[0]
        for row, query in enumerate(range(rows.start, rows.stop)):
            # Key j lies query − j behind: the row read backwards from its query is the mass at distance 0, 1, 2, …
            total[:, : query + 1] += weights[:, row, : query + 1].flip(-1).double().cpu()
    return total / (length - first)


def attention_weights(call: AttentionCall, rows: slice) -> Float[Tensor, "batch heads rows keys"]:
    """Softmax weights of some query rows over all keys."""
    keys = slice(0, call.k.shape[2])
    k = call.k.repeat_interleave(call.heads_per_kv_head, dim=1).float()
    scores = call.q[:, :, rows].float() @ k.transpose(-1, -2) * call.softmax_scale
    if (bias := materialize_bias(call, rows, keys)) is not None:
        scores = scores + bias
    return scores.masked_fill(~visibility_mask(call, rows, keys), -math.inf).softmax(-1)


def mean_distance(mass: Float[Tensor, " distances"]) -> float:
    return float((mass * torch.arange(len(mass))).sum() / mass.sum())


def window_of(mass: Float[Tensor, " distances"], share: float) -> int:
    """The nearest distances that together hold this share.

    mass 0.5 0.3 0.2, share 0.8:   2
    """
    reached = mass.cumsum(0) / mass.sum() >= share - 1e-12
    return int(reached.int().argmax()) + 1


def proven_window(call: AttentionCall) -> list[int] | None:
    """The widest, over the later half of the queries, of the windows that provably hold MASS of their row; None where
    the bias proves none."""
    match call.bias:
        case LinearBias(slopes):
            windows = alibi.proven_windows(call.q, call.k, slopes, tolerance=1 - MASS, block=1)[0]
        case DecayBias(clock):
            starts = decay.proven_first_keys(alibi.max_excess(call.q, call.k), clock, 1 - MASS)[0]
            windows = torch.arange(call.k.shape[2])[-call.q.shape[2] :] - starts.cpu() + 1
        case _:
            return None
    return windows[:, windows.shape[1] // 2 :].amax(dim=1).tolist()


def summary(rows: list[dict[str, Any]], trained_at: int, beyond: list[dict[str, Any]]) -> str:
    widest = max(rows, key=lambda row: row["window"])
    far = sum(row["window"] > trained_at for row in rows)
    told = (
        f"the farthest-looking head (layer {widest['layer']}, head {widest['head']}) holds {MASS:.0%} of its attention "
        f"within {widest['window']:,} tokens; {far} of {len(rows)} heads look beyond the {trained_at:,} of training"
    )
    if not far or not beyond:
        return told
    if all(is_significant_increase(one["rise"], one["interval"]) for one in beyond):
        return f"{told}, and what lies there is used: without it the loss rises by {min(r['rise'] for r in beyond):.4f}"
    return f"{told}, and no use of what lies there shows"


def table(result: dict[str, Any]) -> Group:
    title = f"Attention over {result['length']:,} tokens: window that holds {result['mass']:.0%} of the mass"
    shown = new_table("layer", "head", "slope", "mean distance", "window", "proven here")
    for row in result["rows"]:
        slope = "" if row["slope"] is None else f"{row['slope']:.5f}"
        proven = "" if row["proven"] is None else f"{row['proven']:,}"
        numbers = (f"{row['mean_distance']:,.1f}", f"{row['window']:,}", proven)
        shown.add_row(str(row["layer"]), str(row["head"]), slope, *numbers)
    return with_title(title, shown)


REACH = Analysis("how far does each head look, and how far could it?", run, table, fits=scope)
