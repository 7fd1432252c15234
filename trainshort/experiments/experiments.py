"""What an experiment is: a table or figure of the paper, or the demo's set. It is its cells, each with the model and
the reading that give its number; and what a scale is, at which models are trained and read. No torch.

A table is its cells and nothing else. Which models to train and which evaluations to run follows from them, at every
scale, so that a table and what is computed for it cannot drift apart.

    Cell("ALiBi, L = 512", "3072", 18.40, "perplexity", Variant("wikitext103", "alibi", 512), EvalProtocol(3072))
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from trainshort.config.run_config import RunConfig
from trainshort.errors import InputError
from trainshort.evaluate.results import Query
from trainshort.train.run_folder import run_name
from trainshort.utils.registry import Registry

Quantity = Literal["perplexity", "train speed", "read speed", "train memory", "learning curve"]

METHOD_NAMES = {"alibi": "ALiBi", "sinusoidal": "Sinusoidal", "rotary": "Rotary", "t5": "T5 bias", "none": "None"}


def method_name(position: str) -> str:
    """A position method as people read it; one that the paper does not have keeps the name it was registered by."""
    return METHOD_NAMES.get(position, position)


@cache
def load_published_numbers() -> dict[str, Any]:
    """Every number the paper prints, by table and figure, as data that ships with the package. Lengths that are keys
    are strings there, as JSON has them."""
    text = resources.files("trainshort.experiments").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)


@dataclass(frozen=True)
class Variant:
    """One model of the paper: test bed, position method, training length as the paper has it."""

    setup: str
    position: str
    length: int
    seed: int = 1


@dataclass(frozen=True)
class Scale:
    """How an experiment is made smaller, or left as it is."""

    name: str
    summary: str
    training_lengths: tuple[int, ...]
    """The paper's training lengths that are trained at this scale; the others are left out for time."""
    build: Callable[[Variant], RunConfig]
    length_divisor: int = 1
    """The paper's lengths are divided by this."""
    excluded_lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Lengths left out in single experiments, by their names."""
    stride_one: int = 1
    """Stride that takes the place of the paper's stride 1."""
    sliding_tokens: int | None = None
    """Tokens of text scored by sliding windows; None: all."""
    eval_tokens: int | None = None
    """Tokens of text scored without overlap; None: all."""
    max_eval_length: int = 16_384
    """Longest length that is evaluated at this scale."""
    default_split: str = "valid"
    """Split on which perplexities are reported, where a cell names none: validation's, as the paper has it, unless the
    recipe was chosen by that."""
    gpus: int = 0
    """GPUs that a model of this scale wants where a cluster trains it."""
    uses_single_corpus: bool = False
    """Whether one small corpus stands for all three test beds."""

    def scale_length(self, published: int) -> int:
        """What a length of the paper is here: at the laptop, 512 is 128."""
        return max(1, round(published / self.length_divisor))

    def scale_stride(self, published: int | None) -> int | None:
        if published is None:
            return None
        return self.stride_one if published == 1 else self.scale_length(published)

    def make_config(self, variant: Variant) -> RunConfig:
        return self.build(variant)

    def run_name(self, variant: Variant) -> str:
        """Return the name of the run folder of a model."""
        return run_name(self.build(variant))


@dataclass(frozen=True)
class EvalProtocol:
    """How a trained model is read, in the paper's numbers."""

    length: int
    """L_valid."""
    stride: int | None = None
    """None: without overlap."""
    split: str | None = None
    """None: the one that the scale reports on."""


@dataclass(frozen=True)
class Cell:
    """One published number and how to get it. Without a variant it is quoted from other work, and only shown."""

    row: str
    column: str
    published: float | None
    quantity: Quantity = "perplexity"
    variant: Variant | None = None
    protocol: EvalProtocol | None = None
    x_value: float | None = None
    """Place on a figure's horizontal axis."""

    @property
    def is_cost(self) -> bool:
        """Whether it is a cost of the configuration and not of trained weights: a few steps tell it."""
        return self.quantity in ("train speed", "read speed", "train memory") and self.protocol is None

    def is_computable(self, experiment: str, scale: Scale) -> bool:
        """Whether this scale computes the cell."""
        if self.variant is None:
            return False
        if self.protocol is not None and scale.scale_length(self.protocol.length) > scale.max_eval_length:
            return False
        if self.is_cost:
            return True
        return self.variant.length in scale.training_lengths and self.variant.length not in scale.excluded_lengths.get(
            experiment, ()
        )


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    kind: Literal["table", "lines", "bars", "by speed"] = "table"
    """How it is drawn beside its table; by speed: each row's perplexity against its training speed."""
    axes: tuple[str, str] = ("", "")
    """Labels of a figure's two axes."""

    def variants_to_train(self, scale: Scale) -> list[Variant]:
        """Models to train, each once, in the order of the cells."""
        trained = (c for c in self.cells if c.is_computable(self.name, scale) and not c.is_cost)
        return list(dict.fromkeys(cell.variant for cell in trained if cell.variant))

    def variants_to_measure(self, scale: Scale) -> list[Variant]:
        """Configurations whose speed and memory are wanted, trained or not."""
        cells = (c for c in self.cells if c.is_computable(self.name, scale) and c.is_cost)
        return list(dict.fromkeys(cell.variant for cell in cells if cell.variant))

    def eval_protocols(self, scale: Scale, variant: Variant) -> list[EvalProtocol]:
        """Evaluations of one model."""
        cells = (c for c in self.cells if c.variant == variant and c.is_computable(self.name, scale))
        wanted = (c for c in cells if c.quantity in ("perplexity", "read speed"))
        return list(dict.fromkeys(cell.protocol for cell in wanted if cell.protocol))

    def learning_curve_protocols(self, scale: Scale, variant: Variant) -> list[EvalProtocol]:
        """Readings of one model that are wanted at several moments of its training."""
        cells = (c for c in self.cells if c.variant == variant and c.is_computable(self.name, scale))
        return list(dict.fromkeys(c.protocol for c in cells if c.quantity == "learning curve" and c.protocol))

    @property
    def methods(self) -> list[str]:
        """Position methods of its models, in the order of the cells."""
        return list(dict.fromkeys(cell.variant.position for cell in self.cells if cell.variant))


experiments: Registry[Callable[[], Experiment]] = Registry("experiment")

from trainshort.experiments import tables  # noqa: E402, F401  (fills the registry)


def select_experiments(names: Iterable[str]) -> list[Experiment]:
    """Experiments by name, all of them when none is named; `table 5`, `Table5` and `figure 1` are understood."""
    chosen = [_plain(name) for name in names if name.strip()]
    return [experiments.get(name)() for name in chosen or experiments.names()]


def _plain(name: str) -> str:
    plain = name.strip().lower().replace(" ", "").replace("figure", "fig").replace(".", "")
    if plain in ("fig3", "fig10"):
        raise InputError(f"{name.strip()} is a drawing of how something works; there is nothing to compute for it.")
    return plain


def build_queries(scale: Scale, reading: EvalProtocol) -> list[Query]:
    """The evaluations that a reading wants at a scale, its own first. A sliding one has a companion without overlap on
    the same text: their difference is what the beginnings of blocks cost."""
    stride, split = scale.scale_stride(reading.stride), reading.split or scale.default_split
    if stride is None:
        return [Query(split, None, scale.eval_tokens)]
    return [Query(split, stride, scale.sliding_tokens), Query(split, None, scale.sliding_tokens)]


def build_learning_curve_query(scale: Scale, reading: EvalProtocol) -> Query:
    """The evaluation of a learning curve's checkpoints, without overlap on little text; the step is left open."""
    return Query(reading.split or scale.default_split, None, scale.sliding_tokens)


def with_methods(experiment: Experiment, methods: Iterable[str]) -> Experiment:
    """The same experiment with these position methods, whether the paper has them or not.

    A method that it has not gets the cells of one that it has, ALiBi's where there are any, without published numbers:

        Cell("ALiBi, L = 512", "3072", 18.40, ..., alibi)   →   Cell("mine, L = 512", "3072", None, ..., mine)
    """
    wanted, known = list(dict.fromkeys(methods)), experiment.methods
    model = "alibi" if "alibi" in known else known[0]
    kept = [cell for cell in experiment.cells if cell.variant is None or cell.variant.position in wanted]
    like = [cell for cell in experiment.cells if cell.variant and cell.variant.position == model]
    added = [_for_method(cell, method) for method in wanted if method not in known for cell in like]
    return replace(experiment, cells=(*kept, *added))


def _for_method(cell: Cell, method: str) -> Cell:
    assert cell.variant
    old, new = method_name(cell.variant.position), method_name(method)
    row, column = cell.row.replace(old, new), cell.column.replace(old, new)
    return replace(cell, row=row, column=column, published=None, variant=replace(cell.variant, position=method))


def select_methods(chosen: list[Experiment], methods: list[str], *, named: bool) -> list[Experiment]:
    """The experiments with these methods instead of the paper's. One about a single method is refused if it was named,
    else left out."""
    varied = [one for one in chosen if len(one.methods) > 1]
    if named and len(varied) < len(chosen):
        single = next(one for one in chosen if one not in varied)
        raise InputError(
            f"{single.name} is about one position method ({method_name(single.methods[0])}), so --methods says nothing "
            "there. Choose demo, or a table that compares methods, such as table2 or table5."
        )
    return [with_methods(one, methods) for one in varied]


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The same experiment with other first weights and another order of the data."""
    cells = (replace(c, variant=replace(c.variant, seed=seed)) if c.variant else c for c in experiment.cells)
    return replace(experiment, cells=tuple(cells))
