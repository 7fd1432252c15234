"""Write the folder of a report: the HTML page, the Markdown file, figures, and copies of the JSON files behind them."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table as ConsoleTable

from trainshort.experiments.claims.collection import Collection
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.claims.verdicts import Claim, JudgedClaims, Outcome, evaluate_claims
from trainshort.report import render, sections, summary
from trainshort.report.headline import Headline, find_headline, headline_figure
from trainshort.report.speed import cost_figures, find_speed_results
from trainshort.report.tables import Difference, SourceFiles, Table, TableCell, paper_figures, paper_tables
from trainshort.utils.figures import Figure, draw_changed_figures
from trainshort.utils.io import make_folder, write_atomic, write_with_checksum


def write_report(collection: Collection, out: Path) -> Path:
    """Write a report.

    The folder contains the following files:

    - `index.html` and `report.md`: the report
    - `*.png` and `*.svg`: the figures
    - `data/`: copies of the JSON files that the report links to
    - `claims.json`: the verdicts on the claims of the paper
    - `headline.json` and `tables.json`: the main figure and the tables of the paper as data

    Args:
        collection: The runs and measurements.
        out: The folder of the report.

    Returns:
        The path of `index.html`.
    """
    make_folder(out)
    sources = SourceFiles(out)
    scale = collection.scale
    view = ScaleView(collection, scale) if scale else None
    headline = find_headline(collection)
    judged_claims = evaluate_claims(view) if view else []
    tables = paper_tables(view, sources) if view else []

    main_figure = headline_figure(headline, with_paper=view is not None) if headline else None
    costs = cost_figures(collection)
    speed = find_speed_results(collection)
    further_figures = _find_further_figures(collection, headline, view)

    # The variables of the templates.
    content: dict[str, Any] = {
        "title": "Train short, test long: measured results",
        "subtitle": _make_subtitle(collection),
        "introduction": summary.introduction(headline) if headline else "",
        "results": summary.result_sentences(headline, view) if headline else [],
        "limitations": summary.limitations(headline, collection, judged_claims) if headline else [],
        "headline": main_figure,
        "curves": headline.curves if headline else (),
        "lengths": headline.lengths if headline else [],
        "claims": judged_claims,
        "verdict_counts": summary.format_verdict_counts(judged_claims),
        "criteria_note": _describe_criteria([claim for claim, _ in judged_claims]),
        "scale": scale.name if scale else "",
        "costs": costs,
        "speed": speed,
        "figures": further_figures,
        "samples": sections.find_samples(collection),
        "tables": tables,
        "origin": sections.origin_rows(collection),
        "runs": list(collection.runs.values()),
        "link": sources.link,
    }

    all_figures = [main_figure] if main_figure else []
    all_figures += costs
    all_figures += speed.figures if speed else []
    all_figures += further_figures
    draw_changed_figures(all_figures, out)

    write_atomic(out / "index.html", render.render_html(content, all_figures))
    write_atomic(out / "report.md", render.render_markdown(content))
    if headline:
        write_with_checksum(out / "headline.json", summary.make_headline_record(headline, view, judged_claims))
        write_with_checksum(out / "tables.json", _make_tables_record(collection, tables))
    _write_claims(judged_claims, out / "claims.json", scale.name if scale else "")
    return out / "index.html"


def _make_subtitle(collection: Collection) -> str:
    """Return a text such as "5 models at the laptop scale: two CPU cores, ..."."""
    model_count = sections.format_model_count(collection)
    if collection.scale is None:
        return f"{model_count}."
    return f"{model_count} at the {collection.scale.name} scale: {collection.scale.summary}."


def _find_further_figures(collection: Collection, headline: Headline | None, view: ScaleView | None) -> list[Figure]:
    """Return the figures below the main figure. Figures without data are left out.

    Args:
        collection: The runs.
        headline: The curves of the main figure, or None if there are no such curves.
        view: The stored results at one scale (laptop, gpu or paper). None if the runs belong to no scale.
    """
    figures: list[Figure | None] = []
    if headline is not None:
        figures.append(sections.position_figure(headline))
        figures.append(sections.early_figure(headline, collection, view))
        figures.append(sections.reach_figure(headline, collection))
    if view is not None:
        figures += paper_figures(view)
    return [figure for figure in figures if figure is not None]


def _describe_criteria(claims: list[Claim]) -> str:
    """Return sentences about how many criteria were changed after results were available.

    The criterion of a claim says which measurements support the claim.

    Args:
        claims: The claims of the paper that the report checks.
    """
    changed = [claim.name for claim in claims if claim.criterion.results_were_known]
    unchanged_count = len(claims) - len(changed)
    description = f"{unchanged_count} of {len(claims)} criteria were written before results were available."
    if changed:
        description += f" {len(changed)} criteria were changed after results were available: {', '.join(changed)}."
    return description


# ---- the report as data


def _make_tables_record(collection: Collection, tables: list[Table]) -> dict[str, Any]:
    """Return the content of `tables.json`: all numbers as printed, and the measured number of each seed.

    The tables in the documentation are generated from this file.
    """
    provenances = [stored.evaluation.provenance for run in collection.runs.values() for stored in run.evaluations]
    seeds = {run.config.train.seed for run in collection.runs.values()}
    return {
        "format": 2,
        "seeds": len(seeds),
        "tables": [_make_table_record(table) for table in tables],
        "provenance": provenances[-1] if provenances else {},
    }


def _make_table_record(table: Table) -> dict[str, Any]:
    """Return one table as data for `tables.json`. Each row consists of its label and the list of its cells."""
    return {
        "name": table.name,
        "title": table.title,
        "columns": table.columns,
        "rows": [[label, [_make_cell_record(cell) for cell in cells]] for label, cells in table.rows],
        "note": table.note,
        "differences": [_make_difference_record(difference) for difference in table.differences],
    }


def _make_difference_record(difference: Difference) -> dict[str, Any]:
    """Return the comparison of ALiBi with another method as data for `tables.json`.

    Args:
        difference: The compared rows of a table, their column, and the difference of their perplexities as text.
    """
    return {
        "row": difference.row,
        "column": difference.column,
        "other": difference.baseline_row,
        "told": difference.text,
    }


def _make_cell_record(cell: TableCell) -> dict[str, Any]:
    """Return one table cell as data for `tables.json`."""
    return {"here": cell.here, "paper": cell.paper, "values": cell.values}


def _write_claims(judged_claims: JudgedClaims, path: Path, scale_name: str) -> None:
    """Write the outcomes of all claims as JSON."""
    records = [_make_claim_record(claim, outcome, scale_name) for claim, outcome in judged_claims]
    write_atomic(path, json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def _make_claim_record(claim: Claim, outcome: Outcome, scale_name: str) -> dict[str, Any]:
    """Return the outcome of one claim as data for `claims.json`.

    Args:
        claim: A statement of the paper, with the numbers of the paper and the criterion of the check.
        outcome: The measured numbers and the verdict.
        scale_name: The size at which the numbers were measured: "laptop", "gpu" or "paper".
    """
    return {
        "name": claim.name,
        "statement": claim.statement,
        "paper": claim.published,
        "obtained": outcome.measured,
        "scale": scale_name,
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "detectable": outcome.smallest_detectable,
        "rule": {
            "commit": claim.criterion.commit,
            "date": claim.criterion.date,
            "numbers seen": claim.criterion.results_were_known,
        },
        "sources": [str(source) for source in outcome.sources],
    }


# ---- the terminal


def headline_table(collection: Collection) -> ConsoleTable | None:
    """Return a table for the terminal with the perplexity by method and length.

    Args:
        collection: The runs.

    Returns:
        The table, or None if no run was evaluated beyond its training length.
    """
    headline = find_headline(collection)
    if headline is None:
        return None
    table = ConsoleTable(box=None, pad_edge=False)
    table.add_column(f"trained at {headline.training_length:,}, evaluated at", no_wrap=True)
    for curve in headline.curves:
        table.add_column(curve.name, justify="right", no_wrap=True)
    for length in headline.lengths:
        multiple = length / headline.training_length
        cells: list[str] = []
        for curve in headline.curves:
            # A curve without a result at this length has an empty cell.
            cells.append(f"{curve.points[length]:.2f}" if length in curve.points else "")
        table.add_row(f"{length:,} ({multiple:.4g}x)", *cells)
    return table
