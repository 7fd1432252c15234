"""Planning and running jobs, resuming, costs, plans and cluster settings, with models that train in a second."""

import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
from trainshort.experiments.experiments import Scale, select_experiments, with_methods
from trainshort.experiments.reproduce.costs import measure_costs
from trainshort.experiments.reproduce.jobs import (
    REACH_RESULT_PATH,
    SAMPLE_PATH,
    Job,
    JobPlan,
    checkpoint_step,
    complete_checkpoints,
    fraction_done,
    is_finished,
    plan_jobs,
    reproduce,
    run_job,
)
from trainshort.experiments.reproduce.plan import estimate_paper_hours, format_plan, make_plan, training_command
from trainshort.experiments.reproduce.slurm import SlurmConfig, read_slurm_config, run_on_cluster
from trainshort.experiments.scales import Variant, scales
from trainshort.train.run_folder import run_name
from trainshort.utils import plugins

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scale(tmp_path_factory) -> Scale:
    return tiny_scale(tmp_path_factory.mktemp("tiny"))


def silent_console() -> Console:
    """Return a console that prints into a string."""
    return Console(file=io.StringIO(), width=200)


def plan_without_costs(scale: Scale, methods: tuple[str, ...] = ("alibi",)) -> JobPlan:
    """Plan the demo for some methods, without costs. Measuring costs would start more processes."""
    demo = two_methods()
    cells = [cell for cell in demo.cells if cell.variant and cell.variant.position in methods and not cell.is_cost]
    return plan_jobs([replace(demo, cells=tuple(cells))], scale)


def alibi_job(scale: Scale) -> Job:
    """Return the job of the demo's ALiBi model."""
    return plan_without_costs(scale).jobs[0]


# ---- planning


def test_tables_share_jobs():
    laptop = scales.get("laptop")
    names_of_one_table = {job.name for job in plan_jobs(select_experiments(["table2"]), laptop).jobs}
    jobs = plan_jobs(select_experiments(["table2", "fig1", "table15", "table8"]), laptop).jobs
    names = [job.name for job in jobs]
    assert names_of_one_table < set(names)
    assert len(names) == len(set(names))

    job = next(job for job in jobs if job.name.startswith("alibi-128"))
    assert job.eval_lengths[Query("test", None, 32_768)] >= {128, 256, 768}
    assert job.eval_lengths[Query("test", 32, 4096)] == {128, 256, 384, 512, 768}


def test_every_seed_has_its_own_jobs():
    plan = plan_jobs(select_experiments(["table9"]), scales.get("laptop"), range(1, 4))
    assert len(plan.jobs) == 9


# ---- running


def list_files(folder: Path) -> dict[Path, int]:
    """Return all files in a folder with the time of their last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_second_run_finds_nothing_to_do(scale, tmp_path):
    plan = plan_without_costs(scale)
    job = plan.jobs[0]
    assert not is_finished(tmp_path, job)
    reproduce(plan, tmp_path, console=silent_console())
    assert is_finished(tmp_path, job)
    assert fraction_done([job], tmp_path) == 1.0

    files = list_files(tmp_path / job.name)
    reproduce(plan, tmp_path, console=silent_console())
    assert list_files(tmp_path / job.name) == files


def test_job_of_the_demo_writes_a_sample_and_the_reach_of_heads(scale, tmp_path):
    job = alibi_job(scale)
    run_job(job, tmp_path)
    sample = json.loads((tmp_path / job.name / SAMPLE_PATH).read_text())
    assert [passage["end"] for passage in sample["passages"]] == [16, 64, 256]
    for passage in sample["passages"]:
        assert len(passage["written"]) == 8
        assert all(nll > 0 for _, nll in passage["written"])
    reach = json.loads((tmp_path / job.name / REACH_RESULT_PATH).read_text())
    assert len(reach["result"]["rows"]) == 2  # one layer with two heads


def test_finished_jobs_are_found_without_torch():
    # Importing torch is slow.
    code = (
        "import sys, trainshort.experiments.reproduce.jobs, trainshort.report.write; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def read_losses(folder: Path) -> dict[tuple, float]:
    """Return the loss of each evaluation in a run folder, by stride, number of tokens and length."""
    losses = {}
    for evaluation in evaluations(folder):
        for row in evaluation.rows:
            losses[evaluation.protocol["stride"], evaluation.corpus["tokens"], row.length] = row.nll
    return losses


def test_job_with_missing_files_is_completed(scale, tmp_path):
    job = alibi_job(scale)
    run_job(job, tmp_path)
    folder = tmp_path / job.name
    losses = read_losses(folder)

    for path in (folder / "eval").glob("valid-stride*.json"):
        path.unlink()
    shutil.rmtree(folder / "checkpoints" / "step-000000004")
    assert not is_finished(tmp_path, job)

    run_job(job, tmp_path)
    assert is_finished(tmp_path, job)
    assert read_losses(folder) == losses


def test_learning_curve_evaluates_all_checkpoints(scale, tmp_path):
    figure5 = select_experiments(["fig5"])[0]
    cells = [cell for cell in figure5.cells if cell.variant == Variant("cc100", "alibi", 512)]
    job = plan_jobs([replace(figure5, cells=tuple(cells))], scale).jobs[0]
    run_job(job, tmp_path)
    assert is_finished(tmp_path, job)

    folder = tmp_path / job.name
    evaluated_steps = {evaluation.target["step"] for evaluation in evaluations(folder)}
    assert evaluated_steps == {checkpoint_step(path) for path in complete_checkpoints(folder)}
    assert len(evaluated_steps) == 2


def test_folder_that_is_not_a_run_is_an_error_and_stays_unchanged(scale, tmp_path):
    job = alibi_job(scale)
    (tmp_path / job.name).mkdir()
    (tmp_path / job.name / "notes.txt").write_text("written")
    with pytest.raises(InputError, match=r"config\.json"):
        run_job(job, tmp_path)
    assert (tmp_path / job.name / "notes.txt").read_text() == "written"


def test_run_of_another_version_is_an_error(scale, tmp_path):
    job = alibi_job(scale)
    (tmp_path / job.name).mkdir()
    (tmp_path / job.name / "config.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match=r"format.* 99"):
        run_job(job, tmp_path)


# ---- costs


def test_costs_are_measured_once(scale, tmp_path):
    all_configs = plan_jobs([two_methods()], scale).cost_configs
    name = next(iter(all_configs))
    configs = {name: all_configs[name]}

    measure_costs(configs, tmp_path / COST_FILE)
    costs = read_costs(tmp_path)
    assert costs.keys() == {name}
    entry = costs[name]
    assert entry["tokens"] == 64
    assert len(entry["train_seconds"]) == len(entry["read_seconds"]) > 3
    assert min(entry["train_seconds"]) > 0
    assert entry["train_memory"] is None or entry["train_memory"] > 0

    measure_costs(configs, tmp_path / COST_FILE)
    assert read_costs(tmp_path) == costs


def test_damaged_cost_file_is_an_error(tmp_path):
    (tmp_path / COST_FILE).write_text("{")
    with pytest.raises(InputError, match=rf"{COST_FILE}.* Remove it"):
        read_costs(tmp_path)


# ---- plans


def test_plan_of_the_paper_states_gpus_memory_and_hours(tmp_path):
    paper = scales.get("paper")
    plan = make_plan(select_experiments(["table6", "table9", "table11"]), paper, tmp_path)
    entries = {entry.variant: entry for entry in plan}

    alibi = entries[Variant("wikitext103", "alibi", 512)]
    assert alibi.parameters == 246_933_504
    assert alibi.gpus == 8
    assert alibi.memory == 15.3
    assert alibi.tokens == 286_000 * 73_728
    assert round(alibi.hours or 0, 1) == 25.9
    assert "torchrun --nnodes=1 --nproc_per_node=8" in alibi.command
    assert " -m trainshort train paper-wikitext103-alibi-512 " in alibi.command

    large = entries[Variant("cc100", "alibi", 1024)]
    assert large.gpus == 128
    assert large.memory == 26.2
    assert round(large.parameters / 1e9, 2) == 1.36
    assert "--nnodes=16 --nproc_per_node=8" in large.command

    assert "GPU-hours of V100s" in format_plan(plan, paper)


def test_hours_of_a_model_that_only_has_a_speed():
    assert estimate_paper_hours(Variant("wikitext103", "t5", 3072), 286_000 * 73_728) == pytest.approx(170, abs=1)


def test_commands_for_one_gpu_do_not_use_torchrun():
    command = training_command("gpu-alibi-512", (), Path("runs/x"), 1)
    assert command == "trainshort train gpu-alibi-512 --out runs/x --resume"


def test_commands_set_the_seed_only_if_it_is_not_1():
    for entry in make_plan(select_experiments(["table2"]), scales.get("gpu"), Path("runs"), seeds=2):
        assert entry.command.endswith("--train.seed 2") == (entry.variant.seed == 2)


@pytest.fixture
def plugin_path(monkeypatch) -> Iterator[str]:
    """Load a plug-in file with the position method kerple-log, as the option `--plugin` does. Return its path."""
    path = str(REPOSITORY / "tests" / "plugins" / "kerple_log.py")
    monkeypatch.setenv(plugins.PLUGIN_ENV_VAR, path)
    monkeypatch.setattr(plugins, "_loaded", {})
    plugin = plugins.load_plugin(Path(path))
    yield path
    for registry, name in plugin.entries:
        registry.remove(name)


@pytest.mark.parametrize("scale_name", ["laptop", "gpu", "paper"])
def test_every_command_of_a_plan_trains_the_planned_run(scale_name, plugin_path):
    # kerple, kerple-log (a plug-in) and none have no recipe of their own in these experiments.
    methods = ["alibi", "kerple", "kerple-log", "t5", "none"]
    experiments = [
        with_methods(experiment, methods) for experiment in select_experiments(["demo", "table2", "table5", "table9"])
    ]
    plan = make_plan(experiments, scales.get(scale_name), Path("runs"), seeds=2)
    assert {entry.variant.position for entry in plan} == set(methods)
    for entry in plan:
        words = shlex.split(entry.command.partition("trainshort train ")[2])
        assert ("--plugin" in words) == (entry.variant.position == "kerple-log")
        command = Train.parse(plugins.load_plugin_arguments(words))
        assert run_name(command.config) == entry.name
        assert command.out == Path("runs") / entry.name
        assert command.resume
    assert any(f"--model.position kerple-log --plugin {plugin_path}" in entry.command for entry in plan)


def test_commands_of_a_scale_without_recipes_set_all_settings(scale):
    scale_without_data_folder = replace(
        scale, build=lambda variant: scale.build(variant).replace(data={"folder": None})
    )
    for entry in make_plan([two_methods()], scale_without_data_folder, Path("runs with spaces")):
        command = Train.parse(shlex.split(entry.command)[2:])
        assert command.config == scale_without_data_folder.build(entry.variant)
        assert command.out.parent == Path("runs with spaces")


# ---- options of the command


@pytest.mark.parametrize("words", [["demo,table 5"], ["demo,", "table 5"], ["demo", "table 5"]])
def test_names_are_separated_by_commas_or_spaces(words):
    assert read_command(Reproduce, ["--only", *words, "--seeds", "2"]) == Reproduce(only=("demo", "table 5"), seeds=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": "laptp"}, "'laptp'. Did you mean 'laptop'?"),
        ({"only": ("tabel5",)}, "'tabel5'. Did you mean 'table5'?"),
        ({"launcher": "slrm"}, "'slrm'. Did you mean 'slurm'?"),
        ({"seeds": 0}, "--seeds"),
        ({"scale": "paper", "only": ("table5",)}, "--plan"),
    ],
)
def test_invalid_option_is_an_error(options, expected):
    with pytest.raises(InputError) as error:
        Reproduce(**options).run()
    assert expected in str(error.value)


# ---- clusters


def test_failed_cluster_job_is_named_and_other_results_are_kept(scale, tmp_path):
    pytest.importorskip("submitit", reason="submitit is not installed")
    good_job, bad_job = plan_without_costs(scale, ("alibi", "sinusoidal")).jobs
    (tmp_path / bad_job.name).mkdir()
    (tmp_path / bad_job.name / "other.txt").write_text("not a run")
    done: list[str] = []
    with pytest.raises(InputError, match=rf"1 jobs failed: {bad_job.name} .*config\.json.*same command"):
        run_on_cluster([good_job, bad_job], tmp_path, done.append, SlurmConfig(minutes=5, gpus=0), "local")
    assert done == [good_job.name]
    assert is_finished(tmp_path, good_job)


def test_missing_slurm_is_an_error_before_anything_is_written(scale, tmp_path):
    pytest.importorskip("submitit", reason="submitit is not installed")
    if shutil.which("sbatch"):
        pytest.skip("this machine has Slurm")
    with pytest.raises(InputError, match="--launcher local"):
        run_on_cluster(plan_without_costs(scale).jobs, tmp_path, lambda name: None, SlurmConfig())
    with pytest.raises(InputError, match="--launcher local"):
        Reproduce(only=("demo",), launcher="slurm", out=tmp_path / "runs", report=tmp_path / "page").run()
    assert list(tmp_path.iterdir()) == []


def test_slurm_that_does_not_respond_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="submitit is not installed")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("srun", "sbatch", "squeue"):
        (programs / name).write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    with pytest.raises(InputError, match=r"squeue.*--launcher local"):
        Reproduce(only=("demo",), launcher="slurm", out=tmp_path / "runs", report=tmp_path / "page").run()
    assert list(tmp_path.iterdir()) == [programs]


def test_site_file_is_translated_for_submitit(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(
        'partition = "main"\naccount = "lab"\nqos = "long"\ncores = 8\nmemory = 32\nminutes = 90\n'
        'setup = ["module load cuda"]\noptions = {constraint = "a100"}\n'
    )
    assert read_slurm_config(path, gpus=1).to_submitit() == {
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


def test_no_gpu_option_on_a_cluster_without_gpus(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text("gpus = 0\n")
    assert read_slurm_config(path, gpus=1).to_submitit() == {"timeout_min": 1440}
    assert "gpus_per_node" not in read_slurm_config(None, scales.get("laptop").gpus).to_submitit()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("partitoin = 'x'", "'partitoin'. Did you mean 'partition'?"),
        ("cores = 0", "cores"),
        ("= 3", "Invalid statement"),
    ],
)
def test_invalid_site_file_is_an_error(tmp_path, content, expected):
    path = tmp_path / "site.toml"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        Reproduce(launcher="slurm", site=path).run()
    assert str(path) in str(error.value)
    assert expected in str(error.value)


def test_missing_or_unused_site_file_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        Reproduce(launcher="slurm", site=tmp_path / "nowhere.toml").run()
    (tmp_path / "site.toml").write_text("")
    with pytest.raises(InputError, match="--launcher slurm"):
        Reproduce(site=tmp_path / "site.toml").run()
