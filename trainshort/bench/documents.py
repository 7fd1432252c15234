"""`python -m trainshort.bench.documents`: tables of measurements in the documents, written from the stored results.

A region of a document between these two lines is a table of this file, and a test says when they differ:

    <!-- measured: training -->
    <!-- end of measured -->

A result of a run that was stopped before its end says so under its table. No torch.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from trainshort.bench.measurements import RATIO, BenchResult, Measurement, load

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/evaluation.md", "docs/generation.md", "docs/training.md", "docs/windows.md")
REGION = re.compile(r"(<!-- measured: (\S+) -->\n)(.*?)(<!-- end of measured -->)", re.DOTALL)
SHORT = (1024, 4096, 16_384, 32_768)
"""Lengths that the README shows."""


def table(head: str, rows: list[list[str]]) -> str:
    """A markdown table, its first column to the left."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|---|" + "--:|" * (columns - 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def cell(row: Measurement, name: str, *, digits: int = 2) -> str:
    """One measure: ratios with two digits, others whole."""
    if name not in row.measured:
        return ""
    measure = row.measured[name]
    if measure.unit == RATIO:
        return f"{measure.value:.{digits}f} {RATIO}"
    return f"{measure.value:,.0f} {measure.unit}".strip()


def origin(bench: BenchResult, name: str) -> str:
    """Where the numbers come from, and whether all of them are there."""
    commit, stopped = (
        str(bench.made.get("commit"))[:7],
        "" if bench.finished else ". The run was stopped before its end",
    )
    return f"\n{bench.machine}, commit {commit}, `benchmarks/results/{name}.json`{stopped}.\n"


def attention(bench: BenchResult, lengths: tuple[int, ...] | None = None) -> str:
    """Windowed against plain attention by length."""
    rows = []
    plain = {row.case["tokens"]: row for row in bench.suites["attention"] if row.case["engine"] == "plain"}
    for row in bench.suites["attention"]:
        tokens = row.case["tokens"]
        if row.case["engine"] != "windowed" or (lengths and tokens not in lengths):
            continue
        times = [f"{tokens:,}", cell(row, "to plain"), cell(row, "both to plain")]
        own = row.measured["own memory"].value / plain[tokens].measured["own memory"].value
        rows.append(times if lengths else [*times, cell(row, "peak to plain"), f"{own:.2f} {RATIO}"])
    head = "tokens | forward | forward + backward"
    return table(head if lengths else f"{head} | peak of the process | memory of its own", rows)


def training(bench: BenchResult) -> str:
    """Position methods and MPT by length."""
    names = ("speed", "speed to mpt", "speed to none", "peak", "peak to mpt", "of matmul rate")
    rows = [
        [str(row.case["model"]), f"{row.case['tokens']:,}", *(cell(row, name) for name in names)]
        for row in bench.suites["training"]
    ]
    return table(" | length | speed | to MPT | to none | peak memory | to MPT | of the matrix-multiply rate", rows)


def evaluation(bench: BenchResult) -> str:
    """Speed by length, with its share of the speed at the shortest."""
    rows = []
    for row in bench.suites["evaluate"]:
        share = next(name for name in row.measured if name.startswith("of "))
        rows.append([str(row.case["model"]), f"{row.case['tokens']:,}", cell(row, "speed"), cell(row, share)])
    return table("random weights | length | speed | of that at the shortest", rows)


def kept(bench: BenchResult) -> str:
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
        share, size = (
            f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"
            for low, high in ((shares[0], shares[-1]), (sizes[0], sizes[-1]))
        )
        certificate = f"{masses[-1]:.1e}, {f'{above[-1]:,.0f} rows' if above[-1] else 'no row'} above"
        rows.append([f"{context:,}", f"{share} %", f"{size} MB", f"{rings[-1]:,.0f}", certificate])
    tolerance = bench.settings["decode"]["tolerance"]
    return table(
        f"tokens read | keys kept, of all | cache | longest ring | certificate (tolerance {tolerance:.0e})", rows
    )


TABLES: dict[str, tuple[str, Callable[[BenchResult], str]]] = {
    "attention": ("attention", attention),
    "attention-short": ("attention", lambda bench: attention(bench, SHORT)),
    "training": ("training", training),
    "evaluate": ("evaluate", evaluation),
    "kept": ("decode-trained", kept),
}


def written(text: str) -> str:
    """A document with its tables as the stored results have them."""

    def fill(match: re.Match[str]) -> str:
        file, make = TABLES[match[2]]
        bench = load(RESULTS / f"{file}.json")
        return f"{match[1]}\n{make(bench)}{origin(bench, file)}\n{match[4]}"

    return REGION.sub(fill, text)


if __name__ == "__main__":
    for name in sys.argv[1:] or DOCUMENTS:
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
