"""Checkpoint files that are cut short or changed: found before a weight is used, and the one before is taken."""

import os
import pickle
import random
import shutil
from collections import Counter

import pytest
from harness import result

from trainshort.errors import InputError
from trainshort.train import checkpoint, checkpoint_files

FULL = pytest.mark.fault


def truncate(path, chance) -> str:
    size = path.stat().st_size
    cut = chance.randrange(size)
    os.truncate(path, cut)
    return f"cut to {cut} of {size} bytes"


def flip(path, chance) -> str:
    data = bytearray(path.read_bytes())
    position, bit = chance.randrange(len(data)), chance.randrange(8)
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {position} flipped"


@pytest.mark.parametrize("harm", [truncate, flip])
@pytest.mark.parametrize("times", [20, pytest.param(200, marks=FULL)])
def test_every_damage_is_found_before_a_weight_is_used(sound, tmp_path, monkeypatch, harm, times, caplog):
    used = []
    read = checkpoint.read_part
    monkeypatch.setattr(
        checkpoint, "read_part", lambda folder, *rest, **more: (used.append(folder), read(folder, *rest, **more))
    )
    chance, harmed = random.Random(times), Counter()
    newest, previous = checkpoint_files.list_checkpoints(sound)[-1], checkpoint_files.list_checkpoints(sound)[-2]
    inside = [*checkpoint_files.list_files(newest), checkpoint_files.MANIFEST_FILE]
    for number in range(times):
        run = tmp_path / "run"
        shutil.copytree(sound, run)
        name = inside[number % len(inside)]
        done = harm(run / "checkpoints" / newest.name / name, chance)
        said = []
        assert checkpoint.latest_checkpoint(run, said.append) == run / "checkpoints" / previous.name, (name, done)
        assert any(newest.name in line and "is damaged" in line for line in said), said
        assert said[-1] == f"Using {run / 'checkpoints' / previous.name} instead."
        with pytest.raises(InputError, match="is damaged"):
            checkpoint.load_model(run / "checkpoints" / newest.name)
        assert used == [], (name, done)
        caplog.clear()
        checkpoint.load_model(run)  # takes one that is whole
        assert newest.name in caplog.text
        assert {folder.parent.name for folder in used} <= {
            path.name for path in checkpoint_files.list_checkpoints(sound)
        } - {newest.name}
        used.clear()
        harmed[name] += 1
        shutil.rmtree(run)
    print(f"\n{harm.__name__}: {times} of {times} found before use, fell back to the one before ({dict(harmed)})")


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=FULL)])
def test_a_run_goes_on_from_the_one_before_and_ends_in_the_same_bits(runner, undisturbed, sound, tmp_path, times):
    chance = random.Random(times)
    for number in range(times):
        run = tmp_path / f"run-{number}"
        shutil.copytree(sound, run)
        newest, previous = checkpoint_files.list_checkpoints(run)[-1], checkpoint_files.list_checkpoints(run)[-2]
        name = chance.choice(checkpoint_files.list_files(newest))
        chance.choice([truncate, flip])(newest / name, chance)
        text = " ".join(runner.finish(run).split())
        assert f"{newest} is damaged: {name}" in text
        assert f"Using {previous} instead." in text
        assert f"The damaged {newest.name} is kept as {newest}.damaged." in text
        assert result(run) == undisturbed
    print(f"\nresumed past a damaged checkpoint: {times} of {times} bit-identical at the end")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, crater):
        self.crater = str(crater)

    def __reduce__(self):
        return os.mkdir, (self.crater,)


def test_a_pickle_in_place_of_a_checkpoint_is_not_opened(runner, undisturbed, sound, tmp_path):
    run, crater = tmp_path / "run", tmp_path / "crater"
    shutil.copytree(sound, run)
    bomb = pickle.dumps(Bomb(crater))
    newest = checkpoint_files.list_checkpoints(run)[-1]
    shutil.rmtree(newest)
    newest.write_bytes(bomb)  # a file where a folder should be, newer than all others
    (run / "checkpoints" / "model.pt").write_bytes(bomb)
    text = " ".join(runner.finish(run).split())
    assert f"{newest} is damaged: it is a file, and a checkpoint is a folder" in text
    assert result(run) == undisturbed
    assert not crater.exists()
    pickle.loads(bomb)
    assert crater.exists()
    print("\npickle offered as a checkpoint: refused, nothing executed")
