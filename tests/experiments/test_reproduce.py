"""Tasks, the runner, resuming, launchers, costs and plans, on models that train in a second."""

import io
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import evaluations
from rich.console import Console
from tiny_experiments import tiny_scale, two_methods

from trainshort.cli.paper import Reproduce
from trainshort.cli.parser import read_command
from trainshort.cli.train import Train
from trainshort.errors import InputError
from trainshort.evaluate.results import Query
from trainshort.experiments.claims.collection import COST_FILE, read_costs
from trainshort.experiments.experiments import select_experiments, with_methods
from trainshort.experiments.reproduce import jobs
from trainshort.experiments.reproduce.costs import measure_costs
from trainshort.experiments.reproduce.jobs import plan_jobs, reproduce, run_job
from trainshort.experiments.reproduce.local import SlurmConfig, read_slurm_config, run_on_cluster
from trainshort.experiments.reproduce.plan import estimate_paper_hours, format_plan, make_plan, training_command
from trainshort.experiments.scales import Variant, scales
from trainshort.train.run_folder import run_name
from trainshort.utils import plugins


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_scale(folder)


def trained_alone(scale, methods=("alibi",)):
    """The demo's tasks without costs, which start processes of their own."""
    demo = two_methods()
    cells = tuple(c for c in demo.cells if c.variant.position in methods and not c.is_cost)
    return plan_jobs([replace(demo, cells=cells)], scale)


def test_tasks_are_shared_between_tables():
    laptop = scales.get("laptop")
    alone = {task.name for task in plan_jobs(select_experiments(["table2"]), laptop).jobs}
    both = plan_jobs(select_experiments(["table2", "fig1", "table15", "table8"]), laptop).jobs
    assert alone < {task.name for task in both}
    assert len(both) == len({task.name for task in both})
    alibi = next(task for task in both if task.name.startswith("alibi-128"))
    assert alibi.eval_lengths[Query("test", None, 32_768)] >= {128, 256, 768}
    assert alibi.eval_lengths[Query("test", 32, 4096)] == {128, 256, 384, 512, 768}
    assert len(plan_jobs(select_experiments(["table9"]), laptop, range(1, 4)).jobs) == 9


def test_work_goes_to_the_end_and_a_second_run_finds_nothing_to_do(tiny, tmp_path):
    _, scale = tiny
    assignment = trained_alone(scale)
    task = assignment.jobs[0]
    assert not jobs.is_finished(tmp_path, task)
    reproduce(assignment, tmp_path, console=quiet())
    assert jobs.is_finished(tmp_path, task)
    assert jobs.fraction_done([task], tmp_path) == 1.0
    folder = tmp_path / task.name
    sample = json.loads((folder / jobs.SAMPLE_PATH).read_text())
    assert [one["end"] for one in sample["passages"]] == [16, 64, 256]
    assert all(len(one["written"]) == 8 for one in sample["passages"])
    assert all(nats > 0 for one in sample["passages"] for _, nats in one["written"])
    assert len(json.loads((folder / jobs.REACH_RESULT_PATH).read_text())["result"]["rows"]) == 2  # one layer, two heads
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    reproduce(assignment, tmp_path, console=quiet())
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_needs_no_torch(tiny, tmp_path):
    """That is what makes it quick: everything that is done is known from files."""
    code = (
        "import sys, trainshort.experiments.reproduce.jobs, trainshort.report.write; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def losses(folder):
    found = evaluations(folder)
    return {(one.protocol["stride"], one.corpus["tokens"], row.length): row.nll for one in found for row in one.rows}


def test_an_interrupted_task_goes_on(tiny, tmp_path):
    """Whatever part is missing is made, and the rest is left as it is."""
    _, scale = tiny
    task = trained_alone(scale).jobs[0]
    run_job(task, tmp_path)
    folder = tmp_path / task.name
    whole = losses(folder)
    for path in (folder / "eval").glob("valid-stride*.json"):
        path.unlink()
    shutil.rmtree(folder / "checkpoints" / "step-000000004")
    assert not jobs.is_finished(tmp_path, task)
    run_job(task, tmp_path)
    assert jobs.is_finished(tmp_path, task)
    assert losses(folder) == whole


def test_learning_curves_read_the_checkpoints(tiny, tmp_path):
    _, scale = tiny
    curves = select_experiments(["fig5"])[0]
    cells = tuple(c for c in curves.cells if c.variant == Variant("cc100", "alibi", 512))
    task = plan_jobs([replace(curves, cells=cells)], scale).jobs[0]
    run_job(task, tmp_path)
    assert jobs.is_finished(tmp_path, task)
    steps = {one.target["step"] for one in evaluations(tmp_path / task.name)}
    assert steps == {jobs.checkpoint_step(path) for path in jobs.complete_checkpoints(tmp_path / task.name)}
    assert len(steps) == 2


def test_jobs_run_through_submitit_and_a_failed_one_is_named(tiny, tmp_path):
    pytest.importorskip("submitit", reason="the scale extra is not installed")
    _, scale = tiny
    good, bad = trained_alone(scale, ("alibi", "sinusoidal")).jobs
    (tmp_path / bad.name).mkdir()
    (tmp_path / bad.name / "other.txt").write_text("not a run")
    done: list[str] = []
    with pytest.raises(InputError, match=rf"1 jobs failed: {bad.name} .*no config\.json.*same command"):
        run_on_cluster([good, bad], tmp_path, done.append, SlurmConfig(minutes=5, gpus=0), "local")
    assert done == [good.name]
    assert jobs.is_finished(tmp_path, good)


def test_costs_are_measured_once_and_kept(tiny, tmp_path):
    _, scale = tiny
    costs = dict(list(plan_jobs([two_methods()], scale).cost_configs.items())[:1])
    measure_costs(costs, tmp_path / COST_FILE)
    first = read_costs(tmp_path)
    assert first.keys() == costs.keys()
    for entry in first.values():
        assert entry["tokens"] == 64
        assert len(entry["train_seconds"]) == len(entry["read_seconds"]) > 3
        assert min(entry["train_seconds"]) > 0
        assert entry["train_memory"] is None or entry["train_memory"] > 0
    measure_costs(costs, tmp_path / COST_FILE)
    assert read_costs(tmp_path) == first
    (tmp_path / COST_FILE).write_text("{")
    with pytest.raises(InputError, match=r"not readable JSON .*\. Remove it, and the costs are measured again"):
        read_costs(tmp_path)


def test_plan_of_the_paper(tmp_path):
    paper = scales.get("paper")
    entries = {
        entry.variant: entry
        for entry in make_plan(select_experiments(["table6", "table9", "table11"]), paper, tmp_path)
    }
    alibi = entries[Variant("wikitext103", "alibi", 512)]
    assert (alibi.parameters, alibi.gpus, alibi.memory) == (246_933_504, 8, 15.3)
    assert alibi.tokens == 286_000 * 73_728
    assert round(alibi.hours or 0, 1) == 25.9
    assert "torchrun --nnodes=1 --nproc_per_node=8" in alibi.command
    assert " -m trainshort train paper-wikitext103-alibi-512 " in alibi.command
    large = entries[Variant("cc100", "alibi", 1024)]
    assert (large.gpus, large.memory) == (128, 26.2)
    assert round(large.parameters / 1e9, 2) == 1.36
    assert "--nnodes=16 --nproc_per_node=8" in large.command
    text = format_plan(list(entries.values()), paper)
    assert "GPU-hours of V100s" in text
    assert estimate_paper_hours(Variant("wikitext103", "t5", 3072), 286_000 * 73_728) == pytest.approx(170, abs=1)


def test_plan_commands_are_plain_without_many_gpus():
    assert (
        training_command("gpu-alibi-512", (), Path("runs/x"), 1)
        == "trainshort train gpu-alibi-512 --out runs/x --resume"
    )
    both = make_plan(select_experiments(["table2"]), scales.get("gpu"), Path("runs"), seeds=2)
    assert {one.command.endswith("--train.seed 2"): one.variant.seed for one in both} == {False: 1, True: 2}


@pytest.fixture
def plugged(monkeypatch):
    """A method from a file, as `--plugin` brings it."""
    path = str(Path(__file__).parents[1] / "plugins" / "kerple_log.py")
    monkeypatch.setenv(plugins.PLUGIN_ENV_VAR, path)
    monkeypatch.setattr(plugins, "_loaded", {})
    loaded = plugins.load_plugin(Path(path))
    yield path
    for table, name in loaded.entries:
        table.remove(name)


@pytest.mark.parametrize("scale", ["laptop", "gpu", "paper"])
def test_every_command_of_a_plan_trains_the_run_that_it_names(scale, plugged):
    """Also where a method has no recipe of its own: a built-in one, a plug-in's, the paper's in another table."""
    names = ["alibi", "kerple", "kerple-log", "t5", "none"]
    chosen = [with_methods(one, names) for one in select_experiments(["demo", "table2", "table5", "table9"])]
    entries = make_plan(chosen, scales.get(scale), Path("runs"), seeds=2)
    assert {entry.variant.position for entry in entries} == set(names)
    for entry in entries:
        words = shlex.split(entry.command.partition("trainshort train ")[2])
        assert ("--plugin" in words) == (entry.variant.position == "kerple-log")
        made = Train.parse(plugins.load_plugin_arguments(words))
        assert (run_name(made.config), made.out, made.resume) == (entry.name, Path("runs") / entry.name, True)
    assert any(f"--model.position kerple-log --plugin {plugged}" in entry.command for entry in entries)


def test_a_plan_of_a_scale_without_recipes_names_every_setting(tiny):
    _, prepared = tiny
    scale = replace(prepared, build=lambda variant: prepared.build(variant).replace(data={"folder": None}))
    for entry in make_plan([two_methods()], scale, Path("runs with spaces")):
        made = Train.parse(shlex.split(entry.command)[2:])
        assert (made.config, made.out.parent) == (scale.build(entry.variant), Path("runs with spaces"))


@pytest.mark.parametrize("words", [["demo,table 5"], ["demo,", "table 5"], ["demo", "table 5"]])
def test_names_come_with_commas_or_apart(words):
    assert read_command(Reproduce, ["--only", *words, "--seeds", "2"]) == Reproduce(only=("demo", "table 5"), seeds=2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scale": "laptp"}, "Unknown scale 'laptp'. Did you mean 'laptop'? Known: laptop, gpu, paper."),
        ({"only": ("tabel5",)}, "Unknown experiment 'tabel5'. Did you mean 'table5'?"),
        ({"launcher": "slrm"}, "Unknown launcher 'slrm'. Did you mean 'slurm'? Known: local, slurm."),
        ({"seeds": 0}, "--seeds must be from 1 to 9, got 0."),
        ({"scale": "paper", "only": ("table5",)}, "The scale 'paper' needs several machines. See --plan"),
    ],
)
def test_mistakes_are_told(options, sentence):
    with pytest.raises(InputError) as error:
        Reproduce(**options).run()
    assert str(error.value).startswith(sentence)


def test_slurm_that_is_not_there_is_told(tiny, tmp_path):
    pytest.importorskip("submitit", reason="the scale extra is not installed")
    if shutil.which("sbatch"):
        pytest.skip("this machine has Slurm")
    with pytest.raises(InputError, match="Use --launcher local"):
        run_on_cluster(trained_alone(tiny[1]).jobs, tmp_path, lambda name: None, SlurmConfig())
    with pytest.raises(InputError, match="Use --launcher local"):
        Reproduce(only=("demo",), launcher="slurm", out=tmp_path / "runs", report=tmp_path / "page").run()
    assert list(tmp_path.iterdir()) == []


def test_slurm_that_does_not_answer_is_told_before_anything_is_made(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="the scale extra is not installed")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("srun", "sbatch", "squeue"):
        (programs / name).write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    with pytest.raises(InputError, match=r"^Slurm is installed here and does not answer \(squeue\)\."):
        Reproduce(only=("demo",), launcher="slurm", out=tmp_path / "runs", report=tmp_path / "page").run()
    assert list(tmp_path.iterdir()) == [programs]


def test_a_folder_that_is_no_run_is_told_and_left(tiny, tmp_path):
    _, scale = tiny
    task = trained_alone(scale).jobs[0]
    (tmp_path / task.name).mkdir()
    (tmp_path / task.name / "half").write_text("written")
    with pytest.raises(InputError, match=r"is not a run folder: it contains files but no config\.json"):
        run_job(task, tmp_path)
    assert (tmp_path / task.name / "half").read_text() == "written"


def test_a_run_of_another_version_is_told(tiny, tmp_path):
    _, scale = tiny
    task = trained_alone(scale).jobs[0]
    (tmp_path / task.name).mkdir()
    (tmp_path / task.name / "config.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match=r"this config has format 99.*use the version that wrote it"):
        run_job(task, tmp_path)


def test_a_site_file_says_what_jobs_ask_for(tmp_path):
    file = tmp_path / "site.toml"
    file.write_text(
        'partition = "main"\naccount = "lab"\nqos = "long"\ncores = 8\nmemory = 32\nminutes = 90\n'
        'setup = ["module load cuda"]\noptions = {constraint = "a100"}\n'
    )
    assert read_slurm_config(file, gpus=1).to_submitit() == {
        "timeout_min": 90,
        "gpus_per_node": 1,
        "cpus_per_task": 8,
        "mem_gb": 32,
        "slurm_partition": "main",
        "slurm_account": "lab",
        "slurm_qos": "long",
        "slurm_setup": ["module load cuda"],
        "slurm_additional_parameters": {"constraint": "a100"},
    }
    file.write_text("gpus = 0\n")  # nothing is asked for that a cluster without GPUs would refuse
    assert read_slurm_config(file, gpus=1).to_submitit() == {"timeout_min": 1440}
    assert "gpus_per_node" not in read_slurm_config(None, scales.get("laptop").gpus).to_submitit()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("partitoin = 'x'", "Unknown setting 'partitoin'. Did you mean 'partition'?"),
        ("cores = 0", "cores"),
        ("= 3", "Invalid statement"),
    ],
)
def test_mistakes_in_a_site_file_are_told(tmp_path, content, sentence):
    file = tmp_path / "site.toml"
    file.write_text(content)
    with pytest.raises(InputError) as error:
        Reproduce(launcher="slurm", site=file).run()
    assert str(error.value).startswith(f"The site file {file}: ")
    assert sentence in str(error.value)
    with pytest.raises(InputError, match=r"site file .*nowhere"):
        Reproduce(launcher="slurm", site=tmp_path / "nowhere.toml").run()
    with pytest.raises(InputError, match="give --launcher slurm with it"):
        Reproduce(site=file).run()
