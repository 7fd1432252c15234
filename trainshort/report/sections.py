"""Further sections of the report: loss by position, early tokens, attention reach, text samples, and origin.

This module does not import torch.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainshort.evaluate.results import Query
from trainshort.evaluate.significance import MIN_PREDICTIONS_PER_BIN, bounds, describe_change_past_training, pool_bins
from trainshort.experiments.claims.collection import SAMPLE_FORMAT, Collection, Run, read_stored_result
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.experiments import METHOD_NAMES, EvalProtocol, build_queries, method_name
from trainshort.report.headline import Headline, MethodCurve
from trainshort.utils.figures import Figure, Series

# ---- loss by position


def position_figure(headline: Headline) -> Figure | None:
    """Return a figure of the mean loss by position in the input.

    The figure uses the longest length at which all models of the main figure were evaluated.

    Args:
        headline: The curves of the main figure.

    Returns:
        The figure, or None if the evaluated text is too short.
    """
    evaluations = [curve.stored[0].evaluation for curve in headline.curves]
    length_sets = [{row.length for row in evaluation.scored} for evaluation in evaluations]
    length = max(set.intersection(*length_sets))

    series: list[Series] = []
    sources: list[Path] = []
    changes: list[str] = []
    for curve, evaluation in zip(headline.curves, evaluations, strict=True):
        row = evaluation.row(length)
        bins = pool_bins(row) if row is not None else []
        if len(bins) < 2:
            continue
        positions = tuple(position_bin.middle for position_bin in bins)
        losses = tuple(position_bin.mean for position_bin in bins)
        low, high = bounds(bins)
        series.append(Series(curve.name, positions, losses, curve.color, low, high))
        sources.append(curve.sources[0])
        changes.append(f"{curve.name} {describe_change_past_training(bins, headline.training_length)}")
    if not series:
        return None

    training_length = f"{headline.training_length:,}"
    last_losses = "; ".join(f"{line.name} ends at {line.y[-1]:.2f}" for line in series)
    return Figure(
        name="positions",
        title=f"Loss by position in an input of {length:,} tokens",
        alt=f"Mean loss by position, with the training length {training_length} marked: {last_losses}.",
        series=tuple(series),
        x_label="position in the input",
        y_label="mean loss in nats per token",
        x_log=True,
        note=f"Each point is the mean of at least {MIN_PREDICTIONS_PER_BIN} predictions. Bands: 95 % intervals. "
        f"The models were trained on positions up to {training_length}. "
        f"Change beyond {training_length}, compared with the second half of the trained positions: "
        f"{'; '.join(changes)}.",
        sources=tuple(sources),
    )


# ---- early tokens


def early_figure(headline: Headline, collection: Collection, view: ScaleView | None) -> Figure | None:
    """Return a figure that compares evaluation with and without a sliding window.

    Without overlap, the first tokens of each window are predicted with little context ("early tokens"). A longer input
    has fewer early tokens. With a sliding window, all tokens are predicted with much context.

    Args:
        headline: The curves of the main figure.
        collection: The runs.
        view: The stored results at one scale (laptop, gpu or paper). None if the runs belong to no scale.

    Returns:
        The figure, or None if there are no such evaluations.
    """
    if view is None or view.scale.sliding_tokens is None:
        return None
    # A query selects stored evaluations. It does not contain a length, so any length can be given here.
    sliding_query, plain_query = build_queries(view.scale, EvalProtocol(1, stride=1))

    series: list[Series] = []
    sources: list[Path] = []
    for curve, run in _find_curve_runs(headline, collection):
        for query in (plain_query, sliding_query):
            lengths, perplexities, paths = _read_length_curve(run, query, headline.training_length)
            if len(lengths) < 2:
                continue
            is_sliding = query is sliding_query
            name = f"{curve.name}, sliding" if is_sliding else curve.name
            series.append(Series(name, lengths, perplexities, curve.color, is_reference=not is_sliding))
            sources += paths
    if not series:
        return None

    all_lengths = {length for line in series for length in line.x if not isinstance(length, str)}
    ranges = "; ".join(f"{line.name} from {line.y[0]:.1f} to {line.y[-1]:.1f}" for line in series)
    return Figure(
        name="early-tokens",
        title="The early-token curse: with and without a sliding window",
        alt=f"Perplexity by evaluation length on the same {view.scale.sliding_tokens:,} tokens: {ranges}.",
        series=tuple(series),
        x_label="evaluation length in tokens",
        y_label="perplexity",
        x_log=True,
        y_log=True,
        ticks=tuple((length, f"{length:,}") for length in sorted(all_lengths)),
        note=f"Solid lines: sliding window with stride {view.scale.stride_one}. Almost every token is predicted with "
        "full context. Dotted lines: windows without overlap. The first tokens of each window have little context.",
        sources=tuple(sources),
    )


def _find_curve_runs(headline: Headline, collection: Collection) -> list[tuple[MethodCurve, Run]]:
    """Return each curve of the main figure with the run of its first seed.

    A curve is left out if the folder of its run is not part of the collection.
    """
    runs_by_path = {run.path: run for run in collection.runs.values()}
    pairs: list[tuple[MethodCurve, Run]] = []
    for curve in headline.curves:
        run_folder = curve.sources[0].parent.parent  # Evaluations are stored in RUN/eval/NAME.json.
        if run_folder in runs_by_path:
            pairs.append((curve, runs_by_path[run_folder]))
    return pairs


def _read_length_curve(
    run: Run, query: Query, min_length: int
) -> tuple[tuple[int, ...], tuple[float, ...], list[Path]]:
    """Return the perplexities of a run by evaluation length.

    Args:
        run: The run.
        query: The text and the stride of the evaluation.
        min_length: Shorter evaluation lengths are left out.

    Returns:
        The lengths, the perplexities, and the files without duplicates.
    """
    lengths: list[int] = []
    perplexities: list[float] = []
    paths: dict[Path, None] = {}
    for length, (row, path) in run.rows(query).items():
        if length >= min_length and row.status == "scored":
            lengths.append(length)
            perplexities.append(row.perplexity)
            paths[path] = None
    return tuple(lengths), tuple(perplexities), list(paths)


# ---- attention reach


class ReachResult(NamedTuple):
    """How far the attention heads of a model look.

    Attributes:
        windows: For each head, the smallest window that holds `mass` of the attention weights, in ascending order.
        proven: For each head with a proof, the window that is proven to hold `mass`, in ascending order.
        mass: The share of the attention weights that a window holds.
        length: The number of tokens on which the windows were measured.
    """

    windows: list[float]
    proven: list[float]
    mass: float
    length: int


def _parse_reach_result(values: dict[str, Any]) -> ReachResult:
    """Convert the content of `analysis/reach.json`: how far the attention heads of a model look.

    Each row of the file is one attention head. Its "window" is the smallest number of recent tokens that hold the share
    "mass" of the attention weights. Its "proven" window is a proven upper bound of the window, or None without a proof.
    "length" is the number of tokens on which the windows were measured.

    Args:
        values: The content of the file, which `trainshort analyze` wrote.

    Raises:
        LookupError: If the file contains no attention heads.
    """
    result = values["result"]
    windows = sorted(float(row["window"]) for row in result["rows"])
    proven = sorted(float(row["proven"]) for row in result["rows"] if row["proven"] is not None)
    if not windows:
        raise LookupError("The file contains no heads.")  # `read_stored_result` translates this error for users.
    return ReachResult(windows, proven, mass=float(result["mass"]), length=int(result["length"]))


def reach_figure(headline: Headline, collection: Collection) -> Figure | None:
    """Return a figure of how far the attention heads look. Heads are sorted by their window.

    Args:
        headline: The curves of the main figure.
        collection: The runs.

    Returns:
        The figure, or None if no run was analyzed.
    """
    series: list[Series] = []
    sources: list[Path] = []
    ranges: list[str] = []
    reach = None
    for curve, run in _find_curve_runs(headline, collection):
        path = run.path / "analysis" / "reach.json"
        run_reach = read_stored_result(path, _parse_reach_result, "Remove it and analyze the run again.")
        if run_reach is None:
            continue
        reach = run_reach
        heads = tuple(range(1, len(reach.windows) + 1))
        series.append(Series(curve.name, heads, tuple(reach.windows), curve.color))
        if reach.proven:
            series.append(Series(f"{curve.name}, proven", heads, tuple(reach.proven), curve.color, is_reference=True))
        sources.append(path)
        ranges.append(f"{curve.name} from {reach.windows[0]:,.0f} to {reach.windows[-1]:,.0f} tokens")
    if reach is None:
        return None

    # All models are analyzed with the same settings, so those of the last model are shown.
    mass = f"{reach.mass:.0%}"
    return Figure(
        name="reach",
        title="How far attention reaches",
        alt=f"Window that holds {mass} of a head's attention, over all heads: {'; '.join(ranges)}.",
        series=tuple(series),
        x_label="heads of all layers, sorted by their window",
        y_label=f"tokens that hold {mass} of the attention",
        y_log=True,
        note=f"Solid lines: windows measured on {reach.length:,} tokens. "
        f"Dotted lines: windows that are proven to hold {mass} of the attention weights of every query. "
        "The proof uses the largest queries and keys in this text, so another text may need larger windows. "
        "Only ALiBi has proven windows. "
        f"The models were trained at {headline.training_length:,} tokens.",
        sources=tuple(sources),
    )


# ---- origin


def origin_rows(collection: Collection) -> list[tuple[str, str]]:
    """Return how the results were produced: commits, versions, machines, seeds and times.

    Args:
        collection: The runs.

    Returns:
        Pairs of a label and its text. Rows without a text are left out.
    """
    runs = list(collection.runs.values())
    # Sessions are the training runs. The provenance of an evaluation has the same keys.
    records = [session for run in runs for session in run.sessions]
    records += [stored.evaluation.provenance for run in runs for stored in run.evaluations]

    versions: dict[str, Any] = {}
    times: list[str] = []
    for record in records:
        if record.get("versions"):
            versions = record["versions"]  # The versions of the last record are shown.
        if record.get("time"):
            times.append(str(record["time"]))
    seeds = sorted({run.config.train.seed for run in runs})

    rows = [
        ("Scale", collection.scale.summary if collection.scale else "runs with other settings than the scales"),
        ("Commit", _join_unique(record.get("commit") for record in records)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("Machine", _join_unique(_format_machine(record) for record in records)),
        ("Threads", _join_unique(record.get("threads") for record in records)),
        ("Seeds", _join_unique(seeds)),
        ("Training", _format_training(collection)),
        ("First result", min(times, default="")),
        ("Last result", max(times, default="")),
    ]
    return [(label, text) for label, text in rows if text]


def _format_training(collection: Collection) -> str:
    """Return a text such as "4 models, 4,423,680 tokens, 8.5 minutes of training", or "" without runs."""
    runs = collection.runs.values()
    if not runs:
        return ""
    # `run.metrics` is the log of the training. Its last record contains the totals of the run.
    last_records = [run.metrics[-1] for run in runs if run.metrics]
    tokens = sum(record["tokens"] for record in last_records)
    minutes = sum(record["seconds"] for record in last_records) / 60
    return f"{format_model_count(collection)}, {tokens:,} tokens, {minutes:.1f} minutes of training"


def format_model_count(collection: Collection) -> str:
    """Return the number of models as text, such as "1 model" or "4 models"."""
    count = len(collection.runs)
    return "1 model" if count == 1 else f"{count} models"


def _format_machine(record: dict[str, Any]) -> str:
    """Return a text such as "AMD EPYC, Linux x86_64, 2 cores".

    Args:
        record: A provenance record, which says on which machine and with which software a result was computed.
    """
    machine = record.get("machine") or {}
    parts = [str(machine[key]) for key in ("cpu", "system") if machine.get(key)]
    text = ", ".join(parts)
    if machine.get("cores"):
        text += f", {machine['cores']} cores"
    return text


def _join_unique(values: Iterable[Any]) -> str:
    """Join values with commas. Duplicates, empty strings and None are left out."""
    texts = [str(value) for value in values if value not in (None, "")]
    return ", ".join(dict.fromkeys(texts))


# ---- text samples

SURPRISE_THRESHOLDS = (1.0, 2.0, 4.0, 6.0)
"""A token gets a darker shade for each threshold that its negative log-likelihood (in nats) reaches."""


class GeneratedToken(NamedTuple):
    """A generated token.

    Attributes:
        text: The text of the token.
        nll: The negative log-likelihood of the token in nats.
        shade: The index of the color, from 0 (likely) to 4 (unlikely).
    """

    text: str
    nll: float
    shade: int


@dataclass(frozen=True)
class Passage:
    """A part of a text that a model has generated.

    Attributes:
        end: The position of the last token. The position counts from the start of the prompt.
        prompt_end: The last part of the prompt.
        tokens: The generated tokens.
    """

    end: int
    prompt_end: str
    tokens: Sequence[GeneratedToken]

    @property
    def mean_nll(self) -> float | None:
        """Return the mean negative log-likelihood of the generated tokens, or None if there are no tokens."""
        if not self.tokens:
            return None
        return statistics.fmean(token.nll for token in self.tokens)


@dataclass(frozen=True)
class TextSample:
    """The text that one model has generated.

    Attributes:
        name: The name of the position method.
        training_length: The training length of the model.
        passages: The parts of the text. They end at different multiples of the training length.
        path: The file of the sample.
    """

    name: str
    training_length: int
    passages: list[Passage]
    path: Path


def find_samples(collection: Collection) -> list[TextSample]:
    """Return the text samples of all runs, sorted by position method and training length.

    A text sample is text that a trained model has generated. Runs without a sample are left out.
    """
    hint = "Remove it. `trainshort demo` and `trainshort reproduce` create it again."
    samples: list[TextSample] = []
    for run in collection.runs.values():
        path = run.path / "samples" / "sample.json"
        parsed_sample = read_stored_result(path, _parse_sample, hint)
        if parsed_sample is not None:
            training_length, passages = parsed_sample
            name = method_name(run.config.model.position)
            samples.append(TextSample(name, training_length, passages, path))

    method_ranks = {name: rank for rank, name in enumerate(METHOD_NAMES.values())}
    last_rank = len(method_ranks)  # Methods that are not in the paper come last.

    def sort_key(sample: TextSample) -> tuple[int, int]:
        """Return the rank of the position method, then the training length."""
        return method_ranks.get(sample.name, last_rank), sample.training_length

    return sorted(samples, key=sort_key)


def _parse_sample(values: dict[str, Any]) -> tuple[int, list[Passage]]:
    """Convert the content of `samples/sample.json`, the text that a model has generated.

    Args:
        values: The content of the file.

    Returns:
        The training length of the model, and the generated passages. Each passage ends at another position.
    """
    training_length = int(values["trained_at"])
    if values["format"] != SAMPLE_FORMAT:
        raise ValueError("Unknown format.")  # `read_stored_result` translates this error for users.
    passages: list[Passage] = []
    for passage in values["passages"]:
        # "written" contains the text and the negative log-likelihood (nll) of each generated token.
        tokens = [_make_generated_token(str(text), float(nll)) for text, nll in passage["written"]]
        # "end" is the position of the last token, and "given" is the end of the prompt.
        passages.append(Passage(int(passage["end"]), str(passage["given"]), tokens))
    return training_length, passages


def _make_generated_token(text: str, nll: float) -> GeneratedToken:
    """Return a generated token with its shade."""
    # The number of thresholds that the negative log-likelihood reaches.
    shade = sum(nll >= threshold for threshold in SURPRISE_THRESHOLDS)
    return GeneratedToken(text, nll, shade)
