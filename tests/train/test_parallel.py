"""Tests of training on two processes: the result equals that of one process, and checkpoints can be exchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainshort.config.run_config import DataConfig, RunConfig
from trainshort.data.preparation import prepare
from trainshort.train import checkpoint, checkpoint_files, metrics_log
from trainshort.train.loop import train
from trainshort.train.parallel import bfloat16_unsupported_reason

BASE_CONFIG = {
    "model": {"layers": 2, "width": 16, "heads": 2},
    # With this optimizer, steps are proportional to gradients. So rounding errors stay small.
    "optim": {"name": "nesterov", "lr": 0.02, "momentum": 0.9, "warmup": 3, "schedule": "constant"},
    "train": {
        "length": 16,
        "batch": 8,
        "steps": 6,
        "log_every": 1,
        "valid_every": 3,
        "valid_tokens": 250,
        "save_every": 0,
    },
}
MODELS = {
    "tied": {},
    "untied": {"tie_embeddings": False, "position": "t5"},
    # A single slope cannot be sharded, so one rank has an empty shard.
    "one head": {"heads": 1, "position_settings": {"learned_slopes": True}, "biases": False},
    "adaptive": {"adaptive": {"cutoffs": (20, 100), "factor": 2}, "final_norm": False},
}
STRATEGIES = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "hsdp": {"parallel": "hsdp"},
    "ddp micro-batches": {"parallel": "ddp", "micro_batch": 2},
    "fsdp micro-batches": {"parallel": "fsdp", "micro_batch": 2, "checkpoint_activations": True},
}
# All tested pairs of a model and a strategy.
CASES = [
    *[("tied", strategy) for strategy in STRATEGIES],
    ("untied", "fsdp"),
    ("one head", "fsdp"),
    ("adaptive", "ddp"),
    ("adaptive", "fsdp"),
]


def data_settings(folder: Path) -> dict[str, str]:
    """Return the data settings of all runs."""
    return {"corpus": str(folder / "corpus"), "tokenizer": "bytes", "folder": str(folder / "data")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a prepared text."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "corpus").mkdir()
    text = "".join(f"{number} bottles of beer on the wall, {number % 7} fell. " for number in range(200))
    for split in ("train", "valid", "test"):
        (folder / "corpus" / f"{split}.txt").write_text(text)
    prepare(DataConfig.parse(data_settings(folder)), progress=False)
    return folder


def make_config(folder: Path, model: str = "tied", **train_settings: Any) -> RunConfig:
    """Return the settings of a run.

    Args:
        folder: The folder with the data.
        model: A name in `MODELS`.
        train_settings: Changes of the settings in the section "train".
    """
    values = {
        "model": BASE_CONFIG["model"] | MODELS[model],
        "data": data_settings(folder),
        "optim": BASE_CONFIG["optim"],
        "train": BASE_CONFIG["train"] | train_settings,
    }
    return RunConfig.parse(values)


def train_on_one_process(folder: Path, model: str) -> Path:
    """Train a model in this process, unless this was done before, and return the run folder."""
    run = folder / f"one-process-{model}"
    if not run.exists():
        train(make_config(folder, model), run, quiet=True)
    return run


def make_job(config: RunConfig, run: Path, *, nodes: int = 1) -> dict[str, Any]:
    """Return a job for tests/distributed_workers.py.

    Args:
        config: The settings of the run.
        run: The run folder.
        nodes: The number of machines that are simulated.
    """
    return {"config": config.model_dump(mode="json"), "out": str(run), "nodes": nodes}


def run_on_two_processes(jobs: list[dict[str, Any]], jobs_path: Path) -> None:
    """Run jobs one after another on two processes. All jobs share the processes, because starting takes long.

    Args:
        jobs: The jobs, see `make_job`.
        jobs_path: The JSON file to which the jobs are written.
    """
    jobs_path.write_text(json.dumps(jobs))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    command += [str(root / "tests" / "distributed_workers.py"), str(jobs_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def trained_folder(folder) -> Path:
    """Return the folder with all runs that were trained on two processes."""
    jobs = []
    for model, strategy in CASES:
        nodes = 2 if strategy == "hsdp" else 1
        config = make_config(folder, model, **STRATEGIES[strategy])
        jobs.append(make_job(config, folder / f"{model}-{strategy}", nodes=nodes))
    for strategy in ("ddp", "fsdp"):
        config = make_config(folder, parallel=strategy, precision="bfloat16")
        jobs.append(make_job(config, folder / f"bfloat16-{strategy}"))

    # One process starts this run, and two processes continue it.
    train(make_config(folder, steps=3), folder / "one then two", quiet=True)
    jobs.append(make_job(make_config(folder, parallel="fsdp"), folder / "one then two"))
    # Two processes start this run. One process continues it in a test.
    jobs.append(make_job(make_config(folder, steps=3, parallel="fsdp"), folder / "two then one"))
    # Two processes start and continue this run.
    jobs.append(make_job(make_config(folder, steps=3, parallel="fsdp"), folder / "fsdp twice"))
    jobs.append(make_job(make_config(folder, parallel="fsdp"), folder / "fsdp twice"))
    run_on_two_processes(jobs, folder / "jobs.json")
    return folder


def last_checkpoint(run: Path) -> Path:
    """Return the last checkpoint folder of a run."""
    return checkpoint_files.list_checkpoints(run)[-1]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl of a run."""
    return metrics_log.read_lines(run / "metrics.jsonl")


def assert_equal_runs(actual: Path, expected: Path) -> None:
    """Check that two runs have the same losses and weights, up to rounding."""
    for record, expected_record in zip(read_metrics(actual), read_metrics(expected), strict=True):
        assert record.keys() == expected_record.keys()
        for name in ("nll", "grad_norm", "valid_nll"):
            assert record.get(name, 0.0) == pytest.approx(expected_record.get(name, 0.0), rel=2e-5)
        for name in ("step", "count", "valid_count", "tokens", "lr"):
            assert record.get(name) == expected_record.get(name)

    tensors = checkpoint.model_tensors(checkpoint.load_model(last_checkpoint(actual)))
    expected_tensors = checkpoint.model_tensors(checkpoint.load_model(last_checkpoint(expected)))
    assert tensors.keys() == expected_tensors.keys()
    for name in tensors:
        torch.testing.assert_close(tensors[name], expected_tensors[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_two_processes_equal_one_process(trained_folder, model, strategy):
    assert_equal_runs(trained_folder / f"{model}-{strategy}", train_on_one_process(trained_folder, model))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bfloat16_on_two_processes_is_close_to_float32(trained_folder, strategy):
    float32_metrics = read_metrics(train_on_one_process(trained_folder, "tied"))
    bfloat16_metrics = read_metrics(trained_folder / f"bfloat16-{strategy}")
    assert bfloat16_metrics[-1]["valid_nll"] == pytest.approx(float32_metrics[-1]["valid_nll"], rel=0.02)
    assert bfloat16_metrics[-1]["valid_nll"] != float32_metrics[-1]["valid_nll"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bfloat16_training_stores_float32_weights(trained_folder, strategy):
    run = trained_folder / f"bfloat16-{strategy}"
    tensors = checkpoint.model_tensors(checkpoint.load_model(run))
    weight_count = sum(tensor.numel() for tensor in tensors.values())
    stored_bytes = sum(path.stat().st_size for path in (last_checkpoint(run) / "model").iterdir())
    assert stored_bytes >= 4 * weight_count


def test_sharded_checkpoint_contains_one_safetensors_file_per_rank(trained_folder):
    folder = last_checkpoint(trained_folder / "tied-fsdp")
    assert checkpoint_files.find_corruption(folder) is None
    assert len(list((folder / "model").glob("*.safetensors"))) == 2
    assert {path.suffix for path in folder.rglob("*.*") if path.is_file()} == {".json", ".safetensors"}


def test_sharded_checkpoint_stores_each_tensor_once(trained_folder):
    sharded_folder = last_checkpoint(trained_folder / "tied-fsdp")
    unsharded_folder = last_checkpoint(train_on_one_process(trained_folder, "tied"))
    sharded_bytes = sum(path.stat().st_size for path in sharded_folder.rglob("*.safetensors"))
    unsharded_bytes = sum(path.stat().st_size for path in unsharded_folder.rglob("*.safetensors"))
    assert sharded_bytes < 1.3 * unsharded_bytes


def test_tied_weights_are_one_tensor_after_loading_shards(trained_folder):
    model = checkpoint.load_model(trained_folder / "tied-fsdp")
    assert model.vocabulary.output_weight is model.vocabulary.embedding.weight


def test_number_of_processes_may_change_on_resume(trained_folder):
    train(make_config(trained_folder), trained_folder / "two then one", resume=True, quiet=True)
    expected_ranks = {"two then one": [2, 1], "one then two": [1, 2], "fsdp twice": [2, 2]}
    for name, ranks in expected_ranks.items():
        run = trained_folder / name
        assert_equal_runs(run, train_on_one_process(trained_folder, "tied"))
        sessions = metrics_log.read_lines(run / "sessions.jsonl")
        assert [session["ranks"] for session in sessions] == ranks


def test_bfloat16_support_depends_on_the_instructions_of_the_processor():
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.exists():
        pytest.skip("requires /proc/cpuinfo")
    text = cpu_info.read_text()
    reason = bfloat16_unsupported_reason(torch.device("cpu"))
    if "avx512_bf16" in text or "amx_bf16" in text:
        assert reason is None
    else:
        assert reason == "this processor has no bfloat16 instructions"
