"""Tables that share a model: whatever was computed before, and in whatever order, each cell is the one it would be
alone, on its own text; and none stays empty."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from helpers import evaluations
from tiny_experiments import tiny_scale

from trainshort.evaluate.results import best_step, find_evaluations, select_rows
from trainshort.experiments.claims.collection import collect
from trainshort.experiments.claims.measured import ScaleView
from trainshort.experiments.experiments import Variant, select_experiments, select_methods
from trainshort.experiments.reproduce import jobs
from trainshort.experiments.reproduce.jobs import plan_jobs, run_job
from trainshort.report.headline import find_headline
from trainshort.report.write import write_report
from trainshort.train.loop import train
from trainshort.utils.io import write_with_checksum

NAMES = ("demo", "table15", "table5")
ALIBI = Variant("wikitext103", "alibi", 512)


@pytest.fixture(scope="module")
def scale(tmp_path_factory):
    return tiny_scale(tmp_path_factory.mktemp("tables"))


def of_one_model(name):
    """A table's cells of ALiBi trained at 512, each a number of its own."""
    one = select_experiments([name])[0]
    cells = (cell for cell in one.cells if cell.variant == ALIBI and not cell.is_cost)
    return replace(one, cells=tuple(cell for cell in cells if cell.quantity != "learning curve"))


def task_of(scale, *names):
    (task,) = plan_jobs([of_one_model(name) for name in names], scale).jobs
    task.needs_sample = False
    return task


def numbers(root, scale):
    """Every cell of the three tables, as the report has it."""
    view = ScaleView(collect([root]), scale)
    cells = {(name, cell.row, cell.column): cell for name in NAMES for cell in of_one_model(name).cells}
    kept = {key: view.find_cell(cell) for key, cell in cells.items() if cell.is_computable(key[0], scale)}
    return {key: found.value if found else None for key, found in kept.items()}


@pytest.fixture(scope="module")
def once(scale, tmp_path_factory):
    root = tmp_path_factory.mktemp("once")
    run_job(replace(task_of(scale, *NAMES), eval_lengths={}), root)
    return root


@pytest.fixture
def trained(once, tmp_path):
    """A folder in which the model is trained, and not evaluated yet."""
    return shutil.copytree(once, tmp_path / "runs")


@pytest.fixture(scope="module")
def together(scale, once, tmp_path_factory):
    root = shutil.copytree(once, tmp_path_factory.mktemp("together") / "runs")
    run_job(task_of(scale, *NAMES), root)
    found = numbers(root, scale)
    assert len(found) > 15
    assert None not in found.values()
    return found


@pytest.mark.parametrize("order", [("table15", "table5", "demo"), ("demo", "table15", "table5")], ids="-".join)
def test_in_any_order_all_cells_are_filled_from_their_own_text(scale, trained, together, order):
    for name in order:
        task = task_of(scale, name)
        run_job(task, trained)
        assert jobs.is_finished(trained, task)
    assert numbers(trained, scale) == together


def test_each_text_is_as_long_as_the_scale_says(scale, trained):
    run_job(task_of(scale, "table15"), trained)
    task = task_of(scale, "table5")
    assert not jobs.is_finished(trained, task)
    run_job(task, trained)
    texts = {(one.protocol["stride"], one.corpus["tokens"]) for one in evaluations(trained / task.name)}
    assert texts == {(4, 256), (None, 256), (None, 512)}


@pytest.mark.parametrize("count", [1, 2])
def test_stopped_between_two_evaluations_it_goes_on(scale, together, trained, count):
    whole = task_of(scale, *NAMES)
    run_job(replace(whole, eval_lengths=dict(list(whole.eval_lengths.items())[:count])), trained)
    assert not jobs.is_finished(trained, whole)
    run_job(whole, trained)
    assert numbers(trained, scale) == together


@pytest.mark.parametrize("status", ["out of memory", "cannot", "not finite"])
def test_a_length_that_failed_is_tried_again(scale, together, trained, status):
    task = task_of(scale, *NAMES)
    run_job(task, trained)
    for path in (trained / task.name / "eval").glob("*.json"):
        values = json.loads(path.read_text())
        row = values["rows"][-1]
        values["rows"][-1] = {key: row[key] for key in ("length", "stride")} | {"status": status}
        write_with_checksum(path, values)
    assert not jobs.is_finished(trained, task)
    run_job(task, trained)
    assert jobs.is_finished(trained, task)
    assert numbers(trained, scale) == together


def test_other_texts_precisions_and_slopes_do_not_answer(scale, trained):
    task = task_of(scale, "table5")
    run_job(task, trained)
    (query,) = task.eval_lengths
    (stored,) = find_evaluations(trained / task.name)
    assert len(select_rows([stored], query)) == len(task.eval_lengths[query])
    one = stored.evaluation
    for field, changes in (
        ("corpus", {"own": False}),
        ("corpus", {"split": "test"}),
        ("corpus", {"tokens": 511}),
        ("protocol", {"precision": "bfloat16"}),
        ("protocol", {"slopes": "interpolate"}),
        ("protocol", {"stride": 8}),
        ("target", {"kind": "checkpoint"}),
    ):
        other = one.model_copy(update={field: getattr(one, field) | changes})
        assert not select_rows([replace(stored, evaluation=other)], query), changes


def test_weights_that_are_no_longer_the_best_do_not_answer(scale, together, tmp_path):
    """Somebody looked at the run before its training ended."""
    task = task_of(scale, *NAMES)
    folder = tmp_path / task.name
    train(task.config.replace(train={"steps": 2}), folder, quiet=True)
    early = replace(task, config=task.config.replace(train={"steps": 2}))
    run_job(early, tmp_path)
    assert jobs.is_finished(tmp_path, early)
    run_job(task, tmp_path)
    assert best_step(folder) == 4
    assert {one.target["step"] for one in evaluations(folder)} == {4}
    assert numbers(tmp_path, scale) == together


def test_a_checkpoint_that_was_set_aside_is_none_of_the_run(scale, trained):
    """It has files of the same names, and may claim the lowest loss."""
    task = task_of(scale, "table15")
    run_job(task, trained)
    checkpoints = trained / task.name / "checkpoints"
    state = json.loads((checkpoints / "step-000000004" / "state.json").read_text())
    aside = shutil.copytree(checkpoints / "step-000000004", checkpoints / "step-000000005.damaged")
    (aside / "state.json").write_text(json.dumps(state | {"step": 5, "valid_nll": 0.0}))
    assert best_step(trained / task.name) == 4
    assert jobs.is_finished(trained, task)


def test_a_method_that_the_paper_has_not_gets_its_rows_and_its_curve(scale, tmp_path):
    """No name but the paper's may be needed anywhere: not for a table, a figure, a colour or a sample."""
    chosen = select_methods(select_experiments(["demo", "table5"]), ["alibi", "none"], named=True)
    chosen = [replace(one, cells=tuple(c for c in one.cells if c.variant.length == 512)) for one in chosen]
    for task in plan_jobs(chosen, scale).jobs:
        run_job(task, tmp_path / "runs")
    collection = collect([tmp_path / "runs"])
    collection.__dict__["scale"] = scale  # one for tests, which no registry knows
    page = write_report(collection, tmp_path / "report").read_text(encoding="utf-8")
    headline = find_headline(collection)
    assert headline is not None
    assert [line.name for line in headline.lines] == ["ALiBi", "None"]
    table = page[page.index('id="table5"') :].partition("</table>")[0]
    assert re.search(r'<th scope="row">None, L = 512</th>\s*(<td></td>\s*)*<td><a href="data/', table)
    assert not re.search(r'<th scope="row">None, L = 64</th>', table)  # no number here, none in the paper: no row
