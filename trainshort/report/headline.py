"""The first screen: perplexity against length, and three sentences written from the same numbers."""

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from trainshort.config.run_config import RunConfig
from trainshort.evaluate.results import LengthScore, StoredEvaluation, interval, perplexity
from trainshort.experiments.claims.collection import Collection, Run
from trainshort.experiments.experiments import load_published_numbers, method_name
from trainshort.train.run_folder import run_name
from trainshort.utils.figures import OTHERS, Figure, Series, method_color
from trainshort.utils.terminal import join_words

PAPER_LENGTH = 512
LONG = "sinusoidal"
"""The method that has to be trained at the length it is evaluated at."""
ORDER = ("alibi", "t5", "rotary", "sinusoidal")
NO_WORSE = 0.01
"""Up to one per cent more perplexity counts as no worse."""


@dataclass(frozen=True)
class Curve:
    """One method's curve: mean perplexity over its seeds, by length."""

    name: str
    position: str
    points: dict[int, float]
    bounds: dict[int, tuple[float, float]]
    stored: tuple[StoredEvaluation, ...]
    """The evaluations behind it, one per seed."""
    shade: str
    """The method's colour; where a method has several lines, one that no method has."""

    @property
    def sources(self) -> tuple[Path, ...]:
        return tuple(one.path for one in self.stored)


@dataclass(frozen=True)
class Headline:
    """The lines of all methods that were trained at one length."""

    length: int
    lines: tuple[Curve, ...]
    is_controlled_comparison: bool
    """Whether the models differ in their positions only: one of each method, of one size, on as much of one text."""
    beyond: tuple[Curve, ...]
    """Models that were trained longer, evaluated at their own length: what the lines are measured against."""

    @property
    def lengths(self) -> list[int]:
        return sorted({length for line in self.lines for length in line.points})


def find_headline(collection: Collection) -> Headline | None:
    """The training length that most runs share, and their curves; None when no run was evaluated at two lengths."""
    swept = [
        (run, stored)
        for run in collection.runs.values()
        for stored in run.standard_evaluations
        if _goes_past(run, stored)
    ]
    if not swept:
        return None
    length, text = _most_shared(swept)
    found = {run.path: (run, one) for run, one in swept if _text(one) == text}
    groups: dict[str, list[tuple[Run, StoredEvaluation]]] = {}
    for run, stored in found.values():
        if run.config.train.length == length:
            groups.setdefault(run_name(run.config.replace(train={"seed": 0})), []).append((run, stored))
    firsts = [group[0][0] for group in groups.values()]
    positions = Counter(run.config.model.position for run in firsts)
    lines = []
    for run, group in zip(firsts, groups.values(), strict=True):
        position = run.config.model.position
        name = method_name(position) if positions[position] == 1 else run.name
        lines.append(_line(name, position, [stored for _, stored in group], length))
    lines.sort(key=lambda line: (ORDER.index(line.position) if line.position in ORDER else 9, line.name))
    alike = len({_size(run.config) for run in firsts}) == 1 and max(positions.values()) == 1
    return Headline(length, _assign_colors(lines), alike, _longest_sinusoidal(collection, length, text))


def _size(config: RunConfig) -> tuple[str | int, ...]:
    """What models share that are compared by their positions; by which optimizer each was trained best is its own."""
    model, train = config.model, config.train
    return model.layers, model.width, model.heads, model.vocab_size, config.data.corpus, train.steps * train.batch


def _assign_colors(lines: list[Curve]) -> tuple[Curve, ...]:
    """Lines that go by a run's name have the next colour that no method has."""
    free = cycle(OTHERS)
    return tuple(line if line.name == method_name(line.position) else replace(line, shade=next(free)) for line in lines)


def _longest_sinusoidal(collection: Collection, length: int, text: tuple[int, str, str]) -> tuple[Curve, ...]:
    """The sinusoidal model of the greatest training length, at that length, on the same text."""
    found: dict[int, list[StoredEvaluation]] = {}
    for run in collection.runs.values():
        own = run.config.train.length
        same = [
            one
            for one in run.standard_evaluations
            if _text(one) == text and own in {row.length for row in one.evaluation.scored}
        ]
        if run.config.model.position == LONG and own > length and same:
            found.setdefault(own, []).append(same[-1])
    if not found:
        return ()
    own = max(found)
    line = _line(f"{method_name(LONG)} trained at {own:,}", LONG, found[own], own)
    return (replace(line, points={own: line.points[own]}),)


def _goes_past(run: Run, stored: StoredEvaluation) -> bool:
    """Whether an evaluation has the training length and a longer one."""
    length = run.config.train.length
    rows = [row for row in stored.evaluation.scored if row.length >= length]
    return len(rows) > 1 and rows[0].length == length


def _text(stored: StoredEvaluation) -> tuple[int, str, str]:
    """What two evaluations must share to stand in one figure: the same tokens, in the same precision."""
    corpus = stored.evaluation.corpus
    return corpus["tokens"], corpus["sha256"], stored.evaluation.protocol["precision"]


def _most_shared(swept: list[tuple[Run, StoredEvaluation]]) -> tuple[int, tuple[int, str, str]]:
    """The training length and the text that most runs share; of several texts the test split's, then the longest.
    Curves on different texts in one figure would compare the texts."""
    runs: dict[tuple[int, tuple[int, str, str]], set[Path]] = {}
    for run, stored in swept:
        runs.setdefault((run.config.train.length, _text(stored)), set()).add(run.path)
    test = {_text(stored) for _, stored in swept if stored.evaluation.corpus["split"] == "test"}
    return max(runs, key=lambda key: (len(runs[key]), key[1] in test, key[1][0]))


def _line(name: str, position: str, group: list[StoredEvaluation], length: int) -> Curve:
    rows: dict[int, list[LengthScore]] = {}
    for stored in group:
        for row in stored.evaluation.scored:
            if row.length >= length:
                rows.setdefault(row.length, []).append(row)
    points = {at: statistics.fmean(row.perplexity for row in found) for at, found in rows.items()}
    bounds = {at: bound for at, found in rows.items() if (bound := _bound(found))}
    return Curve(name, position, points, bounds, tuple(group), method_color(position))


def _bound(rows: list[LengthScore]) -> tuple[float, float] | None:
    """Between the seeds, or with one seed the 95 % interval over stretches of text."""
    if len(rows) > 1:
        return min(row.perplexity for row in rows), max(row.perplexity for row in rows)
    found = interval(rows[0])
    return (perplexity(found[0]), perplexity(found[1])) if found else None


def figure(headline: Headline, *, with_paper: bool) -> Figure:
    """Lines by multiples of the training length; the paper's own curves thin, on the right axis."""
    series = []
    for line in (*headline.lines, *headline.beyond):
        at, y = zip(*sorted(line.points.items()), strict=True)
        banded = all(length in line.bounds for length in at)
        low, high = zip(*(line.bounds[length] for length in at), strict=True) if banded else ((), ())
        series.append(Series(line.name, tuple(length / headline.length for length in at), y, line.shade, low, high))
    if with_paper:
        series += _paper_series(headline)
    corpus = headline.lines[0].stored[0].evaluation.corpus
    longest = headline.lengths[-1] / headline.length
    ticks = tuple((2.0**k, f"{2**k}x<br>{headline.length * 2**k:,}") for k in range(12) if 2**k <= longest * 1.01)
    return Figure(
        name="headline",
        title=f"Trained at {headline.length:,} tokens, evaluated at up to {headline.lengths[-1]:,}",
        alt=_alt(headline),
        series=tuple(series),
        x_label="tokens read at once, as multiples of the training length",
        y_label="perplexity here",
        right_label="perplexity in the paper (trained at 512)" if with_paper else "",
        x_log=True,
        y_log=True,
        ticks=ticks,
        note=f"Solid: here, on {corpus['name']}, {corpus['tokens']:,} tokens of its {corpus['split']} split, with the "
        "95 % interval over stretches of the text or the range over seeds."
        + (" The diamond was trained at its own length, on as many tokens." if headline.beyond else "")
        + (" Thin and dotted: the paper's Table 2, on the right axis." if with_paper else ""),
        sources=tuple(path for line in (*headline.lines, *headline.beyond) for path in line.sources),
    )


def _paper_series(headline: Headline) -> list[Series]:
    longest = headline.lengths[-1] / headline.length * 1.04
    rows = [row for row in load_published_numbers()["table2"] if row["L_valid"] <= longest * PAPER_LENGTH]
    found = []
    for line in headline.lines:
        kept = [row for row in rows if row.get(f"{line.position}_ppl")]
        if kept:
            x = tuple(row["L_valid"] / PAPER_LENGTH for row in kept)
            y = tuple(row[f"{line.position}_ppl"] for row in kept)
            found.append(Series(f"{line.name}, paper", x, y, line.shade, is_reference=True, uses_right_axis=True))
    return found


def _alt(headline: Headline) -> str:
    """The figure in words: first and last point of each line."""
    parts = []
    for line in headline.lines:
        (first, begin), *_, (last, end) = sorted(line.points.items())
        parts.append(f"{line.name} goes from {begin:.1f} at {first:,} to {end:.1f} at {last:,}")
    return f"Perplexity against the number of tokens read at once: {'; '.join(parts)}."


def sentences(headline: Headline) -> list[str]:
    """Three sentences of result: who is best at the training length, who keeps it far beyond, who does not."""
    length, longest = headline.length, headline.lengths[-1]
    best = min(headline.lines, key=lambda line: line.points[length])
    others = ", ".join(f"{line.name} {line.points[length]:.1f}" for line in headline.lines if line is not best)
    first = f"Trained on {length:,} tokens at a time and evaluated at {length:,}, {best.name} has "
    first += "the lowest perplexity, " if others else "perplexity "
    first += f"{best.points[length]:.1f}" + (f" ({others})." if others else ".")
    changes = [(line.name, line.points[max(line.points)] / line.points[length] - 1) for line in headline.lines]
    kept = [f"{name} ({change:+.1%})" for name, change in changes if change <= NO_WORSE]
    lost = [f"{name} by {change:.0%}" for name, change in sorted(changes, key=lambda one: -one[1]) if change > NO_WORSE]
    second = f"Evaluated {longest / length:.0f} times as far, at {longest:,} tokens, "
    no_worse = f"{join_words(kept)} {'is' if len(kept) == 1 else 'are'} no worse."
    second += no_worse if kept else f"every method is worse than at {length:,}."
    third = f"Getting worse over that distance: {join_words(lost)}." if lost else "No method that was tried gets worse."
    return [first, second, third]
