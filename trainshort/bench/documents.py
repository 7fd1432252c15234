"""`python -m trainshort.bench.documents`: tables of measurements in the documents, written from the stored results.

A region of a document between these two lines is a table of this file, and a test says when they differ:

    <!-- measured: training -->
    <!-- end of measured -->

and so is a number within a sentence, `<!-- value: recorded -->0.12 ×<!-- end -->`.

A result of a run that was stopped before its end says so under its table. No torch.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from trainshort.bench.measurements import RATIO, BenchResult, Measurement, load

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "docs/attention.md",
    "docs/evaluation.md",
    "docs/generation.md",
    "docs/interop.md",
    "docs/positions.md",
    "docs/training.md",
    "docs/windows.md",
)
REGION = re.compile(r"(<!-- measured: (\S+) -->\n)(.*?)(<!-- end of measured -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)
SHORT = (1024, 4096, 16_384, 32_768)
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
    rows = [cells(row, *TO_PLAIN) for tokens, row in by_length(bench).items() if tokens in SHORT]
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
    "kept": ("decode-trained", kept),
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


def written(text: str) -> str:
    """A document with its tables as the stored results have them."""

    def fill(match: re.Match[str]) -> str:
        names, make = TABLES[match[2]]
        if missing := [name for name in names.split() if not (RESULTS / f"{name}.json").exists()]:
            lacking = ", ".join(f"`benchmarks/results/{name}.json`" for name in missing)
            return f"{match[1]}\nNo such result is stored: {lacking}.\n\n{match[4]}"
        benches = [stored(name) for name in names.split()]
        origins = "".join(origin(bench, name) for bench, name in zip(benches, names.split(), strict=True))
        return f"{match[1]}\n{make(*benches)}{origins}\n{match[4]}"

    def value(match: re.Match[str]) -> str:
        name, make = VALUES[match[2]]
        return match[1] + make(stored(name)) + match[4]

    return VALUE.sub(value, REGION.sub(fill, text))


def stored(name: str) -> BenchResult:
    return load(RESULTS / f"{name}.json")


if __name__ == "__main__":
    for name in sys.argv[1:] or DOCUMENTS:
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
