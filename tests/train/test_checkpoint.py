"""Tests of checkpoints: they are restored bit for bit, damage is detected, and nothing is overwritten."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from trainshort.config.run_config import AdaptiveConfig, ModelConfig, RunConfig, save_config
from trainshort.errors import InputError
from trainshort.model.transformer import TransformerLM
from trainshort.train import checkpoint, checkpoint_files, optim
from trainshort.train.checkpoint import CheckpointData, TrainState
from trainshort.train.parallel import World

MODEL = ModelConfig(vocab_size=50, layers=1, width=16, heads=2)
SINGLE_PROCESS = World()
WEIGHTS_FILE = "model/whole.safetensors"


def make_data(step: int, loss: float | None = None, model: ModelConfig = MODEL, seed: int = 0) -> CheckpointData:
    """Return the content of a checkpoint with random tensors.

    Args:
        step: The step of the checkpoint.
        loss: The mean validation loss, or None if there was no validation.
        model: The settings of the model.
        seed: The seed of the tensors.
    """
    config = RunConfig(model=model)
    torch.manual_seed(seed)
    net = TransformerLM(config.model)
    optimizer = optim.build(net, config.optim)
    optimizer_tensors = optim.state_tensors(optimizer, net)
    for tensor in optimizer_tensors.values():
        tensor.normal_()
    state = TrainState(step=step, tokens=7 * step, seconds=0.1, window_nll=1 / 3, window_count=5)
    if loss is not None:
        state = state.model_copy(update={"valid_nll": loss * 10, "valid_count": 10, "best_loss": loss})
    return CheckpointData(config, state, {"model": checkpoint.model_tensors(net), "optimizer": optimizer_tensors})


def save(run: Path, data: CheckpointData) -> Path:
    """Save a checkpoint from a single process, and return its folder."""
    return checkpoint.save(run, data, SINGLE_PROCESS)


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file. `position` is the index of the byte."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def rewrite_manifest(folder: Path) -> None:
    """Write a valid manifest for the current files of a checkpoint."""
    digests = {name: checkpoint_files.compute_digest(folder / name) for name in checkpoint_files.list_files(folder)}
    checkpoint_files.write_manifest(folder, digests)


def checkpoint_entries(run: Path) -> list[str]:
    """Return the sorted names of all files and folders in the checkpoints folder of a run."""
    return sorted(os.listdir(run / "checkpoints"))


MODELS = {
    "tied": MODEL,
    "untied": MODEL.replace(tie_embeddings=False, position="learned", position_settings={"max_length": 9}),
    "learned slopes": MODEL.replace(position_settings={"learned_slopes": True}, final_norm=False),
    "adaptive": MODEL.replace(adaptive=AdaptiveConfig(cutoffs=(10, 30), factor=2).model_dump()),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_tensors_and_state_are_restored_bit_for_bit(tmp_path, model):
    saved = make_data(3, 2.5, model=model)
    folder = save(tmp_path, saved)
    restored = make_data(0, model=model, seed=1)
    state = checkpoint.restore(folder, restored.parts)
    assert state == saved.state
    for part, tensors in saved.parts.items():
        assert tensors.keys() == restored.parts[part].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, restored.parts[part][name]), name


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_load_model_returns_saved_model_in_evaluation_mode(tmp_path, model):
    saved = make_data(3, 2.5, model=model)
    loaded = checkpoint.load_model(save(tmp_path, saved))
    assert loaded.config == model
    assert not loaded.training
    tensors = checkpoint.model_tensors(loaded)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in saved.parts["model"].items())


def test_tied_weights_are_stored_once_and_loaded_as_one_tensor(tmp_path):
    folder = save(tmp_path, make_data(1))
    model = checkpoint.load_model(folder)
    assert model.vocabulary.output_weight is model.vocabulary.embedding.weight
    parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    file_bytes = (folder / WEIGHTS_FILE).stat().st_size
    assert parameter_bytes <= file_bytes < parameter_bytes + 4096


def test_checkpoint_contains_only_safetensors_and_json(tmp_path):
    folder = save(tmp_path, make_data(1))
    assert {Path(name).suffix for name in checkpoint_files.list_files(folder)} == {".json", ".safetensors"}
    assert (folder / "manifest.json").exists()


def test_existing_checkpoint_is_never_overwritten(tmp_path):
    folder = save(tmp_path, make_data(1))
    content = (folder / WEIGHTS_FILE).read_bytes()
    assert save(tmp_path, make_data(1, seed=9)) == folder
    assert (folder / WEIGHTS_FILE).read_bytes() == content
    checkpoint_files.partial_path(folder).mkdir()
    with pytest.raises(InputError, match="never overwritten"):
        checkpoint_files.finalize_checkpoint(folder, {})


def test_latest_and_best_checkpoint(tmp_path):
    assert checkpoint.latest_checkpoint(tmp_path) is None
    for step, loss in ((1, 3.0), (2, 1.5), (3, None), (4, 2.0)):
        save(tmp_path, make_data(step, loss))
    latest = checkpoint.latest_checkpoint(tmp_path)
    best = checkpoint.best_checkpoint(tmp_path)
    assert latest is not None
    assert latest.name == "step-000000004"
    assert best is not None
    assert best.name == "step-000000002"


def test_best_checkpoint_without_validation_is_the_latest(tmp_path):
    for step in (1, 2):
        save(tmp_path, make_data(step))
    latest = tmp_path / "checkpoints" / "step-000000002"
    assert checkpoint.best_checkpoint(tmp_path) == checkpoint.latest_checkpoint(tmp_path) == latest


def test_delete_old_checkpoints_keeps_the_best_and_the_last(tmp_path):
    for step, loss in enumerate((4.0, 1.0, 3.0, 3.0, 3.0, 2.0), start=1):
        save(tmp_path, make_data(step, loss))
        checkpoint_files.delete_old_checkpoints(tmp_path, 2)
    # No partly removed folders are left.
    assert checkpoint_entries(tmp_path) == ["step-000000002", "step-000000005", "step-000000006"]


def test_remove_partial_checkpoints_leaves_other_folders(tmp_path):
    folder = save(tmp_path, make_data(1))
    for name in (".partial-step-000000002", ".removed-step-000000000"):
        (tmp_path / "checkpoints" / name / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert checkpoint_files.list_checkpoints(tmp_path) == [folder]
    checkpoint_files.remove_partial_checkpoints(tmp_path)
    assert checkpoint_entries(tmp_path) == ["notes", "step-000000001"]


@pytest.mark.parametrize("name", [WEIGHTS_FILE, "optimizer/whole.safetensors", "state.json", "config.json"])
def test_damaged_checkpoint_is_reported_and_skipped(tmp_path, name):
    valid = save(tmp_path, make_data(1))
    damaged = save(tmp_path, make_data(2))
    flip_bit(damaged / name, -2)
    messages = []
    assert checkpoint.latest_checkpoint(tmp_path, messages.append) == valid
    assert len(messages) == 2
    assert messages[0].startswith(f"{damaged} is damaged: the checksum of {name} does not match")
    assert messages[1] == f"Using {valid} instead."
    with pytest.raises(InputError, match=f"the checksum of {name} does not match"):
        checkpoint.load_model(damaged)


def test_best_checkpoint_skips_damaged_weights_and_damaged_state(tmp_path):
    folders = [save(tmp_path, make_data(step, loss)) for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0))]
    flip_bit(folders[2] / WEIGHTS_FILE, 1000)
    flip_bit(folders[1] / "state.json", 20)
    messages = []
    assert checkpoint.best_checkpoint(tmp_path, messages.append) == folders[0]
    text = "\n".join(messages)
    assert f"{folders[2]} is damaged: the checksum of {WEIGHTS_FILE}" in text
    assert f"{folders[1]} is damaged: the checksum of state.json" in text


def test_missing_and_additional_files_are_detected(tmp_path):
    folder = save(tmp_path, make_data(1))
    additional_file = folder / "model" / "more.safetensors"
    additional_file.write_bytes(b"x")
    assert checkpoint_files.find_corruption(folder) == "model/more.safetensors is not in the manifest"
    additional_file.rename(folder / "model" / "more.pt")
    problem = checkpoint_files.find_corruption(folder) or ""
    assert problem.startswith("model/more.pt is neither a safetensors nor a JSON file")
    (folder / "model" / "more.pt").unlink()
    (folder / "state.json").unlink()
    assert checkpoint_files.find_corruption(folder) == "state.json is missing"
    (folder / "manifest.json").unlink()
    assert checkpoint_files.find_corruption(folder) == "manifest.json is missing"


def test_every_changed_bit_of_the_manifest_is_detected(tmp_path):
    folder = save(tmp_path, make_data(1))
    manifest = folder / "manifest.json"
    content = manifest.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            flip_bit(manifest, position, bit)
            assert checkpoint_files.find_corruption(folder, only="state.json"), (position, bit)
            manifest.write_bytes(content)
    assert checkpoint_files.find_corruption(folder) is None


def test_run_with_only_damaged_checkpoints_is_rejected(tmp_path):
    folder = save(tmp_path, make_data(1))
    flip_bit(folder / "config.json", 5)
    assert checkpoint.latest_checkpoint(tmp_path, lambda message: None) is None
    with pytest.raises(InputError, match=r"None of the 1 checkpoints in .* is valid"):
        checkpoint.load_model(tmp_path)


def test_damaged_checkpoints_are_renamed_and_not_removed(tmp_path):
    folders = [save(tmp_path, make_data(step)) for step in (1, 2)]
    for _ in range(2):
        flip_bit(folders[1] / "config.json", 5)
        checkpoint_files.quarantine_checkpoints(tmp_path, folders[0])
        save(tmp_path, make_data(2))
    assert checkpoint_entries(tmp_path) == [
        "step-000000001",
        "step-000000002",
        "step-000000002.damaged",
        "step-000000002.damaged-1",
    ]
    assert checkpoint_files.list_checkpoints(tmp_path) == folders


class MakesFolderWhenUnpickled:
    """Creates the folder TRAINSHORT_TEST_FOLDER (an environment variable) when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["TRAINSHORT_TEST_FOLDER"],)


def test_pickle_is_rejected_and_its_code_does_not_run(tmp_path, monkeypatch):
    created_folder = tmp_path / "created"
    monkeypatch.setenv("TRAINSHORT_TEST_FOLDER", str(created_folder))
    pickled = pickle.dumps(MakesFolderWhenUnpickled())
    for name in ("model.pt", "pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(pickled)
        with pytest.raises(InputError, match=r"Pickled files .* never opened"):
            checkpoint.load_model(tmp_path / name)

    # A pickle in a checkpoint with a valid manifest, under the name of a safetensors file.
    folder = save(tmp_path / "run", make_data(1))
    weights_file = folder / WEIGHTS_FILE
    weights_file.write_bytes(pickled)
    rewrite_manifest(folder)
    assert checkpoint_files.find_corruption(folder) is None
    with pytest.raises(InputError, match="Cannot read the safetensors files"):
        checkpoint.load_model(folder)

    # A pickle in a checkpoint with a valid manifest, with the suffix of a pickle.
    weights_file.rename(weights_file.with_suffix(".pt"))
    rewrite_manifest(folder)
    with pytest.raises(InputError, match=r"model/whole\.pt is neither a safetensors nor a JSON file"):
        checkpoint.load_model(folder)

    assert not created_folder.exists()
    # Check that the pickle would create the folder.
    pickle.loads(pickled)
    assert created_folder.exists()


def test_load_model_from_a_folder_without_run_is_rejected(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(InputError, match=r"There is no run at '.*'\. Give a run folder"):
            checkpoint.load_model(path)


def test_loading_a_large_model_is_logged(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trainshort")
    folder = save(tmp_path, make_data(1))
    checkpoint.load_model(tmp_path)
    assert not caplog.messages
    monkeypatch.setattr(checkpoint, "LOG_LOADING_ABOVE_BYTES", 1000)
    checkpoint.load_model(tmp_path)
    assert caplog.messages == [f"Verifying and loading {folder} (0.0 GB)."]


def test_checkpoint_of_another_model_is_rejected(tmp_path):
    folder = save(tmp_path, make_data(1))
    larger_model = make_data(1, model=MODEL.replace(layers=2))
    with pytest.raises(InputError, match=r"written for another model: layers\.1\."):
        checkpoint.restore(folder, larger_model.parts)


def test_checkpoint_of_another_version_is_rejected(tmp_path):
    folder = save(tmp_path, make_data(1))
    state = json.loads((folder / "state.json").read_text()) | {"colour": "red"}
    (folder / "state.json").write_text(json.dumps(state))
    save_config(RunConfig(), folder / "config.json")
    rewrite_manifest(folder)
    with pytest.raises(InputError, match="written by another version"):
        checkpoint.read_state(folder)


def test_failed_save_leaves_the_earlier_checkpoint_only(tmp_path, monkeypatch):
    first = save(tmp_path, make_data(1))

    def fail_with_full_disk(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "compute_digest", fail_with_full_disk)
    with pytest.raises(InputError, match=r"Cannot save .*step-000000002: the disk is full\."):
        save(tmp_path, make_data(2))
    monkeypatch.undo()
    assert checkpoint_entries(tmp_path) == [first.name]
    assert checkpoint_files.find_corruption(first) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 10**9}, "holds [0-9,]+ weights, but a model of its config.json has at least"),
        ({"width": 10**9, "heads": 10**9}, "has at least"),
        ({"feedforward_width": 10**15}, "has at least"),
        ({"vocab_size": 10**12}, "has at least"),
        ({"position": "learned", "position_settings": {"max_length": 10**12}}, "written for another model"),
    ],
    ids=str,
)
def test_config_of_a_larger_model_is_rejected_before_the_model_is_built(tmp_path, changes, message):
    folder = save(tmp_path, make_data(1))
    values = json.loads((folder / "config.json").read_text())
    values["model"] |= changes
    (folder / "config.json").write_text(json.dumps(values))
    rewrite_manifest(folder)
    assert checkpoint_files.find_corruption(folder) is None
    with pytest.raises(InputError, match=message):
        checkpoint.load_model(folder)


def test_stored_tensor_with_one_element_is_not_broadcast(tmp_path):
    data = make_data(1)
    data.parts["model"] = {name: tensor.flatten()[:1] for name, tensor in data.parts["model"].items()}
    folder = save(tmp_path, data)
    with pytest.raises(InputError, match=r"holds 15 weights, but a model of its config\.json has at least 3,360"):
        checkpoint.load_model(folder)
    with pytest.raises(InputError, match=r"got shape \(1,\)"):
        checkpoint.restore(folder, {"model": make_data(1).parts["model"]})


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "config.json", WEIGHTS_FILE])
@pytest.mark.parametrize("kind", ["named pipe", "folder", "dangling link", "looping link"])
def test_checkpoint_with_unreadable_file_is_skipped(tmp_path, name, kind, caplog):
    valid = save(tmp_path, make_data(1, 2.0))
    path = save(tmp_path, make_data(2, 1.0)) / name
    path.unlink()
    match kind:
        case "named pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "dangling link":
            path.symlink_to("nowhere")
        case "looping link":
            path.symlink_to(path.name)
    assert checkpoint.latest_checkpoint(tmp_path) == valid
    assert checkpoint.best_checkpoint(tmp_path) == valid
    assert "The checkpoint is skipped." in caplog.text
