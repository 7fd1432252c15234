"""What the models wrote, at their training length and past it, with their own surprise at each token. No torch."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.claims.collection import Collection, stored
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
    """Of every run that wrote something."""
    found = []
    for run in collection.runs.values():
        path = run.path / "samples" / "sample.json"
        written = stored(path, _written, "Remove it; trainshort demo and reproduce write it again.")
        if written is not None:
            found.append(WrittenText(method_name(run.config.model.position), *written, path))
    order = list(NAMES.values())
    return sorted(
        found, key=lambda sample: (order.index(sample.name) if sample.name in order else 99, sample.trained_at)
    )


def _written(values: dict[str, Any]) -> tuple[int, tuple[Passage, ...]]:
    """The training length, and what was written."""
    length = int(values["trained_at"])
    if values["format"] == 1:  # 0.1.0 wrote one text, from the training length on to four times that
        ends = {"within": length, "past": 4 * length}
        prompt = str(values["prompt"])
        return length, tuple(Passage(at, prompt, (Piece(str(values[key]), None),)) for key, at in ends.items())
    return length, tuple(
        Passage(
            int(one["end"]), str(one["given"]), tuple(Piece(str(text), float(nats)) for text, nats in one["written"])
        )
        for one in values["passages"]
    )
