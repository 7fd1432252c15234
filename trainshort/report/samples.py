"""What the models wrote, at their training length and past it, with their own surprise at each token. No torch."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.claims.collection import Collection
from trainshort.files import read_sealed
from trainshort.recipes.experiments import NAMES, method_name

SHADES = (1.0, 2.0, 4.0, 6.0)
"""Surprises, in nats, at which the page takes the next shade."""


@dataclass(frozen=True)
class Piece:
    """A token that was written."""

    text: str
    surprise: float | None
    """-log p under the model that wrote it, in nats; 0.1.0 did not store it."""

    @property
    def shade(self) -> int:
        return 0 if self.surprise is None else sum(self.surprise >= bound for bound in SHADES)


@dataclass(frozen=True)
class Passage:
    """A stretch that was written, where it ends, and the text right before it."""

    end: int
    given: str
    pieces: tuple[Piece, ...]

    @property
    def surprise(self) -> float | None:
        known = [piece.surprise for piece in self.pieces if piece.surprise is not None]
        return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class WrittenText:
    """What one model wrote."""

    name: str
    trained_at: int
    passages: tuple[Passage, ...]
    path: Path


def samples(collection: Collection) -> list[WrittenText]:
    """Of every run that wrote something; a file that cannot be read is left out."""
    found = []
    for run in collection.runs.values():
        path = run.path / "samples" / "sample.json"
        try:
            values = read_sealed(path)
            length = int(values["trained_at"])
            name = method_name(run.config.model.position)
            found.append(WrittenText(name, length, tuple(_passages(values, length)), path))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    order = list(NAMES.values())
    return sorted(
        found, key=lambda sample: (order.index(sample.name) if sample.name in order else 99, sample.trained_at)
    )


def _passages(values: dict[str, Any], length: int) -> list[Passage]:
    if values["format"] == 1:  # 0.1.0 wrote one text, from the training length on to four times that
        ends = {"within": length, "past": 4 * length}
        return [Passage(at, str(values["prompt"]), (Piece(str(values[key]), None),)) for key, at in ends.items()]
    return [
        Passage(
            int(one["end"]), str(one["given"]), tuple(Piece(str(text), float(nats)) for text, nats in one["written"])
        )
        for one in values["passages"]
    ]
