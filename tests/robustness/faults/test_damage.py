"""Tests of damaged checkpoints: the damage is found before a weight is used, and the previous checkpoint is loaded."""

import os
import pickle
import random
import shutil
from collections import Counter

import pytest
from harness import read_result

from trainshort.errors import InputError
from trainshort.train import checkpoint, checkpoint_files

FULL = pytest.mark.fault


def truncate(path, rng) -> str:
    """Cut a file at a random position, and describe the damage."""
    size = path.stat().st_size
    new_size = rng.randrange(size)
    os.truncate(path, new_size)
    return f"cut to {new_size} of {size} bytes"


def flip_bit(path, rng) -> str:
    """Flip a random bit of a file, and describe the damage."""
    content = bytearray(path.read_bytes())
    position = rng.randrange(len(content))
    bit = rng.randrange(8)
    content[position] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {position} flipped"


@pytest.mark.parametrize("damage", [truncate, flip_bit])
@pytest.mark.parametrize("times", [20, pytest.param(200, marks=FULL)])
def test_damage_is_found_before_a_weight_is_used(undisturbed_run, tmp_path, monkeypatch, damage, times, caplog):
    read_folders = []
    original_read_part = checkpoint.read_part

    def read_part(folder, *arguments, **options):
        read_folders.append(folder)
        return original_read_part(folder, *arguments, **options)

    monkeypatch.setattr(checkpoint, "read_part", read_part)
    rng = random.Random(times)
    damaged_files = Counter()
    checkpoint_names = [folder.name for folder in checkpoint_files.list_checkpoints(undisturbed_run)]
    newest_name = checkpoint_names[-1]
    newest_checkpoint = undisturbed_run / "checkpoints" / newest_name
    file_names = [*checkpoint_files.list_files(newest_checkpoint), checkpoint_files.MANIFEST_FILE]
    for number in range(times):
        run = tmp_path / "run"
        shutil.copytree(undisturbed_run, run)
        newest = run / "checkpoints" / newest_name
        previous = run / "checkpoints" / checkpoint_names[-2]
        file_name = file_names[number % len(file_names)]
        description = damage(newest / file_name, rng)

        messages = []
        assert checkpoint.latest_checkpoint(run, messages.append) == previous, (file_name, description)
        assert any(newest_name in message for message in messages), messages
        assert str(previous) in messages[-1]
        with pytest.raises(InputError, match=newest_name):
            checkpoint.load_model(newest)
        assert read_folders == [], (file_name, description)

        # Loading the run uses another checkpoint, and logs which checkpoint is damaged.
        caplog.clear()
        checkpoint.load_model(run)
        assert newest_name in caplog.text
        read_names = {folder.parent.name for folder in read_folders}
        assert read_names <= set(checkpoint_names) - {newest_name}
        read_folders.clear()
        damaged_files[file_name] += 1
        shutil.rmtree(run)
    print(f"\n{damage.__name__}: {times} of {times} found, previous checkpoint used ({dict(damaged_files)})")


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=FULL)])
def test_run_resumes_from_the_previous_checkpoint(runner, undisturbed_result, undisturbed_run, tmp_path, times):
    rng = random.Random(times)
    for number in range(times):
        run = tmp_path / f"run-{number}"
        shutil.copytree(undisturbed_run, run)
        *_, previous, newest = checkpoint_files.list_checkpoints(run)
        file_name = rng.choice(checkpoint_files.list_files(newest))
        damage = rng.choice([truncate, flip_bit])
        damage(newest / file_name, rng)
        # Lines of the output can be broken at spaces.
        output = " ".join(runner.finish(run).split())
        for part in (str(newest), file_name, str(previous), f"{newest}.damaged"):
            assert part in output
        assert read_result(run) == undisturbed_result
    print(f"\nresumed before a damaged checkpoint: {times} of {times} bit-identical at the end")


class FolderCreator:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_pickle_in_place_of_a_checkpoint_is_not_loaded(runner, undisturbed_result, undisturbed_run, tmp_path):
    run = tmp_path / "run"
    created_folder = tmp_path / "created"
    shutil.copytree(undisturbed_run, run)
    pickled = pickle.dumps(FolderCreator(created_folder))
    # The newest checkpoint is a file instead of a folder.
    newest = checkpoint_files.list_checkpoints(run)[-1]
    shutil.rmtree(newest)
    newest.write_bytes(pickled)
    (run / "checkpoints" / "model.pt").write_bytes(pickled)

    output = " ".join(runner.finish(run).split())
    assert str(newest) in output
    assert read_result(run) == undisturbed_result
    assert not created_folder.exists()
    # The pickle would have created the folder.
    pickle.loads(pickled)
    assert created_folder.exists()
    print("\npickle as a checkpoint: not executed")
