"""The other figures and facts of the page: loss by position, early tokens, reach, what was written, how it was
made. No torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.evaluate.significance import MIN_PREDICTIONS_PER_BIN, bounds, describe_change_past_training, pool_bins
from trainshort.experiments.claims.collection import SAMPLE_FORMAT, Collection, Run, read_stored_result
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.experiments import METHOD_NAMES, EvalProtocol, build_queries, method_name
from trainshort.report.headline import Curve, Headline
from trainshort.utils.figures import Figure, Series


def position_figure(headline: Headline) -> Figure | None:
    """Mean loss by distance from the start of the input, at the longest length every method was evaluated at."""
    first = [line.stored[0].evaluation for line in headline.lines]
    length = max(set.intersection(*({row.length for row in one.scored} for one in first)))
    series, sources, changes = [], [], []
    for line, evaluation in zip(headline.lines, first, strict=True):
        row = evaluation.row(length)
        bins = pool_bins(row) if row else []
        if len(bins) < 2:
            continue
        x, y = tuple(one.middle for one in bins), tuple(one.mean for one in bins)
        low, high = bounds(bins)
        series.append(Series(line.name, x, y, line.shade, low, high))
        sources.append(line.sources[0])
        changes.append(f"{line.name} {describe_change_past_training(bins, headline.length)}")
    if not series:
        return None
    told = "; ".join(f"{one.name} ends at {one.y[-1]:.2f}" for one in series)
    return Figure(
        name="positions",
        title=f"Loss by position in an input of {length:,} tokens",
        alt=f"Mean loss against position, with the training length {headline.length:,} marked: {told}.",
        series=tuple(series),
        x_label="position in the input",
        y_label="mean loss, nats per token",
        x_log=True,
        note=f"Points of at least {MIN_PREDICTIONS_PER_BIN} predictions, with their 95 % intervals. "
        + f"Up to {headline.length:,} is what the models were trained on. Past it, against the half before it: "
        + f"{'; '.join(changes)}.",
        sources=tuple(sources),
    )


def _headline_runs(headline: Headline, collection: Collection) -> list[tuple[Curve, Run]]:
    """The headline's lines, each with the first of its runs."""
    runs = {run.path: run for run in collection.runs.values()}
    return [(line, runs[folder]) for line in headline.lines if (folder := line.sources[0].parent.parent) in runs]


def early_figure(headline: Headline, collection: Collection, view: ScaleView | None) -> Figure | None:
    """Sliding windows against none, on the same text: how much of a longer input's gain is fewer early tokens."""
    if view is None or view.scale.sliding_tokens is None:
        return None
    stride, tokens = view.scale.stride_one, view.scale.sliding_tokens
    sliding, plain = build_queries(view.scale, EvalProtocol(1, stride=1))
    series, sources, lengths = [], [], set()
    for line, run in _headline_runs(headline, collection):
        for kind, query in (("", plain), (", sliding", sliding)):
            rows = run.rows(query).items()
            found = {at: one for at, one in rows if at >= headline.length and one[0].status == "scored"}
            if len(found) < 2:
                continue
            y = tuple(row.perplexity for row, _ in found.values())
            series.append(Series(line.name + kind, tuple(found), y, line.shade, is_reference=not kind))
            lengths |= found.keys()
            sources += dict.fromkeys(path for _, path in found.values())
    if not series:
        return None
    told = "; ".join(f"{one.name} from {one.y[0]:.1f} to {one.y[-1]:.1f}" for one in series)
    return Figure(
        name="early-tokens",
        title="The early-token curse: with and without a sliding window",
        alt=f"Perplexity against length on the same {tokens:,} tokens: {told}.",
        series=tuple(series),
        x_label="tokens read at once",
        y_label="perplexity",
        x_log=True,
        y_log=True,
        ticks=tuple((length, f"{length:,}") for length in sorted(lengths)),
        note=f"Solid: sliding window, stride {stride}, so that almost every prediction has a full context. Dotted: "
        "without overlap, where the first predictions of each block have little.",
        sources=tuple(sources),
    )


def _read_reach_result(values: dict[str, Any]) -> tuple[list[float], list[float], float, int]:
    """Measured and proven windows in order, the share of attention that they hold, and the tokens that were read."""
    result = values["result"]
    windows = sorted(float(row["window"]) for row in result["rows"])
    proven = sorted(float(row["proven"]) for row in result["rows"] if row["proven"] is not None)
    if not windows:
        raise LookupError("no head was measured")
    return windows, proven, float(result["mass"]), int(result["length"])


def reach_figure(headline: Headline, collection: Collection) -> Figure | None:
    """The window that holds most of each head's attention, heads from the nearest-looking to the farthest."""
    series, sources, told = [], [], []
    share, length = 0.99, 0
    for line, run in _headline_runs(headline, collection):
        path = run.path / "analysis" / "reach.json"
        reach = read_stored_result(path, _read_reach_result, "Remove it and analyze again.")
        if reach is None:
            continue
        windows, proven, share, length = reach
        heads = tuple(range(1, len(windows) + 1))
        series.append(Series(line.name, heads, tuple(windows), line.shade))
        if proven:
            series.append(Series(f"{line.name}, proven", heads, tuple(proven), line.shade, is_reference=True))
        sources.append(path)
        told.append(f"{line.name} from {windows[0]:,.0f} to {windows[-1]:,.0f} tokens")
    if not series:
        return None
    return Figure(
        name="reach",
        title="How far attention reaches",
        alt=f"Window that holds {share:.0%} of a head's attention, over all heads: {'; '.join(told)}.",
        series=tuple(series),
        x_label="heads of all layers, from the nearest-looking to the farthest",
        y_label=f"tokens that hold {share:.0%} of the attention",
        y_log=True,
        note=f"Measured on {length:,} tokens. Dotted: the window that holds {share:.0%} of every row by proof, for "
        "queries and keys no larger than those met in this text; another text may have larger ones and need more. Only "
        f"ALiBi has such a window. The models were trained at {headline.length:,}.",
        sources=tuple(sources),
    )


def origin(collection: Collection) -> list[tuple[str, str]]:
    """How it was made: commits, versions, machines, seeds, times."""
    runs = list(collection.runs.values())
    evaluations = [one for run in runs for one in run.evaluations]
    records = [session for run in runs for session in run.sessions]
    records += [one.evaluation.provenance for one in evaluations]
    ends = [run.metrics[-1] for run in runs if run.metrics]
    tokens, minutes = sum(end["tokens"] for end in ends), sum(end["seconds"] for end in ends) / 60
    versions = [record["versions"] for record in records if record.get("versions")] or [{}]
    times = sorted(str(record["time"]) for record in records if record.get("time")) or [""]
    rows = [
        ("Scale", collection.scale.summary if collection.scale else "runs of your own"),
        ("Commit", _several(record.get("commit") for record in records)),
        ("Versions", ", ".join(f"{name} {value}" for name, value in versions[-1].items() if value)),
        ("Machine", _several(_machine(record) for record in records)),
        ("Threads", _several(record.get("threads") for record in records)),
        ("Seeds", _several(sorted({run.config.train.seed for run in runs}))),
        ("Trained", f"{models(collection)}, {tokens:,} tokens, {minutes:.1f} minutes of training" if runs else ""),
        ("From", times[0]),
        ("To", times[-1]),
    ]
    return [(name, value) for name, value in rows if value]


def models(collection: Collection) -> str:
    return f"{len(collection.runs)} model{'' if len(collection.runs) == 1 else 's'}"


def _machine(record: dict[str, Any]) -> str:
    machine = record.get("machine") or {}
    return ", ".join(str(machine[key]) for key in ("cpu", "system") if machine.get(key)) + (
        f", {machine['cores']} cores" if machine.get("cores") else ""
    )


def _several(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))


# ---- what the models wrote, at their training length and past it, with their own surprise at each token

SURPRISE_THRESHOLDS = (1.0, 2.0, 4.0, 6.0)
"""Surprises, in nats, at which the page takes the next shade."""


@dataclass(frozen=True)
class Passage:
    """A stretch that was written, where it ends, and the text right before it."""

    end: int
    given: str
    pieces: Sequence[tuple[str, float, int]]
    """Each token, -log p of it in nats under the model that wrote it, and the shade of that."""

    @property
    def surprise(self) -> float | None:
        if not self.pieces:
            return None
        return statistics.fmean(nats for _, nats, _ in self.pieces)


@dataclass(frozen=True)
class WrittenText:
    """What one model wrote."""

    name: str
    trained_at: int
    passages: list[Passage]
    path: Path


def samples(collection: Collection) -> list[WrittenText]:
    """Of every run that wrote something."""
    found = []
    for run in collection.runs.values():
        path = run.path / "samples" / "sample.json"
        written = read_stored_result(path, _written, "Remove it; trainshort demo and reproduce write it again.")
        if written is not None:
            found.append(WrittenText(method_name(run.config.model.position), *written, path))
    order = {name: rank for rank, name in enumerate(METHOD_NAMES.values())}
    return sorted(found, key=lambda sample: (order.get(sample.name, 99), sample.trained_at))


def _written(values: dict[str, Any]) -> tuple[int, list[Passage]]:
    """The training length, and what was written."""
    length = int(values["trained_at"])
    if values["format"] != SAMPLE_FORMAT:
        raise ValueError("another format")  # `stored` reports the file.
    passages = []
    for one in values["passages"]:
        written = [(str(text), float(nats)) for text, nats in one["written"]]
        pieces = [(text, nats, sum(nats >= bound for bound in SURPRISE_THRESHOLDS)) for text, nats in written]
        passages.append(Passage(int(one["end"]), str(one["given"]), pieces))
    return length, passages
