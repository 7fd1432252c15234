"""Two gloo processes equal one on the same global batch, however weights are spread; checkpoints go between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainshort.config.run_config import DataConfig, RunConfig
from trainshort.data.preparation import prepare
from trainshort.train import checkpoint, checkpoint_files, metrics_log
from trainshort.train.loop import train
from trainshort.train.parallel import bfloat16_unsupported_reason

BASE = {
    "model": {"layers": 2, "width": 16, "heads": 2},
    # Steps in proportion to gradients, so that rounding stays rounding.
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
    # A single slope cannot be shared out: one rank has an empty part of it.
    "one head": {"heads": 1, "position_settings": {"learned_slopes": True}, "biases": False},
    "adaptive": {"adaptive": {"cutoffs": (20, 100), "factor": 2}, "final_norm": False},
}
STRATEGIES = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "hsdp": {"parallel": "hsdp"},
    "ddp in parts": {"parallel": "ddp", "micro_batch": 2},
    "fsdp in parts": {"parallel": "fsdp", "micro_batch": 2, "checkpoint_activations": True},
}
CASES = [("tied", strategy) for strategy in STRATEGIES] + [
    ("untied", "fsdp"),
    ("one head", "fsdp"),
    ("adaptive", "ddp"),
    ("adaptive", "fsdp"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "corpus").mkdir()
    text = "".join(f"{number} bottles of beer on the wall, {number % 7} fell. " for number in range(200))
    for name in ("train", "valid", "test"):
        (folder / "corpus" / f"{name}.txt").write_text(text)
    prepare(DataConfig.parse(data(folder)), progress=False)
    return folder


def data(folder: Path) -> dict[str, str]:
    return {"corpus": str(folder / "corpus"), "tokenizer": "bytes", "folder": str(folder / "data")}


def config(folder: Path, model: str = "tied", **settings) -> RunConfig:
    return RunConfig.parse(
        BASE | {"model": BASE["model"] | MODELS[model], "data": data(folder), "train": BASE["train"] | settings}
    )


def alone(folder: Path, model: str, **settings) -> Path:
    out = folder / f"alone-{model}-{'-'.join(map(str, settings.values()))}"
    if not out.exists():
        train(config(folder, model, **settings), out, quiet=True)
    return out


def torchrun(folder: Path, name: str, jobs: list[dict]) -> None:
    """Run jobs on two ranks, in one launch, since starting is what takes the time."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(jobs))
    root = Path(__file__).parents[2]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    launcher += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*launcher, str(root / "tests" / "distributed_workers.py"), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def job(config: RunConfig, out: Path, **more) -> dict:
    return {"config": config.model_dump(mode="json"), "out": str(out), **more}


@pytest.fixture(scope="module")
def together(folder) -> Path:
    """All that two ranks are to train, trained."""
    jobs = []
    for model, strategy in CASES:
        nodes = 2 if strategy == "hsdp" else 1
        jobs.append(job(config(folder, model, **STRATEGIES[strategy]), folder / f"{model}-{strategy}", nodes=nodes))
    for strategy in ("ddp", "fsdp"):
        half = config(folder, parallel=strategy, precision="bfloat16")
        jobs.append(job(half, folder / f"half-{strategy}"))
    # A run that one process began.
    half = config(folder, steps=3)
    train(half, folder / "one then two", quiet=True)
    jobs.append(job(config(folder, parallel="fsdp"), folder / "one then two"))
    # Runs that one process will end, or other ranks.
    jobs.append(job(config(folder, steps=3, parallel="fsdp"), folder / "two then one"))
    jobs.append(job(config(folder, steps=3, parallel="fsdp"), folder / "fsdp twice"))
    jobs.append(job(config(folder, parallel="fsdp"), folder / "fsdp twice"))
    torchrun(folder, "together", jobs)
    return folder


def assert_close(a: Path, b: Path) -> None:
    """The same losses, validation and weights, to rounding."""
    first, second = metrics_log.read_lines(a / "metrics.jsonl"), metrics_log.read_lines(b / "metrics.jsonl")
    assert [line["step"] for line in first] == [line["step"] for line in second]
    for one, two in zip(first, second, strict=True):
        for name in ("nll", "grad_norm", "valid_nll"):
            assert (name in one) == (name in two)
            assert one.get(name, 0.0) == pytest.approx(two.get(name, 0.0), rel=2e-5)
        for name in ("count", "valid_count", "tokens", "lr"):
            assert one.get(name) == two.get(name)
    left, right = (
        checkpoint.model_tensors(checkpoint.load_model(checkpoint_files.list_checkpoints(path)[-1])) for path in (a, b)
    )
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_two_processes_equal_one(together, model, strategy):
    assert_close(alone(together, model), together / f"{model}-{strategy}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bfloat16_on_two_ranks_is_near_float32_and_stores_float32(together, strategy):
    exact, half = (
        metrics_log.read_lines(path / "metrics.jsonl")
        for path in (alone(together, "tied"), together / f"half-{strategy}")
    )
    assert half[-1]["valid_nll"] == pytest.approx(exact[-1]["valid_nll"], rel=0.02)
    assert half[-1]["valid_nll"] != exact[-1]["valid_nll"]
    weights = checkpoint.model_tensors(checkpoint.load_model(together / f"half-{strategy}"))
    newest = checkpoint_files.list_checkpoints(together / f"half-{strategy}")[-1]
    stored = sum(path.stat().st_size for path in (newest / "model").iterdir())
    assert stored >= 4 * sum(weight.numel() for weight in weights.values())


def test_sharded_checkpoints_are_safetensors_and_json_of_both_ranks(together):
    newest = checkpoint_files.list_checkpoints(together / "tied-fsdp")[-1]
    assert checkpoint_files.find_corruption(newest) is None
    assert len(list((newest / "model").glob("*.safetensors"))) == 2
    assert {path.suffix for path in newest.rglob("*.*") if path.is_file()} == {".json", ".safetensors"}
    whole = sum(
        path.stat().st_size
        for path in checkpoint_files.list_checkpoints(alone(together, "tied"))[-1].rglob("*.safetensors")
    )
    parts = sum(path.stat().st_size for path in newest.rglob("*.safetensors"))
    assert parts < 1.3 * whole  # each tensor is stored once, not once per rank


def test_tied_weights_stay_tied_through_shards(together):
    model = checkpoint.load_model(together / "tied-fsdp")
    assert model.vocabulary.output_weight is model.vocabulary.embedding.weight


def test_one_process_goes_on_where_two_stopped_and_back(together):
    train(config(together), together / "two then one", resume=True, quiet=True)
    for name in ("two then one", "one then two", "fsdp twice"):
        assert_close(alone(together, "tied"), together / name)
    ranks = {
        name: [s["ranks"] for s in metrics_log.read_lines(together / name / "sessions.jsonl")]
        for name in ("two then one", "one then two", "fsdp twice")
    }
    assert ranks == {"two then one": [2, 1], "one then two": [1, 2], "fsdp twice": [2, 2]}


def test_bfloat16_is_refused_only_where_it_is_slow():
    reason = bfloat16_unsupported_reason(torch.device("cpu"))
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        assert reason is None
    elif flags:
        assert reason == "this processor has no bfloat16 instructions"
