"""All tables and figures of the paper exist with all numbers, and their models have valid configs at every scale."""

from pathlib import Path
from typing import Any

import pytest

from trainshort.config.run_config import RunConfig
from trainshort.errors import InputError
from trainshort.experiments.experiments import (
    Cell,
    EvalProtocol,
    Experiment,
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

TABLES = [f"table{number}" for number in range(1, 16)]
FIGURES = [f"fig{number}" for number in (1, 2, 4, 5, 6, 7, 8, 9, 11)]


def get_experiment(name: str) -> Experiment:
    """Return one experiment by name."""
    return select_experiments([name])[0]


def flatten_numbers(value: Any) -> list[float]:
    """Return all numbers in nested dictionaries and lists."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in flatten_numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in flatten_numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


def cells_of_method(experiment: Experiment, method: str) -> list[Cell]:
    """Return the cells of an experiment whose model has a position method."""
    return [cell for cell in experiment.cells if cell.variant and cell.variant.position == method]


# ---- the numbers of the paper


def test_all_tables_and_figures_exist():
    assert set(experiments.names()) == {"demo", *TABLES, *FIGURES}


@pytest.mark.parametrize("name", ["table5", "table7", "table8", "table9", "table10", "table13", "table14", "table15"])
def test_every_published_perplexity_is_a_cell(name):
    published = [cell.published for cell in get_experiment(name).cells if cell.published is not None]
    assert sorted(published) == sorted(flatten_numbers(load_published_numbers()[name]))


@pytest.mark.parametrize(("name", "count"), [("table2", 35), ("table3", 35), ("table4", 33)])
def test_extrapolation_tables_have_every_length(name, count):
    cells = get_experiment(name).cells
    assert len({cell.protocol for cell in cells}) == count == len(load_published_numbers()[name])
    # The paper has no numbers where the T5 bias ran out of memory.
    methods_without_number = {cell.variant.position for cell in cells if cell.published is None and cell.variant}
    assert methods_without_number == {"t5"}


def test_cells_have_the_right_model_and_protocol():
    table5 = {(cell.row, cell.column): cell for cell in get_experiment("table5").cells}
    cell = table5["ALiBi, L = 512", "3072"]
    assert cell.published == 18.40
    assert cell.variant == Variant("wikitext103", "alibi", 512)
    assert cell.protocol == EvalProtocol(3072)

    table10 = {(cell.row, cell.column): cell for cell in get_experiment("table10").cells}
    cell = table10["ALiBi, L = 512 evaluated at 3072", "test"]
    assert cell.published == 11.11
    assert cell.variant == Variant("books", "alibi", 512)
    assert cell.protocol == EvalProtocol(3072, 512, "test")
    assert table10["kNN-LM", "valid"].variant is None


# Numbers that were copied from the paper by hand, by table and row.
GOLDEN = {
    "table1": {"ALiBi, L = 512": (28_300, 15.3), "Sinusoidal, L = 512": (28_500, 15.3)},
    "table2": {"512": (20.05, 19.73), "1,012": (43.54,), "8,512": (305.65, 18.34)},
    "table5": {"ALiBi, L = 64": (28.46,), "ALiBi, L = 512": (19.73, 18.40), "Sinusoidal, L = L_valid": (28.03, 18.67)},
    "table10": {"ALiBi, L = 512 evaluated at 3072": (11.11, 13.76)},
    "table12": {"ALiBi, L = 1024": (26.2,)},
    "table13": {"Sinusoidal, L = 512": (18.35, 204.42)},
    "table14": {"T5 bias, L = 512": (17.92, 22.62)},
    "table15": {"ALiBi, L = 512": (17.98, 17.92, 18.28)},
    "fig6": {"ALiBi, L = 512": (9.79, 9.30, 9.96)},
}


@pytest.mark.parametrize("name", GOLDEN)
def test_published_numbers_equal_numbers_copied_by_hand(name):
    for row, expected in GOLDEN[name].items():
        published = {cell.published for cell in get_experiment(name).cells if cell.row == row}
        assert published >= set(expected), row


def test_published_numbers_are_complete():
    assert len(flatten_numbers(load_published_numbers())) > 900


# ---- configs


@pytest.mark.parametrize("scale_name", scales.names())
@pytest.mark.parametrize("name", ["demo", *TABLES, *FIGURES])
def test_every_model_has_a_valid_config(scale_name, name):
    scale = scales.get(scale_name)
    experiment = get_experiment(name)
    variants = [*experiment.variants_to_train(scale), *experiment.variants_to_measure(scale)]
    assert variants
    for variant in variants:
        config = scale.make_config(variant)
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
        assert config.train.length == scale.scale_length(variant.length)
        for protocol in experiment.eval_protocols(scale, variant):
            assert scale.scale_length(protocol.length) <= scale.max_eval_length


@pytest.mark.parametrize("scale_name", ["laptop", "gpu"])
def test_models_of_a_scale_differ_only_in_position_and_length(scale_name):
    scale = scales.get(scale_name)
    configs = [
        scale.make_config(variant) for name in TABLES for variant in get_experiment(name).variants_to_train(scale)
    ]
    token_counts = {config.train.steps * config.train.batch * config.train.length for config in configs}
    assert len(token_counts) == 1
    model_settings = {config.model.replace(position="none").model_dump_json() for config in configs}
    assert len(model_settings) == 1

    # The warm-up depends on the number of steps. At the laptop scale, `tune` chooses some settings for each method.
    ignored_settings: dict[str, Any] = {"warmup": 0}
    if scale_name == "laptop":
        ignored_settings |= {"name": "adamw", "lr": 1.0, "position_lr_multiplier": 1.0, "embedding_lr_multiplier": 1.0}
    optimizer_settings = {config.optim.replace(**ignored_settings).model_dump_json() for config in configs}
    assert len(optimizer_settings) == 1

    for position in {config.model.position for config in configs}:
        settings_of_method = {
            config.optim.replace(warmup=0).model_dump_json() for config in configs if config.model.position == position
        }
        assert len(settings_of_method) == 1


def test_paper_scale_has_the_published_settings():
    config = scales.get("paper").make_config(Variant("wikitext103", "alibi", 512))
    assert config.train.batch * config.train.length == 73_728
    assert config.train.steps == 286_000
    assert config.optim.lr == 1.0
    assert config.optim.momentum == 0.99
    assert config.optim.max_grad_norm == 0.1
    assert config.optim.warmup == 16_000
    assert config.optim.min_lr == 1e-4
    assert config.optim.warmup_start_lr == 1e-7


@pytest.mark.parametrize("name", TABLES)
def test_batches_of_the_paper_scale_can_be_divided_among_gpus(name):
    paper = scales.get("paper")
    for variant in get_experiment(name).variants_to_train(paper):
        train = paper.make_config(variant).train
        gpus = PAPER_GPUS[variant.setup]
        assert train.batch % gpus == 0
        assert (train.batch // gpus) % (train.micro_batch or 1) == 0


# ---- names of runs and recipes


def test_every_model_has_a_recipe():
    for name, scale in scales.items():
        for table in TABLES:
            for variant in get_experiment(table).variants_to_train(scale):
                assert recipes.get(recipe_name(scale, variant))() == scale.make_config(variant), name


def test_recipes_are_unique_and_named_after_their_length():
    configs = {name: recipes.get(name)() for name in recipes.names()}
    assert len({config.model_dump_json() for config in configs.values()}) == len(configs)
    for name, config in configs.items():
        if not name.startswith("demo-"):
            assert name.endswith(f"-{config.train.length}")
    assert configs["demo-alibi"].train.length == 128


def test_run_name_changes_with_settings_that_change_the_model():
    config = scales.get("laptop").make_config(Variant("wikitext103", "alibi", 512))
    name = run_name(config)
    assert name.startswith("alibi-128-")
    assert run_name(config.replace(model={"position_settings": {"max_bias": 4.0}})) != name
    assert run_name(config.replace(train={"seed": 2})) != name
    assert run_name(config.replace(optim={"lr": 1e-3})) != name
    same_results = config.replace(train={"keep_checkpoints": 3, "micro_batch": 2}, data={"folder": Path("x")})
    assert run_name(same_results) == name


def test_run_name_ignores_settings_that_do_not_change_results():
    assert run_name(RunConfig()) != run_name(RunConfig().replace(model={"adaptive": {}}))
    assert run_name(RunConfig()) != run_name(RunConfig().replace(model={"tolerance": 1e-3}))
    assert run_name(RunConfig()) == run_name(RunConfig().replace(model={"tolerance": 0.0, "backend": "reference"}))
    assert run_name(RunConfig()) == run_name(RunConfig().replace(train={"parallel": "fsdp", "compile": True}))


# ---- choosing and changing experiments


def test_with_seed_changes_only_the_seed():
    table9 = get_experiment("table9")
    with_second_seed = with_seed(table9, 2)
    assert {cell.variant.seed for cell in with_second_seed.cells if cell.variant} == {2}
    assert with_seed(with_second_seed, 1) == table9


def test_names_of_experiments_may_have_spaces_and_capital_letters():
    names = [experiment.name for experiment in select_experiments(["Table 5", "Fig. 1", "figure 11"])]
    assert names == ["table5", "fig1", "fig11"]


def test_unknown_experiment_is_an_error_with_a_suggestion():
    with pytest.raises(InputError, match=r"'table16'.* Did you mean 'table"):
        select_experiments(["table16"])
    with pytest.raises(InputError, match="Figure 3"):
        select_experiments(["Figure 3"])


@pytest.mark.parametrize("name", ["demo", "table1", "table2", "table5", "table6", "table9", "table11", "fig1", "fig5"])
def test_new_method_gets_the_cells_of_alibi(name):
    experiment = get_experiment(name)
    (changed,) = select_methods([experiment], ["mine", "sinusoidal"], named=True)
    assert set(changed.methods) == {"mine", "sinusoidal"}

    new_cells = cells_of_method(changed, "mine")
    alibi_cells = cells_of_method(experiment, "alibi")
    assert len(new_cells) == len(alibi_cells)
    for new_cell, alibi_cell in zip(new_cells, alibi_cells, strict=True):
        assert new_cell.variant is not None
        assert alibi_cell.variant is not None
        assert new_cell.protocol == alibi_cell.protocol
        assert new_cell.quantity == alibi_cell.quantity
        assert new_cell.variant.length == alibi_cell.variant.length
        assert new_cell.published is None
        labels = new_cell.row + new_cell.column
        assert "ALiBi" not in labels
        assert "mine" in labels

    assert cells_of_method(changed, "sinusoidal") == cells_of_method(experiment, "sinusoidal")
    assert with_methods(experiment, experiment.methods) == experiment


def test_methods_of_a_table_about_one_method_cannot_be_changed():
    with pytest.raises(InputError, match=r"--methods .*table15.*ALiBi"):
        select_methods(select_experiments(["table5", "table15"]), ["none"], named=True)
    selected = select_methods(select_experiments([]), ["none"], named=False)
    assert "table15" not in [experiment.name for experiment in selected]
