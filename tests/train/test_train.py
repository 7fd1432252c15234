"""Training: what the loop promises, on a model small enough to train in a blink."""

import json
import math
import os
import shutil
import signal
import sys

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

LINEAR = {"name": "nesterov", "lr": 0.01, "warmup": 0, "schedule": "constant"}
"""Steps in proportion to gradients. AdamW divides by their size, and so makes rounding errors of zeros into steps."""
TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Numbers in words, counting up: learnable at once."""
    folder = tmp_path_factory.mktemp("text") / "corpus"
    folder.mkdir()
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for name, lines in (("train", 400), ("valid", 20), ("test", 20)):
        (folder / f"{name}.txt").write_text("\n".join(" ".join(words) for _ in range(lines)) + "\n")
    return folder


@pytest.fixture
def config(corpus):
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


def weights(folder) -> dict[str, torch.Tensor]:
    return checkpoint.model_tensors(checkpoint.load_model(folder))


def assert_same(a, b) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def metrics(run) -> list[dict]:
    lines = metrics_log.read_lines(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def last(run):
    return checkpoint_files.list_checkpoints(run)[-1]


def test_a_run_learns_and_leaves_what_it_should(config, tmp_path):
    config = config.replace(train={"steps": 120, "valid_every": 40}, model={"dropout": 0.0})
    result = train(config, tmp_path / "run", quiet=True)
    lines = metrics(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 5  # bytes: the natural logarithm of 256 is 5.5
    assert result.valid_nll / result.valid_count < 1.5
    assert result.valid_count == 100
    assert result.steps == 120
    assert result.tokens == 120 * 4 * 16 - 10  # one of the blocks was the last, of 6 tokens
    assert result.best == last(tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["model"]["vocab_size"] == 256
    assert [line["step"] for line in lines if "loss" in line] == list(range(2, 121, 2))
    assert [line["step"] for line in lines if "valid_loss" in line] == [40, 80, 120]
    for line in lines:
        if "loss" in line:
            assert line["loss"] == line["nll"] / line["count"]
            assert line["count"] in (2 * 4 * 16, 2 * 4 * 16 - 10)
    session = metrics_log.read_lines(tmp_path / "run" / "sessions.jsonl")
    assert [(record["step"], record["threads"], record["ranks"]) for record in session] == [(0, 1, 1)]


def stop_at(monkeypatch, *steps: int, number: int = signal.SIGTERM) -> None:
    """Send this process a real signal when the batch of one of these updates is read, once each."""
    left = list(steps)
    batch = BatchStream.batch

    def signalling(self, step):
        if step in left:
            left.remove(step)
            os.kill(os.getpid(), number)
        return batch(self, step)

    monkeypatch.setattr(BatchStream, "batch", signalling)


@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_stopped_and_resumed_equals_never_stopped(config, tmp_path, monkeypatch, optimizer):
    config = config.replace(optim={"name": optimizer, "lr": 0.01 if optimizer == "adamw" else 0.1})
    train(config, tmp_path / "whole", quiet=True)
    stops = (0, 1, 7, 10, 13, 19)  # before the first update, between log lines, at a validation, before the last
    stop_at(monkeypatch, *stops)
    for step in stops:
        with pytest.raises(Interrupted):
            train(config, tmp_path / "stopped", resume=True, quiet=True)
        assert last(tmp_path / "stopped").name == checkpoint_files.checkpoint_name(step)
    train(config, tmp_path / "stopped", resume=True, quiet=True)
    assert_same(weights(last(tmp_path / "whole")), weights(last(tmp_path / "stopped")))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "stopped")
    # It can fail: another seed ends elsewhere.
    train(config.replace(train={"seed": 2}), tmp_path / "other", quiet=True)
    assert metrics(tmp_path / "whole") != metrics(tmp_path / "other")


def test_a_signal_says_what_happened_and_gives_the_handlers_back(config, tmp_path, monkeypatch, capfd):
    before = signal.getsignal(signal.SIGINT)
    stop_at(monkeypatch, 5, number=signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(config, tmp_path / "run", quiet=True)
    assert stopped.value.code == 130
    assert signal.getsignal(signal.SIGINT) is before
    told = " ".join(capfd.readouterr().err.split())
    assert "SIGINT: saving, then stopping; once more stops at once." in told
    assert f"Stopped after step 5. Saved {last(tmp_path / 'run')}; go on by --resume." in told


def test_micro_batches_equal_one_batch(config, tmp_path):
    config = config.replace(model={"dropout": 0.0}, optim=LINEAR)
    train(config, tmp_path / "whole", quiet=True)
    train(config.replace(train={"micro_batch": 1}), tmp_path / "parts", quiet=True)
    a, b = weights(last(tmp_path / "whole")), weights(last(tmp_path / "parts"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_micro_batches_of_unequal_counts_are_weighted_by_tokens(config, tmp_path):
    """With documents packed, some targets are not scored; the mean is over targets, not over micro-batches."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        lines = (json.dumps({"text": "ab" * (3 + 5 * number % 17)}) for number in range(100))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = {"corpus": str(folder), "folder": tmp_path / "data", "packing": "documents"}
    prepare(DataConfig.parse(data), progress=False)
    config = config.replace(model={"dropout": 0.0}, data=data, optim=LINEAR, train={"log_every": 1})
    train(config, tmp_path / "whole", quiet=True)
    counts = {line["count"] for line in metrics(tmp_path / "whole") if "count" in line}
    assert len(counts) > 1
    train(config.replace(train={"micro_batch": 1}), tmp_path / "parts", quiet=True)
    a, b = weights(last(tmp_path / "whole")), weights(last(tmp_path / "parts"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_the_first_update_is_the_formula(config, tmp_path):
    """One update by hand: mean loss over the batch, gradient, clipping, the first step of Nesterov momentum."""
    config = config.replace(model={"dropout": 0.0}, optim=LINEAR, train={"steps": 1, "log_every": 1})
    train(config, tmp_path / "run", quiet=True)
    prepared = open_or_prepare(config.data, progress=False)
    settings = resolve_config(config, prepared.meta.vocab_size, World())
    batch = BatchStream(prepared.split("train"), length=16, batch_size=4, seed=1, bos=prepared.meta.bos).batch(0)
    torch.manual_seed(1)
    model = TransformerLM(settings.model)
    logits = model(torch.from_numpy(batch.inputs))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    loss.backward()
    line = metrics(tmp_path / "run")[0]
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    done = weights(last(tmp_path / "run"))
    for name, p in model.named_parameters():
        decay = 0.1 if p.ndim > 1 else 0.0
        expected = p * (1 - 0.01 * decay) - 0.01 * (1 + 0.99) * p.grad
        torch.testing.assert_close(done[name], expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("valid_tokens", [100, 5, 10_000])
def test_validation_is_the_evaluation_of_non_overlapping_blocks(config, tmp_path, valid_tokens):
    config = config.replace(train={"steps": 3, "valid_tokens": valid_tokens})
    result = train(config, tmp_path / "run", quiet=True)
    prepared = open_or_prepare(config.data, progress=False)
    text = np.asarray(prepared.split("valid")[:valid_tokens]).astype(np.int64)
    assert result.valid_count == len(text)
    model = checkpoint.load_model(tmp_path / "run")
    inputs = np.concatenate([[prepared.meta.end or 0], text[:-1]])
    total = 0.0
    for start in range(0, len(text), 16):
        logits = model(torch.from_numpy(inputs[None, start : start + 16]))[0]
        total += float(F.cross_entropy(logits, torch.from_numpy(text[start : start + 16]), reduction="sum").detach())
    assert result.valid_nll == pytest.approx(total, rel=1e-5)


def test_best_is_kept_beside_the_last(config, tmp_path):
    """The learning rate explodes after the first validation, so that the best stays behind."""
    config = config.replace(
        optim={"lr": 0.3, "warmup": 40, "warmup_start_lr": 0.001},
        train={"steps": 40, "valid_every": 10, "keep_checkpoints": 1},
    )
    result = train(config, tmp_path / "run", quiet=True)
    losses = {line["step"]: line["valid_loss"] for line in metrics(tmp_path / "run") if "valid_loss" in line}
    best = min(losses, key=losses.get)
    assert best != 40
    assert result.best.name == checkpoint_files.checkpoint_name(best)
    assert [path.name for path in checkpoint_files.list_checkpoints(tmp_path / "run")] == [
        checkpoint_files.checkpoint_name(best),
        checkpoint_files.checkpoint_name(40),
    ]


def test_early_stop(config, tmp_path):
    settings = {"steps": 400, "valid_every": 5, "patience": 3}
    config = config.replace(optim={"lr": 1.0, "warmup": 0, "schedule": "constant"}, train=settings)
    result = train(config, tmp_path / "run", quiet=True)
    losses = [line["valid_loss"] for line in metrics(tmp_path / "run") if "valid_loss" in line]
    assert result.steps < 400
    assert len(losses) == result.steps // 5
    assert min(losses[-3:]) >= min(losses[:-3])
    again = train(config, tmp_path / "run", resume=True, quiet=True)  # it has finished: nothing more to do
    assert again.steps == result.steps


def test_save_every_0_saves_at_the_end_only(config, tmp_path):
    train(
        config.replace(train={"save_every": 0, "keep_checkpoints": 9, "valid_every": 5}), tmp_path / "run", quiet=True
    )
    assert [path.name for path in checkpoint_files.list_checkpoints(tmp_path / "run")] == [
        checkpoint_files.checkpoint_name(20)
    ]
    train(
        config.replace(train={"save_every": 6, "keep_checkpoints": 9, "valid_every": 0}), tmp_path / "more", quiet=True
    )
    assert [int(path.name[-2:]) for path in checkpoint_files.list_checkpoints(tmp_path / "more")] == [6, 12, 18, 20]
    assert [line["step"] for line in metrics(tmp_path / "more") if "valid_loss" in line] == [20]


def test_a_finished_run_can_be_made_longer(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    before = weights(last(tmp_path / "run"))
    assert train(config, tmp_path / "run", resume=True, quiet=True).steps == 20
    assert_same(before, weights(last(tmp_path / "run")))
    assert train(config.replace(train={"steps": 24}), tmp_path / "run", resume=True, quiet=True).steps == 24
    assert [record["step"] for record in metrics_log.read_lines(tmp_path / "run" / "sessions.jsonl")] == [0, 20, 20]


def test_a_loss_that_is_not_finite_stops_before_the_update(config, tmp_path, monkeypatch):
    """A learning rate at which weights overflow: the loss is NaN by itself, nothing is injected."""
    config = config.replace(optim={"lr": 1e30, "warmup": 0}, train={"save_every": 1, "valid_every": 0})
    with pytest.raises(NotFiniteError, match=r"at step 2\. That step was not made; the last good checkpoint is .*01\."):
        train(config, tmp_path / "run", quiet=True)
    assert last(tmp_path / "run").name == checkpoint_files.checkpoint_name(1)


def test_existing_folders_are_refused_before_anything_is_done(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    before = last(tmp_path / "run")
    with pytest.raises(InputError, match="already exists"):
        train(config, tmp_path / "run", quiet=True)
    with pytest.raises(InputError, match=r"started with model\.width=16, but model\.width=32"):
        train(config.replace(model={"width": 32}), tmp_path / "run", resume=True, quiet=True)
    assert last(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"vocab_size": 300}}, r"model\.vocab_size is 300, but the data has 256 token types"),
        ({"train": {"length": 10**6}}, r"needs 1000000"),
        ({"model": {"position": "alibbi"}}, r"Did you mean 'alibi'"),
        ({"model": {"backend": "cuda9"}}, r"cuda9"),
    ],
)
def test_wrong_settings_leave_no_folder(config, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        train(config.replace(**changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_batches_must_be_shareable(config):
    with pytest.raises(InputError, match=r"train\.batch 4 cannot be shared by 3 processes"):
        resolve_config(config, 256, World(size=3))
    with pytest.raises(InputError, match=r"train\.micro_batch 4 does not divide the 6 sequences that each of 2"):
        resolve_config(config.replace(train={"batch": 12, "micro_batch": 4}), 256, World(size=2))


@pytest.mark.parametrize(
    "absurd",
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
def test_a_model_that_no_machine_holds_is_refused_before_it_is_built(config, tmp_path, absurd):
    with pytest.raises(InputError, match=r"has at least [0-9,]+ weights and needs [0-9,.]+ GB; there are [0-9,.]+ GB"):
        train(config.replace(model=absurd), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_other_data_is_refused_on_resume(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    record = metrics_log.read_lines(tmp_path / "run" / "sessions.jsonl")[0]
    (tmp_path / "run" / "sessions.jsonl").unlink()
    metrics_log.append_line(tmp_path / "run" / "sessions.jsonl", record | {"data": "0123456789abcdef"})
    with pytest.raises(InputError, match=r"trained on other data: its train\.bin had sha256 0123456789ab"):
        train(config, tmp_path / "run", resume=True, quiet=True)


@pytest.mark.parametrize("name", ["train.bin", "train.documents.bin", "tokenizer.json"])
def test_data_that_was_damaged_is_refused_at_the_start_and_on_resume(config, tmp_path, name):
    data = tmp_path / "data"
    shutil.copytree(config.data.folder, data)
    config = config.replace(data={"folder": data})
    train(config, tmp_path / "run", quiet=True)
    size = (data / name).stat().st_size
    (data / name).write_bytes(bytes(size))
    for run, resume in (("run", True), ("new", False)):
        with pytest.raises(InputError, match=rf"{name} is damaged or belongs to another preparation"):
            train(config, tmp_path / run, resume=resume, quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_torn_line_in_sessions_is_mended(config, tmp_path):
    train(config, tmp_path / "run", quiet=True)
    with (tmp_path / "run" / "sessions.jsonl").open("a") as file:
        file.write('{"step": 20, "ran')  # a disk that was full
    for _ in range(2):
        train(config, tmp_path / "run", resume=True, quiet=True)
    assert [record["step"] for record in metrics_log.read_lines(tmp_path / "run" / "sessions.jsonl")] == [0, 20, 20]


def test_another_thread_count_is_told(config, tmp_path, caplog):
    train(config, tmp_path / "run", quiet=True)
    record = metrics_log.read_lines(tmp_path / "run" / "sessions.jsonl")[0]
    (tmp_path / "run" / "sessions.jsonl").unlink()
    metrics_log.append_line(tmp_path / "run" / "sessions.jsonl", record | {"threads": 64})
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert "used 64 threads and now uses 1; results will differ by rounding" in caplog.text


def test_when_all_checkpoints_are_damaged_the_run_does_not_start_over(config, tmp_path):
    train(config.replace(train={"keep_checkpoints": 1, "valid_every": 0}), tmp_path / "run", quiet=True)
    (last(tmp_path / "run") / "state.json").write_text("{}")
    with pytest.raises(InputError, match=r"None of the 1 checkpoints in .* is whole \(step-\d+: .*\)\. Restore one"):
        train(
            config.replace(train={"keep_checkpoints": 1, "valid_every": 0}), tmp_path / "run", resume=True, quiet=True
        )


def test_activation_checkpointing_changes_nothing_but_memory(config, tmp_path):
    train(config, tmp_path / "plain", quiet=True)
    train(config.replace(train={"checkpoint_activations": True}), tmp_path / "less", quiet=True)
    assert_same(weights(last(tmp_path / "plain")), weights(last(tmp_path / "less")))


def test_bfloat16_is_used_where_it_is_fast_and_told_where_not(config, tmp_path, monkeypatch, caplog):
    train(config, tmp_path / "plain", quiet=True)
    half = config.replace(train={"precision": "bfloat16"})
    monkeypatch.setattr("trainshort.train.parallel.no_bfloat16", lambda device: "this test has no bfloat16")
    train(half, tmp_path / "slow", quiet=True)
    assert "train.precision is bfloat16, but this test has no bfloat16: computing in float32." in caplog.text
    assert_same(weights(last(tmp_path / "plain")), weights(last(tmp_path / "slow")))
    monkeypatch.setattr("trainshort.train.parallel.no_bfloat16", lambda device: None)
    result = train(half, tmp_path / "fast", quiet=True)
    a, b = weights(last(tmp_path / "plain")), weights(last(tmp_path / "fast"))
    assert all(value.dtype == torch.float32 for value in b.values())
    assert any(not torch.equal(a[name], b[name]) for name in a)
    exact = train(config, tmp_path / "again", quiet=True)
    assert result.valid_nll == pytest.approx(exact.valid_nll, rel=0.05)


@pytest.mark.slow
def test_compiling_changes_rounding_only(config, tmp_path):
    config = config.replace(model={"dropout": 0.0}, train={"steps": 5})
    plain = train(config, tmp_path / "plain", quiet=True)
    compiled = train(config.replace(train={"compile": True}), tmp_path / "compiled", quiet=True)
    assert compiled.valid_nll == pytest.approx(plain.valid_nll, rel=1e-3)
    assert weights(last(tmp_path / "plain")).keys() == weights(last(tmp_path / "compiled")).keys()


def test_tensorboard_gets_the_same_numbers(config, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(config.replace(train={"tensorboard": True}), tmp_path / "run", quiet=True)
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    logged = {line["step"]: line["loss"] for line in metrics(tmp_path / "run") if "loss" in line}
    assert shown == pytest.approx(logged, rel=1e-6)


def test_tensorboard_that_is_not_installed_is_told_at_once(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"requires tensorboard\. Install it with: pip install 'tensorboard'"):
        train(config.replace(train={"tensorboard": True}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_train_length_ties_nothing_else(config, tmp_path):
    """A model trained at 16 tokens reads 100."""
    train(config, tmp_path / "run", quiet=True)
    assert checkpoint.load_model(tmp_path / "run")(torch.zeros(1, 100, dtype=torch.long)).shape == (1, 100, 256)
