"""`write_report`: a folder with index.html, report.md, the figures, and a copy of every file behind them."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from trainshort.experiments.claims.collection import Collection
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.claims.verdicts import Claim, JudgedClaims, evaluate_claims
from trainshort.report import headline as first
from trainshort.report import render, sections, summary
from trainshort.report.speed import cost_figures, speed
from trainshort.report.tables import Sources, TableCell, paper_figures, paper_tables
from trainshort.report.tables import Table as PaperTable
from trainshort.utils.figures import Figure, draw_changed_figures
from trainshort.utils.io import make_folder, write_atomic, write_with_checksum


def write_report(collection: Collection, out: Path) -> Path:
    """Write everything, and return the path of the page."""
    make_folder(out)
    sources = Sources(out)
    scale = collection.scale
    view = ScaleView(collection, scale) if scale else None
    headline = first.find_headline(collection)
    figure = first.figure(headline, with_paper=view is not None) if headline else None
    costs = cost_figures(collection)
    measured = speed(collection)
    figures = _figures(collection, headline, view)
    judged = evaluate_claims(view) if view else []
    content: dict[str, Any] = {
        "title": "Train short, test long: what was obtained here",
        "subtitle": sections.models(collection) + (f" at the {scale.name} scale: {scale.summary}." if scale else "."),
        "about": summary.introduction(headline) if headline else "",
        "sentences": summary.result_sentences(headline, view) if headline else [],
        "trust": summary.limitations(headline, collection, judged) if headline else [],
        "headline": figure,
        "lines": headline.lines if headline else (),
        "lengths": headline.lengths if headline else [],
        "claims": judged,
        "tally": summary.verdicts(judged),
        "rules": _rules([claim for claim, _ in judged]),
        "scale": scale.name if scale else "",
        "costs": costs,
        "speed": measured,
        "figures": figures,
        "samples": sections.samples(collection),
        "tables": paper_tables(view, sources) if view else [],
        "origin": sections.origin(collection),
        "runs": list(collection.runs.values()),
        "link": sources.link,
    }
    drawn = [*([figure] if figure else []), *costs, *(measured.figures if measured else ()), *figures]
    draw_changed_figures(drawn, out)
    write_atomic(out / "index.html", render.html(content, drawn))
    write_atomic(out / "report.md", render.markdown(content))
    if headline:
        write_with_checksum(out / "headline.json", summary.summary(headline, view, judged))
        write_with_checksum(out / "tables.json", _stored_tables(collection, content["tables"]))
    _write_claims(judged, out / "claims.json", content["scale"])
    return out / "index.html"


def _figures(collection: Collection, headline: first.Headline | None, view: ScaleView | None) -> list[Figure]:
    """Figures after the headline, those that have data."""
    made = [
        headline and sections.position_figure(headline),
        headline and sections.early_figure(headline, collection, view),
        headline and sections.reach_figure(headline, collection),
        *(paper_figures(view) if view else ()),
    ]
    return [figure for figure in made if figure]


def _rules(claims: list[Claim]) -> str:
    """Which verdicts follow a rule that was there before the numbers, and which do not."""
    later = [claim for claim in claims if claim.rule.results_were_known]
    first = f"{len(claims) - len(later)} of {len(claims)} rules were fixed before the first run was looked at"
    if not later:
        return f"{first}."
    names = ", ".join(claim.name for claim in later)
    return f"{first}; {len(later)} were changed after numbers had been seen, and say so ({names})."


def _stored_tables(collection: Collection, tables: list[PaperTable]) -> dict[str, Any]:
    """The tables as data: per cell what was obtained and what the paper has, as printed, and each seed's number."""
    records = [one.evaluation.provenance for run in collection.runs.values() for one in run.evaluations]
    return {
        "format": 2,
        "seeds": len({run.config.train.seed for run in collection.runs.values()}),
        "tables": [
            {
                "name": one.name,
                "title": one.title,
                "columns": one.columns,
                "rows": [[row, [_stored_cell(cell) for cell in cells]] for row, cells in one.rows],
                "note": one.note,
                "differences": one.differences,
            }
            for one in tables
        ],
        "provenance": records[-1] if records else {},
    }


def _stored_cell(cell: TableCell) -> dict[str, Any]:
    return {"here": cell.here, "paper": cell.paper, "values": cell.values}


def _write_claims(judged: JudgedClaims, path: Path, scale: str) -> None:
    rows = [
        {
            "name": claim.name,
            "statement": claim.statement,
            "paper": claim.published,
            "obtained": outcome.obtained,
            "scale": scale,
            "verdict": outcome.verdict,
            "reason": outcome.reason,
            "detectable": outcome.smallest_detectable,
            "rule": {
                "commit": claim.rule.commit,
                "date": claim.rule.date,
                "numbers seen": claim.rule.results_were_known,
            },
            "sources": [str(source) for source in outcome.sources],
        }
        for claim, outcome in judged
    ]
    write_atomic(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def headline_table(collection: Collection) -> Table | None:
    """Perplexity by method and length; None when nothing was evaluated past its training length."""
    headline = first.find_headline(collection)
    if headline is None:
        return None
    table = Table(box=None, pad_edge=False)
    table.add_column(f"trained at {headline.length:,}, evaluated at", no_wrap=True)
    for line in headline.lines:
        table.add_column(line.name, justify="right", no_wrap=True)
    for length in headline.lengths:
        cells = [line.points.get(length) for line in headline.lines]
        times = f"{length:,} ({length / headline.length:.4g}x)"
        table.add_row(times, *("" if cell is None else f"{cell:.2f}" for cell in cells))
    return table
