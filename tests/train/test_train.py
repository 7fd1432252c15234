"""Tests of the training loop, on a model that trains in a fraction of a second."""

import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from trainshort.config.run_config import DataConfig, RunConfig
from trainshort.data.batches import BatchStream
from trainshort.data.preparation import open_or_prepare, prepare
from trainshort.errors import InputError
from trainshort.model.transformer import TransformerLM
from trainshort.train import checkpoint, checkpoint_files, metrics_log
from trainshort.train.loop import NotFiniteError, train
from trainshort.train.parallel import World
from trainshort.train.setup import resolve_config
from trainshort.utils.terminal import Interrupted

# With this optimizer, steps are proportional to gradients. AdamW divides by the size of the gradients, so rounding
# errors of gradients that should be zero would become large steps.
LINEAR_OPTIMIZER = {"name": "nesterov", "lr": 0.01, "warmup": 0, "schedule": "constant"}

# Values in metrics.jsonl that differ between equal runs.
TIME_FIELDS = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder with texts that repeat the numbers from one to ten."""
    folder = tmp_path_factory.mktemp("text") / "corpus"
    folder.mkdir()
    line = "one two three four five six seven eight nine ten"
    for split, line_count in (("train", 400), ("valid", 20), ("test", 20)):
        (folder / f"{split}.txt").write_text("\n".join([line] * line_count) + "\n")
    return folder


@pytest.fixture
def config(corpus):
    """Return the settings of a small run of 20 steps. The data is prepared."""
    data = {"corpus": str(corpus), "tokenizer": "bytes", "folder": corpus.parent / "data"}
    prepare(DataConfig.parse(data), progress=False)
    return RunConfig.parse(
        {
            "model": {"layers": 1, "width": 16, "heads": 2, "dropout": 0.1},
            "data": data,
            "optim": {"lr": 0.01, "warmup": 3},
            "train": {
                "length": 16,
                "batch": 4,
                "steps": 20,
                "log_every": 2,
                "valid_every": 10,
                "valid_tokens": 100,
                "save_every": 6,
            },
        }
    )


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in a checkpoint or run folder."""
    return checkpoint.model_tensors(checkpoint.load_model(path))


def last_checkpoint(run: Path) -> Path:
    """Return the last checkpoint folder of a run."""
    return checkpoint_files.list_checkpoints(run)[-1]


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints of a run."""
    return [int(folder.name.removeprefix("step-")) for folder in checkpoint_files.list_checkpoints(run)]


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in the last checkpoint of a run."""
    return load_tensors(last_checkpoint(run))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl without values that depend on time."""
    records = metrics_log.read_lines(run / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in TIME_FIELDS} for record in records]


def read_sessions(run: Path) -> list[dict[str, Any]]:
    """Return the records in sessions.jsonl."""
    return metrics_log.read_lines(run / "sessions.jsonl")


def validation_losses(run: Path) -> dict[int, float]:
    """Return the validation losses in metrics.jsonl by step."""
    return {record["step"]: record["valid_loss"] for record in read_metrics(run) if "valid_loss" in record}


def assert_equal_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that all tensors are bit-identical."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def assert_close_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that all tensors are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)


def send_signal_at_steps(monkeypatch, *steps: int, number: int = signal.SIGTERM) -> None:
    """Send a signal to this process when the batch of a step is read. The signal is sent once for each step."""
    remaining_steps = list(steps)
    read_batch = BatchStream.batch

    def read_batch_and_send_signal(self, step):
        if step in remaining_steps:
            remaining_steps.remove(step)
            os.kill(os.getpid(), number)
        return read_batch(self, step)

    monkeypatch.setattr(BatchStream, "batch", read_batch_and_send_signal)


def replace_first_session(run: Path, **changes: Any) -> None:
    """Replace sessions.jsonl by its first record with some values changed."""
    record = read_sessions(run)[0]
    (run / "sessions.jsonl").unlink()
    metrics_log.append_line(run / "sessions.jsonl", record | changes)


def test_run_learns_and_writes_metrics_and_checkpoints(config, tmp_path):
    run = tmp_path / "run"
    config = config.replace(train={"steps": 120, "valid_every": 40}, model={"dropout": 0.0})
    result = train(config, run, quiet=True)
    records = read_metrics(run)
    training_records = [record for record in records if "loss" in record]
    assert training_records[0]["loss"] > 5  # An untrained model has a loss of 5.5, the logarithm of 256 bytes.
    assert result.valid_nll / result.valid_count < 1.5
    assert result.valid_count == 100
    assert result.steps == 120
    assert result.tokens == 120 * 4 * 16 - 10  # The last block of the text has only 6 tokens.
    assert result.best == last_checkpoint(run)
    stored_config = json.loads((run / "config.json").read_text())
    assert stored_config["model"]["vocab_size"] == 256
    assert [record["step"] for record in training_records] == list(range(2, 121, 2))
    assert list(validation_losses(run)) == [40, 80, 120]
    for record in training_records:
        assert record["loss"] == record["nll"] / record["count"]
        assert record["count"] in (2 * 4 * 16, 2 * 4 * 16 - 10)
    sessions = [(record["step"], record["threads"], record["ranks"]) for record in read_sessions(run)]
    assert sessions == [(0, 1, 1)]


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 0.01), ("nesterov", 0.1)])
def test_resumed_run_equals_uninterrupted_run(config, tmp_path, monkeypatch, optimizer, lr):
    config = config.replace(optim={"name": optimizer, "lr": lr})
    train(config, tmp_path / "uninterrupted", quiet=True)
    # Stop before the first step, between log lines, at a validation and before the last step.
    stop_steps = (0, 1, 7, 10, 13, 19)
    send_signal_at_steps(monkeypatch, *stop_steps)
    for step in stop_steps:
        with pytest.raises(Interrupted):
            train(config, tmp_path / "resumed", resume=True, quiet=True)
        assert last_checkpoint(tmp_path / "resumed").name == checkpoint_files.checkpoint_name(step)
    train(config, tmp_path / "resumed", resume=True, quiet=True)
    assert_equal_tensors(last_tensors(tmp_path / "resumed"), last_tensors(tmp_path / "uninterrupted"))
    assert read_metrics(tmp_path / "resumed") == read_metrics(tmp_path / "uninterrupted")
    # Another seed gives another result, so the comparison above can fail.
    train(config.replace(train={"seed": 2}), tmp_path / "other seed", quiet=True)
    assert read_metrics(tmp_path / "other seed") != read_metrics(tmp_path / "uninterrupted")


def test_interrupted_run_reports_checkpoint_and_restores_signal_handler(config, tmp_path, monkeypatch, capfd):
    handler_before = signal.getsignal(signal.SIGINT)
    send_signal_at_steps(monkeypatch, 5, number=signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(config, tmp_path / "run", quiet=True)
    assert caught.value.code == 130
    assert signal.getsignal(signal.SIGINT) is handler_before
    output = " ".join(capfd.readouterr().err.split())
    assert "SIGINT: saving, then stopping." in output
    assert f"Stopped after step 5. Saved {last_checkpoint(tmp_path / 'run')}." in output


def test_micro_batches_equal_one_batch(config, tmp_path):
    config = config.replace(model={"dropout": 0.0}, optim=LINEAR_OPTIMIZER)
    train(config, tmp_path / "one batch", quiet=True)
    train(config.replace(train={"micro_batch": 1}), tmp_path / "micro-batches", quiet=True)
    assert_close_tensors(last_tensors(tmp_path / "micro-batches"), last_tensors(tmp_path / "one batch"))


def test_micro_batches_are_weighted_by_their_numbers_of_targets(config, tmp_path):
    """With packed documents, micro-batches have different numbers of targets. The loss is a mean over all targets."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    documents = [json.dumps({"text": "ab" * (3 + 5 * number % 17)}) for number in range(100)]
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.jsonl").write_text("\n".join(documents) + "\n")
    data = {"corpus": str(corpus), "folder": tmp_path / "data", "packing": "documents"}
    prepare(DataConfig.parse(data), progress=False)
    config = config.replace(model={"dropout": 0.0}, data=data, optim=LINEAR_OPTIMIZER, train={"log_every": 1})
    train(config, tmp_path / "one batch", quiet=True)
    target_counts = {record["count"] for record in read_metrics(tmp_path / "one batch") if "count" in record}
    assert len(target_counts) > 1
    train(config.replace(train={"micro_batch": 1}), tmp_path / "micro-batches", quiet=True)
    assert_close_tensors(last_tensors(tmp_path / "micro-batches"), last_tensors(tmp_path / "one batch"))


def test_first_step_equals_formula(config, tmp_path):
    """Compute one step independently: mean loss, gradients, clipping, and the first step of Nesterov momentum."""
    config = config.replace(model={"dropout": 0.0}, optim=LINEAR_OPTIMIZER, train={"steps": 1, "log_every": 1})
    train(config, tmp_path / "run", quiet=True)
    prepared = open_or_prepare(config.data, progress=False)
    resolved_config = resolve_config(config, prepared.meta.vocab_size, World())
    batch = BatchStream(prepared.split("train"), length=16, batch_size=4, seed=1, bos=prepared.meta.bos).batch(0)
    torch.manual_seed(1)
    model = TransformerLM(resolved_config.model)
    logits = model(torch.from_numpy(batch.inputs))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    loss.backward()
    record = read_metrics(tmp_path / "run")[0]
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    squared_norms = [float(parameter.grad.square().sum()) for parameter in model.parameters()]
    assert record["grad_norm"] == pytest.approx(math.sqrt(sum(squared_norms)), rel=1e-5)

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    trained_tensors = last_tensors(tmp_path / "run")
    for name, parameter in model.named_parameters():
        weight_decay = 0.1 if parameter.ndim > 1 else 0.0
        expected = parameter * (1 - 0.01 * weight_decay) - 0.01 * (1 + 0.99) * parameter.grad
        torch.testing.assert_close(trained_tensors[name], expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("valid_tokens", [100, 5, 10_000])
def test_validation_loss_equals_loss_of_blocks_without_overlap(config, tmp_path, valid_tokens):
    config = config.replace(train={"steps": 3, "valid_tokens": valid_tokens})
    result = train(config, tmp_path / "run", quiet=True)
    prepared = open_or_prepare(config.data, progress=False)
    tokens = np.asarray(prepared.split("valid")[:valid_tokens]).astype(np.int64)
    assert result.valid_count == len(tokens)
    model = checkpoint.load_model(tmp_path / "run")
    inputs = np.concatenate([[prepared.meta.end or 0], tokens[:-1]])
    total_loss = 0.0
    for start in range(0, len(tokens), 16):
        logits = model(torch.from_numpy(inputs[None, start : start + 16]))[0]
        targets = torch.from_numpy(tokens[start : start + 16])
        total_loss += float(F.cross_entropy(logits, targets, reduction="sum").detach())
    assert result.valid_nll == pytest.approx(total_loss, rel=1e-5)


def test_best_and_last_checkpoint_are_kept(config, tmp_path):
    """The learning rate becomes too large after the first validation, so the best checkpoint is not the last."""
    config = config.replace(
        optim={"lr": 0.3, "warmup": 40, "warmup_start_lr": 0.001},
        train={"steps": 40, "valid_every": 10, "keep_checkpoints": 1},
    )
    result = train(config, tmp_path / "run", quiet=True)
    losses = validation_losses(tmp_path / "run")
    best_step = min(losses, key=lambda step: losses[step])
    assert best_step != 40
    assert result.best.name == checkpoint_files.checkpoint_name(best_step)
    assert checkpoint_steps(tmp_path / "run") == [best_step, 40]


def test_run_stops_early_if_the_validation_loss_does_not_improve(config, tmp_path):
    settings = {"steps": 400, "valid_every": 5, "patience": 3}
    config = config.replace(optim={"lr": 1.0, "warmup": 0, "schedule": "constant"}, train=settings)
    result = train(config, tmp_path / "run", quiet=True)
    losses = list(validation_losses(tmp_path / "run").values())
    assert result.steps < 400
    assert len(losses) == result.steps // 5
    assert min(losses[-3:]) >= min(losses[:-3])
    # The run is finished, so resuming it does no further step.
    resumed_result = train(config, tmp_path / "run", resume=True, quiet=True)
    assert resumed_result.steps == result.steps


def test_save_every_0_saves_only_the_last_step(config, tmp_path):
    config = config.replace(train={"save_every": 0, "keep_checkpoints": 9, "valid_every": 5})
    train(config, tmp_path / "run", quiet=True)
    assert checkpoint_steps(tmp_path / "run") == [20]


def test_valid_every_0_validates_only_the_last_step(config, tmp_path):
    config = config.replace(train={"save_every": 6, "keep_checkpoints": 9, "valid_every": 0})
    train(config, tmp_path / "run", quiet=True)
    assert checkpoint_steps(tmp_path / "run") == [6, 12, 18, 20]
    assert list(validation_losses(tmp_path / "run")) == [20]


def test_finished_run_can_be_resumed_with_more_steps(config, tmp_path):
    run = tmp_path / "run"
    train(config, run, quiet=True)
    tensors = last_tensors(run)
    assert train(config, run, resume=True, quiet=True).steps == 20
    assert_equal_tensors(last_tensors(run), tensors)
    assert train(config.replace(train={"steps": 24}), run, resume=True, quiet=True).steps == 24
    assert [record["step"] for record in read_sessions(run)] == [0, 20, 20]


def test_loss_that_is_not_finite_stops_the_run(config, tmp_path):
    """With this learning rate, the weights overflow in the first step and the second loss is NaN."""
    config = config.replace(optim={"lr": 1e30, "warmup": 0}, train={"save_every": 1, "valid_every": 0})
    with pytest.raises(NotFiniteError, match=r"at step 2\. .* last valid checkpoint is .*step-000000001\."):
        train(config, tmp_path / "run", quiet=True)
    assert checkpoint_steps(tmp_path / "run") == [1]


def test_existing_run_is_not_changed(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    checkpoint_before = last_checkpoint(tmp_path / "run")
    with pytest.raises(InputError, match="already exists"):
        train(config, tmp_path / "run", quiet=True)
    with pytest.raises(InputError, match=r"model\.width=16, but got model\.width=32"):
        train(config.replace(model={"width": 32}), tmp_path / "run", resume=True, quiet=True)
    assert last_checkpoint(tmp_path / "run") == checkpoint_before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"vocab_size": 300}}, r"model\.vocab_size is 300, but the data has 256 token types"),
        ({"train": {"length": 10**6}}, r"1000000"),
        ({"model": {"position": "alibbi"}}, r"Did you mean 'alibi'"),
        ({"model": {"backend": "cuda9"}}, r"cuda9"),
    ],
)
def test_invalid_settings_create_no_run_folder(config, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        train(config.replace(**changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_batch_size_must_be_divisible(config):
    with pytest.raises(InputError, match=r"train\.batch must be a multiple of .* \(3\), got 4"):
        resolve_config(config, 256, World(size=3))
    with pytest.raises(InputError, match=r"train\.micro_batch must divide the 6 sequences of each process, got 4"):
        resolve_config(config.replace(train={"batch": 12, "micro_batch": 4}), 256, World(size=2))


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 10**9},
        {"layers": 10**9, "width": 1, "heads": 1},
        {"width": 10**9, "heads": 10**9},
        {"feedforward_width": 10**15},
        {"vocab_size": 10**12},
        {"position": "learned", "position_settings": {"max_length": 10**12}},
    ],
    ids=str,
)
def test_model_that_exceeds_memory_is_rejected_before_it_is_built(config, tmp_path, changes):
    with pytest.raises(InputError, match=r"has at least [0-9,]+ weights and needs [0-9,.]+ GB of memory"):
        train(config.replace(model=changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_resume_with_other_data_is_rejected(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    replace_first_session(tmp_path / "run", data="0123456789abcdef")
    with pytest.raises(InputError, match=r"trained on other data: .*0123456789ab"):
        train(config, tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize("name", ["train.bin", "train.documents.bin", "tokenizer.json"])
def test_damaged_data_is_rejected(config, tmp_path, name):
    data_folder = tmp_path / "data"
    shutil.copytree(config.data.folder, data_folder)
    config = config.replace(data={"folder": data_folder})
    train(config, tmp_path / "run", quiet=True)
    size = (data_folder / name).stat().st_size
    (data_folder / name).write_bytes(bytes(size))
    for run, resume in (("run", True), ("new", False)):
        with pytest.raises(InputError, match=name):
            train(config, tmp_path / run, resume=resume, quiet=True)
    assert not (tmp_path / "new").exists()


def test_incomplete_line_in_sessions_is_removed(config, tmp_path):
    run = tmp_path / "run"
    train(config, run, quiet=True)
    with (run / "sessions.jsonl").open("a") as file:
        file.write('{"step": 20, "ran')
    for _ in range(2):
        train(config, run, resume=True, quiet=True)
    assert [record["step"] for record in read_sessions(run)] == [0, 20, 20]


def test_changed_number_of_threads_is_logged(config, tmp_path, caplog):
    train(config, tmp_path / "run", quiet=True)
    replace_first_session(tmp_path / "run", threads=64)
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert "used 64 threads, this session uses 1" in caplog.text


def test_run_with_only_damaged_checkpoints_does_not_start_again(config, tmp_path):
    config = config.replace(train={"keep_checkpoints": 1, "valid_every": 0})
    train(config, tmp_path / "run", quiet=True)
    (last_checkpoint(tmp_path / "run") / "state.json").write_text("{}")
    with pytest.raises(InputError, match=r"None of the 1 checkpoints in .* is valid \(step-\d+: .*\)\. Restore"):
        train(config, tmp_path / "run", resume=True, quiet=True)


def test_activation_checkpointing_does_not_change_results(config, tmp_path):
    train(config, tmp_path / "plain", quiet=True)
    train(config.replace(train={"checkpoint_activations": True}), tmp_path / "checkpointed", quiet=True)
    assert_equal_tensors(last_tensors(tmp_path / "checkpointed"), last_tensors(tmp_path / "plain"))


def test_unsupported_bfloat16_falls_back_to_float32(config, tmp_path, monkeypatch, caplog):
    reason = "this test has no bfloat16"
    monkeypatch.setattr("trainshort.train.parallel.bfloat16_unsupported_reason", lambda device: reason)
    train(config, tmp_path / "float32", quiet=True)
    train(config.replace(train={"precision": "bfloat16"}), tmp_path / "bfloat16", quiet=True)
    assert f"train.precision is bfloat16, but {reason}." in caplog.text
    assert_equal_tensors(last_tensors(tmp_path / "bfloat16"), last_tensors(tmp_path / "float32"))


def test_bfloat16_changes_results_slightly_and_stores_float32(config, tmp_path, monkeypatch):
    monkeypatch.setattr("trainshort.train.parallel.bfloat16_unsupported_reason", lambda device: None)
    float32_result = train(config, tmp_path / "float32", quiet=True)
    bfloat16_result = train(config.replace(train={"precision": "bfloat16"}), tmp_path / "bfloat16", quiet=True)
    float32_tensors = last_tensors(tmp_path / "float32")
    bfloat16_tensors = last_tensors(tmp_path / "bfloat16")
    assert all(tensor.dtype == torch.float32 for tensor in bfloat16_tensors.values())
    assert any(not torch.equal(float32_tensors[name], bfloat16_tensors[name]) for name in float32_tensors)
    assert bfloat16_result.valid_nll == pytest.approx(float32_result.valid_nll, rel=0.05)


@pytest.mark.slow
def test_compiled_model_gives_the_same_result_up_to_rounding(config, tmp_path):
    config = config.replace(model={"dropout": 0.0}, train={"steps": 5})
    plain_result = train(config, tmp_path / "plain", quiet=True)
    compiled_result = train(config.replace(train={"compile": True}), tmp_path / "compiled", quiet=True)
    assert compiled_result.valid_nll == pytest.approx(plain_result.valid_nll, rel=1e-3)
    assert last_tensors(tmp_path / "plain").keys() == last_tensors(tmp_path / "compiled").keys()


def test_tensorboard_contains_the_logged_losses(config, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(config.replace(train={"tensorboard": True}), tmp_path / "run", quiet=True)
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tensorboard_losses = {event.step: event.value for event in events.Scalars("loss")}
    logged_losses = {record["step"]: record["loss"] for record in read_metrics(tmp_path / "run") if "loss" in record}
    assert tensorboard_losses == pytest.approx(logged_losses, rel=1e-6)


def test_missing_tensorboard_is_reported_before_training(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match="requires tensorboard"):
        train(config.replace(train={"tensorboard": True}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_trained_model_reads_longer_inputs(config, tmp_path):
    """The model is trained at a length of 16 tokens and reads 100 tokens."""
    train(config, tmp_path / "run", quiet=True)
    model = checkpoint.load_model(tmp_path / "run")
    tokens = torch.zeros(1, 100, dtype=torch.long)
    assert model(tokens).shape == (1, 100, 256)
