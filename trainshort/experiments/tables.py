"""Tables 1 to 15, cell by cell, the demo's set, and Figures 1, 2, 4 to 9 and 11. Figures 3 and 10 are drawings of how
something works, with nothing to compute."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trainshort.config.position_config import PAPER_METHODS as METHODS
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
"""Lengths at which the demo's models are evaluated, as multiples of their own."""
COST_LENGTHS = (2048, 16_384)
"""Lengths at which the methods' costs differ, in the paper's numbers: 512 and 4,096 tokens at the laptop."""
PERPLEXITY, SPEED = "perplexity", "tokens/s, training"
"""What several figures have on an axis."""
BY_LENGTH: dict[str, Any] = {"kind": "lines", "axes": ("tokens read at once", PERPLEXITY)}
BY_SPEED: dict[str, Any] = {"kind": "by speed", "axes": (SPEED, PERPLEXITY)}
"""How several experiments are drawn."""
Cells = Callable[[], Iterator[Cell]]


def register_experiment(name: str, title: str, **drawn: Any) -> Callable[[Cells], Cells]:
    """Decorator: file an experiment by the function of its cells. `trainshort list` shows that one's docstring, or else
    the title."""

    def add(cells: Cells) -> Cells:
        def build() -> Experiment:
            return Experiment(name, title, tuple(cells()), **drawn)

        build.__doc__ = cells.__doc__ or f"{title}."
        experiments.add(name, build)
        return cells

    return add


def format_row_label(variant: Variant, read: int | None = None) -> str:
    """ALiBi, L = 512 [read at 3072]"""
    far = f" read at {read}" if read and read != variant.length else ""
    return f"{method_name(variant.position)}, L = {variant.length}{far}"


def make_perplexity_cell(
    row: str, column: str, value: float | None, variant: Variant, at: int, stride: int | None = None
) -> Cell:
    """A perplexity at a length, which is its place in a figure as well."""
    return Cell(row, column, value, "perplexity", variant, EvalProtocol(at, stride), at)


@register_experiment("demo", "Four position methods past their training length")
def demo() -> Iterator[Cell]:
    """Four methods trained at one length, evaluated at 1 to 16 times that, and sinusoidal trained at 6 times.

    Sliding windows and cost as well. Beside Tables 1, 2, 6 and 13 to 15, as far as the paper has these lengths.
    """
    for method in METHODS:
        variant = Variant("wikitext103", method, 512)
        name = method_name(method)
        for multiple in DEMO_MULTIPLES:
            length = round(512 * multiple)
            yield make_perplexity_cell(name, f"{multiple:g} L", _near(method, length), variant, length)
        for multiple in (1, 2, 4):
            printed = _stride_one(method).get(str(512 * multiple))
            reading = EvalProtocol(512 * multiple, stride=1)
            yield Cell(name, f"{multiple} L, sliding", printed, "perplexity", variant, reading)
        yield from _training(name, variant)
        for length in COST_LENGTHS:
            far = Variant("wikitext103", method, length)
            yield Cell(name, f"training tokens/s at {length // 512} L", None, "train speed", far)
    # The paper's title: ALiBi trained at 512 and evaluated at 3,072, against sinusoidal trained there.
    short, long = Variant("wikitext103", "alibi", 512), Variant("wikitext103", "sinusoidal", 3072)
    yield make_perplexity_cell(format_row_label(long), "6 L", 18.67, long, 3072)
    yield from _training(format_row_label(long), long)
    for variant in (short, long):
        yield Cell(format_row_label(variant), "over training", None, "learning curve", variant, EvalProtocol(3072))


def _training(row: str, variant: Variant) -> Iterator[Cell]:
    numbers = load_published_numbers()["table1"][variant.position][str(variant.length)]
    yield Cell(row, "training tokens/s", numbers["train_wps_k"] * 1e3, "train speed", variant)
    yield Cell(row, "training GB", numbers["train_mem_gb"], "train memory", variant)


def _near(method: str, length: int) -> float | None:
    """The paper's number at a length, or at the nearest one that Table 2 has within 3 %."""
    rows = load_published_numbers()["table2"]
    row = min(rows, key=lambda row: abs(row["L_valid"] - length))
    return row[f"{method}_ppl"] if abs(row["L_valid"] - length) <= 0.03 * length else None


def _stride_one(method: str) -> dict[str, float]:
    name = {"sinusoidal": "table13", "t5": "table14", "alibi": "table15"}.get(method)
    return load_published_numbers()[name]["512"] if name else {}


@register_experiment("table1", "Speed and memory of training and evaluation")
def table1() -> Iterator[Cell]:
    """Speed and memory of four methods at three lengths."""
    for method in METHODS:
        for length in (512, 1024, 3072):
            variant = Variant("wikitext103", method, length)
            numbers = load_published_numbers()["table1"][method][str(length)]
            row = format_row_label(variant)
            yield Cell(row, "train tokens/s", numbers["train_wps_k"] * 1e3, "train speed", variant)
            yield Cell(row, "read tokens/s", numbers["eval_wps_k"] * 1e3, "read speed", variant)
            yield Cell(row, "train GB", numbers["train_mem_gb"], "train memory", variant)


def make_extrapolation_cells(name: str, length: int, *, speed: bool = True) -> Iterator[Cell]:
    """A sweep past the training length: perplexity and speed of each method at each point."""
    for numbers in load_published_numbers()[name]:
        at = numbers["L_valid"]
        for method in METHODS:
            variant = Variant("wikitext103", method, length)
            row, column = f"{at:,}", method_name(method)
            yield make_perplexity_cell(row, column, numbers[f"{method}_ppl"], variant, at)
            if speed:
                wps = numbers[f"{method}_wps"]
                yield Cell(row, f"{column} tokens/s", wps, "read speed", variant, EvalProtocol(at), at)


for _name, _length in (("table2", 512), ("table3", 1024), ("table4", 3072)):
    _title = f"Extrapolation of the four methods, trained at {_length}"
    register_experiment(_name, _title)(lambda name=_name, length=_length: make_extrapolation_cells(name, length))


def make_length_pair_cells(name: str, setup: str) -> Iterator[Cell]:
    """ALiBi by training and evaluation length, and the others at their own length (Tables 5 and 8)."""
    numbers = load_published_numbers()[name]
    for length, row in numbers["alibi"].items():
        variant = Variant(setup, "alibi", int(length))
        for at, value in row.items():
            yield make_perplexity_cell(format_row_label(variant), at, value, variant, int(at))
    for method in ("sinusoidal", "rotary", "t5"):
        for at, value in numbers.get(f"{method}_L_eq_Lvalid", {}).items():
            yield make_perplexity_cell(
                f"{method_name(method)}, L = L_valid", at, value, Variant(setup, method, int(at)), int(at)
            )


@register_experiment("table5", "ALiBi trained at one length and evaluated at longer ones", **BY_LENGTH)
def table5() -> Iterator[Cell]:
    """ALiBi by training length and evaluation length, and the other methods at their own length."""
    return make_length_pair_cells("table5", "wikitext103")


@register_experiment("table6", "Validation and test, without overlap", **BY_SPEED)
def table6() -> Iterator[Cell]:
    """Valid and test perplexity without overlap, with speeds."""
    for numbers in load_published_numbers()["table6"]:
        variant, at = Variant("wikitext103", numbers["model"], numbers["L"]), numbers["L_valid"]
        row = format_row_label(variant, at)
        yield Cell(row, "train tokens/s", numbers["train_wps_k"] * 1e3, "train speed", variant)
        yield Cell(row, "read tokens/s", numbers["inf_wps_k"] * 1e3, "read speed", variant, EvalProtocol(at))
        for split in ("valid", "test"):
            yield Cell(row, split, numbers[split], "perplexity", variant, EvalProtocol(at, split=split))


def make_valid_and_test_cells(name: str, setup: str, stride: int | None) -> Iterator[Cell]:
    """Rows "method L512 Lvalid3072" with a valid and a test column; other names are quoted work."""
    for row, values in load_published_numbers()[name].items():
        for split, value in zip(("valid", "test"), values, strict=True):
            method, *numbers = row.split()
            if method not in METHODS:
                yield Cell(row, split, value)
                continue
            length = int(numbers[0].removeprefix("L"))
            at = int(numbers[1].removeprefix("Lvalid")) if len(numbers) > 1 else length
            variant = Variant(setup, method, length)
            yield Cell(
                format_row_label(variant, at), split, value, "perplexity", variant, EvalProtocol(at, stride, split)
            )


STRIDE_512 = "with a sliding window of stride 512, beside other work"
register_experiment("table7", f"WikiText-103 {STRIDE_512}")(
    lambda: make_valid_and_test_cells("table7", "wikitext103", 512)
)
register_experiment("table8", "BookCorpus: ALiBi at longer lengths than trained")(
    lambda: make_length_pair_cells("table8", "books")
)
register_experiment("table9", "BookCorpus: validation and test, without overlap")(
    lambda: make_valid_and_test_cells("table9", "books", None)
)
register_experiment("table10", f"BookCorpus {STRIDE_512}")(lambda: make_valid_and_test_cells("table10", "books", 512))


def make_cc100_cells(name: str) -> Iterator[Cell]:
    """CC100+RoBERTa. Table 11 has one length a row ("ppl_1024") and counts updates, Table 12 has several."""
    for numbers in load_published_numbers()[name]:
        variant = Variant("cc100", numbers["model"], numbers["L"])
        row = format_row_label(variant) + (f", {numbers['updates_k']}k updates" if "updates_k" in numbers else "")
        yield Cell(row, "train GB", numbers["mem_gb"], "train memory", variant)
        one = {key.removeprefix("ppl_"): value for key, value in numbers.items() if key.startswith("ppl_")}
        for at, value in numbers.get("ppl", one).items():
            yield make_perplexity_cell(row, f"at {at}", value, variant, int(at))


register_experiment("table11", "CC100+RoBERTa, 1.3B parameters: at equal time")(lambda: make_cc100_cells("table11"))
register_experiment("table12", "CC100+RoBERTa, 1.3B parameters: at equal updates")(lambda: make_cc100_cells("table12"))


def make_sliding_cells(name: str, method: str) -> Iterator[Cell]:
    for length, row in load_published_numbers()[name].items():
        variant = Variant("wikitext103", method, int(length))
        for at, value in row.items():
            yield make_perplexity_cell(format_row_label(variant), at, value, variant, int(at), stride=1)


for _name, _method in (("table13", "sinusoidal"), ("table14", "t5"), ("table15", "alibi")):
    _title = f"{method_name(_method)} under a sliding window of stride 1"
    register_experiment(_name, _title)(lambda name=_name, method=_method: make_sliding_cells(name, method))


@register_experiment("fig1", "Extrapolation of the four methods", **BY_LENGTH)
def fig1() -> Iterator[Cell]:
    """Perplexity against length: four methods, trained at 512 and at 1024."""
    for name, length in (("table2", 512), ("table3", 1024)):
        for cell in make_extrapolation_cells(name, length, speed=False):
            assert cell.variant
            yield replace(cell, row=format_row_label(cell.variant), column=cell.row)


@register_experiment("fig2", "Speed and memory, as bars", kind="bars")
def fig2() -> Iterator[Cell]:
    """Training speed, evaluation speed and memory as bars."""
    return table1()


@register_experiment("fig4", "ALiBi evaluated past its length", **BY_LENGTH)
def fig4() -> Iterator[Cell]:
    """ALiBi past its length, and sinusoidal models at theirs."""
    for cell in make_length_pair_cells("table5", "wikitext103"):
        if cell.variant and cell.variant.position in ("alibi", "sinusoidal") and cell.x_value and cell.x_value >= 512:
            yield cell


@register_experiment("fig5", "Perplexity over training time", kind="lines", axes=("minutes of training", PERPLEXITY))
def fig5() -> Iterator[Cell]:
    """CC100+RoBERTa: validation perplexity over training time."""
    for name, points in load_published_numbers()["fig5"].items():
        model, _, at = name.partition("_Lvalid")
        method = "sinusoidal" if model.startswith("sin") else "alibi"
        variant = Variant("cc100", method, int(model.removeprefix("sin").removeprefix("alibi")))
        row, reading = format_row_label(variant, int(at)), EvalProtocol(int(at))
        for updates, hours, value in points:
            yield Cell(row, f"{updates:,} updates", value, "learning curve", variant, reading, hours)


@register_experiment("fig6", "CC100+RoBERTa: extrapolation", **BY_LENGTH)
def fig6() -> Iterator[Cell]:
    """CC100+RoBERTa: perplexity against length."""
    for name, points in load_published_numbers()["fig6"].items():
        method, _, length = name.partition("_L")
        variant = Variant("cc100", method, int(length))
        for at, value in points:
            yield make_perplexity_cell(format_row_label(variant), f"{at:,.0f}", value, variant, int(at))


@register_experiment("fig7", "Training speed", kind="lines", axes=("training length", SPEED))
def fig7() -> Iterator[Cell]:
    """Training speed against length."""
    for method, points in load_published_numbers()["fig7"].items():
        for length, speed in points:
            variant = Variant("wikitext103", method, length)
            yield Cell(method_name(method), f"{length:,}", speed, "train speed", variant, x_value=length)


@register_experiment("fig8", "Training speed and perplexity at 3072", **BY_SPEED)
def fig8() -> Iterator[Cell]:
    """Perplexity at 3072 against training length, with each model's training speed."""
    for method, points in load_published_numbers()["fig8"].items():
        for length, (speed, value) in points.items():
            variant, reading = Variant("wikitext103", method, int(length)), EvalProtocol(3072)
            yield Cell(format_row_label(variant), "perplexity at 3072", value, "perplexity", variant, reading, speed)
            yield Cell(format_row_label(variant), "train tokens/s", speed, "train speed", variant)


@register_experiment("fig9", "BookCorpus: ALiBi evaluated past its length", **BY_LENGTH)
def fig9() -> Iterator[Cell]:
    """BookCorpus: ALiBi past its length, and sinusoidal models at theirs."""
    return make_length_pair_cells("table8", "books")


@register_experiment("fig11", "Sliding window of stride 1", **BY_LENGTH)
def fig11() -> Iterator[Cell]:
    """ALiBi and sinusoidal under a sliding window of stride 1."""
    yield from make_sliding_cells("table15", "alibi")
    yield from make_sliding_cells("table13", "sinusoidal")
