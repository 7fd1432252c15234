"""Figures 1, 2, 4 to 9 and 11. Figures 3 and 10 are drawings of how something works, with nothing to compute."""

from dataclasses import replace

from trainshort.recipes.experiments import Cell, EvalProtocol, Experiment, experiments, method_name, published
from trainshort.recipes.paper_tables import extrapolation, label, sliding, speed_and_memory, triangle
from trainshort.recipes.scales import Variant

LENGTH, PERPLEXITY = "tokens read at once", "perplexity"


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
    return Experiment("fig7", "Training speed", tuple(cells), "lines", ("training length", "tokens/s, training"))


@experiments.register("fig8")
def fig8() -> Experiment:
    """Perplexity read at 3072 against training length, with each model's training speed."""
    cells = []
    for method, points in published()["fig8"].items():
        for length, (speed, value) in points.items():
            variant, reading = Variant("wikitext103", method, int(length)), EvalProtocol(3072)
            cells.append(Cell(label(variant), "perplexity at 3072", value, "perplexity", variant, reading, speed))
            cells.append(Cell(label(variant), "train tokens/s", speed, "train speed", variant))
    return Experiment("fig8", "Training speed and perplexity at 3072", tuple(cells))


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
