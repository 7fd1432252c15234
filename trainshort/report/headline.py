"""The main figure of the report: perplexity by evaluation length, and sentences about the same numbers."""

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from trainshort.config.run_config import RunConfig
from trainshort.evaluate.results import LengthScore, StoredEvaluation, interval, perplexity
from trainshort.experiments.claims.collection import Collection, Run
from trainshort.experiments.experiments import load_published_numbers, method_name
from trainshort.train.run_folder import run_name
from trainshort.utils.figures import OTHERS, Figure, Series, method_color
from trainshort.utils.terminal import join_words

PAPER_TRAINING_LENGTH = 512
"""The training length of the paper's curves in the figure (Table 2)."""

BASELINE_METHOD = "sinusoidal"
"""The position method that has to be trained at the evaluation length, because it does not extrapolate."""

METHOD_ORDER = ("alibi", "t5", "rotary", "sinusoidal")
"""The order of the curves. Curves of other methods come last."""

MAX_INCREASE = 0.01
"""A perplexity that is at most 1 % higher than at the training length counts as no worse."""


class TextKey(NamedTuple):
    """What two evaluations must have in common, so that their perplexities can be compared.

    Attributes:
        tokens: The number of tokens.
        sha256: The hash of the tokens.
        precision: The precision of the model, such as "float32".
    """

    tokens: int
    sha256: str
    precision: str


class Sweep(NamedTuple):
    """A run, and an evaluation of this run at its training length and at least one longer length."""

    run: Run
    stored: StoredEvaluation

    @property
    def text(self) -> TextKey:
        """Return the text of the evaluation."""
        return _text_key(self.stored)

    @property
    def training_length(self) -> int:
        """Return the training length of the run."""
        return self.run.config.train.length


@dataclass(frozen=True)
class MethodCurve:
    """The perplexity of one model by evaluation length.

    Attributes:
        name: The name of the curve: the name of the method, or of the run if a method has several curves.
        position: The position method.
        points: The mean perplexity over the seeds, by evaluation length.
        bounds: The range over the seeds, by evaluation length. With one seed, the 95 % interval over the text.
        stored: The evaluations that the curve is computed from, one for each seed.
        color: The color of the curve.
    """

    name: str
    position: str
    points: dict[int, float]
    bounds: dict[int, tuple[float, float]]
    stored: tuple[StoredEvaluation, ...]
    color: str

    @property
    def sources(self) -> tuple[Path, ...]:
        """Return the files of the evaluations."""
        return tuple(stored.path for stored in self.stored)


@dataclass(frozen=True)
class Headline:
    """The content of the main figure: the curves of all models with the same training length.

    Attributes:
        training_length: The training length.
        curves: The curves of the models.
        is_controlled_comparison: Whether the models differ only in the position method. They then have the same size,
            and were trained on the same number of tokens of the same corpus.
        longer_models: A model that was trained at a longer length, evaluated at this length, as a reference. The tuple
            is empty if there is no such model.
    """

    training_length: int
    curves: tuple[MethodCurve, ...]
    is_controlled_comparison: bool
    longer_models: tuple[MethodCurve, ...]

    @property
    def lengths(self) -> list[int]:
        """Return all evaluation lengths in ascending order."""
        return sorted({length for curve in self.curves for length in curve.points})

    @property
    def longest_multiple(self) -> float:
        """Return the longest evaluation length as a multiple of the training length."""
        return self.lengths[-1] / self.training_length


# ---- finding the curves


def find_headline(collection: Collection) -> Headline | None:
    """Find the models with the most common training length and build their curves.

    Args:
        collection: The runs.

    Returns:
        The curves, or None if no run was evaluated at its training length and at a longer length.
    """
    sweeps = _find_sweeps(collection)
    if not sweeps:
        return None
    training_length, text = _most_common_setting(sweeps)

    # A run can have several evaluations of this text. The newest one comes last and replaces the others.
    newest: dict[Path, Sweep] = {}
    for sweep in sweeps:
        if sweep.text == text:
            newest[sweep.run.path] = sweep

    # Runs that differ only in the seed form one curve.
    groups: dict[str, list[Sweep]] = {}
    for sweep in newest.values():
        if sweep.training_length == training_length:
            name_without_seed = run_name(sweep.run.config.replace(train={"seed": 0}))
            groups.setdefault(name_without_seed, []).append(sweep)

    first_runs = [group[0].run for group in groups.values()]
    curves_per_method = Counter(run.config.model.position for run in first_runs)
    curves: list[MethodCurve] = []
    for group in groups.values():
        run = group[0].run
        position = run.config.model.position
        name = method_name(position) if curves_per_method[position] == 1 else run.name
        curves.append(_make_curve(name, position, [sweep.stored for sweep in group], training_length))
    curves.sort(key=_curve_sort_key)

    has_equal_settings = len({_shared_settings(run.config) for run in first_runs}) == 1
    has_one_curve_per_method = max(curves_per_method.values()) == 1
    return Headline(
        training_length=training_length,
        curves=_assign_colors(curves),
        is_controlled_comparison=has_equal_settings and has_one_curve_per_method,
        longer_models=_longest_sinusoidal(collection, training_length, text),
    )


def _find_sweeps(collection: Collection) -> list[Sweep]:
    """Return all standard evaluations that contain the training length of their run and a longer length.

    A standard evaluation uses the best checkpoint, windows that do not overlap, and unchanged ALiBi slopes.
    """
    sweeps: list[Sweep] = []
    for run in collection.runs.values():
        training_length = run.config.train.length
        for stored in run.standard_evaluations:
            # The evaluation lengths with a result, in ascending order.
            lengths = [row.length for row in stored.evaluation.scored if row.length >= training_length]
            if len(lengths) > 1 and lengths[0] == training_length:
                sweeps.append(Sweep(run, stored))
    return sweeps


def _text_key(stored: StoredEvaluation) -> TextKey:
    """Return the text and the precision of an evaluation."""
    corpus = stored.evaluation.corpus
    return TextKey(corpus["tokens"], corpus["sha256"], stored.evaluation.protocol["precision"])


def _most_common_setting(sweeps: list[Sweep]) -> tuple[int, TextKey]:
    """Return the training length and the text that most runs have in common.

    A pair of a training length and a text is called a setting here. If several settings are equally common, a test
    split is preferred, then a longer text.

    Args:
        sweeps: The evaluations. Each evaluation has a run and a text.
    """
    runs_by_setting: dict[tuple[int, TextKey], set[Path]] = {}
    test_texts: set[TextKey] = set()
    for sweep in sweeps:
        setting = (sweep.training_length, sweep.text)
        runs_by_setting.setdefault(setting, set()).add(sweep.run.path)
        if sweep.stored.evaluation.corpus["split"] == "test":
            test_texts.add(sweep.text)

    def priority(setting: tuple[int, TextKey]) -> tuple[int, bool, int]:
        """Return a sort key. The setting with the largest key is chosen."""
        _, text = setting
        return len(runs_by_setting[setting]), text in test_texts, text.tokens

    return max(runs_by_setting, key=priority)


def _shared_settings(config: RunConfig) -> tuple[str | int, ...]:
    """Return the settings of a run that must be equal in a controlled comparison of position methods.

    The optimizer settings may differ, because each method may be trained with its own best optimizer settings.
    """
    model = config.model
    trained_sequences = config.train.steps * config.train.batch
    return model.layers, model.width, model.heads, model.vocab_size, config.data.corpus, trained_sequences


def _make_curve(name: str, position: str, evaluations: list[StoredEvaluation], min_length: int) -> MethodCurve:
    """Build the curve of a model.

    Args:
        name: The name of the curve.
        position: The position method.
        evaluations: The evaluations of the model, one for each seed.
        min_length: Shorter evaluation lengths are left out.
    """
    rows_by_length: dict[int, list[LengthScore]] = {}
    for stored in evaluations:
        for row in stored.evaluation.scored:
            if row.length >= min_length:
                rows_by_length.setdefault(row.length, []).append(row)

    points: dict[int, float] = {}
    bounds: dict[int, tuple[float, float]] = {}
    for length, rows in rows_by_length.items():
        points[length] = statistics.fmean(row.perplexity for row in rows)
        bound = _perplexity_bounds(rows)
        if bound is not None:
            bounds[length] = bound
    return MethodCurve(name, position, points, bounds, tuple(evaluations), method_color(position))


def _perplexity_bounds(rows: list[LengthScore]) -> tuple[float, float] | None:
    """Return the bounds of a point of a curve.

    With several seeds, the bounds are the lowest and the highest perplexity. With a single seed, they are the 95 %
    interval over the text.

    Args:
        rows: The results at one evaluation length, one for each seed.

    Returns:
        The lower and the upper bound. None if the text is too short for an interval.
    """
    if len(rows) > 1:
        perplexities = [row.perplexity for row in rows]
        return min(perplexities), max(perplexities)
    loss_interval = interval(rows[0])
    if loss_interval is None:
        return None
    low, high = loss_interval
    return perplexity(low), perplexity(high)


def _curve_sort_key(curve: MethodCurve) -> tuple[int, str]:
    """Return a sort key: the order of the methods, then the name of the curve."""
    if curve.position in METHOD_ORDER:
        return METHOD_ORDER.index(curve.position), curve.name
    return len(METHOD_ORDER), curve.name


def _assign_colors(curves: list[MethodCurve]) -> tuple[MethodCurve, ...]:
    """Give each curve a separate color if its position method has several curves.

    Such curves are named after their runs. All other curves are named after their method, and keep its color.
    """
    free_colors = cycle(OTHERS)  # colors that belong to no position method
    colored: list[MethodCurve] = []
    for curve in curves:
        if curve.name != method_name(curve.position):
            curve = replace(curve, color=next(free_colors))
        colored.append(curve)
    return tuple(colored)


def _longest_sinusoidal(collection: Collection, min_length: int, text: TextKey) -> tuple[MethodCurve, ...]:
    """Return the sinusoidal model with the longest training length, evaluated at its training length.

    The model is a reference for models that are evaluated beyond their training length.

    Args:
        collection: The runs.
        min_length: Only models with a longer training length are considered.
        text: The text of the evaluation.

    Returns:
        A curve with a single point, or an empty tuple if there is no such model.
    """
    evaluations_by_length: dict[int, list[StoredEvaluation]] = {}
    for run in collection.runs.values():
        training_length = run.config.train.length
        if run.config.model.position != BASELINE_METHOD or training_length <= min_length:
            continue
        newest_evaluation = None
        for stored in run.standard_evaluations:  # The newest evaluation comes last.
            if _text_key(stored) == text and _has_score(stored, training_length):
                newest_evaluation = stored
        if newest_evaluation is not None:
            evaluations_by_length.setdefault(training_length, []).append(newest_evaluation)

    if not evaluations_by_length:
        return ()
    longest = max(evaluations_by_length)
    name = f"{method_name(BASELINE_METHOD)} trained at {longest:,}"
    curve = _make_curve(name, BASELINE_METHOD, evaluations_by_length[longest], min_length=longest)
    return (replace(curve, points={longest: curve.points[longest]}),)


def _has_score(stored: StoredEvaluation, length: int) -> bool:
    """Return whether an evaluation contains a perplexity at a length."""
    return any(row.length == length for row in stored.evaluation.scored)


# ---- the figure


def headline_figure(headline: Headline, *, with_paper: bool) -> Figure:
    """Return the main figure of the report.

    Args:
        headline: The curves.
        with_paper: Whether to add the curves of the paper, as dotted lines on the right axis.
    """
    all_curves = (*headline.curves, *headline.longer_models)
    series = [_curve_series(curve, headline.training_length) for curve in all_curves]
    if with_paper:
        series += _paper_series(headline)
    return Figure(
        name="headline",
        title=f"Trained at {headline.training_length:,} tokens, evaluated at up to {headline.lengths[-1]:,}",
        alt=_alternative_text(headline),
        series=tuple(series),
        x_label="evaluation length as a multiple of the training length",
        y_label="measured perplexity",
        right_label="perplexity in the paper (trained at 512)" if with_paper else "",
        x_log=True,
        y_log=True,
        ticks=_multiple_ticks(headline),
        note=_figure_note(headline, with_paper=with_paper),
        sources=tuple(path for curve in all_curves for path in curve.sources),
    )


def _curve_series(curve: MethodCurve, training_length: int) -> Series:
    """Return a curve for the figure. The x-values are multiples of the training length.

    Args:
        curve: The perplexities and their bounds, by evaluation length.
        training_length: The training length of the models in the figure.
    """
    lengths = sorted(curve.points)
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    # The band is drawn only if all points have bounds.
    if all(length in curve.bounds for length in lengths):
        low = tuple(curve.bounds[length][0] for length in lengths)
        high = tuple(curve.bounds[length][1] for length in lengths)
    multiples = tuple(length / training_length for length in lengths)
    perplexities = tuple(curve.points[length] for length in lengths)
    return Series(curve.name, x=multiples, y=perplexities, color=curve.color, low=low, high=high)


def _paper_series(headline: Headline) -> list[Series]:
    """Return the curves of the paper (Table 2), as dotted lines for the right axis.

    Only the position methods of `headline` are included. The curves end at the longest evaluation length of `headline`,
    as a multiple of the training length.
    """
    # The lengths in Table 2 are not exact multiples, such as 16.6 instead of 16. Therefore 4 % are added.
    max_length = headline.longest_multiple * 1.04 * PAPER_TRAINING_LENGTH
    rows = [row for row in load_published_numbers()["table2"] if row["L_valid"] <= max_length]
    series: list[Series] = []
    for curve in headline.curves:
        column = f"{curve.position}_ppl"
        method_rows = [row for row in rows if row.get(column)]
        if method_rows:
            x = tuple(row["L_valid"] / PAPER_TRAINING_LENGTH for row in method_rows)
            y = tuple(row[column] for row in method_rows)
            name = f"{curve.name}, paper"
            series.append(Series(name, x, y, curve.color, is_reference=True, uses_right_axis=True))
    return series


def _multiple_ticks(headline: Headline) -> tuple[tuple[float, str], ...]:
    """Return ticks at 1, 2, 4, 8, ... times the training length, with labels such as "4x<br>512"."""
    ticks: list[tuple[float, str]] = []
    for exponent in range(12):  # up to 2,048 times the training length
        multiple = 2**exponent
        # The longest length may be a little shorter than an exact multiple.
        if multiple <= headline.longest_multiple * 1.01:
            length = headline.training_length * multiple
            ticks.append((float(multiple), f"{multiple}x<br>{length:,}"))
    return tuple(ticks)


def _figure_note(headline: Headline, *, with_paper: bool) -> str:
    """Return the caption of the main figure.

    Args:
        headline: The curves.
        with_paper: Whether the figure also shows the curves of the paper.
    """
    # All curves show results for the same text, so the description of the first result is used.
    first_evaluation = headline.curves[0].stored[0].evaluation
    corpus = first_evaluation.corpus
    note = (
        f"Solid lines: perplexity on {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}. "
        "Bands: 95 % interval over the text, or range over the seeds."
    )
    if headline.longer_models:
        note += " Diamond: a model that was trained at this length, on the same number of tokens."
    if with_paper:
        note += " Thin dotted lines: Table 2 of the paper, on the right axis."
    return note


def _alternative_text(headline: Headline) -> str:
    """Return the alternative text of the figure: the first and the last point of each curve."""
    parts: list[str] = []
    for curve in headline.curves:
        first = min(curve.points)
        last = max(curve.points)
        first_text = f"{curve.points[first]:.1f} at {first:,}"
        last_text = f"{curve.points[last]:.1f} at {last:,}"
        parts.append(f"{curve.name} goes from {first_text} to {last_text}")
    return f"Perplexity by evaluation length: {'; '.join(parts)}."


# ---- the sentences


def headline_sentences(headline: Headline) -> list[str]:
    """Return three sentences about the curves.

    The sentences say which method is best at the training length, which methods are no worse at the longest length,
    and which methods are worse.
    """
    changes: dict[str, float] = {}
    for curve in headline.curves:
        longest_length = max(curve.points)
        changes[curve.name] = curve.points[longest_length] / curve.points[headline.training_length] - 1
    return [
        _best_method_sentence(headline),
        _extrapolating_sentence(headline, changes),
        _describe_rising_perplexities(changes),
    ]


def _best_method_sentence(headline: Headline) -> str:
    """Return a sentence with the perplexities of all methods at the training length, the lowest one first."""
    length = headline.training_length
    best = min(headline.curves, key=lambda curve: curve.points[length])
    best_perplexity = f"{best.points[length]:.1f}"
    other_curves = [curve for curve in headline.curves if curve is not best]
    if not other_curves:
        return f"At the training length of {length:,} tokens, {best.name} has a perplexity of {best_perplexity}."
    others = ", ".join(f"{curve.name} {curve.points[length]:.1f}" for curve in other_curves)
    return (
        f"At the training length of {length:,} tokens, {best.name} has the lowest perplexity: "
        f"{best_perplexity} ({others})."
    )


def _extrapolating_sentence(headline: Headline, changes: dict[str, float]) -> str:
    """Return a sentence with the methods that are no worse at the longest length than at the training length.

    Args:
        headline: The curves.
        changes: The relative change of the perplexity from the training length to the longest length, by curve.
    """
    longest = headline.lengths[-1]
    start = f"At {longest:,} tokens ({headline.longest_multiple:.0f} times the training length),"
    no_worse = [f"{name} ({change:+.1%})" for name, change in changes.items() if change <= MAX_INCREASE]
    if not no_worse:
        return f"{start} every method has a higher perplexity than at the training length."
    return (
        f"{start} the perplexity is at most {MAX_INCREASE:.0%} higher than at the training length "
        f"for {join_words(no_worse)}."
    )


def _describe_rising_perplexities(changes: dict[str, float]) -> str:
    """Return a sentence with the methods whose perplexity rises, largest increase first.

    Args:
        changes: The relative change of the perplexity from the training length to the longest length, by curve.
    """
    # Each item is a pair of a name and a change.
    largest_first = sorted(changes.items(), key=lambda item: item[1], reverse=True)
    worse = [f"{name} ({change:+.0%})" for name, change in largest_first if change > MAX_INCREASE]
    if not worse:
        return f"No method has a perplexity that is more than {MAX_INCREASE:.0%} higher."
    return f"The perplexity is higher for {join_words(worse)}."
