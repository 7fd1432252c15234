"""The tables and figures of the paper as experiments, and the experiment "demo".

Figures 3 and 10 are drawings without numbers, so they are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trainshort.config.position_config import PAPER_METHODS
from trainshort.experiments.experiments import (
    Cell,
    EvalProtocol,
    Experiment,
    Variant,
    experiments,
    load_published_numbers,
    method_name,
)

DEMO_MULTIPLES = (1, 1.25, 1.5, 2, 4, 6, 8, 16)
"""The lengths at which the demo's models are evaluated, as multiples of the training length."""

COST_LENGTHS = (2048, 16_384)
"""Training lengths of the paper at which the demo measures the speed. The scale "laptop" uses 512 and 4,096."""

# Labels of axes.
PERPLEXITY = "perplexity"
TRAINING_SPEED = "tokens/s, training"

# Settings of `Experiment` that several figures share.
PERPLEXITY_BY_LENGTH: dict[str, Any] = {"kind": "lines", "axes": ("evaluation length in tokens", PERPLEXITY)}
PERPLEXITY_BY_SPEED: dict[str, Any] = {"kind": "by speed", "axes": (TRAINING_SPEED, PERPLEXITY)}

CellFunction = Callable[[], Iterator[Cell]]
"""A function that yields the cells of an experiment."""


def register_experiment(name: str, title: str, **settings: Any) -> Callable[[CellFunction], CellFunction]:
    """Return a decorator that registers a function as an experiment (a table or figure of the paper).

    The function yields the cells of the experiment. A cell is one number of the paper, with the model and the
    evaluation that measure it.

    Args:
        name: The name of the experiment.
        title: The title of the table or figure.
        settings: Other fields of `Experiment`, such as `kind`.
    """

    def register(make_cells: CellFunction) -> CellFunction:
        """Register an experiment (a table or figure of the paper) and return `make_cells` unchanged.

        Args:
            make_cells: A generator function that yields the cells of the experiment. A cell is one number of the paper,
                with the model and the evaluation that measure it. The cells are created only when the experiment is
                used.
        """

        def make_experiment() -> Experiment:
            return Experiment(name, title, tuple(make_cells()), **settings)

        # `trainshort list experiments` shows the first line of this docstring.
        make_experiment.__doc__ = make_cells.__doc__ or f"{title}."
        experiments.add(name, make_experiment)
        return make_cells

    return register


# ---- helpers


def format_row_label(variant: Variant, eval_length: int | None = None) -> str:
    """Return the label of a row, such as "ALiBi, L = 512 evaluated at 3072". L is the training length.

    Args:
        variant: The model.
        eval_length: The evaluation length. It is left out if it equals the training length.
    """
    label = f"{method_name(variant.position)}, L = {variant.length}"
    if eval_length and eval_length != variant.length:
        label += f" evaluated at {eval_length}"
    return label


def make_perplexity_cell(
    row: str, column: str, published: float | None, variant: Variant, eval_length: int, stride: int | None = None
) -> Cell:
    """Return a cell with the perplexity of a model at an evaluation length. The length is also the x-value.

    A cell is one number of the paper, with the model and the evaluation that measure it. The x-value is used if the
    cell is drawn in a figure.

    Args:
        row: The label of the row.
        column: The label of the column.
        published: The perplexity in the paper, or None.
        variant: The model.
        eval_length: The evaluation length in the paper. A scale converts it to the actual length.
        stride: The stride of a sliding window. None evaluates windows that do not overlap.
    """
    protocol = EvalProtocol(eval_length, stride)
    return Cell(
        row=row,
        column=column,
        published=published,
        quantity="perplexity",
        variant=variant,
        protocol=protocol,
        x_value=eval_length,
    )


def _words_to_tokens(thousands_per_second: float) -> float:
    """Convert a speed of the paper from thousands of words per second to tokens per second. A word is one token."""
    return thousands_per_second * 1e3


# ---- the demo


@register_experiment("demo", "Four position methods past their training length")
def demo() -> Iterator[Cell]:
    """Four methods trained at one length and evaluated at 1 to 16 times this length, and sinusoidal trained at 6 times.

    The demo also contains sliding-window evaluations and costs. The published numbers are from Tables 1, 2, and 13 to
    15. Some demo cells have no published number.
    """
    for method in PAPER_METHODS:
        yield from _demo_method_cells(method)

    # The title of the paper is "Train Short, Test Long". ALiBi is trained at 512 and evaluated at 3,072. It is compared
    # with sinusoidal embeddings that are trained and evaluated at 3,072.
    short = Variant("wikitext103", "alibi", 512)
    long = Variant("wikitext103", "sinusoidal", 3072)
    yield make_perplexity_cell(
        row=format_row_label(long), column="6 L", published=18.67, variant=long, eval_length=3072
    )
    yield from _training_cost_cells(format_row_label(long), long)
    for variant in (short, long):
        row = format_row_label(variant)
        yield Cell(
            row=row,
            column="over training",
            published=None,
            quantity="learning curve",
            variant=variant,
            protocol=EvalProtocol(3072),
        )


def _demo_method_cells(method: str) -> Iterator[Cell]:
    """Yield the cells of the demo for one position method: perplexities, sliding windows and costs.

    In the labels of the columns, L is the training length of the model, which is 512 in the paper.
    """
    variant = Variant("wikitext103", method, 512)
    row = method_name(method)
    for multiple in DEMO_MULTIPLES:
        length = round(512 * multiple)
        yield make_perplexity_cell(
            row=row,
            column=f"{multiple:g} L",
            published=_published_near(method, length),
            variant=variant,
            eval_length=length,
        )

    sliding_perplexities = _published_sliding_perplexities(method)
    for multiple in (1, 2, 4):
        length = 512 * multiple
        published = sliding_perplexities.get(str(length))
        protocol = EvalProtocol(length, stride=1)
        yield Cell(
            row=row,
            column=f"{multiple} L, sliding",
            published=published,
            quantity="perplexity",
            variant=variant,
            protocol=protocol,
        )

    yield from _training_cost_cells(row, variant)
    for length in COST_LENGTHS:
        longer_variant = Variant("wikitext103", method, length)
        yield Cell(
            row=row,
            column=f"training tokens/s at {length // 512} L",
            published=None,
            quantity="train speed",
            variant=longer_variant,
        )


def _training_cost_cells(row: str, variant: Variant) -> Iterator[Cell]:
    """Yield the training speed and the training memory of a model that is part of Table 1.

    Args:
        row: The label of the row.
        variant: The model.
    """
    published = load_published_numbers()["table1"][variant.position][str(variant.length)]
    yield Cell(
        row=row,
        column="training tokens/s",
        published=_words_to_tokens(published["train_wps_k"]),
        quantity="train speed",
        variant=variant,
    )
    yield Cell(
        row=row, column="training GB", published=published["train_mem_gb"], quantity="train memory", variant=variant
    )


def _published_near(method: str, length: int) -> float | None:
    """Return the paper's perplexity of a model trained at 512, from the row of Table 2 with the nearest length.

    Args:
        method: The position method.
        length: The evaluation length.

    Returns:
        The perplexity, or None if the nearest evaluation length in Table 2 differs by more than 3 % from `length`.
    """
    # The lengths in Table 2 are not exact multiples of the training length, such as 1,012 instead of 1,024.
    rows = load_published_numbers()["table2"]
    # "L_valid" is the evaluation length.
    nearest_row = min(rows, key=lambda row: abs(row["L_valid"] - length))
    distance = abs(nearest_row["L_valid"] - length)
    if distance > 0.03 * length:
        return None
    return nearest_row[f"{method}_ppl"]


def _published_sliding_perplexities(method: str) -> dict[str, float]:
    """Return the paper's sliding-window perplexities of a model trained at 512 (Tables 13 to 15).

    Args:
        method: The position method.

    Returns:
        The perplexities by evaluation length. The lengths are strings, because the numbers are stored as JSON. The
        dictionary is empty if the paper has no such table for the method.
    """
    tables = {"sinusoidal": "table13", "t5": "table14", "alibi": "table15"}
    if method not in tables:
        return {}
    return load_published_numbers()[tables[method]]["512"]


# ---- tables


@register_experiment("table1", "Speed and memory of training and evaluation")
def table1() -> Iterator[Cell]:
    """Speed and memory of four methods at three lengths.

    Yields:
        One cell for each number: the paper's value, and the model that measures it. "read" means evaluation.
    """
    for method in PAPER_METHODS:
        for length in (512, 1024, 3072):
            variant = Variant("wikitext103", method, length)
            published = load_published_numbers()["table1"][method][str(length)]
            row = format_row_label(variant)
            train_speed = _words_to_tokens(published["train_wps_k"])
            eval_speed = _words_to_tokens(published["eval_wps_k"])
            yield Cell(row=row, column="train tokens/s", published=train_speed, quantity="train speed", variant=variant)
            yield Cell(row=row, column="read tokens/s", published=eval_speed, quantity="read speed", variant=variant)
            yield Cell(
                row=row,
                column="train GB",
                published=published["train_mem_gb"],
                quantity="train memory",
                variant=variant,
            )


def make_extrapolation_cells(table: str, length: int, *, speed: bool = True) -> Iterator[Cell]:
    """Yield the perplexity and the evaluation speed of each method at many evaluation lengths (Tables 2 to 4).

    Args:
        table: The name of the table with the published numbers.
        length: The training length.
        speed: Whether to yield the evaluation speeds.
    """
    for numbers in load_published_numbers()[table]:  # `numbers` is one row of the table.
        eval_length = numbers["L_valid"]
        row = f"{eval_length:,}"
        for method in PAPER_METHODS:
            variant = Variant("wikitext103", method, length)
            column = method_name(method)
            yield make_perplexity_cell(
                row=row, column=column, published=numbers[f"{method}_ppl"], variant=variant, eval_length=eval_length
            )
            if speed:
                published_speed = numbers[f"{method}_wps"]  # words per second; a word is one token
                protocol = EvalProtocol(eval_length)
                yield Cell(
                    row=row,
                    column=f"{column} tokens/s",
                    published=published_speed,
                    quantity="read speed",
                    variant=variant,
                    protocol=protocol,
                    x_value=eval_length,
                )


def _register_extrapolation_table(name: str, length: int) -> None:
    """Register one of the Tables 2 to 4, which evaluate models with one training length at many lengths."""
    title = f"Extrapolation of the four methods, trained at {length}"
    register = register_experiment(name, title)
    register(lambda: make_extrapolation_cells(name, length))


_register_extrapolation_table("table2", 512)
_register_extrapolation_table("table3", 1024)
_register_extrapolation_table("table4", 3072)


def make_length_pair_cells(table: str, setup: str) -> Iterator[Cell]:
    """Yield the perplexities of Table 5 or 8.

    ALiBi is evaluated at many pairs of training length and evaluation length. The other methods are evaluated at their
    training length.

    Args:
        table: The name of the table with the published numbers.
        setup: The setup of the models, such as "wikitext103".
    """
    published = load_published_numbers()[table]
    # The keys of the published numbers are lengths as strings, such as ["alibi"]["512"]["3072"].
    for length, perplexities in published["alibi"].items():
        variant = Variant(setup, "alibi", int(length))
        for eval_length, perplexity in perplexities.items():
            row = format_row_label(variant)
            yield make_perplexity_cell(
                row=row, column=eval_length, published=perplexity, variant=variant, eval_length=int(eval_length)
            )

    for method in ("sinusoidal", "rotary", "t5"):
        # L is the training length and L_valid the evaluation length. They are equal here.
        row = f"{method_name(method)}, L = L_valid"
        for length, perplexity in published.get(f"{method}_L_eq_Lvalid", {}).items():
            variant = Variant(setup, method, int(length))
            yield make_perplexity_cell(
                row=row, column=length, published=perplexity, variant=variant, eval_length=int(length)
            )


@register_experiment("table5", "ALiBi trained at one length and evaluated at longer ones", **PERPLEXITY_BY_LENGTH)
def table5() -> Iterator[Cell]:
    """ALiBi by training length and evaluation length, and the other methods at their training length."""
    return make_length_pair_cells("table5", "wikitext103")


@register_experiment("table6", "Validation and test, without overlap", **PERPLEXITY_BY_SPEED)
def table6() -> Iterator[Cell]:
    """Valid and test perplexity without overlap, with speeds.

    Yields:
        Four cells for each model: its training speed, its evaluation speed, and its perplexity on both splits.
    """
    for numbers in load_published_numbers()["table6"]:
        variant = Variant("wikitext103", numbers["model"], numbers["L"])
        eval_length = numbers["L_valid"]
        row = format_row_label(variant, eval_length)
        train_speed = _words_to_tokens(numbers["train_wps_k"])
        eval_speed = _words_to_tokens(numbers["inf_wps_k"])
        yield Cell(row=row, column="train tokens/s", published=train_speed, quantity="train speed", variant=variant)
        yield Cell(
            row=row,
            column="read tokens/s",
            published=eval_speed,
            quantity="read speed",
            variant=variant,
            protocol=EvalProtocol(eval_length),
        )
        for split in ("valid", "test"):
            yield Cell(
                row=row,
                column=split,
                published=numbers[split],
                quantity="perplexity",
                variant=variant,
                protocol=EvalProtocol(eval_length, split=split),
            )


def make_valid_and_test_cells(table: str, setup: str, stride: int | None) -> Iterator[Cell]:
    """Yield the validation and test perplexities of Tables 7, 9 and 10.

    Args:
        table: The name of the table with the published numbers. Its keys are models such as "alibi L512 Lvalid3072",
            or names of other work that the paper quotes.
        setup: The setup of the models, such as "books".
        stride: The stride of a sliding window. None evaluates windows that do not overlap.
    """
    for name, perplexities in load_published_numbers()[table].items():
        for split, perplexity in zip(("valid", "test"), perplexities, strict=True):
            method, *lengths = name.split()
            if method not in PAPER_METHODS:
                # The number is quoted from other work, so it is not measured.
                yield Cell(row=name, column=split, published=perplexity)
                continue
            length = int(lengths[0].removeprefix("L"))
            eval_length = length
            if len(lengths) > 1:
                eval_length = int(lengths[1].removeprefix("Lvalid"))
            variant = Variant(setup, method, length)
            row = format_row_label(variant, eval_length)
            protocol = EvalProtocol(eval_length, stride, split)
            yield Cell(
                row=row, column=split, published=perplexity, quantity="perplexity", variant=variant, protocol=protocol
            )


register_experiment("table7", "WikiText-103 with a sliding window of stride 512, and other work")(
    lambda: make_valid_and_test_cells("table7", "wikitext103", 512)
)
register_experiment("table8", "BookCorpus: ALiBi at longer lengths than trained")(
    lambda: make_length_pair_cells("table8", "books")
)
register_experiment("table9", "BookCorpus: validation and test, without overlap")(
    lambda: make_valid_and_test_cells("table9", "books", None)
)
register_experiment("table10", "BookCorpus with a sliding window of stride 512, and other work")(
    lambda: make_valid_and_test_cells("table10", "books", 512)
)


def make_cc100_cells(table: str) -> Iterator[Cell]:
    """Yield the training memory and the perplexities of the models on CC100+RoBERTa (Tables 11 and 12).

    Args:
        table: The name of the table with the published numbers. A row of Table 11 has one perplexity, with a key such
            as "ppl_1024". A row of Table 12 has a dictionary of perplexities by evaluation length.
    """
    for numbers in load_published_numbers()[table]:
        variant = Variant("cc100", numbers["model"], numbers["L"])
        row = format_row_label(variant)
        if "updates_k" in numbers:
            row += f", {numbers['updates_k']}k updates"
        yield Cell(row=row, column="train GB", published=numbers["mem_gb"], quantity="train memory", variant=variant)

        perplexities = numbers.get("ppl")
        if perplexities is None:
            perplexities = {}
            for key, value in numbers.items():
                if key.startswith("ppl_"):
                    perplexities[key.removeprefix("ppl_")] = value
        for eval_length, perplexity in perplexities.items():
            yield make_perplexity_cell(
                row=row, column=f"at {eval_length}", published=perplexity, variant=variant, eval_length=int(eval_length)
            )


register_experiment("table11", "CC100+RoBERTa, 1.3B parameters: at equal time")(lambda: make_cc100_cells("table11"))
register_experiment("table12", "CC100+RoBERTa, 1.3B parameters: at equal updates")(lambda: make_cc100_cells("table12"))


def make_sliding_cells(table: str, method: str) -> Iterator[Cell]:
    """Yield the perplexities of one method with a sliding window of stride 1 (Tables 13 to 15).

    Args:
        table: The name of the table with the published perplexities, by training length and evaluation length.
        method: The position method.
    """
    for length, perplexities in load_published_numbers()[table].items():
        variant = Variant("wikitext103", method, int(length))
        for eval_length, perplexity in perplexities.items():
            row = format_row_label(variant)
            yield make_perplexity_cell(
                row=row,
                column=eval_length,
                published=perplexity,
                variant=variant,
                eval_length=int(eval_length),
                stride=1,
            )


def _register_sliding_table(name: str, method: str) -> None:
    """Register one of the Tables 13 to 15, which evaluate one method with a sliding window."""
    title = f"{method_name(method)} with a sliding window of stride 1"
    register = register_experiment(name, title)
    register(lambda: make_sliding_cells(name, method))


_register_sliding_table("table13", "sinusoidal")
_register_sliding_table("table14", "t5")
_register_sliding_table("table15", "alibi")


# ---- figures


@register_experiment("fig1", "Extrapolation of the four methods", **PERPLEXITY_BY_LENGTH)
def fig1() -> Iterator[Cell]:
    """Perplexity against length: four methods, trained at 512 and at 1024.

    The figure shows the perplexities of Tables 2 and 3, so it uses the cells of these tables with other labels.
    """
    for table, length in (("table2", 512), ("table3", 1024)):
        for cell in make_extrapolation_cells(table, length, speed=False):
            assert cell.variant is not None  # Every cell of these tables has a model.
            # In the tables, a row is an evaluation length. In the figure, a row is the line of a model.
            yield replace(cell, row=format_row_label(cell.variant), column=cell.row)


@register_experiment("fig2", "Speed and memory, as bars", kind="bars")
def fig2() -> Iterator[Cell]:
    """Training speed, evaluation speed and memory as bars."""
    return table1()


@register_experiment("fig4", "ALiBi evaluated past its length", **PERPLEXITY_BY_LENGTH)
def fig4() -> Iterator[Cell]:
    """ALiBi beyond its training length, and sinusoidal models at their training length.

    The figure shows a part of the perplexities of Table 5, so it uses the cells of this table.
    """
    for cell in make_length_pair_cells("table5", "wikitext103"):
        assert cell.variant is not None
        assert cell.x_value is not None
        # The x-value is the evaluation length. Figure 4 shows two methods, and starts at length 512.
        if cell.variant.position in ("alibi", "sinusoidal") and cell.x_value >= 512:
            yield cell


@register_experiment("fig5", "Perplexity over training time", kind="lines", axes=("minutes of training", PERPLEXITY))
def fig5() -> Iterator[Cell]:
    """CC100+RoBERTa: validation perplexity over training time.

    Yields:
        One cell for each point of a curve in the paper. Our curve is measured at the checkpoints of the model.
    """
    # A key such as "sin1024_Lvalid2048" or "alibi512_Lvalid1024" is a model and an evaluation length.
    for name, points in load_published_numbers()["fig5"].items():
        model, _, eval_length = name.partition("_Lvalid")
        if model.startswith("sin"):
            variant = Variant("cc100", "sinusoidal", int(model.removeprefix("sin")))
        else:
            variant = Variant("cc100", "alibi", int(model.removeprefix("alibi")))
        row = format_row_label(variant, int(eval_length))
        protocol = EvalProtocol(int(eval_length))
        for updates, training_time, perplexity in points:
            yield Cell(
                row=row,
                column=f"{updates:,} updates",
                published=perplexity,
                quantity="learning curve",
                variant=variant,
                protocol=protocol,
                x_value=training_time,
            )


@register_experiment("fig6", "CC100+RoBERTa: extrapolation", **PERPLEXITY_BY_LENGTH)
def fig6() -> Iterator[Cell]:
    """CC100+RoBERTa: perplexity against length.

    Yields:
        One cell for each point of the figure: the perplexity of a model at an evaluation length.
    """
    # A key such as "alibi_L512" is a position method and a training length.
    for name, points in load_published_numbers()["fig6"].items():
        method, _, length = name.partition("_L")
        variant = Variant("cc100", method, int(length))
        for eval_length, perplexity in points:
            row = format_row_label(variant)
            yield make_perplexity_cell(
                row=row,
                column=f"{eval_length:,.0f}",
                published=perplexity,
                variant=variant,
                eval_length=int(eval_length),
            )


@register_experiment("fig7", "Training speed", kind="lines", axes=("training length", TRAINING_SPEED))
def fig7() -> Iterator[Cell]:
    """Training speed against length.

    Yields:
        One cell for each point of the figure: the training speed of a model with a certain training length.
    """
    for method, points in load_published_numbers()["fig7"].items():
        for length, speed in points:
            variant = Variant("wikitext103", method, length)
            yield Cell(
                row=method_name(method),
                column=f"{length:,}",
                published=speed,
                quantity="train speed",
                variant=variant,
                x_value=length,
            )


@register_experiment("fig8", "Training speed and perplexity at 3072", **PERPLEXITY_BY_SPEED)
def fig8() -> Iterator[Cell]:
    """Perplexity at 3072 against training length, with each model's training speed.

    Yields:
        Two cells for each model: its perplexity at the evaluation length 3,072, and its training speed in tokens/s.
    """
    for method, points in load_published_numbers()["fig8"].items():
        for length, (speed, perplexity) in points.items():
            variant = Variant("wikitext103", method, int(length))
            row = format_row_label(variant)
            yield Cell(
                row=row,
                column="perplexity at 3072",
                published=perplexity,
                quantity="perplexity",
                variant=variant,
                protocol=EvalProtocol(3072),
                x_value=speed,
            )
            yield Cell(row=row, column="train tokens/s", published=speed, quantity="train speed", variant=variant)


@register_experiment("fig9", "BookCorpus: ALiBi evaluated past its length", **PERPLEXITY_BY_LENGTH)
def fig9() -> Iterator[Cell]:
    """BookCorpus: ALiBi beyond its training length, and sinusoidal models at their training length."""
    return make_length_pair_cells("table8", "books")


@register_experiment("fig11", "Sliding window of stride 1", **PERPLEXITY_BY_LENGTH)
def fig11() -> Iterator[Cell]:
    """ALiBi and sinusoidal with a sliding window of stride 1."""
    yield from make_sliding_cells("table15", "alibi")
    yield from make_sliding_cells("table13", "sinusoidal")
