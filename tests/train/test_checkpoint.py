"""Checkpoints: what was saved comes back bit for bit, what is damaged is never used, nothing is overwritten."""

import json
import os
import pickle

import pytest
import torch

from trainshort.config.run_config import AdaptiveConfig, ModelConfig, RunConfig, save_config
from trainshort.errors import InputError
from trainshort.model.transformer import TransformerLM
from trainshort.train import checkpoint, checkpoint_files, optim
from trainshort.train.checkpoint import CheckpointData, TrainState
from trainshort.train.parallel import World

MODEL = ModelConfig(vocab_size=50, layers=1, width=16, heads=2)
ALONE = World()


def snapshot(step: int, loss: float | None = None, model: ModelConfig = MODEL, seed: int = 0) -> CheckpointData:
    config = RunConfig(model=model)
    torch.manual_seed(seed)
    net = TransformerLM(config.model)
    optimizer = optim.build(net, config.optim)
    moments = optim.state_tensors(optimizer, net)
    for tensor in moments.values():
        tensor.normal_()
    state = TrainState(step=step, tokens=7 * step, seconds=0.1, window_nll=1 / 3, window_count=5)
    if loss is not None:
        state = state.model_copy(update={"valid_nll": loss * 10, "valid_count": 10, "best_loss": loss})
    return CheckpointData(config, state, {"model": checkpoint.model_tensors(net), "optimizer": moments})


def flip(path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        MODEL.replace(tie_embeddings=False, position="learned", position_settings={"max_length": 9}),
        MODEL.replace(position_settings={"learned_slopes": True}, final_norm=False),
        MODEL.replace(adaptive=AdaptiveConfig(cutoffs=(10, 30), factor=2).model_dump()),
    ],
    ids=["tied", "untied", "learned slopes", "adaptive"],
)
def test_tensors_and_state_come_back_bit_for_bit(tmp_path, model):
    saved = snapshot(3, 2.5, model=model)
    folder = checkpoint.save(tmp_path, saved, ALONE)
    other = snapshot(0, model=model, seed=1)
    state = checkpoint.restore(folder, other.parts)
    assert state == saved.state
    for part, values in saved.parts.items():
        assert values.keys() == other.parts[part].keys()
        for name, value in values.items():
            assert torch.equal(value, other.parts[part][name]), name
    loaded = checkpoint.load_model(folder)
    assert loaded.config == model
    assert not loaded.training
    weights = checkpoint.model_tensors(loaded)
    assert all(torch.equal(value, weights[name]) for name, value in saved.parts["model"].items())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    loaded = checkpoint.load_model(folder)
    assert loaded.vocabulary.output_weight is loaded.vocabulary.embedding.weight
    parameters = sum(p.numel() for p in loaded.parameters())
    assert 4 * parameters <= (folder / "model" / "whole.safetensors").stat().st_size < 4 * parameters + 4096


def test_only_safetensors_and_json_are_written(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    assert {name.rpartition(".")[2] for name in checkpoint_files.list_files(folder)} == {"json", "safetensors"}
    assert (folder / "manifest.json").exists()


def test_a_checkpoint_is_never_overwritten(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    before = (folder / "model" / "whole.safetensors").read_bytes()
    assert checkpoint.save(tmp_path, snapshot(1, seed=9), ALONE) == folder
    assert (folder / "model" / "whole.safetensors").read_bytes() == before
    checkpoint_files.partial_path(folder).mkdir()
    with pytest.raises(InputError, match="never overwritten"):
        checkpoint_files.finalize_checkpoint(folder, {})


def test_latest_and_best(tmp_path):
    assert checkpoint.latest_checkpoint(tmp_path) is None
    for step, loss in ((1, 3.0), (2, 1.5), (3, None), (4, 2.0)):
        checkpoint.save(tmp_path, snapshot(step, loss), ALONE)
    assert checkpoint.latest_checkpoint(tmp_path).name == "step-000000004"
    assert checkpoint.best_checkpoint(tmp_path).name == "step-000000002"


def test_best_without_any_validation_is_the_latest(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, snapshot(step), ALONE)
    assert (
        checkpoint.best_checkpoint(tmp_path)
        == checkpoint.latest_checkpoint(tmp_path)
        == tmp_path / "checkpoints" / "step-000000002"
    )


def test_retention_keeps_the_best_and_the_last(tmp_path):
    for step, loss in enumerate((4.0, 1.0, 3.0, 3.0, 3.0, 2.0), start=1):
        checkpoint.save(tmp_path, snapshot(step, loss), ALONE)
        checkpoint_files.delete_old_checkpoints(tmp_path, 2)
    assert [path.name[-1] for path in checkpoint_files.list_checkpoints(tmp_path)] == ["2", "5", "6"]
    assert sorted(os.listdir(tmp_path / "checkpoints"))[0].startswith("step-")  # nothing half removed is left


def test_sweep_clears_what_a_kill_left_and_nothing_else(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    for name in (".partial-step-000000002", ".removed-step-000000000"):
        (tmp_path / "checkpoints" / name / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert checkpoint_files.list_checkpoints(tmp_path) == [folder]
    checkpoint_files.remove_partial_checkpoints(tmp_path)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["notes", "step-000000001"]


@pytest.mark.parametrize(
    "name", ["model/whole.safetensors", "optimizer/whole.safetensors", "state.json", "config.json"]
)
def test_damage_is_named_and_the_one_before_is_used(tmp_path, name):
    first = checkpoint.save(tmp_path, snapshot(1), ALONE)
    second = checkpoint.save(tmp_path, snapshot(2), ALONE)
    flip(second / name, -2)
    said = []
    assert checkpoint.latest_checkpoint(tmp_path, said.append) == first
    expected = f"{second} is damaged: {name} has another sha256 than when it was written. It is passed over."
    assert said == [expected, f"Using {first} instead."]
    with pytest.raises(InputError, match=f"{name} has another sha256"):
        checkpoint.load_model(second)


def test_best_passes_over_damage_in_weights_and_in_state(tmp_path):
    made = [checkpoint.save(tmp_path, snapshot(step, loss), ALONE) for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0))]
    flip(made[2] / "model" / "whole.safetensors", 1000)
    flip(made[1] / "state.json", 20)
    said = []
    assert checkpoint.best_checkpoint(tmp_path, said.append) == made[0]
    assert any("step-000000003 is damaged: model/whole.safetensors" in line for line in said)
    assert any("step-000000002 is damaged: state.json" in line for line in said)


def test_missing_added_and_foreign_files_are_damage(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    extra = folder / "model" / "more.safetensors"
    extra.write_bytes(b"x")
    assert checkpoint_files.find_corruption(folder) == "model/more.safetensors is not in the manifest"
    extra.rename(folder / "model" / "more.pt")
    assert "model/more.pt is neither safetensors nor JSON" in checkpoint_files.find_corruption(folder)
    (folder / "model" / "more.pt").unlink()
    (folder / "state.json").unlink()
    assert checkpoint_files.find_corruption(folder) == "state.json is missing"
    (folder / "manifest.json").unlink()
    assert checkpoint_files.find_corruption(folder) == "manifest.json is missing"


def test_every_bit_of_the_manifest_counts(tmp_path):
    """Each single flip in it is noticed, though most would leave it readable JSON."""
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            flip(path, position, bit)
            assert checkpoint_files.find_corruption(folder, only="state.json"), (position, bit)
            path.write_bytes(whole)
    assert checkpoint_files.find_corruption(folder) is None


def test_when_nothing_is_whole_nothing_is_used(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    flip(folder / "config.json", 5)
    assert checkpoint.latest_checkpoint(tmp_path, lambda _: None) is None
    with pytest.raises(InputError, match=r"None of the 1 checkpoints in .* is whole"):
        checkpoint.load_model(tmp_path)


def test_damaged_checkpoints_are_set_aside_not_removed(tmp_path):
    made = [checkpoint.save(tmp_path, snapshot(step), ALONE) for step in (1, 2)]
    for _ in range(2):
        flip(made[1] / "config.json", 5)
        checkpoint_files.quarantine_checkpoints(tmp_path, made[0])
        checkpoint.save(tmp_path, snapshot(2), ALONE)
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["step-000000001", "step-000000002", "step-000000002.damaged", "step-000000002.damaged-1"]
    assert checkpoint_files.list_checkpoints(tmp_path) == made


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["TRAINSHORT_TEST_BOMB"],)


def test_a_pickle_is_refused_and_nothing_in_it_runs(tmp_path, monkeypatch):
    crater = tmp_path / "crater"
    monkeypatch.setenv("TRAINSHORT_TEST_BOMB", str(crater))
    pickled = pickle.dumps(Bomb())
    for name in ("model.pt", "pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(pickled)
        with pytest.raises(InputError, match=r"Pickled files .* never opened, because reading one can execute code"):
            checkpoint.load_model(tmp_path / name)
    # Inside a checkpoint whose manifest vouches for it, under the name of a safetensors file.
    folder = checkpoint.save(tmp_path / "run", snapshot(1), ALONE)
    target = folder / "model" / "whole.safetensors"
    target.write_bytes(pickled)
    checkpoint_files.write_manifest(
        folder, {name: checkpoint_files.compute_digest(folder / name) for name in checkpoint_files.list_files(folder)}
    )
    assert checkpoint_files.find_corruption(folder) is None
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        checkpoint.load_model(folder)
    # And under its own name.
    target.rename(target.with_suffix(".pt"))
    checkpoint_files.write_manifest(
        folder, {name: checkpoint_files.compute_digest(folder / name) for name in checkpoint_files.list_files(folder)}
    )
    with pytest.raises(InputError, match=r"model/whole\.pt is neither safetensors nor JSON"):
        checkpoint.load_model(tmp_path / "run" / "checkpoints" / "step-000000001")
    assert not crater.exists()
    pickle.loads(pickled)
    assert crater.exists()  # the bomb does go off when it is opened


def test_load_model_says_what_it_wants(tmp_path):
    with pytest.raises(InputError, match="There is no run at"):
        checkpoint.load_model(str(tmp_path / "nowhere"))  # a path may be a string, as load_tokenizer's
    with pytest.raises(InputError, match=r"There is no run at '.*nowhere'\. Give a run folder"):
        checkpoint.load_model(tmp_path / "nowhere")
    with pytest.raises(
        InputError, match=r"There is no run at '.*'\. Give a run folder, or one of the folders in its checkpoints/"
    ):
        checkpoint.load_model(tmp_path)


def test_a_large_model_is_told_while_it_loads(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trainshort")
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    checkpoint.load_model(tmp_path)
    assert not caplog.messages
    monkeypatch.setattr(checkpoint, "LOG_LOADING_ABOVE_BYTES", 1000)
    checkpoint.load_model(tmp_path)
    assert caplog.messages == [f"Verifying and loading {folder} (0.0 GB)."]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    other = snapshot(1, model=MODEL.replace(layers=2))
    with pytest.raises(InputError, match=r"written for another model: layers\.1\."):
        checkpoint.restore(folder, other.parts)


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    state = json.loads((folder / "state.json").read_text()) | {"colour": "red"}
    (folder / "state.json").write_text(json.dumps(state))
    save_config(RunConfig(), folder / "config.json")
    checkpoint_files.write_manifest(
        folder, {name: checkpoint_files.compute_digest(folder / name) for name in checkpoint_files.list_files(folder)}
    )
    with pytest.raises(InputError, match="written by another version"):
        checkpoint.read_state(folder)


def test_a_save_that_fails_leaves_no_trace(tmp_path, monkeypatch):
    """Whatever goes wrong while a file is written, the checkpoint before it is untouched and the path is named."""
    first = checkpoint.save(tmp_path, snapshot(1), ALONE)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "compute_digest", full)
    with pytest.raises(InputError, match=r"Cannot save .*step-000000002: the disk is full\. The checkpoints bef"):
        checkpoint.save(tmp_path, snapshot(2), ALONE)
    monkeypatch.undo()
    assert os.listdir(tmp_path / "checkpoints") == [first.name]
    assert checkpoint_files.find_corruption(first) is None


def forge(folder, **changes):
    """Change a checkpoint's settings and write a manifest that fits."""
    values = json.loads((folder / "config.json").read_text())
    values["model"] |= changes
    (folder / "config.json").write_text(json.dumps(values))
    checkpoint_files.write_manifest(
        folder, {name: checkpoint_files.compute_digest(folder / name) for name in checkpoint_files.list_files(folder)}
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": 10**9}, "holds [0-9,]+ weights, but a model of its config.json has at least"),
        ({"width": 10**9, "heads": 10**9}, "has at least"),
        ({"feedforward_width": 10**15}, "has at least"),
        ({"vocab_size": 10**12}, "has at least"),
        ({"position": "learned", "position_settings": {"max_length": 10**12}}, "is on one side only"),
    ],
)
def test_a_model_larger_than_its_weights_is_refused_before_it_is_built(tmp_path, changes, told):
    folder = checkpoint.save(tmp_path, snapshot(1), ALONE)
    forge(folder, **changes)
    assert checkpoint_files.find_corruption(folder) is None
    with pytest.raises(InputError, match=told):
        checkpoint.load_model(folder)


def test_a_single_value_in_place_of_a_tensor_is_not_spread_over_it(tmp_path):
    saved = snapshot(1)
    saved.parts["model"] = {name: tensor.flatten()[:1] for name, tensor in saved.parts["model"].items()}
    folder = checkpoint.save(tmp_path, saved, ALONE)
    with pytest.raises(InputError, match=r"holds 15 weights, but a model of its config\.json has at least 3,360"):
        checkpoint.load_model(folder)
    with pytest.raises(InputError, match=r"has shape \(1,\) there"):
        checkpoint.restore(folder, {"model": snapshot(1).parts["model"]})


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "config.json", "model/whole.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling link", "looping link"])
def test_a_checkpoint_that_cannot_be_opened_is_passed_over(tmp_path, name, kind, caplog):
    first = checkpoint.save(tmp_path, snapshot(1, 2.0), ALONE)
    path = checkpoint.save(tmp_path, snapshot(2, 1.0), ALONE) / name
    path.unlink()
    {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "dangling link": lambda: path.symlink_to("nowhere"),
        "looping link": lambda: path.symlink_to(path.name),
    }[kind]()
    assert checkpoint.latest_checkpoint(tmp_path) == first
    assert checkpoint.best_checkpoint(tmp_path) == first
    assert "It is passed over." in caplog.text
