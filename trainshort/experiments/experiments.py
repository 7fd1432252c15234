"""Define experiments (tables and figures of the paper) and scales (the sizes at which experiments are run).

An experiment consists of cells. A cell is one number of the paper, together with the model and the evaluation that
produce the number:

    Cell("ALiBi, L = 512", "3072", 18.40, "perplexity", Variant("wikitext103", "alibi", 512), EvalProtocol(3072))

The models to train and the evaluations to run are derived from the cells. This module does not import torch.
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
"""What a cell contains. "read speed" is the evaluation speed."""

METHOD_NAMES = {"alibi": "ALiBi", "sinusoidal": "Sinusoidal", "rotary": "Rotary", "t5": "T5 bias", "none": "None"}
"""The names of position methods in tables and figures."""


def method_name(position: str) -> str:
    """Return the name of a position method for tables. A method that is not in the paper keeps its registered name."""
    return METHOD_NAMES.get(position, position)


@cache
def load_published_numbers() -> dict[str, Any]:
    """Return all numbers of the paper by table and figure, such as `["table5"]["alibi"]["512"]["3072"]`.

    Lengths that are keys are strings, because the numbers are stored as JSON.
    """
    file = resources.files("trainshort.experiments").joinpath("published.json")
    return json.loads(file.read_text(encoding="utf-8"))


# ---- the parts of an experiment


@dataclass(frozen=True)
class Variant:
    """One model of the paper.

    Attributes:
        setup: The dataset and model size of the paper: "wikitext103", "books" or "cc100".
        position: The position method.
        length: The training length in the paper. A scale maps it to the actual training length.
        seed: The random seed.
    """

    setup: str
    position: str
    length: int
    seed: int = 1


@dataclass(frozen=True)
class EvalProtocol:
    """How the paper evaluates a trained model. A scale converts the length and the stride to the actual values.

    Attributes:
        length: The evaluation length (L_valid in the paper).
        stride: The stride of a sliding window: the number of tokens that each window scores. None evaluates windows
            that do not overlap.
        split: The split of the dataset. None uses the default split of the scale.
    """

    length: int
    stride: int | None = None
    split: str | None = None


@dataclass(frozen=True)
class Scale:
    """A size at which experiments are run.

    Attributes:
        name: The name of the scale, such as "laptop".
        summary: A short description.
        training_lengths: The paper's training lengths that are trained at this scale. Others would take too long.
        build: A function that returns the config of a model at this scale.
        length_divisor: All lengths of the paper are divided by this number.
        excluded_lengths: Training lengths that are not trained for certain experiments, by the experiment's name.
        stride_one: The stride that replaces the paper's stride of 1.
        sliding_tokens: How many tokens are evaluated with sliding windows. None means all tokens.
        eval_tokens: How many tokens are evaluated without overlap. None means all tokens.
        max_eval_length: The longest evaluation length.
        default_split: The split that is evaluated if a cell does not name a split. The paper uses "valid". A scale
            whose training recipe was chosen by the validation loss uses "test".
        gpus: The number of GPUs that a cluster job requests for one model.
        uses_single_corpus: Whether one small dataset replaces the three datasets of the paper.
    """

    name: str
    summary: str
    training_lengths: tuple[int, ...]
    build: Callable[[Variant], RunConfig]
    length_divisor: int = 1
    excluded_lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stride_one: int = 1
    sliding_tokens: int | None = None
    eval_tokens: int | None = None
    max_eval_length: int = 16_384
    default_split: str = "valid"
    gpus: int = 0
    uses_single_corpus: bool = False

    def scale_length(self, published: int) -> int:
        """Return the length at this scale for a length of the paper. At the scale "laptop", 512 becomes 128."""
        return max(1, round(published / self.length_divisor))

    def scale_stride(self, published: int | None) -> int | None:
        """Convert a stride of the paper to the stride at this scale.

        Args:
            published: The stride of the sliding window in the paper. None means windows that do not overlap.

        Returns:
            The stride at this scale, or None if `published` is None.
        """
        if published is None:
            return None
        if published == 1:
            # Stride 1 needs one forward pass per token, which takes too long on a small machine.
            return self.stride_one
        return self.scale_length(published)

    def make_config(self, variant: Variant) -> RunConfig:
        """Return the config of a model at this scale."""
        return self.build(variant)

    def run_name(self, variant: Variant) -> str:
        """Return the name of the run folder of a model."""
        return run_name(self.build(variant))

    def trains(self, variant: Variant, experiment_name: str) -> bool:
        """Return whether a model of an experiment is trained at this scale."""
        excluded_lengths = self.excluded_lengths.get(experiment_name, ())
        return variant.length in self.training_lengths and variant.length not in excluded_lengths


@dataclass(frozen=True)
class Cell:
    """One number of the paper, and how to measure it.

    Attributes:
        row: The label of the row in the table.
        column: The label of the column.
        published: The number in the paper, or None if the paper has no number for this cell.
        quantity: What the number measures.
        variant: The model. None for a number that the paper quotes from other work. Such a number is not measured.
        protocol: How the trained model is evaluated. None for costs, which do not need a trained model.
        x_value: The position on the x-axis if the experiment is drawn as a figure.
    """

    row: str
    column: str
    published: float | None
    quantity: Quantity = "perplexity"
    variant: Variant | None = None
    protocol: EvalProtocol | None = None
    x_value: float | None = None

    @property
    def is_cost(self) -> bool:
        """Return whether the cell is a speed or a memory that is measured in a few steps, without a trained model."""
        return self.quantity in ("train speed", "read speed", "train memory") and self.protocol is None

    def is_computable(self, experiment_name: str, scale: Scale) -> bool:
        """Return whether the cell (one number of the paper) is measured at a scale.

        A cell is not measured if the paper quotes the number from other work, if its evaluation length is too long for
        the scale, or if its model is not trained at the scale. Costs (speed and memory) need no trained model.

        Args:
            experiment_name: The name of the experiment that contains the cell.
            scale: The size at which the experiment is run (laptop, gpu or paper).
        """
        if self.variant is None:
            return False  # The paper quotes the number from other work.
        if self.protocol is not None and scale.scale_length(self.protocol.length) > scale.max_eval_length:
            return False
        return self.is_cost or scale.trains(self.variant, experiment_name)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: The name, such as "table5" or "fig1".
        title: The title.
        cells: The numbers of the table or figure.
        kind: How the experiment is drawn. "table" is not drawn. "by speed" draws the perplexity of each row against
            its training speed.
        axes: The labels of the x-axis and the y-axis.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    kind: Literal["table", "lines", "bars", "by speed"] = "table"
    axes: tuple[str, str] = ("", "")

    @property
    def methods(self) -> list[str]:
        """Return the position methods of all models, in the order of the cells."""
        return list(dict.fromkeys(cell.variant.position for cell in self.cells if cell.variant))

    def variants_to_train(self, scale: Scale) -> list[Variant]:
        """Return the models that are trained at a scale, in the order of the cells, without duplicates.

        Cells with costs (speed and memory) need no trained model.

        Args:
            scale: The size at which the experiment is run (laptop, gpu or paper).
        """
        variants: dict[Variant, None] = {}  # A dictionary keeps the order and removes duplicates.
        for cell in self._computable_cells(scale):
            if cell.variant is not None and not cell.is_cost:
                variants[cell.variant] = None
        return list(variants)

    def variants_to_measure(self, scale: Scale) -> list[Variant]:
        """Return the models whose costs (speed or memory) are measured. These models do not have to be trained.

        Args:
            scale: The size at which the experiment is run (laptop, gpu or paper).
        """
        variants: dict[Variant, None] = {}  # A dictionary keeps the order and removes duplicates.
        for cell in self._computable_cells(scale):
            if cell.variant is not None and cell.is_cost:
                variants[cell.variant] = None
        return list(variants)

    def eval_protocols(self, scale: Scale, variant: Variant) -> list[EvalProtocol]:
        """Return the evaluations of a trained model."""
        return self._protocols(scale, variant, ("perplexity", "read speed"))

    def learning_curve_protocols(self, scale: Scale, variant: Variant) -> list[EvalProtocol]:
        """Return the evaluations that are run on all kept checkpoints of a model."""
        return self._protocols(scale, variant, ("learning curve",))

    def _protocols(self, scale: Scale, variant: Variant, quantities: tuple[Quantity, ...]) -> list[EvalProtocol]:
        """Return how a model is evaluated for the cells that contain certain quantities, without duplicates.

        Args:
            scale: The size at which the experiment is run (laptop, gpu or paper).
            variant: The model.
            quantities: The quantities, such as "perplexity".
        """
        protocols: dict[EvalProtocol, None] = {}  # A dictionary keeps the order and removes duplicates.
        for cell in self._computable_cells(scale):
            if cell.variant == variant and cell.quantity in quantities and cell.protocol is not None:
                protocols[cell.protocol] = None
        return list(protocols)

    def _computable_cells(self, scale: Scale) -> list[Cell]:
        """Return the cells that are measured at a scale."""
        return [cell for cell in self.cells if cell.is_computable(self.name, scale)]


experiments: Registry[Callable[[], Experiment]] = Registry("experiment")

# Importing this module fills the registry. `tables` needs the classes above.
from trainshort.experiments import tables  # noqa: E402, F401

# ---- choosing experiments


def select_experiments(names: Iterable[str]) -> list[Experiment]:
    """Return experiments (tables and figures of the paper) by name.

    Args:
        names: The names. "table 5", "Table5" and "figure 1" are accepted. Without names, all experiments are returned.

    Raises:
        InputError: If there is no experiment with this name.
    """
    normalized_names = [_normalize_name(name) for name in names if name.strip()]
    selected_names = normalized_names or experiments.names()
    return [experiments.get(name)() for name in selected_names]


def _normalize_name(name: str) -> str:
    """Return the registered form of an experiment's name: "Figure 1" becomes "fig1".

    Raises:
        InputError: If the name is a figure of the paper without numbers.
    """
    normalized = name.strip().lower().replace(" ", "").replace("figure", "fig").replace(".", "")
    if normalized in ("fig3", "fig10"):
        raise InputError(f"{name.strip()} is a drawing without numbers, so there is nothing to compute.")
    return normalized


def select_methods(chosen: list[Experiment], methods: list[str], *, named: bool) -> list[Experiment]:
    """Replace the position methods of experiments.

    Args:
        chosen: The experiments.
        methods: The position methods to compare.
        named: Whether the user chose the experiments by name. Then an experiment about a single method is an error.
            Otherwise such an experiment is left out.

    Raises:
        InputError: If the user chose an experiment about a single method.
    """
    comparisons: list[Experiment] = []
    for experiment in chosen:
        if len(experiment.methods) > 1:
            comparisons.append(experiment)
        elif named:
            raise InputError(
                f"--methods cannot be used with {experiment.name}, because {experiment.name} is about one position "
                f"method ({method_name(experiment.methods[0])}). Choose demo, or a table that compares methods, "
                "such as table2 or table5."
            )
    return [with_methods(experiment, methods) for experiment in comparisons]


# ---- the evaluations of a cell


def build_queries(scale: Scale, protocol: EvalProtocol) -> list[Query]:
    """Return the evaluations that a protocol of the paper needs at a scale.

    A protocol is how the paper evaluates a model. A query is the evaluation that is run here, without its length.

    Args:
        scale: The scale (laptop, gpu or paper), which defines the number of tokens and the actual stride.
        protocol: How the paper evaluates the model. The length of the protocol is not part of the result.

    Returns:
        For windows without overlap, the result is one evaluation.

        For a sliding window, the result is two evaluations of the same text: the first one with the sliding window, the
        second one without overlap. Their difference shows the effect of tokens that have little context.
    """
    stride = scale.scale_stride(protocol.stride)
    split = protocol.split or scale.default_split
    if stride is None:
        return [Query(split=split, stride=None, tokens=scale.eval_tokens)]
    sliding_query = Query(split=split, stride=stride, tokens=scale.sliding_tokens)
    plain_query = Query(split=split, stride=None, tokens=scale.sliding_tokens)
    return [sliding_query, plain_query]


def build_learning_curve_query(scale: Scale, protocol: EvalProtocol) -> Query:
    """Return the evaluation of checkpoints for a learning curve.

    Checkpoints are evaluated with windows that do not overlap, on the same short text as sliding windows.

    Args:
        scale: The scale (laptop, gpu or paper), which defines the number of tokens.
        protocol: How the paper evaluates the model. Only the split of the protocol is used.

    Returns:
        The evaluation. The caller sets its training step, once for each checkpoint.
    """
    split = protocol.split or scale.default_split
    return Query(split=split, stride=None, tokens=scale.sliding_tokens)


# ---- changing experiments


def with_methods(experiment: Experiment, methods: Iterable[str]) -> Experiment:
    """Return an experiment with other position methods.

    A method that is not part of the experiment gets the cells of ALiBi (or of the first method, if the experiment has
    no ALiBi cells), without published numbers:

        Cell("ALiBi, L = 512", "3072", 18.40, ..., alibi)   becomes   Cell("mine, L = 512", "3072", None, ..., mine)

    Args:
        experiment: The experiment.
        methods: The position methods of the new experiment.
    """
    unique_methods = list(dict.fromkeys(methods))
    known_methods = experiment.methods
    template_method = "alibi" if "alibi" in known_methods else known_methods[0]

    cells: list[Cell] = []
    template_cells: list[Cell] = []
    for cell in experiment.cells:
        if cell.variant is None or cell.variant.position in unique_methods:
            cells.append(cell)
        if cell.variant is not None and cell.variant.position == template_method:
            template_cells.append(cell)

    for method in unique_methods:
        if method not in known_methods:
            cells += [_replace_method(cell, method) for cell in template_cells]
    return replace(experiment, cells=tuple(cells))


def _replace_method(cell: Cell, method: str) -> Cell:
    """Return a copy of a cell with another position method in its model and its labels.

    The copy has no published number, because the paper did not measure this method.

    Args:
        cell: One number of the paper, with its model and its labels.
        method: The new position method.
    """
    assert cell.variant is not None
    old_name = method_name(cell.variant.position)
    new_name = method_name(method)
    return replace(
        cell,
        row=cell.row.replace(old_name, new_name),
        column=cell.column.replace(old_name, new_name),
        published=None,
        variant=replace(cell.variant, position=method),
    )


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """Return an experiment whose models are trained with another random seed.

    Cells without a model are kept. They contain numbers that the paper quotes from other work.
    """
    cells: list[Cell] = []
    for cell in experiment.cells:
        if cell.variant is None:
            cells.append(cell)
        else:
            variant = replace(cell.variant, seed=seed)
            cells.append(replace(cell, variant=variant))
    return replace(experiment, cells=tuple(cells))
