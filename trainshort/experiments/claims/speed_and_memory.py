"""Check the claims about training speed and training memory."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from trainshort.experiments.claims.extrapolation import BASE_LENGTH, wikitext_variant
from trainshort.experiments.claims.measured import CurvePoint, MeasuredCell, RatioWithInterval, ScaleView
from trainshort.experiments.claims.verdicts import (
    CriterionVersion,
    Outcome,
    combine_verdicts,
    judge_above,
    judge_below,
    make_outcome,
    missing_outcome,
    negate_verdict,
    register_claim,
)
from trainshort.experiments.experiments import EvalProtocol, Variant
from trainshort.experiments.tables import COST_LENGTHS

MISSING_COSTS = "the costs of the four methods from one interleaved measurement (`--only demo` or `table1`)"

PAIRED_ROUNDS_CRITERION = CriterionVersion(
    "36d23a9",
    "2026-11-16",
    results_were_known=True,
    change="all methods are judged by the same criterion: paired rounds, at every length that was measured",
)
REPEATED_MEMORY_CRITERION = CriterionVersion(
    "1d2079f",
    "2026-11-17",
    results_were_known=True,
    change="the memory of each model is measured several times, and the range of the measurements is the noise",
)

SPEED_LENGTHS = (BASE_LENGTH, *COST_LENGTHS)
"""The training lengths (of the paper) at which speeds are compared. Lengths that were not measured are skipped."""


def speedups_over_sinusoidal(view: ScaleView, position: str) -> dict[int, RatioWithInterval]:
    """Return how much faster a position method trains than sinusoidal embeddings.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        position: The position method.

    Returns:
        The relative differences in speed with their intervals, by the actual training length. -0.01 means 1 % slower.
        Lengths that were not measured are left out.
    """
    speedups: dict[int, RatioWithInterval] = {}
    for length in SPEED_LENGTHS:
        model = wikitext_variant(position, length)
        sinusoidal = wikitext_variant("sinusoidal", length)
        speedup = view.compare_speeds(model, sinusoidal)
        if speedup is not None:
            speedups[view.scale.scale_length(length)] = speedup
    return speedups


def format_speedups(speedups: dict[int, RatioWithInterval]) -> str:
    """Return the speedups as text, such as "-0.7% (-1.2% to +0.1%) at 128; +0.2% (-0.5% to +0.9%) at 512"."""
    return "; ".join(f"{speedup} at {length:,}" for length, speedup in speedups.items())


@register_claim(
    "same-speed",
    statement="ALiBi's training speed is within 1 % of the speed of sinusoidal embeddings.",
    published="28.3k against 28.5k tokens/s (-0.7 %)",
    criterion=PAIRED_ROUNDS_CRITERION,
)
def check_same_speed(view: ScaleView) -> Outcome:
    """Check that ALiBi trains at most 1 % slower than sinusoidal embeddings at every length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    speedups = speedups_over_sinusoidal(view, "alibi")
    if not speedups:
        return missing_outcome(MISSING_COSTS)
    reason = (
        "The claim is supported if ALiBi is at most 1 % slower at every length. "
        "The speeds were compared round by round on this machine."
    )
    # A speedup of -0.01 means 1 % slower than sinusoidal embeddings.
    verdict = combine_verdicts(judge_above(speedup, -0.01) for speedup in speedups.values())
    return make_outcome(verdict, format_speedups(speedups), reason, *speedups.values())


@register_claim(
    "same-memory",
    statement="ALiBi needs less than 1 % and at most 100 MB more training memory than sinusoidal embeddings.",
    published="15.3 against 15.3 GB at 512, 19.3 against 19.2 GB at 1,024",
    criterion=REPEATED_MEMORY_CRITERION,
)
def check_same_memory(view: ScaleView) -> Outcome:
    """Check that ALiBi needs at most 1 % and at most 100 MB more memory than sinusoidal embeddings.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    alibi = wikitext_variant("alibi")
    sinusoidal = wikitext_variant("sinusoidal")
    alibi_memory = view.find_cost(alibi, "train memory")
    sinusoidal_memory = view.find_cost(sinusoidal, "train memory")
    change = view.compare_memories(alibi, sinusoidal)
    if alibi_memory is None or sinusoidal_memory is None or change is None:
        return missing_outcome(MISSING_COSTS)

    measured = f"{alibi_memory.value:.3f} against {sinusoidal_memory.value:.3f} GB"
    reason = (
        f"ALiBi's training memory differs by {change}. "
        "The claim is supported if the difference is at most 1 % and at most 100 MB. "
        "Memory is the peak above the memory of the idle program."
    )
    # The smaller limit applies: 1 %, or 100 MB (0.1 GB) divided by the memory of the sinusoidal model in GB.
    max_change = min(0.01, 0.1 / sinusoidal_memory.value)
    return make_outcome(negate_verdict(judge_above(change, max_change)), measured, reason, change)


@register_claim(
    "others-slower",
    statement="Rotary embeddings and the T5 bias train more slowly than sinusoidal embeddings.",
    published="at 512: rotary -30 %, T5 bias -49 %, in the authors' code",
    criterion=PAIRED_ROUNDS_CRITERION,
)
def check_others_slower(view: ScaleView) -> Outcome:
    """Check that rotary embeddings and the T5 bias train more than 1 % slower than sinusoidal at every length.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    rotary_speedups = speedups_over_sinusoidal(view, "rotary")
    t5_speedups = speedups_over_sinusoidal(view, "t5")
    if not rotary_speedups or not t5_speedups:
        return missing_outcome(MISSING_COSTS)
    measured = f"rotary {format_speedups(rotary_speedups)}. T5 bias {format_speedups(t5_speedups)}"
    reason = (
        "The claim is supported if both methods are more than 1 % slower at every length. "
        "The size of the difference depends on the implementation, as the paper says."
    )
    speedups = [*rotary_speedups.values(), *t5_speedups.values()]
    # A speedup of -0.01 means 1 % slower than sinusoidal embeddings.
    verdict = combine_verdicts(judge_below(speedup, -0.01) for speedup in speedups)
    return make_outcome(verdict, measured, reason, *speedups)


@register_claim(
    "sooner",
    statement="ALiBi trained at 1,024 reaches a given perplexity at 2,048 about 11 % earlier than sinusoidal "
    "embeddings trained at 2,048.",
    published="1.3B parameters: 11 % less time (mean of five points), 26.2 against 29.3 GB",
    criterion=CriterionVersion(
        "a8d97b8",
        "2026-11-16",
        results_were_known=True,
        change="if the models trained at 1,024 and 2,048 do not exist, the models trained at 512 and 3,072 are "
        "compared; speeds are compared separately for each round of the measurement",
    ),
)
def check_time_to_perplexity(view: ScaleView) -> Outcome:
    """Check that ALiBi reaches a perplexity earlier than a sinusoidal model that was trained on longer sequences.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).

    Returns:
        The verdict ("supported", "not supported", "inconclusive" or "not tested") with the measured numbers.
    """
    # The paper compares the first pair of models. The second pair is trained at every scale.
    for setup, short_length, long_length in (("cc100", 1024, 2048), ("wikitext103", BASE_LENGTH, 3072)):
        alibi = Variant(setup, "alibi", short_length)
        sinusoidal = Variant(setup, "sinusoidal", long_length)
        outcome = _time_to_perplexity_outcome(view, alibi, sinusoidal)
        if outcome is not None:
            return outcome
    return missing_outcome("both models with several checkpoints that were evaluated (`--only demo` or `fig5,table11`)")


def _time_to_perplexity_outcome(view: ScaleView, short: Variant, long: Variant) -> Outcome | None:
    """Compare how fast two models learn. Both models are evaluated at the training length of the long model.

    Args:
        view: The stored results at one scale (laptop, gpu or paper).
        short: The ALiBi model with the shorter training length.
        long: The sinusoidal model with the longer training length.

    Returns:
        The outcome of the claim, or None if measurements are missing.
    """
    speedup = view.compare_speeds(short, long)
    protocol = EvalProtocol(long.length)
    short_curve = view.find_learning_curve(short, protocol)
    long_curve = view.find_learning_curve(long, protocol)
    if speedup is None or len(short_curve) < 2 or len(long_curve) < 2:
        return None

    sources = tuple(point.source for point in (*short_curve, *long_curve)) + speedup.sources
    lengths = f"{view.scale.scale_length(short.length):,} against {view.scale.scale_length(long.length):,}"
    reason = (
        "The times to the same perplexity are compared where the two learning curves overlap. "
        "The times are computed from training tokens and paired speeds. "
        "The interval is the interval of the speeds."
    )

    if short_curve[0].perplexity < long_curve[-1].perplexity:
        measured = f"ALiBi's first checkpoint is better than sinusoidal's last checkpoint (trained at {lengths})"
        return make_outcome("supported", measured, reason, MeasuredCell((), sources))

    token_saving = time_saved(_as_pairs(short_curve), _as_pairs(long_curve))
    if token_saving is None:
        measured = f"ALiBi does not reach sinusoidal's perplexity (trained at {lengths})"
        return make_outcome("not supported", measured, reason, MeasuredCell((), sources))

    saving = _saving_in_time(token_saving, speedup, sources)
    measured = f"{saving} time saved (trained at {lengths})"
    return make_outcome(judge_above(saving, 0), measured, reason, saving)


def _as_pairs(curve: Sequence[CurvePoint]) -> list[tuple[float, float]]:
    """Return the points of a learning curve as pairs of training tokens and perplexity."""
    return [(float(point.tokens), point.perplexity) for point in curve]


def _saving_in_time(token_saving: float, speedup: RatioWithInterval, sources: tuple[Path, ...]) -> RatioWithInterval:
    """Combine a saving in training tokens with a difference in speed.

    Example: a model that needs 10 % fewer tokens and is 25 % faster needs 0.9 / 1.25 = 72 % of the time.

    Args:
        token_saving: The share of the training tokens that is saved, such as 0.1.
        speedup: How much faster each token is processed, such as 0.25, with its interval.
        sources: The files that contain the values.

    Returns:
        The share of the time that is saved, with its interval.
    """

    def time_saving(speedup_value: float) -> float:
        """Return the share of the time that is saved at a certain difference in speed."""
        needed_time = (1 - token_saving) / (1 + speedup_value)  # as a fraction of the time of the other model
        return 1 - needed_time

    return RatioWithInterval(
        change=time_saving(speedup.change),
        low=time_saving(speedup.low),
        high=time_saving(speedup.high),
        sources=sources,
    )


def time_saved(short: list[tuple[float, float]], long: list[tuple[float, float]]) -> float | None:
    """Return the share of time that a model saves compared with another model, at equal perplexity.

    The times are compared at five perplexities that both learning curves pass. The result is the mean.

    Args:
        short: The learning curve of the model with the shorter training length, as pairs of time and perplexity.
        long: The learning curve of the model with the longer training length.

    Returns:
        The share of time, or None if the curves do not overlap.

    Example:
        >>> time_saved([(1, 20), (2, 10)], [(2, 20), (4, 10)])
        0.5
    """
    # Perplexities fall during training, so the first point of a curve is its highest point.
    _, short_start = short[0]
    _, short_end = short[-1]
    _, long_start = long[0]
    _, long_end = long[-1]
    # Both curves pass all perplexities between these two.
    lowest = max(short_end, long_end)
    highest = min(short_start, long_start)
    if not lowest < highest:
        return None

    savings: list[float] = []
    for k in range(5):
        perplexity = lowest + (highest - lowest) * k / 4
        short_time = _time_at_perplexity(short, perplexity)
        long_time = _time_at_perplexity(long, perplexity)
        savings.append(1 - short_time / long_time)
    return sum(savings) / len(savings)


def _time_at_perplexity(curve: list[tuple[float, float]], perplexity: float) -> float:
    """Return the time at which a falling learning curve first reaches a perplexity.

    Args:
        curve: Pairs of time and perplexity. Values between two points are interpolated linearly.
        perplexity: The perplexity.
    """
    for (start_time, start_perplexity), (end_time, end_perplexity) in pairwise(curve):
        if end_perplexity <= perplexity <= start_perplexity:
            if start_perplexity == end_perplexity:
                return start_time
            fraction = (start_perplexity - perplexity) / (start_perplexity - end_perplexity)
            return start_time + (end_time - start_time) * fraction
    last_time, _ = curve[-1]
    return last_time
