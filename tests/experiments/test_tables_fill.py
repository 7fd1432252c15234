"""Tables that share a model have the same numbers as if each table were computed alone, in any order."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import evaluations
from tiny_experiments import tiny_scale

from trainshort.evaluate.results import best_step, find_evaluations, select_rows
from trainshort.experiments.claims.collection import collect
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.experiments import Experiment, Scale, Variant, select_experiments, select_methods
from trainshort.experiments.reproduce.jobs import Job, is_finished, plan_jobs, run_job
from trainshort.report.headline import find_headline
from trainshort.report.write import write_report
from trainshort.train.loop import train
from trainshort.utils.io import write_with_checksum

TABLES = ("demo", "table15", "table5")
ALIBI = Variant("wikitext103", "alibi", 512)

Numbers = dict[tuple[str, str, str], float | None]
"""The measured numbers by table, row and column. None means that a cell is empty."""


def alibi_experiment(name: str) -> Experiment:
    """Return a table with only the perplexities of ALiBi trained at 512."""
    experiment = select_experiments([name])[0]
    cells = [
        cell
        for cell in experiment.cells
        if cell.variant == ALIBI and not cell.is_cost and cell.quantity != "learning curve"
    ]
    return replace(experiment, cells=tuple(cells))


def alibi_job(scale: Scale, *tables: str) -> Job:
    """Return the job that fills the cells of ALiBi in some tables."""
    (job,) = plan_jobs([alibi_experiment(name) for name in tables], scale).jobs
    job.needs_sample = False
    return job


def read_numbers(root: Path, scale: Scale) -> Numbers:
    """Return all numbers of the three tables, as in the report."""
    view = ScaleView(collect([root]), scale)
    numbers: Numbers = {}
    for table in TABLES:
        for cell in alibi_experiment(table).cells:
            if cell.is_computable(table, scale):
                measured = view.find_cell(cell)
                numbers[table, cell.row, cell.column] = measured.value if measured else None
    return numbers


@pytest.fixture(scope="module")
def scale(tmp_path_factory) -> Scale:
    return tiny_scale(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def trained_once(scale, tmp_path_factory) -> Path:
    """A folder with the trained model, without evaluations. Tests must not change it."""
    root = tmp_path_factory.mktemp("once")
    run_job(replace(alibi_job(scale, *TABLES), eval_lengths={}), root)
    return root


@pytest.fixture
def root(trained_once, tmp_path) -> Path:
    """A copy of the folder with the trained model, which a test may change."""
    return shutil.copytree(trained_once, tmp_path / "runs")


@pytest.fixture(scope="module")
def expected(scale, trained_once, tmp_path_factory) -> Numbers:
    """The numbers if all tables are computed together."""
    root = shutil.copytree(trained_once, tmp_path_factory.mktemp("together") / "runs")
    run_job(alibi_job(scale, *TABLES), root)
    numbers = read_numbers(root, scale)
    assert len(numbers) > 15
    assert None not in numbers.values()
    return numbers


@pytest.mark.parametrize("order", [("table15", "table5", "demo"), ("demo", "table15", "table5")], ids="-".join)
def test_tables_can_be_computed_in_any_order(scale, root, expected, order):
    for table in order:
        job = alibi_job(scale, table)
        run_job(job, root)
        assert is_finished(root, job)
    assert read_numbers(root, scale) == expected


def test_each_evaluation_uses_the_text_of_the_scale(scale, root):
    run_job(alibi_job(scale, "table15"), root)
    job = alibi_job(scale, "table5")
    assert not is_finished(root, job)
    run_job(job, root)
    texts = {
        (evaluation.protocol["stride"], evaluation.corpus["tokens"]) for evaluation in evaluations(root / job.name)
    }
    assert texts == {(4, 256), (None, 256), (None, 512)}


@pytest.mark.parametrize("count", [1, 2])
def test_job_continues_after_some_evaluations(scale, expected, root, count):
    job = alibi_job(scale, *TABLES)
    first_evaluations = dict(list(job.eval_lengths.items())[:count])
    run_job(replace(job, eval_lengths=first_evaluations), root)
    assert not is_finished(root, job)
    run_job(job, root)
    assert read_numbers(root, scale) == expected


@pytest.mark.parametrize("status", ["out of memory", "cannot", "not finite"])
def test_failed_length_is_evaluated_again(scale, expected, root, status):
    job = alibi_job(scale, *TABLES)
    run_job(job, root)
    for path in (root / job.name / "eval").glob("*.json"):
        evaluation = json.loads(path.read_text())
        last_row = evaluation["rows"][-1]
        evaluation["rows"][-1] = {"length": last_row["length"], "stride": last_row["stride"], "status": status}
        write_with_checksum(path, evaluation)
    assert not is_finished(root, job)
    run_job(job, root)
    assert is_finished(root, job)
    assert read_numbers(root, scale) == expected


def test_evaluations_with_other_settings_do_not_fill_a_table(scale, root):
    job = alibi_job(scale, "table5")
    run_job(job, root)
    (query,) = job.eval_lengths
    (stored,) = find_evaluations(root / job.name)
    assert len(select_rows([stored], query)) == len(job.eval_lengths[query])

    evaluation = stored.evaluation
    for field, changes in (
        ("corpus", {"own": False}),
        ("corpus", {"split": "test"}),
        ("corpus", {"tokens": 511}),
        ("protocol", {"precision": "bfloat16"}),
        ("protocol", {"slopes": "interpolate"}),
        ("protocol", {"stride": 8}),
        ("target", {"kind": "checkpoint"}),
    ):
        changed = evaluation.model_copy(update={field: getattr(evaluation, field) | changes})
        assert not select_rows([replace(stored, evaluation=changed)], query), changes


def test_evaluations_of_an_earlier_best_checkpoint_do_not_fill_a_table(scale, expected, tmp_path):
    # The run is evaluated after 2 of 4 training steps.
    job = alibi_job(scale, *TABLES)
    folder = tmp_path / job.name
    early_config = job.config.replace(train={"steps": 2})
    train(early_config, folder, quiet=True)
    early_job = replace(job, config=early_config)
    run_job(early_job, tmp_path)
    assert is_finished(tmp_path, early_job)

    run_job(job, tmp_path)
    assert best_step(folder) == 4
    assert {evaluation.target["step"] for evaluation in evaluations(folder)} == {4}
    assert read_numbers(tmp_path, scale) == expected


def test_checkpoint_that_was_moved_aside_is_ignored(scale, root):
    job = alibi_job(scale, "table15")
    run_job(job, root)
    checkpoints = root / job.name / "checkpoints"
    state = json.loads((checkpoints / "step-000000004" / "state.json").read_text())
    damaged = shutil.copytree(checkpoints / "step-000000004", checkpoints / "step-000000005.damaged")
    (damaged / "state.json").write_text(json.dumps(state | {"step": 5, "valid_nll": 0.0}))  # the lowest loss
    assert best_step(root / job.name) == 4
    assert is_finished(root, job)


def test_method_that_is_not_in_the_paper_gets_rows_and_a_curve(scale, tmp_path):
    experiments = select_methods(select_experiments(["demo", "table5"]), ["alibi", "none"], named=True)
    for index, experiment in enumerate(experiments):
        cells = [cell for cell in experiment.cells if cell.variant and cell.variant.length == 512]
        experiments[index] = replace(experiment, cells=tuple(cells))
    for job in plan_jobs(experiments, scale).jobs:
        run_job(job, tmp_path / "runs")

    collection = collect([tmp_path / "runs"])
    collection.__dict__["scale"] = scale  # The scale for tests is not in the registry, so it is not found.
    page = write_report(collection, tmp_path / "report").read_text(encoding="utf-8")
    headline = find_headline(collection)
    assert headline is not None
    assert [curve.name for curve in headline.curves] == ["ALiBi", "None"]

    table = page[page.index('id="table5"') :].partition("</table>")[0]
    assert re.search(r'<th scope="row">None, L = 512</th>\s*(<td></td>\s*)*<td><a href="data/', table)
    # A row without a measured number and without a number in the paper is left out.
    assert not re.search(r'<th scope="row">None, L = 64</th>', table)
