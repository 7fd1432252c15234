"""Write the stored results into README.md and docs/: `python -m benchmarks.update_docs [REPORT ...]`.

A document marks the places of results. The text between two such lines is a table of this file:

    <!-- measured: training -->
    <!-- end of measured -->

Tables of a report (of the demo, of the search of training settings, or of the paper's tables) are marked by `obtained`
instead of `measured`. A value inside a sentence is marked as `<!-- value: recorded -->0.12 ×<!-- end -->`.

If folders of reports are given, their results are first stored in benchmarks/results, and their figures in docs.
A test fails if a document differs from the stored results. This file does not import torch.
"""

import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainshort.evaluate.results import Evaluation, interval, perplexity
from trainshort.experiments.experiments import load_published_numbers, method_name
from trainshort.utils.bench_results import RATIO, BenchResult, Measurement, load_bench_result
from trainshort.utils.figures import Figure, Series, draw_figures, method_color
from trainshort.utils.io import read_with_checksum

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "docs/attention.md",
    "docs/evaluation.md",
    "docs/generation.md",
    "docs/interop.md",
    "docs/positions.md",
    "docs/reproduce.md",
    "docs/training.md",
    "docs/windows.md",
)

# The place of a table. Group 1 is the first comment, group 2 the name of the table, group 4 the last comment.
REGION = re.compile(r"(<!-- (?:measured|obtained): (\S+) -->\n)(.*?)(<!-- end of (?:measured|obtained) -->)", re.DOTALL)

# The place of a value. The groups are those of REGION.
VALUE = re.compile(r"(<!-- value: (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)

# This column is left out of documents, because other models train while evaluations are timed.
HIDDEN_COLUMN = "read tokens/s"

# The lengths of the paper's Table 2 that are shown next to the first and the last length of the demo.
PAPER_LENGTHS = (512, 8512)

# The lengths that the README shows.
README_LENGTHS = (1024, 4096, 16_384, 32_768)

# Columns with the length and the times relative to plain attention.
RATIO_COLUMNS = ("tokens", "to plain", "both to plain")

# Names of the models in the table "field-training".
FIELD_MODELS = {
    "alibi-learned": "ALiBi, trained slopes",
    "alibi-ssmax": "ALiBi, length scaling (SSMax)",
    "fox-alibi": "FoX, gates start at ALiBi's slopes",
}

# Results with times of attention with a decay bias, and the names of the rows.
DECAY_RESULTS = {
    "attention-clock": "ALiBi's slopes as a decay bias, random inputs",
    "attention-fox-times": "FoX, gates start at one half, recorded",
    "attention-fox-alibi-times": "FoX, gates start at ALiBi's slopes, recorded",
}

# Results with the share of skipped work for recorded models, and the names of the rows.
WORK_RESULTS = {
    "attention-demo-alibi": "demo: ALiBi",
    "attention-demo-fox-alibi": "demo: FoX, gates start at ALiBi's slopes",
    "attention-demo-fox": "demo: FoX, gates start at one half",
    "attention-alibi-8x64": "8 heads of 64: ALiBi",
    "attention-fox-alibi-8x64": "8 heads of 64: FoX, gates start at ALiBi's slopes",
    "attention-fox-8x64": "8 heads of 64: FoX, gates start at one half",
}


# ---- cells and tables


def format_table(header: str, rows: list[list[str]]) -> str:
    """Return a Markdown table. The first column is aligned to the left, all other columns to the right.

    Args:
        header: The column titles, separated by " | ".
        rows: The cells of each row.
    """
    column_count = header.count("|") + 1
    lines = [f"| {header} |", "|---|" + "--:|" * (column_count - 1)]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def format_cell(row: Measurement, name: str, *, ratio_digits: int = 2) -> str:
    """Return a measured value with its unit, or an empty string if the row does not have this value.

    Times and sizes below 100 have one decimal place. Other values except ratios have none.

    Args:
        row: The measurement.
        name: The name of the value.
        ratio_digits: The decimal places of a ratio.
    """
    if name not in row.measured:
        return ""
    measure = row.measured[name]
    if measure.unit == RATIO:
        digits = ratio_digits
    elif measure.unit in ("ms", "MB") and measure.value < 100:
        digits = 1
    else:
        digits = 0
    return f"{measure.value:,.{digits}f} {measure.unit}".strip()


def format_cells(row: Measurement, *names: str) -> list[str]:
    """Return several cells of a row. Each name is a key of the case, such as "tokens", or a measured value."""
    cells = []
    for name in names:
        case_value = row.case.get(name)
        if isinstance(case_value, int):
            cells.append(f"{case_value:,}")
        elif case_value:
            cells.append(case_value)
        else:
            cells.append(format_cell(row, name))
    return cells


def format_ratio(value: float, baseline: float, *, digits: int = 2) -> str:
    """Return the ratio of a value to a baseline: "1.25 ×"."""
    return f"{value / baseline:.{digits}f} {RATIO}"


def describe_origin(result: BenchResult, name: str) -> str:
    """Return the line below a table: the machine, the commit and the file of a result.

    Args:
        result: The benchmark result.
        name: The name of its file in benchmarks/results, without the suffix.
    """
    commit = str(result.made.get("commit"))
    short_commit = commit[:7]
    if commit.endswith("+changes"):
        short_commit += " with uncommitted changes"
    remark = "" if result.finished else ". The run was stopped before its end"
    return f"\n{result.machine}, commit {short_commit}, `benchmarks/results/{name}.json`{remark}.\n"


# ---- tables of benchmark results


def rows_by_length(result: BenchResult, implementation: str = "windowed") -> dict[int, Measurement]:
    """Return the rows of one implementation in the attention benchmark, by the number of tokens."""
    rows = {}
    for row in result.suites["attention"]:
        if row.case["engine"] == implementation:
            rows[int(row.case["tokens"])] = row
    return rows


def attention_table(result: BenchResult) -> str:
    """Return the times and the memory of the backend `windowed` relative to plain attention, by length."""
    plain_rows = rows_by_length(result, "plain")
    rows = []
    for tokens, row in rows_by_length(result).items():
        own_memory = row.measured["own memory"].value
        plain_memory = plain_rows[tokens].measured["own memory"].value
        cells = format_cells(row, *RATIO_COLUMNS, "peak to plain")
        rows.append([*cells, format_ratio(own_memory, plain_memory)])
    return format_table("tokens | forward | forward + backward | peak of the process | memory of its own", rows)


def short_attention_table(result: BenchResult) -> str:
    """Return the times of the backend `windowed` relative to plain attention, at the lengths of the README."""
    rows = []
    for tokens, row in rows_by_length(result).items():
        if tokens in README_LENGTHS:
            rows.append(format_cells(row, *RATIO_COLUMNS))
    return format_table("tokens | forward | forward + backward", rows)


def bidirectional_table(result: BenchResult) -> str:
    """Return the times and the memory of the backend `windowed` relative to plain attention, without a causal mask."""
    rows = [format_cells(row, *RATIO_COLUMNS, "peak to plain") for row in rows_by_length(result).values()]
    return format_table("tokens | forward | forward + backward | peak of the process", rows)


def training_table(result: BenchResult) -> str:
    """Return the training speed and memory of the position methods and of MPT, by length."""
    names = ("model", "tokens", "speed", "speed to mpt", "speed to none", "peak", "peak to mpt", "of matmul rate")
    rows = [format_cells(row, *names) for row in result.suites["training"]]
    header = " | length | speed | to MPT | to none | peak memory | to MPT | of the matrix-multiply rate"
    return format_table(header, rows)


def evaluation_table(result: BenchResult) -> str:
    """Return the speed of evaluation by length, and its share of the speed at the shortest length."""
    rows = []
    for row in result.suites["evaluate"]:
        # The name of the share contains the shortest length, such as "of 1,024".
        share_names = [name for name in row.measured if name.startswith("of ")]
        rows.append(format_cells(row, "model", "tokens", "speed", share_names[0]))
    return format_table("random weights | length | speed | of that at the shortest", rows)


def cache_size_table(result: BenchResult) -> str:
    """Return how many keys of a real text a bounded cache keeps, by context length.

    A context was measured for several splits of the text. The table shows the range over the splits, and the largest
    certificate (an upper bound on the softmax mass of evicted keys).
    """
    rows_by_context: dict[int, list[Measurement]] = {}
    for row in result.suites["decode"]:
        rows_by_context.setdefault(int(row.case["context"]), []).append(row)

    table_rows = []
    for context, rows in rows_by_context.items():
        longest_ring = max(_measured_values(rows, "longest ring"))
        largest_certificate = max(_measured_values(rows, "certificate"))
        row_count = max(_measured_values(rows, "rows above tolerance"))
        row_text = f"{row_count:,.0f} rows" if row_count else "no row"
        table_rows.append(
            [
                f"{context:,}",
                f"{_format_range(_measured_values(rows, 'keys kept'))} %",
                f"{_format_range(_measured_values(rows, 'cache'))} MB",
                f"{longest_ring:,.0f}",
                f"{largest_certificate:.1e}, {row_text} above",
            ]
        )
    tolerance = result.settings["decode"]["tolerance"]
    header = "tokens read | keys kept, of all | cache | longest ring buffer"
    return format_table(f"{header} | certificate (tolerance {tolerance:.0e})", table_rows)


def _measured_values(rows: list[Measurement], name: str) -> list[float]:
    """Return one measured value of each row."""
    return [row.measured[name].value for row in rows]


def _format_range(values: list[float]) -> str:
    """Return "5.3 to 5.4", or "8.4" if the smallest and the largest value look the same."""
    smallest = f"{min(values):.1f}"
    largest = f"{max(values):.1f}"
    return smallest if smallest == largest else f"{smallest} to {largest}"


def recorded_inputs_table(*results: BenchResult) -> str:
    """Return the times of the backend `windowed` relative to plain attention, for inputs of several trained models.

    Args:
        *results: One result for each model, in the order of the columns.
    """
    rows_by_model = [rows_by_length(result) for result in results]
    lengths = sorted(set().union(*rows_by_model))
    table_rows = []
    for length in lengths:
        cells = [f"{length:,}"]
        for rows in rows_by_model:
            cells.append(format_ratios_to_plain(rows[length]) if length in rows else "")
        table_rows.append(cells)
    return format_table("tokens | the demo's ALiBi model | 600 steps | 100 steps", table_rows)


def format_ratios_to_plain(row: Measurement) -> str:
    """Return both times relative to plain attention: "0.12 × and 0.15 ×" (forward, and forward with backward)."""
    return " and ".join(format_cells(row, "to plain", "both to plain"))


def work_table(*results: BenchResult) -> str:
    """Return the share of the causal work that the kernel computes, and other bounds of this share.

    Args:
        *results: One result for each model of `WORK_RESULTS`.
    """
    names = (
        "work",
        "work by ACP",
        "work needed",
        "work needed in blocks",
        "work to ACP",
        "work to needed",
        "work to needed in blocks",
    )
    table_rows = []
    for model, result in zip(WORK_RESULTS.values(), results, strict=True):
        for tokens, row in rows_by_length(result).items():
            measures = [row.measured[name] for name in names]
            values = [f"{measure.value:.2f} {measure.unit}" for measure in measures]
            table_rows.append([model, f"{tokens:,}", *values])
    header = "model | tokens | read | ACP would read | needed by rows | needed in blocks"
    return format_table(f"{header} | to ACP | to rows' need | to blocks' need", table_rows)


def time_growth(result: BenchResult) -> str:
    """Return the time per token at 32,768 tokens relative to 8,192 tokens, forward and forward with backward."""
    rows = rows_by_length(result)
    long_measures = rows[32_768].measured
    short_measures = rows[8192].measured
    ratios = []
    for name in ("forward", "forward + backward"):
        # 32,768 tokens are four times as many as 8,192.
        ratios.append(format_ratio(long_measures[name].value / 4, short_measures[name].value))
    return " and ".join(ratios)


def peers_table(result: BenchResult) -> str:
    """Return the times of other implementations of ALiBi relative to the backend `windowed`."""
    measures_by_name = {str(row.case["engine"]): row.measured for row in result.suites["attention"]}
    windowed = measures_by_name["windowed"]
    rows = []
    for implementation, measures in measures_by_name.items():
        cells = [implementation]
        for name in ("forward", "forward + backward"):
            cells.append(format_ratio(measures[name].value, windowed[name].value, digits=1))
        rows.append(cells)
    return format_table("at 8,192 tokens, to windowed | forward | forward + backward", rows)


def decode_table(result: BenchResult) -> str:
    """Return the time per token and the cache size of the bounded and the full cache."""
    rows_by_case = {}
    for row in result.suites["decode"]:
        # The part "mpt" calls the cache "decoder", because one of its decoders is MPT.
        cache_name = row.case.get("cache") or row.case.get("decoder")
        rows_by_case[row.case["part"], cache_name, row.case.get("context")] = row
    contexts = sorted({int(context) for part, _, context in rows_by_case if part == "context"})
    mpt_context = max(int(context) for part, _, context in rows_by_case if part == "mpt")
    shortest = contexts[0]
    longest = contexts[-1]

    # The title of each row, and where its value is stored: the part, the name of the value and the context.
    row_sources = []
    for context in contexts:
        row_sources.append((f"a token at {context:,} tokens of context", "context", "time per token", context))
    row_sources += [
        (f"to {shortest:,}, at {longest:,}", "context", f"to {shortest:,}", longest),
        (f"cache at {longest:,}", "context", "cache", longest),
        ("of the limit set by reading the weights once", "weights", "of the limit", shortest),
        (f"speed to Hugging Face's MPT at {mpt_context:,}, same weights", "mpt", "speed to mpt", mpt_context),
    ]
    table_rows = []
    for title, part, name, context in row_sources:
        cells = [title]
        for cache_name in ("bounded", "full"):
            cells.append(format_cell(rows_by_case[part, cache_name, context], name, ratio_digits=1))
        table_rows.append(cells)
    return format_table("random weights | bounded | full", table_rows)


def patch_table(result: BenchResult) -> str:
    """Return the speed and the memory of the patched MPT and of the MPT without attention, relative to MPT."""
    names = ("forward speed to mpt", "step speed to mpt", "forward peak to mpt", "step peak to mpt")
    rows = []
    for row in result.suites["patch"]:
        if row.case["model"] != "mpt":
            rows.append(format_cells(row, "tokens", "model", *names, "same greedy tokens"))
    header = "tokens | MPT | forward speed | speed of a training step | peak memory, forward | peak memory, training"
    return format_table(f"{header} | same greedy tokens, of 32", rows)


def best_patch_speeds(result: BenchResult) -> str:
    """Return the forward speed of each model relative to MPT, computed from the fastest round of each model."""
    shortest_times = {row.case["model"]: min(row.seconds["forward"]) for row in result.suites["patch"]}
    mpt_time = shortest_times.pop("mpt")
    speeds = [f"{format_ratio(mpt_time, seconds)} {model}" for model, seconds in shortest_times.items()]
    return ", ".join(speeds)


def field_training_table(result: BenchResult) -> str:
    """Return the time and the memory of a training step of the models in `FIELD_MODELS`, relative to ALiBi."""
    rows = []
    for row in result.suites["training"]:
        model = str(row.case["model"])
        if model in FIELD_MODELS:
            # The stored value is a speed ratio. The time ratio is its inverse.
            time_ratio = format_ratio(1, row.measured["speed to alibi"].value, digits=3)
            memory_ratio = format_cell(row, "peak to alibi", ratio_digits=3)
            rows.append([FIELD_MODELS[model], *format_cells(row, "tokens"), time_ratio, memory_ratio])
    return format_table("6 layers of width 512 | length | time of a step, to ALiBi | peak memory, to ALiBi", rows)


def decay_bias_table(*results: BenchResult) -> str:
    """Return the times of attention with a decay bias, relative to plain attention and to ALiBi.

    Args:
        *results: One result for each row group of `DECAY_RESULTS`.
    """
    table_rows = []
    for title, result in zip(DECAY_RESULTS.values(), results, strict=True):
        windowed_rows = rows_by_length(result)
        # "clock" is the backend `windowed` with ALiBi's slopes as a decay bias. Results with recorded inputs do not
        # contain it, because these inputs already have a decay bias.
        decay_rows = rows_by_length(result, "clock")
        for tokens, row in (decay_rows or windowed_rows).items():
            ratio_to_alibi = ""
            if decay_rows:
                decay_time = row.measured["forward + backward"].value
                alibi_time = windowed_rows[tokens].measured["forward + backward"].value
                ratio_to_alibi = format_ratio(decay_time, alibi_time)
            table_rows.append([title, *format_cells(row, *RATIO_COLUMNS), ratio_to_alibi])
    header = "8 heads of 64 | tokens | forward, to plain | forward + backward, to plain"
    return format_table(f"{header} | forward + backward, to ALiBi", table_rows)


def value_of_recorded_inputs(result: BenchResult) -> str:
    """Return both times relative to plain attention at 32,768 tokens."""
    return format_ratios_to_plain(rows_by_length(result)[32_768])


TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "attention": ("attention", attention_table),
    "attention-short": ("attention", short_attention_table),
    "training": ("training", training_table),
    "evaluate": ("evaluate", evaluation_table),
    "kept": ("decode-trained", cache_size_table),
    "both-sides": ("attention-both", bidirectional_table),
    "recorded": ("attention-recorded-demo attention-recorded attention-recorded-100", recorded_inputs_table),
    "peers": ("attention-peers", peers_table),
    "decode": ("decode", decode_table),
    "patch": ("patch", patch_table),
    "bounds": (" ".join(WORK_RESULTS), work_table),
    "field-training": ("training-field", field_training_table),
    "clocks": (" ".join(DECAY_RESULTS), decay_bias_table),
}
"""The tables of benchmark results by the name in the documents: the stored results, separated by spaces, and the
function that makes the table."""

VALUES: dict[str, tuple[str, Callable[[BenchResult], str]]] = {
    "recorded": ("attention-recorded", value_of_recorded_inputs),
    "growth": ("attention", time_growth),
    "patch": ("patch", best_patch_speeds),
    "growth-recorded": ("attention-recorded", time_growth),
}
"""The values inside sentences by the name in the documents: the stored result and the function that makes the value."""


# ---- tables of reports


def demo_table(values: dict[str, Any]) -> str:
    """Return the perplexities of the demo next to those of the paper, followed by the findings of the report.

    Args:
        values: The stored headline of the demo's report. `lines` holds the perplexities of each position method by
            length, and `found` holds the findings as sentences.
    """
    training_length = values["length"]
    longest = max(int(length) for line in values["lines"].values() for length in line["points"])
    paper_rows = {row["L_valid"]: row for row in load_published_numbers()["table2"]}
    rows = []
    for name, line in values["lines"].items():
        points = line["points"]
        if str(training_length) not in points:
            continue
        cells = [name]
        for length in (training_length, longest):
            # A point is a perplexity, or a perplexity with the limits of its interval.
            cells.append(_format_perplexity(*points.get(str(length), ())))
        for length in PAPER_LENGTHS:
            published_perplexity = paper_rows[length][line["position"] + "_ppl"]
            cells.append(f"{published_perplexity:.2f}")
        rows.append(cells)

    header = (
        f" | here, at {training_length:,} | here, at {longest:,} ({longest / training_length:.0f} {RATIO})"
        f" | paper, at 512 | paper, at 8,512 (16.6 {RATIO})"
    )
    corpus = values["corpus"]
    description = (
        f"Here: perplexity on {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}, with "
        "95 % intervals over that text; one seed."
    )
    findings = "\n".join(f"- {sentence}" for sentence in values["found"])
    return f"{format_table(header, rows)}\n{description} {_report_origin(values, 'demo')}\n\n{findings}\n"


def _format_perplexity(value: float | None = None, low: float | None = None, high: float | None = None) -> str:
    """Return a perplexity with its interval, such as "50.0 (49.1 to 50.9)". Missing numbers are left out."""
    if value is None:
        return ""
    if low is None or high is None:
        return f"{value:.1f}"
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def trial_perplexities(values: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the validation perplexities of the search, by position method and by the name of the settings.

    Args:
        values: The content of tune.json, which `benchmarks.tune_laptop` writes.
    """
    perplexities: dict[str, dict[str, float]] = {}
    for result in values["results"]:
        mean_loss = result["nll"] / result["count"]
        perplexities.setdefault(result["method"], {})[result["way"]] = perplexity(mean_loss)
    return perplexities


def tune_table(values: dict[str, Any]) -> str:
    """Return the validation perplexity of every trial. The chosen trial of each position method is bold.

    Args:
        values: The content of tune.json, which `benchmarks.tune_laptop` writes.
    """
    perplexities = trial_perplexities(values)
    rows = []
    for settings_name in values["grid"]:
        cells = [settings_name]
        for method, method_perplexities in perplexities.items():
            cell = "not run"
            if settings_name in method_perplexities:
                cell = f"{method_perplexities[settings_name]:.1f}"
            is_chosen = values["best"].get(method) == settings_name
            cells.append(f"**{cell}**" if is_chosen else cell)
        rows.append(cells)
    header = " | ".join(["way", *map(method_name, perplexities)])

    tokens = values["results"][0]["tokens"]
    remark = ""
    if values["tried"] != values["planned"]:
        remark = f" {values['tried']} of {values['planned']} trials were run."
    origin = _report_origin(values, "tune")
    pilot_rows = [[name, f"{value:.1f}"] for name, value in values["pilot"].items()]
    pilot_table = format_table("trial before the grid was fixed | perplexity", pilot_rows)
    return f"{format_table(header, rows)}\n{tokens:,} tokens each, one seed.{remark} {origin}\n\n{pilot_table}"


def tune_figure(values: dict[str, Any]) -> Figure:
    """Return the figure of the search: the validation perplexity of every trial, with one line per position method."""
    x_by_settings = {settings_name: number for number, settings_name in enumerate(values["grid"], 1)}
    series = []
    for method, perplexities in trial_perplexities(values).items():
        measured_settings = [name for name in x_by_settings if name in perplexities]
        x = tuple(x_by_settings[name] for name in measured_settings)
        y = tuple(perplexities[name] for name in measured_settings)
        series.append(Series(method_name(method), x, y, method_color(method)))
    ticks = tuple((x, name.replace(", ", "<br>")) for name, x in x_by_settings.items())
    return Figure(
        name="tune",
        title="The search: validation perplexity of every trial",
        alt="Validation perplexity of every method with all settings that were tried. The table contains the numbers.",
        series=tuple(series),
        x_label="",
        y_label="perplexity at the training length",
        ticks=ticks,
    )


def encoder_table(values: dict[str, Any]) -> str:
    """Return the pseudo-perplexity of the masked language models by length.

    Args:
        values: The stored evaluation of the ALiBi model. All other stored evaluations `mlm-*.json` are columns, too.
    """
    other_paths = sorted(path for path in RESULTS.glob("mlm-*.json") if path.stem != "mlm-alibi")
    alibi = Evaluation.parse(values)
    evaluations = [alibi]
    for path in other_paths:
        evaluations.append(Evaluation.parse(read_with_checksum(path)))

    rows = []
    for score in alibi.scored:
        multiple = score.length / (alibi.trained_at or 1)
        perplexities = [_format_score(evaluation, score.length) for evaluation in evaluations]
        rows.append([f"{score.length:,} ({multiple:.0f} {RATIO})", *perplexities])
    methods = [method_name(str(evaluation.target["position"])) for evaluation in evaluations]
    header = " | ".join(["tokens read at once", *methods])
    corpus = alibi.corpus
    description = (
        f"Pseudo-perplexity on {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}, with "
        f"95 % intervals over that text, after {alibi.target['step']:,} steps; one seed."
    )
    return f"{format_table(header, rows)}\n{description} {_report_origin(values, 'mlm-alibi')}\n"


def _format_score(evaluation: Evaluation, length: int) -> str:
    """Return the perplexity at one length with its interval, or an empty string if that length was not scored."""
    score = evaluation.row(length)
    if score is None or score.status != "scored":
        return ""
    loss_interval = interval(score) or ()
    return _format_perplexity(score.perplexity, *map(perplexity, loss_interval))


def paper_table(name: str, values: dict[str, Any]) -> str:
    """Return a table of the paper with the measured numbers, and the published numbers in brackets.

    A second table lists the differences between ALiBi and the other methods, if the report contains any.

    Args:
        name: The name of the table, such as "table5".
        values: The stored tables of a report.
    """
    tables_by_name = {table["name"]: table for table in values["tables"]}
    table = tables_by_name[name]
    rows = []
    for row_name, cells in table["rows"]:
        texts = [f"{cell['here']} ({cell['paper']})" if cell["here"] else "" for cell in cells]
        if any(texts):
            rows.append([row_name, *texts])
    titles = ["", *table["columns"]]

    # Leave out columns without any number, and the hidden column.
    shown_columns = []
    for index, title in enumerate(titles):
        if title != HIDDEN_COLUMN and any(row[index] for row in rows):
            shown_columns.append(index)
    header = " | ".join(titles[index] for index in shown_columns)
    shown_rows = [[row[index] for index in shown_columns] for row in rows]

    description = f"{values['seeds']} seeds. {table['note']} {_report_origin(values, 'tables')}"
    difference_table = ""
    if table["differences"]:
        keys = ("row", "column", "other", "told")
        difference_rows = [[difference[key] for key in keys] for difference in table["differences"]]
        difference_table = "\n" + format_table("ALiBi | column | to | difference (95 %)", difference_rows)
    return f"{format_table(header, shown_rows)}\n{description}\n{difference_table}"


def _report_origin(values: dict[str, Any], name: str) -> str:
    """Return a sentence with the commit and the file of a stored report."""
    commit = str(values["provenance"].get("commit"))
    return f"Commit {commit[:7]}, `benchmarks/results/{name}.json`."


REPORT_TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "demo": ("demo", demo_table),
    "tune": ("tune", tune_table),
    "encoders": ("mlm-alibi", encoder_table),
    "table5": ("tables", partial(paper_table, "table5")),
    "table6": ("tables", partial(paper_table, "table6")),
}
"""The tables of reports by the name in the documents: the stored result, and the function that makes the table."""


# ---- the documents


def store_report(report: Path) -> None:
    """Copy the results of a report into the repository.

    A report of one seed is the report of the demo, and its headline is stored. The tables of a report are stored only
    if the report has several seeds.

    Args:
        report: The folder of the report.
    """
    if read_with_checksum(report / "tables.json")["seeds"] > 1:
        shutil.copyfile(report / "tables.json", RESULTS / "tables.json")
        for picture in report.glob("table*-figure.png"):
            shutil.copyfile(picture, ROOT / "docs" / picture.name)
        return
    shutil.copyfile(report / "headline.json", RESULTS / "demo.json")
    shutil.copyfile(report / "headline.png", ROOT / "docs" / "headline.png")


def update_regions(text: str) -> str:
    """Return a document in which all tables and values are those of the stored results.

    Args:
        text: The document. A table of a report stays as it is if its result is not stored.
    """

    def replace_table(match: re.Match[str]) -> str:
        name = match[2]
        table_text = bench_table(name) if name in TABLES else report_table(name)
        if table_text is None:
            return match[0]
        return f"{match[1]}\n{table_text}\n{match[4]}"

    def replace_value(match: re.Match[str]) -> str:
        result_name, make_value = VALUES[match[2]]
        return match[1] + make_value(load_stored_result(result_name)) + match[4]

    text = REGION.sub(replace_table, text)
    return VALUE.sub(replace_value, text)


def bench_table(name: str) -> str:
    """Return a table of benchmark results with the origin of each result, or a line that names missing results."""
    joined_names, make_table = TABLES[name]
    result_names = joined_names.split()
    missing = [result_name for result_name in result_names if not (RESULTS / f"{result_name}.json").exists()]
    if missing:
        paths = ", ".join(f"`benchmarks/results/{result_name}.json`" for result_name in missing)
        return f"No such result is stored: {paths}.\n"
    results = {result_name: load_stored_result(result_name) for result_name in result_names}
    origins = "".join(describe_origin(result, result_name) for result_name, result in results.items())
    return make_table(*results.values()) + origins


def report_table(name: str) -> str | None:
    """Return a table of a stored report, or None if the report or the table is not stored."""
    result_name, make_table = REPORT_TABLES[name]
    path = RESULTS / f"{result_name}.json"
    if not path.exists():
        return None
    values = read_with_checksum(path)
    if result_name == "tables":
        # A report of several seeds contains only those tables of the paper that the user requested.
        stored_tables = {table["name"] for table in values["tables"]}
        if name not in stored_tables:
            return None
    return make_table(values)


def load_stored_result(name: str) -> BenchResult:
    """Load a benchmark result of benchmarks/results by its name, such as "attention"."""
    return load_bench_result(RESULTS / f"{name}.json")


def main() -> None:
    """Store the reports that the command line names, draw the figure of the search, and update all documents."""
    for folder in sys.argv[1:]:
        store_report(Path(folder))
    tune_path = RESULTS / "tune.json"
    if tune_path.exists():
        draw_figures([tune_figure(read_with_checksum(tune_path))], ROOT / "docs" / "tune")
        # Only the PNG file is used in the documentation.
        (ROOT / "docs" / "tune.svg").unlink()
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        path.write_text(update_regions(text), encoding="utf-8")


if __name__ == "__main__":
    main()
