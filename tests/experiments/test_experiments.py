"""Every table and figure of the paper is there, with all its numbers, and has a valid config at every scale."""

from pathlib import Path

import pytest

from trainshort.config.run_config import RunConfig
from trainshort.errors import InputError
from trainshort.experiments.experiments import (
    EvalProtocol,
    experiments,
    load_published_numbers,
    select_experiments,
    select_methods,
    with_methods,
    with_seed,
)
from trainshort.experiments.recipes import recipe_name, recipes
from trainshort.experiments.scales import PAPER_GPUS, Variant, scales
from trainshort.train.run_folder import run_name

TABLES = [f"table{n}" for n in range(1, 16)]
FIGURES = [f"fig{n}" for n in (1, 2, 4, 5, 6, 7, 8, 9, 11)]


def numbers(value) -> list[float]:
    """All numbers in nested data."""
    if isinstance(value, dict):
        return [n for one in value.values() for n in numbers(one)]
    if isinstance(value, list):
        return [n for one in value for n in numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


def test_every_table_and_figure_is_there():
    assert set(experiments.names()) == {"demo", *TABLES, *FIGURES}


@pytest.mark.parametrize("name", ["table5", "table7", "table8", "table9", "table10", "table13", "table14", "table15"])
def test_every_published_perplexity_is_a_cell(name):
    cells = sorted(cell.published for cell in select_experiments([name])[0].cells if cell.published is not None)
    assert cells == sorted(numbers(load_published_numbers()[name]))


def test_sweep_tables_hold_every_point():
    for name, count in (("table2", 35), ("table3", 35), ("table4", 33)):
        cells = select_experiments([name])[0].cells
        assert len({cell.protocol for cell in cells}) == count == len(load_published_numbers()[name])
        oom = [cell for cell in cells if cell.published is None]
        assert {cell.variant.position for cell in oom} == {"t5"}


def test_a_few_golden_cells():
    cells = {(c.row, c.column): c for c in select_experiments(["table5"])[0].cells}
    cell = cells["ALiBi, L = 512", "3072"]
    assert (cell.published, cell.variant, cell.protocol) == (
        18.40,
        Variant("wikitext103", "alibi", 512),
        EvalProtocol(3072),
    )
    cells = {(c.row, c.column): c for c in select_experiments(["table10"])[0].cells}
    cell = cells["ALiBi, L = 512 read at 3072", "test"]
    assert (cell.published, cell.variant.setup, cell.protocol) == (11.11, "books", EvalProtocol(3072, 512, "test"))
    assert cells["kNN-LM", "valid"].variant is None


@pytest.mark.parametrize("scale", scales.names())
@pytest.mark.parametrize("name", ["demo", *TABLES, *FIGURES])
def test_every_model_has_a_valid_config(scale, name):
    chosen, experiment = scales.get(scale), select_experiments([name])[0]
    wanted = [*experiment.variants_to_train(chosen), *experiment.variants_to_measure(chosen)]
    assert wanted
    for variant in wanted:
        config = chosen.make_config(variant)
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
        assert config.train.length == chosen.scale_length(variant.length)
        for reading in experiment.eval_protocols(chosen, variant):
            assert chosen.scale_length(reading.length) <= chosen.max_eval_length


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_runs_differ_in_position_and_length_alone_and_see_equally_many_tokens(scale):
    chosen = scales.get(scale)
    configs = [
        chosen.make_config(variant)
        for name in TABLES
        for variant in select_experiments([name])[0].variants_to_train(chosen)
    ]
    assert len({c.train.steps * c.train.batch * c.train.length for c in configs}) == 1
    alike = {"warmup": 0} | (
        {"name": "adamw", "lr": 1.0, "position_lr_multiplier": 1.0, "embedding_lr_multiplier": 1.0}
        if scale == "laptop"
        else {}
    )
    assert (
        len({c.optim.replace(**alike).model_dump_json() for c in configs}) == 1
    )  # what tune searches is each method's
    for position in {c.model.position for c in configs}:
        own = [c.optim.replace(warmup=0) for c in configs if c.model.position == position]
        assert len({one.model_dump_json() for one in own}) == 1
    assert len({c.model.replace(position="none").model_dump_json() for c in configs}) == 1


def test_paper_scale_is_the_published_setup():
    config = scales.get("paper").make_config(Variant("wikitext103", "alibi", 512))
    assert config.train.batch * config.train.length == 73_728
    assert (config.train.steps, config.optim.lr, config.optim.momentum, config.optim.max_grad_norm) == (
        286_000,
        1.0,
        0.99,
        0.1,
    )
    assert (config.optim.warmup, config.optim.min_lr, config.optim.warmup_start_lr) == (16_000, 1e-4, 1e-7)
    for name in TABLES:
        for variant in select_experiments([name])[0].variants_to_train(scales.get("paper")):
            settings, gpus = scales.get("paper").make_config(variant).train, PAPER_GPUS[variant.setup]
            assert settings.batch % gpus == 0
            assert (settings.batch // gpus) % (settings.micro_batch or 1) == 0


def test_every_model_has_a_recipe():
    for name, scale in scales.items():
        for table in TABLES:
            for variant in select_experiments([table])[0].variants_to_train(scale):
                assert recipes.get(recipe_name(scale, variant))() == scale.make_config(variant), name


def test_names_follow_what_a_run_is():
    config = scales.get("laptop").make_config(Variant("wikitext103", "alibi", 512))
    name = run_name(config)
    assert run_name(config.replace(model={"position_settings": {"max_bias": 4.0}})) != name
    assert name.startswith("alibi-128-")
    assert run_name(config.replace(train={"keep_checkpoints": 3, "micro_batch": 2}, data={"folder": Path("x")})) == name
    assert run_name(config.replace(train={"seed": 2})) != name
    assert run_name(config.replace(optim={"lr": 1e-3})) != name


def test_the_run_name_depends_on_settings_that_influence_results_only():
    assert run_name(RunConfig()) != run_name(RunConfig().replace(model={"adaptive": {}}))
    assert run_name(RunConfig()) != run_name(RunConfig().replace(model={"tolerance": 1e-3}))
    assert run_name(RunConfig()) == run_name(RunConfig().replace(model={"tolerance": 0.0, "backend": "reference"}))
    assert run_name(RunConfig()) == run_name(RunConfig().replace(train={"parallel": "fsdp", "compile": True}))


def test_seeds_change_the_models_and_nothing_else():
    one = select_experiments(["table9"])[0]
    two = with_seed(one, 2)
    assert {cell.variant.seed for cell in two.cells if cell.variant} == {2}
    assert with_seed(two, 1) == one


def test_names_are_read_generously_and_unknown_ones_help():
    assert [one.name for one in select_experiments(["Table 5", "Fig. 1", "figure 11"])] == ["table5", "fig1", "fig11"]
    with pytest.raises(InputError, match=r"Unknown experiment 'table16'. Did you mean 'table"):
        select_experiments(["table16"])
    with pytest.raises(InputError, match="Figure 3 is a drawing"):
        select_experiments(["Figure 3"])


GOLDEN = {
    "table1": {"ALiBi, L = 512": (28_300, 15.3), "Sinusoidal, L = 512": (28_500, 15.3)},
    "table2": {"512": (20.05, 19.73), "1,012": (43.54,), "8,512": (305.65, 18.34)},
    "table5": {"ALiBi, L = 64": (28.46,), "ALiBi, L = 512": (19.73, 18.40), "Sinusoidal, L = L_valid": (28.03, 18.67)},
    "table10": {"ALiBi, L = 512 read at 3072": (11.11, 13.76)},
    "table12": {"ALiBi, L = 1024": (26.2,)},
    "table13": {"Sinusoidal, L = 512": (18.35, 204.42)},
    "table14": {"T5 bias, L = 512": (17.92, 22.62)},
    "table15": {"ALiBi, L = 512": (17.98, 17.92, 18.28)},
    "fig6": {"ALiBi, L = 512": (9.79, 9.30, 9.96)},
}
"""Numbers copied from the paper's pages by hand, and not from the file."""


@pytest.mark.parametrize("name", GOLDEN)
def test_the_papers_numbers_are_the_papers(name):
    for row, values in GOLDEN[name].items():
        printed = {cell.published for cell in select_experiments([name])[0].cells if cell.row == row}
        assert printed >= set(values), row


def test_no_published_number_was_lost():
    assert len(numbers(load_published_numbers())) > 900


@pytest.mark.parametrize("name", ["demo", "table1", "table2", "table5", "table6", "table9", "table11", "fig1", "fig5"])
def test_methods_of_ones_own_take_the_papers_cells(name):
    one = select_experiments([name])[0]
    (ours,) = select_methods([one], ["mine", "sinusoidal"], named=True)
    assert set(ours.methods) == {"mine", "sinusoidal"}
    mine = [cell for cell in ours.cells if cell.variant and cell.variant.position == "mine"]
    alibi = [cell for cell in one.cells if cell.variant and cell.variant.position == "alibi"]
    assert [(cell.protocol, cell.quantity, cell.variant.length) for cell in mine] == [
        (cell.protocol, cell.quantity, cell.variant.length) for cell in alibi
    ]
    assert all(cell.published is None and "ALiBi" not in cell.row + cell.column for cell in mine)
    assert all("mine" in cell.row + cell.column for cell in mine)
    theirs = [cell for cell in one.cells if cell.variant and cell.variant.position == "sinusoidal"]
    assert [cell for cell in ours.cells if cell.variant and cell.variant.position == "sinusoidal"] == theirs
    assert with_methods(one, one.methods) == one


def test_a_table_of_one_method_has_no_methods_to_choose():
    with pytest.raises(InputError, match=r"table15 is about one position method \(ALiBi\), so --methods says nothing"):
        select_methods(select_experiments(["table5", "table15"]), ["none"], named=True)
    assert "table15" not in [one.name for one in select_methods(select_experiments([]), ["none"], named=False)]


def test_one_model_has_one_name_and_its_length_is_in_it():
    made = [recipes.get(name)() for name in recipes.names()]
    assert len({config.model_dump_json() for config in made}) == len(made)
    for name in recipes.names():
        if not name.startswith("demo-"):
            assert name.endswith(f"-{recipes.get(name)().train.length}")
    assert recipes.get("demo-alibi")().train.length == 128
