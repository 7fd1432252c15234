"""`python -m trainshort.report.readme [report/laptop]`: what README and docs say of the demo, the search, the tables.

Given a report's folder, its results are stored first. Of one seed: headline.json as benchmarks/results/demo.json, and
the first figure as docs/headline.png; of several: tables.json beside it, and the pictures of its tables. Then each
region of a document between two such lines is written from what is stored, and a test says when they differ; where
nothing is stored it is left.

    <!-- obtained: demo -->
    <!-- end of obtained -->

No torch.
"""

import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainshort.bench.documents import RESULTS, ROOT, table
from trainshort.bench.measurements import RATIO
from trainshort.evaluate.results import Evaluation, interval, perplexity
from trainshort.files import read_sealed
from trainshort.plots.figures import Figure, Series, color, draw
from trainshort.recipes.experiments import method_name, published

DOCUMENTS = ("README.md", "docs/reproduce.md", "docs/evaluation.md")
REGION = re.compile(r"(<!-- obtained: (\S+) -->\n)(.*?)(<!-- end of obtained -->)", re.DOTALL)
BESIDE = "read tokens/s"
"""A column that documents leave out: evaluations are timed while other models train beside them."""
PAPER = (512, 8512)
"""Lengths of the paper's Table 2 that stand beside the demo's first and last."""


def demo(values: dict[str, Any]) -> str:
    """The demo's four methods at their length and at the farthest, beside the paper's; then what was found."""
    length = values["length"]
    farthest = max(int(at) for line in values["lines"].values() for at in line["points"])
    paper = {row["L_valid"]: row for row in published()["table2"]}
    rows = []
    for name, line in values["lines"].items():
        if str(length) in line["points"]:
            here = [_told(*line["points"].get(str(at), ())) for at in (length, farthest)]
            rows.append([name, *here, *(f"{paper[at][line['position'] + '_ppl']:.2f}" for at in PAPER)])
    corpus, times = values["corpus"], farthest / length
    head = f" | here, at {length:,} | here, at {farthest:,} ({times:.0f} {RATIO}) | "
    head += f"paper, at 512 | paper, at 8,512 (16.6 {RATIO})"
    where = (
        f"Here: perplexity on {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}, with "
        "95 % intervals over that text; one seed."
    )
    found = "\n".join(f"- {sentence}" for sentence in values["found"])
    return f"{table(head, rows)}\n{where} {_origin(values, 'demo')}\n\n{found}\n"


def _told(value: float | None = None, low: float | None = None, high: float | None = None) -> str:
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
    return f"{table(head, rows)}\n{tokens:,} tokens each, one seed.{done} {_origin(values, 'tune')}\n\n{pilot}"


def tune_picture(values: dict[str, Any]) -> Figure:
    """The same as a figure: a line per method over the ways."""
    places = {way: number for number, way in enumerate(values["grid"], 1)}
    series = []
    for method, found in trials(values).items():
        tried = [way for way in places if way in found]
        x, y = tuple(places[way] for way in tried), tuple(found[way] for way in tried)
        series.append(Series(method_name(method), x, y, color(method)))
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
    """Pseudo-perplexity of the masked language models by length, ALiBi's and whatever is stored beside it."""
    beside = sorted(path for path in RESULTS.glob("mlm-*.json") if path.stem != "mlm-alibi")
    found = [Evaluation.read(one) for one in (values, *map(read_sealed, beside))]
    rows = []
    for row in found[0].scored:
        cells = [
            _told(one.perplexity, *map(perplexity, interval(one) or ())) if one and one.status == "scored" else ""
            for one in (evaluation.row(row.length) for evaluation in found)
        ]
        rows.append([f"{row.length:,} ({row.length / (found[0].trained_at or 1):.0f} {RATIO})", *cells])
    head = " | ".join(["tokens read at once", *(method_name(str(one.target["position"])) for one in found)])
    corpus, step = found[0].corpus, found[0].target["step"]
    where = (
        f"Pseudo-perplexity on {corpus['tokens']:,} tokens of the {corpus['split']} split of {corpus['name']}, with "
        f"95 % intervals over that text, after {step:,} steps; one seed."
    )
    return f"{table(head, rows)}\n{where} {_origin(values, 'mlm-alibi')}\n"


def paper_table(name: str, values: dict[str, Any]) -> str:
    """A table of the paper as obtained here, with the paper's numbers in brackets; then what of it can be told."""
    one = next(one for one in values["tables"] if one["name"] == name)
    rows = [
        [row, *(f"{cell['here']} ({cell['paper']})" if cell["here"] else "" for cell in cells)]
        for row, cells in one["rows"]
    ]
    rows = [row for row in [["", *one["columns"]], *rows] if any(row[1:])]
    filled = [number for number in range(len(rows[0])) if any(row[number] for row in rows[1:])]
    columns = [number for number in filled if rows[0][number] != BESIDE]
    head, *kept = [[row[number] for number in columns] for row in rows]
    told = [[each[key] for key in ("row", "column", "other", "told")] for each in one["differences"]]
    where = f"{values['seeds']} seeds. {one['note']} {_origin(values, 'tables')}"
    against = f"\n{table('ALiBi | column | to | difference (95 %)', told)}" if told else ""
    return f"{table(' | '.join(head), kept)}\n{where}\n{against}"


def _origin(values: dict[str, Any], name: str) -> str:
    return f"Commit {str(values['provenance'].get('commit'))[:7]}, `benchmarks/results/{name}.json`."


REGIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "demo": ("demo", demo),
    "tune": ("tune", tune),
    "encoders": ("mlm-alibi", encoders),
    "table5": ("tables", partial(paper_table, "table5")),
    "table6": ("tables", partial(paper_table, "table6")),
}


def written(text: str) -> str:
    """A document with its regions as the stored results have them."""

    def fill(match: re.Match[str]) -> str:
        file, make = REGIONS[match[2]]
        path = RESULTS / f"{file}.json"
        if not path.exists():
            return match[0]
        values = read_sealed(path)
        if match[2].startswith("table") and match[2] not in {one["name"] for one in values["tables"]}:
            return match[0]
        return f"{match[1]}\n{make(values)}\n{match[4]}"

    return REGION.sub(fill, text)


def store(report: Path) -> None:
    """Keep what a report found in the repository: with one seed it is the demo's, with several it is of the tables."""
    if read_sealed(report / "tables.json")["seeds"] > 1:
        shutil.copyfile(report / "tables.json", RESULTS / "tables.json")
        for picture in report.glob("table*-figure.png"):
            shutil.copyfile(picture, ROOT / "docs" / picture.name)
        return
    shutil.copyfile(report / "headline.json", RESULTS / "demo.json")
    shutil.copyfile(report / "headline.png", ROOT / "docs" / "headline.png")


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        store(Path(folder))
    if (RESULTS / "tune.json").exists():
        draw([tune_picture(read_sealed(RESULTS / "tune.json"))], ROOT / "docs" / "tune")
        (ROOT / "docs" / "tune.svg").unlink()
    for document in DOCUMENTS:
        place = ROOT / document
        place.write_text(written(place.read_text(encoding="utf-8")), encoding="utf-8")
