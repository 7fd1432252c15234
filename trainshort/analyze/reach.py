"""Attention reach: how far each head looks, and how far it could with queries and keys of the sizes it met here.

For every layer and head, over the later half of the queries: the mean distance of the attention mass, the window that
holds 99 % of it, and beside it the window that provably holds 99 % of every row's (ALiBi: alibi.proven_windows). The
proof knows the norms of this text's queries and keys and nothing else of them: whatever their directions, no row looks
farther. Another text may have larger ones, and so a wider window; it is a bound for this text, not for all.

Weights are computed a few query rows at a time from the layer's own queries and keys, and only their sum by distance is
kept, so that a long text needs no length × length matrix.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Group
from torch import Tensor

from trainshort import alibi
from trainshort.analyze.base import Analysis, Lab, analyses, new_table, titled
from trainshort.attention import Call, LinearBias
from trainshort.attention.op import scale, visible, written_bias
from trainshort.evaluate.recording import attention_calls

MASS = 0.99
ROW_ELEMENTS = 1 << 24
"""Attention weights computed at once: 64 MB in float32."""


def run(lab: Lab) -> dict[str, Any]:
    model = lab.model("the reach analysis")
    length = max(lab.multiples(8, 4, 2, 1))
    tokens = torch.from_numpy(lab.tokens[:length].astype("int64"))[None].to(lab.target.device)
    rows = []
    for layer, call in enumerate(attention_calls(model, tokens)):
        mass = mass_by_distance(call)
        proven = proven_window(call)
        for head in range(len(mass)):
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "slope": float(call.bias.slopes[head]) if isinstance(call.bias, LinearBias) else None,
                    "mean_distance": mean_distance(mass[head]),
                    "window": window_of(mass[head], MASS),
                    "proven": None if proven is None else proven[head],
                }
            )
    return {"summary": summary(rows, lab.trained_at), "length": length, "mass": MASS, "rows": rows}


def mass_by_distance(call: Call) -> Float[Tensor, "heads distances"]:
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


def attention_weights(call: Call, rows: slice) -> Float[Tensor, "batch heads rows keys"]:
    """Softmax weights of some query rows over all keys."""
    keys = slice(0, call.k.shape[2])
    k = call.k.repeat_interleave(call.group, dim=1).float()
    scores = call.q[:, :, rows].float() @ k.transpose(-1, -2) * scale(call)
    if (bias := written_bias(call, rows, keys)) is not None:
        scores = scores + bias
    return scores.masked_fill(~visible(call, rows, keys), -math.inf).softmax(-1)


def mean_distance(mass: Float[Tensor, " distances"]) -> float:
    return float((mass * torch.arange(len(mass))).sum() / mass.sum())


def window_of(mass: Float[Tensor, " distances"], share: float) -> int:
    """The nearest distances that together hold this share.

    mass 0.5 0.3 0.2, share 0.8:   2
    """
    reached = mass.cumsum(0) / mass.sum() >= share - 1e-12
    return int(reached.int().argmax()) + 1


def proven_window(call: Call) -> list[int] | None:
    """The widest, over the later half of the queries, of the windows that provably hold MASS of their row; None without
    linear biases."""
    if not isinstance(call.bias, LinearBias):
        return None
    windows = alibi.proven_windows(call.q, call.k, call.bias.slopes, tolerance=1 - MASS, block=1)[0]
    return windows[:, windows.shape[1] // 2 :].amax(dim=1).tolist()


def summary(rows: list[dict[str, Any]], trained_at: int) -> str:
    widest = max(rows, key=lambda row: row["window"])
    beyond = sum(row["window"] > trained_at for row in rows)
    return (
        f"the farthest-looking head (layer {widest['layer']}, head {widest['head']}) holds {MASS:.0%} of its attention "
        f"within {widest['window']:,} tokens; {beyond} of {len(rows)} heads look beyond the {trained_at:,} of training"
    )


def table(result: dict[str, Any]) -> Group:
    title = f"Attention over {result['length']:,} tokens: window that holds {result['mass']:.0%} of the mass"
    shown = new_table("layer", "head", "slope", "mean distance", "window", "proven here")
    for row in result["rows"]:
        slope = "" if row["slope"] is None else f"{row['slope']:.5f}"
        proven = "" if row["proven"] is None else f"{row['proven']:,}"
        numbers = (f"{row['mean_distance']:,.1f}", f"{row['window']:,}", proven)
        shown.add_row(str(row["layer"]), str(row["head"]), slope, *numbers)
    return titled(title, shown)


analyses.register("reach")(Analysis("how far does each head look, and how far could it?", run, table))
