"""`python -m benchmarks.update_docs [REPORT ...]`: write the stored results into README.md and docs/.

A document marks the places of results. The text between two such lines is a table of this file:

    <!-- measured: training -->
    <!-- end of measured -->

Tables from a report (of the demo, the search or the paper's tables) are marked by `obtained` in place of `measured`.
A value inside a sentence is marked as `<!-- value: recorded -->0.12 ×<!-- end -->`.

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
REGION = re.compile(r"(<!-- (?:measured|obtained): (\S+) -->\n)(.*?)(<!-- end of (?:measured|obtained) -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)
HIDDEN_COLUMN = "read tokens/s"
"""This column is left out of documents, because other models train while evaluations are timed."""
PAPER_LENGTHS = (512, 8512)
"""The lengths of the paper's Table 2 that are shown next to the first and the last length of the demo."""
README_LENGTHS = (1024, 4096, 16_384, 32_768)
"""Lengths that the README shows."""


def table(head: str, rows: list[list[str]]) -> str:
    """A markdown table, its first column to the left."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|---|" + "--:|" * (columns - 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def cell(row: Measurement, name: str, *, digits: int = 2) -> str:
    """One measure: ratios with two digits, times and sizes below 100 with one, others whole."""
    if name not in row.measured:
        return ""
    value, unit = row.measured[name].value, row.measured[name].unit
    places = digits if unit == RATIO else int(unit in ("ms", "MB") and value < 100)
    return f"{value:,.{places}f} {unit}".strip()


def cells(row: Measurement, *names: str) -> list[str]:
    """What a case is, such as its tokens, and its measures."""
    case = {name: f"{value:,}" if isinstance(value, int) else value for name, value in row.case.items()}
    return [case.get(name) or cell(row, name) for name in names]


def times(one: float, other: float, *, digits: int = 2) -> str:
    return f"{one / other:.{digits}f} {RATIO}"


def origin(bench: BenchResult, name: str) -> str:
    """Where the numbers come from, and whether all of them are there."""
    commit = str(bench.made.get("commit"))
    short_commit = commit[:7]
    if commit.endswith("+changes"):
        short_commit += " with uncommitted changes"
    stopped = "" if bench.finished else ". The run was stopped before its end"
    return f"\n{bench.machine}, commit {short_commit}, `benchmarks/results/{name}.json`{stopped}.\n"


def by_length(bench: BenchResult, engine: str = "windowed") -> dict[int, Measurement]:
    """Rows of one engine."""
    return {int(row.case["tokens"]): row for row in bench.suites["attention"] if row.case["engine"] == engine}


TO_PLAIN = ("tokens", "to plain", "both to plain")


def attention(bench: BenchResult) -> str:
    """Windowed against plain attention by length."""
    plain, rows = by_length(bench, "plain"), []
    for tokens, row in by_length(bench).items():
        own, theirs = (one.measured["own memory"].value for one in (row, plain[tokens]))
        rows.append([*cells(row, *TO_PLAIN, "peak to plain"), times(own, theirs)])
    return table("tokens | forward | forward + backward | peak of the process | memory of its own", rows)


def attention_short(bench: BenchResult) -> str:
    rows = [cells(row, *TO_PLAIN) for tokens, row in by_length(bench).items() if tokens in README_LENGTHS]
    return table("tokens | forward | forward + backward", rows)


def both_sides(bench: BenchResult) -> str:
    """Windowed against plain attention by length, both to both sides."""
    rows = [cells(row, *TO_PLAIN, "peak to plain") for row in by_length(bench).values()]
    return table("tokens | forward | forward + backward | peak of the process", rows)


def training(bench: BenchResult) -> str:
    """Position methods and MPT by length."""
    names = ("model", "tokens", "speed", "speed to mpt", "speed to none", "peak", "peak to mpt", "of matmul rate")
    rows = [cells(row, *names) for row in bench.suites["training"]]
    return table(" | length | speed | to MPT | to none | peak memory | to MPT | of the matrix-multiply rate", rows)


def evaluation(bench: BenchResult) -> str:
    """Speed by length, with its share of the speed at the shortest."""
    rows = []
    for row in bench.suites["evaluate"]:
        share = next(name for name in row.measured if name.startswith("of "))
        rows.append(cells(row, "model", "tokens", "speed", share))
    return table("random weights | length | speed | of that at the shortest", rows)


def cache_size_table(bench: BenchResult) -> str:
    """What a bounded cache keeps of real text, by context: the range over the splits, and the worst certificate."""
    contexts: dict[int, list[Measurement]] = {}
    for row in bench.suites["decode"]:
        contexts.setdefault(int(row.case["context"]), []).append(row)
    rows = []
    for context, cases in contexts.items():
        shares, rings, sizes, masses, above = (
            sorted(row.measured[name].value for row in cases)
            for name in ("keys kept", "longest ring", "cache", "certificate", "rows above tolerance")
        )
        # One number where lowest and highest are shown alike.
        share, size = (" to ".join(dict.fromkeys(f"{one[at]:.1f}" for at in (0, -1))) for one in (shares, sizes))
        certificate = f"{masses[-1]:.1e}, {f'{above[-1]:,.0f} rows' if above[-1] else 'no row'} above"
        rows.append([f"{context:,}", f"{share} %", f"{size} MB", f"{rings[-1]:,.0f}", certificate])
    tolerance = bench.settings["decode"]["tolerance"]
    head = "tokens read | keys kept, of all | cache | longest ring buffer"
    return table(f"{head} | certificate (tolerance {tolerance:.0e})", rows)


def recorded(*benches: BenchResult) -> str:
    """Windowed against plain attention by length, on inputs recorded from several trained models."""
    found = [by_length(bench) for bench in benches]
    rows = [
        [f"{tokens:,}", *(to_plain(rows[tokens]) if tokens in rows else "" for rows in found)]
        for tokens in sorted(set().union(*found))
    ]
    return table("tokens | the demo's ALiBi model | 600 steps | 100 steps", rows)


def to_plain(row: Measurement) -> str:
    return " and ".join(cells(row, "to plain", "both to plain"))


def bounds(*benches: BenchResult) -> str:
    """What the kernel reads of recorded inputs, beside what ACP's bound leaves and what the mass needs."""
    shares = ("work", "work by ACP", "work needed", "work needed in blocks")
    names = (*shares, "work to ACP", "work to needed", "work to needed in blocks")
    rows = [
        [model, f"{tokens:,}", *(f"{row.measured[name].value:.2f} {row.measured[name].unit}" for name in names)]
        for model, bench in zip(MODELS.values(), benches, strict=True)
        for tokens, row in by_length(bench).items()
    ]
    head = "model | tokens | read | ACP would read | needed by rows | needed in blocks"
    return table(f"{head} | to ACP | to rows' need | to blocks' need", rows)


def growth(bench: BenchResult) -> str:
    """The time per token at 32,768 tokens to that at 8,192, forward and with backward."""
    long, short = (by_length(bench)[tokens].measured for tokens in (32_768, 8192))
    return " and ".join(times(long[name].value / 4, short[name].value) for name in ("forward", "forward + backward"))


def peers(bench: BenchResult) -> str:
    """Other implementations of ALiBi against the windowed engine."""
    found = {str(row.case["engine"]): row.measured for row in bench.suites["attention"]}
    names, ours = ("forward", "forward + backward"), found["windowed"]
    rows = [
        [engine, *(times(theirs[name].value, ours[name].value, digits=1) for name in names)]
        for engine, theirs in found.items()
    ]
    return table("at 8,192 tokens, to windowed | forward | forward + backward", rows)


def decode(bench: BenchResult) -> str:
    """A token's time and a cache's size by context, for the bounded cache and the full one."""
    found = {
        (row.case["part"], row.case.get("cache") or row.case.get("decoder"), row.case.get("context")): row
        for row in bench.suites["decode"]
    }
    contexts = sorted({int(row.case["context"]) for row in bench.suites["decode"] if row.case["part"] == "context"})
    against = max(int(row.case["context"]) for row in bench.suites["decode"] if row.case["part"] == "mpt")
    asked = [(f"a token at {n:,} tokens of context", "context", "time per token", n) for n in contexts]
    asked += [(f"to {contexts[0]:,}, at {contexts[-1]:,}", "context", f"to {contexts[0]:,}", contexts[-1])]
    asked += [(f"cache at {contexts[-1]:,}", "context", "cache", contexts[-1])]
    asked += [("of the limit set by reading the weights once", "weights", "of the limit", contexts[0])]
    asked += [(f"speed to Hugging Face's MPT at {against:,}, same weights", "mpt", "speed to mpt", against)]
    rows = [
        [text, *(cell(found[part, cache, context], name, digits=1) for cache in ("bounded", "full"))]
        for text, part, name, context in asked
    ]
    return table("random weights | bounded | full", rows)


def patched(bench: BenchResult) -> str:
    """MPT after `patch` against itself before; and what no patch of attention can pass."""
    names = [f"{name} to mpt" for name in ("forward speed", "step speed", "forward peak", "step peak")]
    others = [row for row in bench.suites["patch"] if row.case["model"] != "mpt"]
    head = "tokens | MPT | forward speed | speed of a training step | peak memory, forward | peak memory, training"
    rows = [cells(row, "tokens", "model", *names, "same greedy tokens") for row in others]
    return table(f"{head} | same greedy tokens, of 32", rows)


def quickest(bench: BenchResult) -> str:
    """Forward, the quickest round of each model: what was least disturbed."""
    seconds = {row.case["model"]: min(row.seconds["forward"]) for row in bench.suites["patch"]}
    mpt = seconds.pop("mpt")
    return ", ".join(f"{times(mpt, taken)} {model}" for model, taken in seconds.items())


def field_training(bench: BenchResult) -> str:
    """A training step of models of the field, to ALiBi's of the same shape."""
    rows = []
    for row in bench.suites["training"]:
        if name := FIELD.get(str(row.case["model"])):
            time = times(1, row.measured["speed to alibi"].value, digits=3)
            rows.append([name, *cells(row, "tokens"), time, cell(row, "peak to alibi", digits=3)])
    return table("6 layers of width 512 | length | time of a step, to ALiBi | peak memory, to ALiBi", rows)


def clocks(*benches: BenchResult) -> str:
    """Attention under a clock, to plain attention without positions, and to ALiBi's where both were measured."""
    rows = []
    for title, bench in zip(CLOCKS.values(), benches, strict=True):
        clock, slopes = by_length(bench, "clock"), by_length(bench)
        for tokens, row in (clock or slopes).items():
            both, other = (one.measured["forward + backward"].value for one in (row, slopes[tokens]))
            rows.append([title, *cells(row, *TO_PLAIN), times(both, other) if clock else ""])
    head = "8 heads of 64 | tokens | forward, to plain | forward + backward, to plain"
    return table(f"{head} | forward + backward, to ALiBi", rows)


FIELD = {
    "alibi-learned": "ALiBi, trained slopes",
    "alibi-ssmax": "ALiBi, length scaling (SSMax)",
    "fox-alibi": "FoX, gates start at ALiBi's slopes",
}
CLOCKS = {
    "attention-clock": "ALiBi's slopes as a decay bias, random inputs",
    "attention-fox-times": "FoX, gates start at one half, recorded",
    "attention-fox-alibi-times": "FoX, gates start at ALiBi's slopes, recorded",
}
"""Times under clocks, by their stored results."""
MODELS = {
    "attention-demo-alibi": "demo: ALiBi",
    "attention-demo-fox-alibi": "demo: FoX, gates start at ALiBi's slopes",
    "attention-demo-fox": "demo: FoX, gates start at one half",
    "attention-alibi-8x64": "8 heads of 64: ALiBi",
    "attention-fox-alibi-8x64": "8 heads of 64: FoX, gates start at ALiBi's slopes",
    "attention-fox-8x64": "8 heads of 64: FoX, gates start at one half",
}
"""Recorded models that bounds are compared on, by their stored results."""
TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "attention": ("attention", attention),
    "attention-short": ("attention", attention_short),
    "training": ("training", training),
    "evaluate": ("evaluate", evaluation),
    "kept": ("decode-trained", cache_size_table),
    "both-sides": ("attention-both", both_sides),
    "recorded": ("attention-recorded-demo attention-recorded attention-recorded-100", recorded),
    "peers": ("attention-peers", peers),
    "decode": ("decode", decode),
    "patch": ("patch", patched),
    "bounds": (" ".join(MODELS), bounds),
    "field-training": ("training-field", field_training),
    "clocks": (" ".join(CLOCKS), clocks),
}
"""The stored results of each table, and who writes it."""
VALUES: dict[str, tuple[str, Callable[[BenchResult], str]]] = {
    "recorded": ("attention-recorded", lambda bench: to_plain(by_length(bench)[32_768])),
    "growth": ("attention", growth),
    "patch": ("patch", quickest),
    "growth-recorded": ("attention-recorded", growth),
}


# Tables of reports


def demo(values: dict[str, Any]) -> str:
    """The demo's four methods at their length and at the farthest, beside the paper's; then what was found."""
    length = values["length"]
    farthest = max(int(at) for line in values["lines"].values() for at in line["points"])
    paper = {row["L_valid"]: row for row in load_published_numbers()["table2"]}
    rows = []
    for name, line in values["lines"].items():
        if str(length) in line["points"]:
            here = [_format_value(*line["points"].get(str(at), ())) for at in (length, farthest)]
            rows.append([name, *here, *(f"{paper[at][line['position'] + '_ppl']:.2f}" for at in PAPER_LENGTHS)])
    corpus, times = values["corpus"], farthest / length
    head = f" | here, at {length:,} | here, at {farthest:,} ({times:.0f} {RATIO}) | "
    head += f"paper, at 512 | paper, at 8,512 (16.6 {RATIO})"
    where = (
        f"Here: perplexity on {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}, with "
        "95 % intervals over that text; one seed."
    )
    found = "\n".join(f"- {sentence}" for sentence in values["found"])
    return f"{table(head, rows)}\n{where} {_report_origin(values, 'demo')}\n\n{found}\n"


def _format_value(value: float | None = None, low: float | None = None, high: float | None = None) -> str:
    bounds = "" if low is None or high is None else f" ({low:.1f} to {high:.1f})"
    return "" if value is None else f"{value:.1f}{bounds}"


def trials(values: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Validation perplexities by method and way."""
    found: dict[str, dict[str, float]] = {}
    for one in values["results"]:
        found.setdefault(one["method"], {})[one["way"]] = perplexity(one["nll"] / one["count"])
    return found


def tune(values: dict[str, Any]) -> str:
    """Validation perplexities of every trial; the chosen one of each method in bold."""
    found = trials(values)
    rows = []
    for way in values["grid"]:
        told = {method: f"{ways[way]:.1f}" if way in ways else "not run" for method, ways in found.items()}
        best = {method: f"**{told[method]}**" for method in told if values["best"].get(method) == way}
        rows.append([way, *(told | best).values()])
    head = " | ".join(["way", *map(method_name, found)])
    tokens = values["results"][0]["tokens"]
    done = "" if values["tried"] == values["planned"] else f" {values['tried']} of {values['planned']} trials were run."
    pilot_rows = [[way, f"{value:.1f}"] for way, value in values["pilot"].items()]
    pilot = table("trial before the grid was fixed | perplexity", pilot_rows)
    return f"{table(head, rows)}\n{tokens:,} tokens each, one seed.{done} {_report_origin(values, 'tune')}\n\n{pilot}"


def tune_picture(values: dict[str, Any]) -> Figure:
    """The same as a figure: a line per method over the ways."""
    places = {way: number for number, way in enumerate(values["grid"], 1)}
    series = []
    for method, found in trials(values).items():
        tried = [way for way in places if way in found]
        x, y = tuple(places[way] for way in tried), tuple(found[way] for way in tried)
        series.append(Series(method_name(method), x, y, method_color(method)))
    return Figure(
        name="tune",
        title="The search: validation perplexity of every trial",
        alt="Validation perplexity of every method in every way that was tried; the numbers stand in the table.",
        series=tuple(series),
        x_label="",
        y_label="perplexity at the training length",
        ticks=tuple((number, way.replace(", ", "<br>")) for way, number in places.items()),
    )


def encoders(values: dict[str, Any]) -> str:
    """Return the pseudo-perplexity of the masked language models by length.

    Args:
        values: The stored evaluation of the ALiBi model. All other stored evaluations `mlm-*.json` are columns, too.
    """
    other_paths = sorted(path for path in RESULTS.glob("mlm-*.json") if path.stem != "mlm-alibi")
    evaluations = [Evaluation.parse(values), *(Evaluation.parse(read_with_checksum(path)) for path in other_paths)]
    alibi = evaluations[0]
    rows = []
    for length in (scored.length for scored in alibi.scored):
        multiple = length / (alibi.trained_at or 1)
        scores = [_format_score(evaluation, length) for evaluation in evaluations]
        rows.append([f"{length:,} ({multiple:.0f} {RATIO})", *scores])
    methods = [method_name(str(evaluation.target["position"])) for evaluation in evaluations]
    head = " | ".join(["tokens read at once", *methods])
    corpus, step = alibi.corpus, alibi.target["step"]
    where = (
        f"Pseudo-perplexity on {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}, with "
        f"95 % intervals over that text, after {step:,} steps; one seed."
    )
    return f"{table(head, rows)}\n{where} {_report_origin(values, 'mlm-alibi')}\n"


def _format_score(evaluation: Evaluation, length: int) -> str:
    """Return the perplexity at one length with its interval, or an empty string if that length was not scored."""
    score = evaluation.row(length)
    if score is None or score.status != "scored":
        return ""
    bounds = interval(score) or ()
    return _format_value(score.perplexity, *map(perplexity, bounds))


def paper_table(name: str, values: dict[str, Any]) -> str:
    """A table of the paper as obtained here, with the paper's numbers in brackets; then what of it can be told."""
    one = next(one for one in values["tables"] if one["name"] == name)
    rows = [
        [row, *(f"{cell['here']} ({cell['paper']})" if cell["here"] else "" for cell in cells)]
        for row, cells in one["rows"]
    ]
    rows = [row for row in [["", *one["columns"]], *rows] if any(row[1:])]
    filled = [number for number in range(len(rows[0])) if any(row[number] for row in rows[1:])]
    columns = [number for number in filled if rows[0][number] != HIDDEN_COLUMN]
    head, *kept = [[row[number] for number in columns] for row in rows]
    told = [[each[key] for key in ("row", "column", "other", "told")] for each in one["differences"]]
    where = f"{values['seeds']} seeds. {one['note']} {_report_origin(values, 'tables')}"
    against = f"\n{table('ALiBi | column | to | difference (95 %)', told)}" if told else ""
    return f"{table(' | '.join(head), kept)}\n{where}\n{against}"


def _report_origin(values: dict[str, Any], name: str) -> str:
    return f"Commit {str(values['provenance'].get('commit'))[:7]}, `benchmarks/results/{name}.json`."


REPORT_TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "demo": ("demo", demo),
    "tune": ("tune", tune),
    "encoders": ("mlm-alibi", encoders),
    "table5": ("tables", partial(paper_table, "table5")),
    "table6": ("tables", partial(paper_table, "table6")),
}
"""The tables of reports: the stored result, and the function that makes the table."""


# The documents


def store_report(report: Path) -> None:
    """Copy the results of a report into the repository.

    A report of one seed is the demo's: its headline is stored. Of a report of several seeds, the tables are stored.

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
        return match[1] + make_value(stored(result_name)) + match[4]

    text = REGION.sub(replace_table, text)
    return VALUE.sub(replace_value, text)


def bench_table(name: str) -> str:
    """Return a table of benchmark results with the origin of each result, or a line that names missing results."""
    result_names, make_table = TABLES[name]
    missing = [result for result in result_names.split() if not (RESULTS / f"{result}.json").exists()]
    if missing:
        paths = ", ".join(f"`benchmarks/results/{result}.json`" for result in missing)
        return f"No such result is stored: {paths}.\n"
    benches = {result: stored(result) for result in result_names.split()}
    origins = "".join(origin(bench, result) for result, bench in benches.items())
    return make_table(*benches.values()) + origins


def report_table(name: str) -> str | None:
    """Return a table of a stored report, or None if it is not stored."""
    result_name, make_table = REPORT_TABLES[name]
    path = RESULTS / f"{result_name}.json"
    if not path.exists():
        return None
    values = read_with_checksum(path)
    # A report of several seeds holds only those tables of the paper that were asked for.
    if result_name == "tables" and name not in {table["name"] for table in values["tables"]}:
        return None
    return make_table(values)


def stored(name: str) -> BenchResult:
    return load_bench_result(RESULTS / f"{name}.json")


def main() -> None:
    for folder in sys.argv[1:]:
        store_report(Path(folder))
    if (RESULTS / "tune.json").exists():
        draw_figures([tune_picture(read_with_checksum(RESULTS / "tune.json"))], ROOT / "docs" / "tune")
        (ROOT / "docs" / "tune.svg").unlink()
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(update_regions(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
