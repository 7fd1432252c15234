"""Analysis `early-tokens`: why does a longer input lower the loss? (Appendix B of the paper)

Without overlap, the first tokens of every window have little context. This effect is the early-token curse. Longer
windows have fewer such tokens. With stride 1, every token has full context, so a longer input can only help through
its longer context. Let N(l) be the loss at length l without overlap, S(l) the loss with stride 1, and L the shortest
length:

    N(L) - N(l)  =  [S(L) - S(l)]       +  [(N(L) - S(L)) - (N(l) - S(l))]
    total gain      from longer context    from fewer early tokens

Stride 1 needs one forward pass per target, so the losses with stride 1 are measured for a random sample of targets.
Only differences on the same targets are used, because differences vary less than losses.

A loss can also depend on the position of a token alone. Therefore the analysis also replaces the context by other text.
If the loss does not rise, the model does not use its context, and the analysis makes no claim.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from rich.console import Group

from trainshort.data.passes import Passes
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, compare, format_effect, new_table, with_title
from trainshort.evaluate.results import Interval, bootstrap_interval, sum_by_span
from trainshort.evaluate.significance import MIN_EFFECT_NATS, is_significant_decrease, is_significant_increase
from trainshort.utils.terminal import perplexity

# The analysis scores single targets, which is cheap. Therefore it uses this many targets per sample of the other
# analyses, which score several tokens per sample.
TARGETS_PER_SAMPLE = 8


@dataclass(frozen=True)
class LossesAtLength:
    """The losses at one input length.

    Attributes:
        non_overlapping: The losses of all targets of the text, without overlap.
        stride_1: The losses of the sampled targets, with stride 1.
    """

    non_overlapping: Float[np.ndarray, " tokens"]
    stride_1: Float[np.ndarray, " samples"]


def choose_lengths(context: AnalysisContext) -> list[int]:
    """Return the input lengths. Raise `InputError` if no length is possible."""
    return context.choose_lengths(1, 2, 4, 8)


def run(context: AnalysisContext) -> dict[str, Any]:
    """Measure at each input length how much the loss falls because of longer context and of fewer early tokens."""
    lengths = choose_lengths(context)
    num_tokens = len(context.tokens)
    num_sampled = min(num_tokens, context.samples * TARGETS_PER_SAMPLE)
    # The targets are drawn at random. Targets at a fixed distance would always have the same positions in the windows.
    sampled_targets = np.sort(context.rng().choice(num_tokens, size=num_sampled, replace=False))

    tokens_to_read = 0
    for length in lengths:
        num_windows = int((sampled_targets >= length).sum())
        # Each sampled window is read with its own context and with a replaced context.
        tokens_to_read += num_tokens + 2 * length * num_windows
    context.meter.start(tokens_to_read)

    losses_by_length: dict[int, LossesAtLength] = {}
    for length in lengths:
        non_overlapping = context.score_all(Passes(num_tokens, length, length))
        stride_1 = score_with_stride_1(context, length, sampled_targets, non_overlapping)
        losses_by_length[length] = LossesAtLength(non_overlapping, stride_1)

    shortest_length = lengths[0]
    rows = []
    for length, losses in losses_by_length.items():
        row = _make_row(length, sampled_targets, losses_by_length[shortest_length], losses)
        # At the shortest length, all tokens except the last token are replaced. At longer lengths, the tokens that the
        # shortest length also reads are kept.
        num_kept_tokens = 1 if length == shortest_length else shortest_length
        row["replaced"] = loss_increase_with_replaced_context(
            context, length, sampled_targets, losses.stride_1, num_kept_tokens
        )
        rows.append(row)
    return {"summary": summary(rows), "samples": len(sampled_targets), "rows": rows}


def score_with_stride_1(
    context: AnalysisContext,
    length: int,
    sampled_targets: Int[np.ndarray, " samples"],
    non_overlapping: Float[np.ndarray, " tokens"],
) -> Float[np.ndarray, " samples"]:
    """Compute the losses of sampled targets (tokens that the model predicts) with stride 1.

    With stride 1, each target is the last token of its own window, so the target has as much context as possible.

    Args:
        context: The model and the text.
        length: The number of tokens in a window.
        sampled_targets: The positions of the targets in the text.
        non_overlapping: The losses of all tokens if the text is cut into windows that do not overlap. The first
            `length` tokens of the text have the same context with stride 1, so their losses are copied from here.

    Returns:
        The loss of each sampled target.
    """
    losses = non_overlapping[sampled_targets].copy()
    has_full_context = sampled_targets >= length
    if has_full_context.any():
        window_ends = sampled_targets[has_full_context] + 1  # The target is the last token before the end.
        windows = context.sample_windows(window_ends, length)
        losses[has_full_context] = context.score(windows, num_scored=1)[:, 0]
    return losses


def loss_increase_with_replaced_context(
    context: AnalysisContext,
    length: int,
    sampled_targets: Int[np.ndarray, " samples"],
    stride_1_losses: Float[np.ndarray, " samples"],
    num_kept_tokens: int,
) -> dict[str, Any] | None:
    """Measure how much the losses of sampled targets rise if their distant context is replaced by other text.

    A target is a token that the model predicts. The other text is taken from random positions of the same text.

    Args:
        context: The model and the text.
        length: The input length.
        sampled_targets: The positions of the targets in the text.
        stride_1_losses: The losses of the targets with their own context.
        num_kept_tokens: The number of tokens before each target that are not replaced.

    Returns:
        The comparison, as `compare` returns it. None if no sampled target has a full context.
    """
    has_full_context = sampled_targets >= length
    if not has_full_context.any():
        return None
    window_ends = sampled_targets[has_full_context] + 1  # The target is the last token before the end.
    windows = context.sample_windows(window_ends, length)
    num_replaced = length - num_kept_tokens
    other_starts = context.rng().integers(len(context.tokens) - length, size=len(windows))
    windows[:, :num_replaced] = context.windows_at(other_starts, num_replaced)
    own_context_losses = stride_1_losses[has_full_context][:, None]  # one row per target, with one loss
    return compare(own_context_losses, changed_losses=context.score(windows, num_scored=1))


def _make_row(
    length: int, sampled_targets: Int[np.ndarray, " samples"], base: LossesAtLength, losses: LossesAtLength
) -> dict[str, Any]:
    """Compute the gain of one input length over the shortest length, and its two parts.

    - The gain is how much lower the loss without overlap is.
    - The part from longer context is how much lower the loss with stride 1 is.
    - The part from fewer early tokens is the rest of the gain. Early tokens are the first tokens of a window, which
      have little context.

    The early-token curse is the loss without overlap minus the loss with stride 1.

    Args:
        length: The input length.
        sampled_targets: The positions of the sampled targets in the text.
        base: The losses at the shortest length.
        losses: The losses at this length.
    """
    mean_loss = float(losses.non_overlapping.mean())
    gain = float(base.non_overlapping.mean() - losses.non_overlapping.mean())
    context_gains = base.stride_1 - losses.stride_1  # one value per sampled target
    from_context = float(context_gains.mean())
    # The losses with stride 1 are known for the sampled targets only. The mean for the complete text is estimated from
    # differences on the sampled targets, because differences vary less than losses.
    base_curse = (base.non_overlapping[sampled_targets] - base.stride_1).mean()
    stride_1_loss = float(base.non_overlapping.mean() - base_curse - context_gains.mean())

    # The interval of the gain is computed from the gain of each span of the text.
    gains_by_span = sum_by_span(base.non_overlapping - losses.non_overlapping)
    span_counts, span_gains = np.array(gains_by_span).T
    gain_interval = bootstrap_interval(span_gains, span_counts)
    context_interval = bootstrap_interval(context_gains)
    return {
        "length": length,
        "tokens": len(losses.non_overlapping),
        "non_overlapping": mean_loss,
        "stride_1": stride_1_loss,
        "curse": mean_loss - stride_1_loss,
        "curse_interval": bootstrap_interval(losses.non_overlapping[sampled_targets] - losses.stride_1),
        "gain": gain,
        "gain_interval": gain_interval,
        "from_context": from_context,
        "context_interval": context_interval,
        "from_early": gain - from_context,
        "early_interval": _subtract_intervals(gain_interval, context_interval),
    }


def _subtract_intervals(minuend: Interval | None, subtrahend: Interval | None) -> Interval | None:
    """Return an interval that contains every difference of a value in `minuend` and a value in `subtrahend`.

    Example:
        >>> _subtract_intervals((5, 6), (1, 2))
        (3, 5)
    """
    if minuend is None or subtrahend is None:
        return None
    return minuend[0] - subtrahend[1], minuend[1] - subtrahend[0]


# ---- conclusion


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a sentence that says how much the loss falls at the longest length, and why.

    The two possible causes are the longer context of each token, and fewer early tokens (tokens at the start of a
    window, which have little context).

    Args:
        rows: The measurements of `run`, sorted by length.
    """
    first = rows[0]
    last = rows[-1]
    if not any(_uses_replaced_context(row) for row in rows):
        return (
            f"Not supported: use of context at {first['length']:,} tokens (other text in its place does not raise the "
            f"loss significantly, by at least {MIN_EFFECT_NATS} nats)"
        )
    if len(rows) == 1:
        return _summarize_single_length(first)

    claim = f"lower loss at {last['length']:,} tokens than at {first['length']:,} tokens"
    gain = f"gain {format_effect(last['gain'], last['gain_interval'])}"
    if not is_significant_increase(last["gain"], last["gain_interval"]):
        return f"Not supported: {claim} ({gain})"
    from_early = _describe_part("fewer early tokens", last["from_early"], last["early_interval"])
    from_context = _describe_part("longer context", last["from_context"], last["context_interval"])
    is_context_significant = is_significant_increase(last["from_context"], last["context_interval"])
    if is_context_significant and not _uses_replaced_context(last):
        # The two measurements of the use of longer context contradict each other.
        from_context += ", but inconclusive: other text in the place of the longer context does not raise the loss"
    return f"Supported: {claim} ({gain}); {from_early}; {from_context}"


def _summarize_single_length(row: dict[str, Any]) -> str:
    """Return whether there is an early-token curse. This is the conclusion if only one input length was measured.

    The early-token curse is the loss that is added because the first tokens of a window have little context.
    """
    curse = format_effect(row["curse"], row["curse_interval"])
    if is_significant_increase(row["curse"], row["curse_interval"]):
        return f"Supported: early-token curse at {row['length']:,} tokens ({curse})"
    return f"Not supported: early-token curse at {row['length']:,} tokens ({curse})"


def _uses_replaced_context(row: dict[str, Any]) -> bool:
    """Return whether the loss at one input length rises significantly if the context is replaced by other text."""
    comparison = row["replaced"]
    return comparison is not None and is_significant_increase(comparison["rise"], comparison["interval"])


def _describe_part(cause: str, effect: float, interval: Interval | None) -> str:
    """Return a statement about one part of the gain, and whether this part is statistically supported.

    The gain is how much the loss falls if the model reads longer inputs.

    Args:
        cause: The cause of this part of the gain, such as "longer context".
        effect: The size of this part in nats. It is negative if the cause raises the loss.
        interval: The 95 % interval of the effect.
    """
    if is_significant_increase(effect, interval):
        verdict = "supported"
    elif is_significant_decrease(effect, interval):
        verdict = "supported, raises the loss"
    else:
        verdict = "not supported"
    return f"from {cause}: {format_effect(effect, interval)}, {verdict}"


def table(result: dict[str, Any]) -> Group:
    """Return the table of the losses and the gains at each input length.

    The columns after the length are:

    - "ppl no overlap" and "stride 1": the perplexity if the windows do not overlap, and if each token is predicted in
      its own window
    - "curse": the loss without overlap minus the loss with stride 1
    - "gain": how much the loss without overlap falls compared with the shortest length. "early" (fewer tokens with
      little context) and "context" (longer context) are the two parts of the gain.
    - "± 95 %": half of the width of the 95 % interval of "context"
    """
    title = f"Early-token curse; stride 1 measured on {result['samples']:,} targets; gains in nats"
    columns = ("length", "ppl no overlap", "stride 1", "curse", "gain", "early", "context", "± 95 %")
    rows_table = new_table(*columns)
    for row in result["rows"]:
        low, high = row["context_interval"] or (0.0, 0.0)
        rows_table.add_row(
            f"{row['length']:,}",
            f"{perplexity(row['non_overlapping']):.3f}",
            f"{perplexity(row['stride_1']):.3f}",
            f"{row['curse']:+.4f}",
            f"{row['gain']:+.4f}",
            f"{row['from_early']:+.4f}",
            f"{row['from_context']:+.4f}",
            f"{(high - low) / 2:.4f}",
        )
    return with_title(title, rows_table)


EARLY_TOKENS = Analysis(
    "does a longer input help through its longer context, or through fewer early tokens?",
    run,
    table,
    check=choose_lengths,
)
