"""What an experiment is: the paper's cells, each with the model and the reading that give its number. No torch.

A table is its cells and nothing else. Which models to train and which evaluations to run follows from them, at every
scale, so that a table and what is computed for it cannot drift apart.

    Cell("ALiBi, L = 512", "3072", 18.40, "perplexity", Variant("wikitext103", "alibi", 512), Reading(3072))
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from trainshort.errors import InputError
from trainshort.evaluate.query import Query
from trainshort.recipes.scales import Scale, Variant
from trainshort.registry import Registry

Quantity = Literal["perplexity", "train speed", "read speed", "train memory", "learning curve"]

UNITS: dict[Quantity, str] = {
    "perplexity": "perplexity",
    "train speed": "tokens/s, training",
    "read speed": "tokens/s, reading",
    "train memory": "GB, training",
    "learning curve": "perplexity over training",
}

NAMES = {"alibi": "ALiBi", "sinusoidal": "Sinusoidal", "rotary": "Rotary", "t5": "T5 bias", "none": "None"}


@dataclass(frozen=True)
class Reading:
    """How a trained model is read, in the paper's numbers."""

    length: int
    """L_valid."""
    stride: int | None = None
    """None: without overlap."""
    split: str = "valid"


@dataclass(frozen=True)
class Cell:
    """One published number and how to get it. Without a variant it is quoted from other work, and only shown."""

    row: str
    column: str
    published: float | None
    quantity: Quantity = "perplexity"
    variant: Variant | None = None
    reading: Reading | None = None
    x: float | None = None
    """Place on a figure's horizontal axis."""

    @property
    def apart(self) -> bool:
        """Whether it is a cost of the configuration and not of trained weights: a few updates tell it."""
        return self.quantity in ("train speed", "read speed", "train memory") and self.reading is None

    def possible(self, experiment: str, scale: Scale) -> bool:
        """Whether this scale computes the cell."""
        if self.variant is None:
            return False
        if self.reading is not None and scale.length(self.reading.length) > scale.longest:
            return False
        if self.apart:
            return True
        return self.variant.length in scale.lengths and self.variant.length not in scale.left_out.get(experiment, ())


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    kind: Literal["table", "lines", "bars"] = "table"
    axes: tuple[str, str] = ("", "")
    """Labels of a figure's two axes."""

    def variants(self, scale: Scale) -> list[Variant]:
        """Models to train, each once, in the order of the cells."""
        trained = (c for c in self.cells if c.possible(self.name, scale) and not c.apart)
        return list(dict.fromkeys(cell.variant for cell in trained if cell.variant))

    def measured_apart(self, scale: Scale) -> list[Variant]:
        """Configurations whose speed and memory are wanted, trained or not."""
        cells = (c for c in self.cells if c.possible(self.name, scale) and c.apart)
        return list(dict.fromkeys(cell.variant for cell in cells if cell.variant))

    def readings(self, scale: Scale, variant: Variant) -> list[Reading]:
        """Evaluations of one model."""
        cells = (c for c in self.cells if c.variant == variant and c.possible(self.name, scale))
        wanted = (c for c in cells if c.quantity in ("perplexity", "read speed"))
        return list(dict.fromkeys(cell.reading for cell in wanted if cell.reading))

    def curves(self, scale: Scale, variant: Variant) -> list[Reading]:
        """Readings of one model that are wanted at several moments of its training."""
        cells = (c for c in self.cells if c.variant == variant and c.possible(self.name, scale))
        return list(dict.fromkeys(c.reading for c in cells if c.quantity == "learning curve" and c.reading))


experiments: Registry[Callable[[], Experiment]] = Registry("table or figure")

from trainshort.recipes import figures, tables  # noqa: E402, F401  (fills the registry)


def choose(names: Iterable[str]) -> list[Experiment]:
    """Experiments by name, all of them when none is named; `table 5`, `Table5` and `figure 1` are understood."""
    chosen = [_plain(name) for name in names if name.strip()]
    return [experiments.get(name)() for name in chosen or experiments.names()]


def _plain(name: str) -> str:
    plain = name.strip().lower().replace(" ", "").replace("figure", "fig").replace(".", "")
    if plain in ("fig3", "fig10"):
        raise InputError(f"{name.strip()} is a drawing of how something works; there is nothing to compute for it.")
    return plain


def queries(scale: Scale, reading: Reading) -> list[Query]:
    """The evaluations that a reading wants at a scale, its own first. A sliding one has a companion without overlap on
    the same text: their difference is what the beginnings of blocks cost."""
    stride = scale.stride(reading.stride)
    if stride is None:
        return [Query(reading.split, None, scale.eval_tokens)]
    return [Query(reading.split, stride, scale.sliding_tokens), Query(reading.split, None, scale.sliding_tokens)]


def moments(scale: Scale, reading: Reading) -> Query:
    """The evaluation of a learning curve's checkpoints, without overlap on little text; the step is left open."""
    return Query(reading.split, None, scale.sliding_tokens)


def reseeded(experiment: Experiment, seed: int) -> Experiment:
    """The same experiment with other first weights and another order of the data."""
    cells = (replace(c, variant=replace(c.variant, seed=seed)) if c.variant else c for c in experiment.cells)
    return replace(experiment, cells=tuple(cells))
