"""Tables 1 to 15, cell by cell, the demo's set, and Figures 1, 2, 4 to 9 and 11. Figures 3 and 10 are drawings of how
something works, with nothing to compute."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trainshort.recipes.experiments import (
    Cell,
    EvalProtocol,
    Experiment,
    Variant,
    experiments,
    method_name,
    published,
)
from trainshort.settings import PAPER as METHODS

DEMO_MULTIPLES = (1, 1.25, 1.5, 2, 4, 6, 8, 16)
"""Lengths at which the demo's models are read, as multiples of their own."""
COST_LENGTHS = (2048, 16_384)
"""Lengths at which the methods' costs differ, in the paper's numbers: 512 and 4,096 tokens at the laptop."""
LENGTH, PERPLEXITY, SPEED = "tokens read at once", "perplexity", "tokens/s, training"
"""What figures have on their axes."""


def label(variant: Variant, read: int | None = None) -> str:
    """ALiBi, L = 512 [read at 3072]"""
    far = f" read at {read}" if read and read != variant.length else ""
    return f"{method_name(variant.position)}, L = {variant.length}{far}"


@experiments.register("demo")
def demo() -> Experiment:
    """Four methods trained at one length, read at 1 to 16 times that, and sinusoidal trained at 6 times; sliding
    windows, cost. Beside Tables 1, 2, 6 and 13 to 15, as far as the paper has these lengths."""
    cells = []
    for method in METHODS:
        variant = Variant("wikitext103", method, 512)
        name = method_name(method)
        for multiple in DEMO_MULTIPLES:
            length = round(512 * multiple)
            printed = _near(method, length)
            cells.append(Cell(name, f"{multiple:g} L", printed, "perplexity", variant, EvalProtocol(length), length))
        for multiple in (1, 2, 4):
            printed = _stride_one(method).get(str(512 * multiple))
            reading = EvalProtocol(512 * multiple, stride=1)
            cells.append(Cell(name, f"{multiple} L, sliding", printed, "perplexity", variant, reading))
        numbers = published()["table1"][method]["512"]
        cells.append(Cell(name, "training tokens/s", numbers["train_wps_k"] * 1e3, "train speed", variant))
        cells.append(Cell(name, "training GB", numbers["train_mem_gb"], "train memory", variant))
        for length in COST_LENGTHS:
            far = Variant("wikitext103", method, length)
            cells.append(Cell(name, f"training tokens/s at {length // 512} L", None, "train speed", far))
    cells += short_and_long()
    return Experiment("demo", "Four position methods past their training length", tuple(cells), "table")


def short_and_long() -> Iterator[Cell]:
    """The paper's title: ALiBi trained at 512 and read at 3,072, against sinusoidal trained there."""
    far = EvalProtocol(3072)
    short, long = Variant("wikitext103", "alibi", 512), Variant("wikitext103", "sinusoidal", 3072)
    numbers = published()["table1"]["sinusoidal"]["3072"]
    yield Cell(label(long), "6 L", 18.67, "perplexity", long, far, 3072)
    yield Cell(label(long), "training tokens/s", numbers["train_wps_k"] * 1e3, "train speed", long)
    yield Cell(label(long), "training GB", numbers["train_mem_gb"], "train memory", long)
    for variant in (short, long):
        yield Cell(label(variant), "over training", None, "learning curve", variant, far)


def _near(method: str, length: int) -> float | None:
    """The paper's number at a length, or at the nearest one that Table 2 has within 3 %."""
    rows = published()["table2"]
    row = min(rows, key=lambda row: abs(row["L_valid"] - length))
    return row[f"{method}_ppl"] if abs(row["L_valid"] - length) <= 0.03 * length else None


def _stride_one(method: str) -> dict[str, float]:
    name = {"sinusoidal": "table13", "t5": "table14", "alibi": "table15"}.get(method)
    return published()[name]["512"] if name else {}


def speed_and_memory() -> Iterator[Cell]:
    for method in METHODS:
        for length in (512, 1024, 3072):
            variant = Variant("wikitext103", method, length)
            numbers = published()["table1"][method][str(length)]
            row = label(variant)
            yield Cell(row, "train tokens/s", numbers["train_wps_k"] * 1e3, "train speed", variant)
            yield Cell(row, "read tokens/s", numbers["eval_wps_k"] * 1e3, "read speed", variant)
            yield Cell(row, "train GB", numbers["train_mem_gb"], "train memory", variant)


@experiments.register("table1")
def table1() -> Experiment:
    """Speed and memory of four methods at three lengths."""
    return Experiment("table1", "Speed and memory of training and reading", tuple(speed_and_memory()))


def extrapolation(name: str, length: int, *, speed: bool = True) -> Iterator[Cell]:
    """A sweep past the training length: perplexity and speed of each method at each point."""
    for numbers in published()[name]:
        at = numbers["L_valid"]
        for method in METHODS:
            variant, reading = Variant("wikitext103", method, length), EvalProtocol(at)
            row, column = f"{at:,}", method_name(method)
            yield Cell(row, column, numbers[f"{method}_ppl"], "perplexity", variant, reading, at)
            if speed:
                wps = numbers[f"{method}_wps"]
                yield Cell(row, f"{column} tokens/s", wps, "read speed", variant, reading, at)


def _sweep_table(name: str, length: int) -> None:
    def build() -> Experiment:
        title = f"Extrapolation of the four methods, trained at {length}"
        return Experiment(name, title, tuple(extrapolation(name, length)))

    build.__doc__ = f"Extrapolation of four methods trained at {length}."
    experiments.register(name)(build)


for _name, _length in (("table2", 512), ("table3", 1024), ("table4", 3072)):
    _sweep_table(_name, _length)


def triangle(name: str, setup: str) -> Iterator[Cell]:
    """ALiBi by training and reading length, and the others at their own length (Tables 5 and 8)."""
    numbers = published()[name]
    for length, row in numbers["alibi"].items():
        variant = Variant(setup, "alibi", int(length))
        for at, value in row.items():
            yield Cell(label(variant), at, value, "perplexity", variant, EvalProtocol(int(at)), int(at))
    for method in ("sinusoidal", "rotary", "t5"):
        for length, value in numbers.get(f"{method}_L_eq_Lvalid", {}).items():
            variant, reading = Variant(setup, method, int(length)), EvalProtocol(int(length))
            yield Cell(
                f"{method_name(method)}, L = L_valid", length, value, "perplexity", variant, reading, int(length)
            )


@experiments.register("table5")
def table5() -> Experiment:
    """ALiBi by training length and reading length, and the other methods at their own length."""
    title = "ALiBi trained at one length and read at longer ones"
    return Experiment("table5", title, tuple(triangle("table5", "wikitext103")), "lines", (LENGTH, PERPLEXITY))


@experiments.register("table6")
def table6() -> Experiment:
    """Valid and test perplexity without overlap, with speeds."""
    cells = []
    for numbers in published()["table6"]:
        variant, at = Variant("wikitext103", numbers["model"], numbers["L"]), numbers["L_valid"]
        row = label(variant, at)
        cells += [
            Cell(row, "train tokens/s", numbers["train_wps_k"] * 1e3, "train speed", variant),
            Cell(row, "read tokens/s", numbers["inf_wps_k"] * 1e3, "read speed", variant, EvalProtocol(at)),
            Cell(row, "valid", numbers["valid"], "perplexity", variant, EvalProtocol(at, split="valid")),
            Cell(row, "test", numbers["test"], "perplexity", variant, EvalProtocol(at, split="test")),
        ]
    return Experiment("table6", "Validation and test, without overlap", tuple(cells), "by speed", (SPEED, PERPLEXITY))


def valid_and_test(name: str, setup: str, stride: int | None) -> Iterator[Cell]:
    """Rows "method L512 Lvalid3072" with a valid and a test column; other names are quoted work."""
    for row, values in published()[name].items():
        for split, value in zip(("valid", "test"), values, strict=True):
            method, *numbers = row.split()
            if method not in METHODS:
                yield Cell(row, split, value)
                continue
            length = int(numbers[0].removeprefix("L"))
            at = int(numbers[1].removeprefix("Lvalid")) if len(numbers) > 1 else length
            variant = Variant(setup, method, length)
            yield Cell(label(variant, at), split, value, "perplexity", variant, EvalProtocol(at, stride, split))


def _valid_and_test_table(name: str, title: str, setup: str, stride: int | None) -> None:
    def build() -> Experiment:
        return Experiment(name, title, tuple(valid_and_test(name, setup, stride)))

    build.__doc__ = title + "."
    experiments.register(name)(build)


_valid_and_test_table(
    "table7", "WikiText-103 with a sliding window of stride 512, beside other work", "wikitext103", 512
)


@experiments.register("table8")
def table8() -> Experiment:
    """BookCorpus: ALiBi by training length and reading length."""
    return Experiment("table8", "BookCorpus: ALiBi at longer lengths than trained", tuple(triangle("table8", "books")))


_valid_and_test_table("table9", "BookCorpus: validation and test, without overlap", "books", None)
_valid_and_test_table("table10", "BookCorpus with a sliding window of stride 512, beside other work", "books", 512)


def large_row(numbers: dict[str, Any], perplexities: dict[int, float], row: str) -> Iterator[Cell]:
    variant = Variant("cc100", numbers["model"], numbers["L"])
    yield Cell(row, "train GB", numbers["mem_gb"], "train memory", variant)
    for at, value in perplexities.items():
        yield Cell(row, f"at {at}", value, "perplexity", variant, EvalProtocol(at), at)


@experiments.register("table11")
def table11() -> Experiment:
    """CC100+RoBERTa, 1.3B parameters, at equal time."""
    cells: list[Cell] = []
    for numbers in published()["table11"]:
        values = {int(key.removeprefix("ppl_")): value for key, value in numbers.items() if key.startswith("ppl_")}
        variant = Variant("cc100", numbers["model"], numbers["L"])
        cells += large_row(numbers, values, f"{label(variant)}, {numbers['updates_k']}k updates")
    return Experiment("table11", "CC100+RoBERTa, 1.3B parameters: at equal time", tuple(cells))


@experiments.register("table12")
def table12() -> Experiment:
    """CC100+RoBERTa, 1.3B parameters, at equal updates."""
    cells: list[Cell] = []
    for numbers in published()["table12"]:
        values = {int(at): value for at, value in numbers["ppl"].items()}
        cells += large_row(numbers, values, label(Variant("cc100", numbers["model"], numbers["L"])))
    return Experiment("table12", "CC100+RoBERTa, 1.3B parameters: at equal updates", tuple(cells))


def sliding(name: str, method: str) -> Iterator[Cell]:
    for length, row in published()[name].items():
        variant = Variant("wikitext103", method, int(length))
        for at, value in row.items():
            yield Cell(label(variant), at, value, "perplexity", variant, EvalProtocol(int(at), stride=1), int(at))


def _sliding_table(name: str, method: str) -> Callable[[], Experiment]:
    def build() -> Experiment:
        return Experiment(
            name, f"{method_name(method)} under a sliding window of stride 1", tuple(sliding(name, method))
        )

    build.__doc__ = f"{method_name(method)} under a sliding window of stride 1."
    return experiments.register(name)(build)


for _name, _method in (("table13", "sinusoidal"), ("table14", "t5"), ("table15", "alibi")):
    _sliding_table(_name, _method)


@experiments.register("fig1")
def fig1() -> Experiment:
    """Perplexity against length: four methods, trained at 512 and at 1024."""
    cells = []
    for name, length in (("table2", 512), ("table3", 1024)):
        for cell in extrapolation(name, length, speed=False):
            assert cell.variant
            cells.append(replace(cell, row=label(cell.variant), column=cell.row))
    return Experiment("fig1", "Extrapolation of the four methods", tuple(cells), "lines", (LENGTH, PERPLEXITY))


@experiments.register("fig2")
def fig2() -> Experiment:
    """Training speed, reading speed and memory as bars."""
    return Experiment("fig2", "Speed and memory, as bars", tuple(speed_and_memory()), "bars")


@experiments.register("fig4")
def fig4() -> Experiment:
    """ALiBi past its length, and sinusoidal models at theirs."""
    cells = tuple(
        cell
        for cell in triangle("table5", "wikitext103")
        if cell.variant and cell.variant.position in ("alibi", "sinusoidal") and cell.x and cell.x >= 512
    )
    return Experiment("fig4", "ALiBi read past its length", cells, "lines", (LENGTH, PERPLEXITY))


@experiments.register("fig5")
def fig5() -> Experiment:
    """CC100+RoBERTa: validation perplexity over training time."""
    cells = []
    for name, points in published()["fig5"].items():
        model, _, read = name.partition("_Lvalid")
        method = "sinusoidal" if model.startswith("sin") else "alibi"
        variant = Variant("cc100", method, int(model.removeprefix("sin").removeprefix("alibi")))
        reading = EvalProtocol(int(read))
        row = label(variant, reading.length)
        for updates, hours, value in points:
            column = f"{updates:,} updates"
            cells.append(Cell(row, column, value, "learning curve", variant, reading, hours))
    return Experiment(
        "fig5", "Perplexity over training time", tuple(cells), "lines", ("minutes of training", PERPLEXITY)
    )


@experiments.register("fig6")
def fig6() -> Experiment:
    """CC100+RoBERTa: perplexity against length."""
    cells = []
    for name, points in published()["fig6"].items():
        method, _, length = name.partition("_L")
        variant = Variant("cc100", method, int(length))
        for at, value in points:
            cells.append(
                Cell(label(variant), f"{at:,.0f}", value, "perplexity", variant, EvalProtocol(int(at)), int(at))
            )
    return Experiment("fig6", "CC100+RoBERTa: extrapolation", tuple(cells), "lines", (LENGTH, PERPLEXITY))


@experiments.register("fig7")
def fig7() -> Experiment:
    """Training speed against length."""
    cells = []
    for method, points in published()["fig7"].items():
        for length, speed in points:
            variant = Variant("wikitext103", method, length)
            cells.append(Cell(method_name(method), f"{length:,}", speed, "train speed", variant, x=length))
    return Experiment("fig7", "Training speed", tuple(cells), "lines", ("training length", SPEED))


@experiments.register("fig8")
def fig8() -> Experiment:
    """Perplexity read at 3072 against training length, with each model's training speed."""
    cells = []
    for method, points in published()["fig8"].items():
        for length, (speed, value) in points.items():
            variant, reading = Variant("wikitext103", method, int(length)), EvalProtocol(3072)
            cells.append(Cell(label(variant), "perplexity at 3072", value, "perplexity", variant, reading, speed))
            cells.append(Cell(label(variant), "train tokens/s", speed, "train speed", variant))
    title = "Training speed and perplexity at 3072"
    return Experiment("fig8", title, tuple(cells), "by speed", (SPEED, PERPLEXITY))


@experiments.register("fig9")
def fig9() -> Experiment:
    """BookCorpus: ALiBi past its length, and sinusoidal models at theirs."""
    cells = tuple(triangle("table8", "books"))
    return Experiment("fig9", "BookCorpus: ALiBi read past its length", cells, "lines", (LENGTH, PERPLEXITY))


@experiments.register("fig11")
def fig11() -> Experiment:
    """ALiBi and sinusoidal under a sliding window of stride 1."""
    cells = (*sliding("table15", "alibi"), *sliding("table13", "sinusoidal"))
    return Experiment("fig11", "Sliding window of stride 1", cells, "lines", (LENGTH, PERPLEXITY))
