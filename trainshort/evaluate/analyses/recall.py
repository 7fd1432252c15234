"""Copy and recall at a distance: is something that stood d tokens ago still found?

    copy      a stretch of text, then d tokens of other text, then the same stretch again
    recall    a random key with a random value, then d tokens of text, then the key again: is the value known?

    … K K K K V V V V  text text text …  K K K K V V V V
              ⎸<------------- d ------------->⎹  scored: the last V, after the cue

The control is the same row with something else in the first place, so that the drop of the loss is what finding it was
worth. At distances past the training length no bias and no position of this size was ever trained.
"""

from typing import Any

import numpy as np
from rich.console import Group

from trainshort.errors import InputError
from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, compare, interval_text, new_table, with_title
from trainshort.evaluate.significance import format_range, is_significant_increase

CUE, VALUE = 8, 8
"""Tokens that are given of the repeated stretch, and tokens that are then scored."""
MIN_RECALL_DISTANCE = 2 * (CUE + VALUE)
"""The shortest distance at which the stretch and its repetition are apart."""
RECALL_TASKS = ("copy", "recall")


def scope(lab: AnalysisContext) -> list[int]:
    """The distances: those that leave room for text between the two stretches, and for the whole row in the text."""
    asked = lab.multiples(1, 2, 4, 8, 16, 32)
    room = min(len(lab.tokens) - 1, lab.target.max_length or len(lab.tokens))
    if lab.lengths and _length(lab, asked[-1]) > room:
        raise InputError(
            f"recall at {asked[-1]:,} tokens reads {_length(lab, asked[-1]):,} at once, more than the {room:,} that "
            "text and model allow. Give a longer text or shorter --lengths."
        )
    distances = [d for d in asked if d >= MIN_RECALL_DISTANCE and _length(lab, d) <= room]
    if not distances:
        raise InputError(
            f"recall requires a distance of at least {MIN_RECALL_DISTANCE} tokens. None of "
            f"{', '.join(map(str, asked))} fits. Use longer --lengths or a longer text."
        )
    return distances


def run(lab: AnalysisContext) -> dict[str, Any]:
    rows = []
    distances = scope(lab)
    lab.meter.start(4 * lab.samples * sum(_length(lab, distance) - 1 for distance in distances))
    for distance in distances:
        for kind in RECALL_TASKS:
            with_it, without = (lab.score(part, VALUE) for part in probe_rows(lab, kind, distance))
            found = compare(with_it, without)
            losses = {"loss": float(with_it.mean()), "control": found["loss"]}
            gain = {"gain": found["rise"], "interval": found["interval"]}
            rows.append({"kind": kind, "distance": distance, **losses, **gain})
    return {"summary": summary(rows), "probes": lab.samples, "scored": VALUE, "cue": CUE, "rows": rows}


def _length(lab: AnalysisContext, distance: int) -> int:
    """Tokens of a row: some text first, the stretch, what lies between, the stretch again."""
    return lab.trained_at // 2 + distance + CUE + VALUE


def probe_rows(lab: AnalysisContext, kind: str, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in which the stretch stood `distance` tokens before its repetition, and the same rows without it."""
    rng = np.random.default_rng((lab.seed, distance, len(kind)))
    lead, size, length = lab.trained_at // 2, CUE + VALUE, _length(lab, distance)
    starts = rng.integers(len(lab.tokens) - length, size=lab.samples)
    present = lab.rows(starts, length)
    stretch = _text_spans(lab, kind, rng)
    present[:, lead : lead + size] = present[:, -size:] = stretch
    absent = present.copy()
    other = _text_spans(lab, kind, rng)
    absent[:, lead : lead + size] = other
    if kind == "recall":
        absent[:, lead : lead + CUE] = stretch[:, :CUE]  # the key was there, with another value
    return present, absent


def _text_spans(lab: AnalysisContext, kind: str, rng: np.random.Generator) -> np.ndarray:
    size = CUE + VALUE
    if kind == "copy":
        starts = rng.integers(len(lab.tokens) - size, size=lab.samples)
        return lab.rows(starts, size)
    # Token types that the text has: others were never trained and would say nothing.
    known = np.unique(np.asarray(lab.tokens))
    return rng.choice(known, size=(lab.samples, size)).astype(np.int64)


def summary(rows: list[dict[str, Any]]) -> str:
    found = {
        kind: [(r["distance"], is_significant_increase(r["gain"], r["interval"])) for r in rows if r["kind"] == kind]
        for kind in RECALL_TASKS
    }
    return "; ".join(format_range(kind, found[kind]) for kind in RECALL_TASKS)


def table(result: dict[str, Any]) -> Group:
    title = f"Loss of {result['scored']} tokens that stood before, after a cue of {result['cue']}"
    shown = new_table("probe", "distance", "loss", "control", "gain", "95 %")
    for row in result["rows"]:
        numbers = (f"{row['loss']:.3f}", f"{row['control']:.3f}", f"{row['gain']:+.3f}", interval_text(row["interval"]))
        shown.add_row(row["kind"], f"{row['distance']:,}", *numbers)
    return with_title(title, shown)


RECALL = Analysis("is something that stood d tokens ago still found?", run, table, fits=scope)
