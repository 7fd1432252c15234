"""The extrapolation card: how far a model is good, in one file of its folder and one line for people. No torch.

    trained at 128, good to 4,096+        no worse at 4,096 tokens than at 128; nothing longer was tried
    trained at 128, good to 160           worse from there on
    trained at 128, good to 160, cannot tell at 256 (too little text)
    trained at 128, cannot read past 128

"Good" has no holes: at every length tried up to there the loss is higher than at the training length by less than what
matters. "Worse" is more than that, beyond doubt. Both words follow the rule of `trainshort.evaluate.evidence`.

`extrapolation.json` holds the line as "summary"; whoever loads the model shows it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainshort.errors import InputError
from trainshort.evaluate.evidence import EFFECT, shows, unbroken
from trainshort.evaluate.results import Evaluation, LengthScore, interval
from trainshort.files import read_sealed, write_sealed

FILE = "extrapolation.json"
FORMAT = 1
SLACK = 1.02
"""The looser of the two marks counts a perplexity as good up to this many times that at the training length."""


def make(evaluation: Evaluation, source: str) -> dict[str, Any] | None:
    """The card of a sweep, or None when it says nothing about extrapolation: it needs the training length (the shortest
    length, for a model that does not tell its own) and at least one longer, scored without overlap and as trained."""
    if evaluation.protocol.get("stride") is not None or evaluation.protocol.get("slopes") is not None:
        return None
    # A length beyond the end of the text was given no longer inputs than the text: it says nothing about that length.
    told = [row for row in evaluation.rows if row.status != "scored" or row.length <= row.tokens]
    rows = [row for row in told if row.length >= (evaluation.trained_at or 0)]
    base = rows[0] if rows else None
    if base is None or base.status != "scored" or len(rows) < 2 or evaluation.trained_at not in (None, base.length):
        return None
    scored = [row for row in rows if row.status == "scored"]
    best = min(scored, key=lambda row: row.perplexity)
    marks = {
        "no_worse": _mark(rows, lambda row: row.loss - base.loss < EFFECT),
        "within_2_percent": _mark(rows, lambda row: row.perplexity <= SLACK * base.perplexity),
    }
    return {
        "format": FORMAT,
        "summary": _summary(evaluation, rows, base, marks["no_worse"]),
        "trained_at": evaluation.trained_at,
        "base": _entry(base),
        "best": _entry(best),
        **marks,
        "gain": {
            "loss": base.loss - best.loss,
            "interval": interval(base, best),
            "perplexity": base.perplexity - best.perplexity,
        },
        "lengths": [_entry(row) for row in rows],
        "target": {key: evaluation.target.get(key) for key in ("name", "kind", "weights", "step")},
        "corpus": evaluation.corpus,
        "source": source,
        "provenance": evaluation.provenance,
    }


def _mark(rows: list[LengthScore], good: Callable[[LengthScore], bool]) -> dict[str, Any]:
    """The longest length that is good with all before it; `open` when nothing longer was tried, so that it may be good
    farther still."""
    length = unbroken((row.length, row.status == "scored" and good(row)) for row in rows)
    return {"length": length, "open": length == rows[-1].length}


def _entry(row: LengthScore) -> dict[str, Any]:
    numbers = {"tokens": row.tokens, "nll": row.nll, "perplexity": row.perplexity} if row.status == "scored" else {}
    speed = {"tokens_per_second": row.speed, "memory": row.memory} if row.status == "scored" else {}
    return {"length": row.length, "status": row.status, "reason": row.reason, **numbers, **speed}


def _summary(evaluation: Evaluation, rows: list[LengthScore], base: LengthScore, mark: dict[str, Any]) -> str:
    begin = f"trained at {base.length:,}" if evaluation.trained_at else f"compared with {base.length:,}"
    next_row = next((row for row in rows if row.length > mark["length"]), None)
    longest = evaluation.target.get("longest")
    if next_row is not None and next_row.status == "cannot" and longest:
        return f"{begin}, cannot read past {longest:,}"
    good = f"{begin}, good to {mark['length']:,}{'+' if mark['open'] else ''}"
    if next_row is None or next_row.status != "scored" or shows(next_row.loss - base.loss, interval(next_row, base)):
        return good
    return f"{good}, cannot tell at {next_row.length:,} (too little text)"


def save(card: dict[str, Any], folder: Path) -> bool:
    """Write the card, unless the folder has one of the same weights on more tokens; whether it was written."""
    path = folder / FILE
    old = load(folder)
    if old and old["target"]["weights"] == card["target"]["weights"] and old["base"]["tokens"] > card["base"]["tokens"]:
        return False
    write_sealed(path, card)
    return True


def load(folder: Path) -> dict[str, Any] | None:
    """A folder's card; None when there is none that can be read."""
    try:
        card = read_sealed(folder / FILE)
    except InputError:
        return None
    return card if card.get("format") == FORMAT else None
