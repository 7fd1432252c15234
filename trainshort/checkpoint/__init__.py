"""Checkpoints: safetensors and JSON, whole or not there, verified before use.

    step-000000200/
      manifest.json    sha256 of every file below; written last
      state.json       step, sums, best loss
      config.json      the run's settings, so that a checkpoint can be read by itself
      model/           *.safetensors
      optimizer/       *.safetensors

A save writes a new folder beside, brings it to the disk, then renames it. So whatever stops a save, the checkpoints
before it are untouched, and what is there is complete. A file that changed later is found by its sha256.
"""

import contextlib
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainshort import registry
from trainshort.checkpoint import folders, manifest, tensors
from trainshort.checkpoint.folders import STATE, State, best, find, is_hugging_face, latest, read_state
from trainshort.config import ModelConfig, RunConfig, load_config, save_config
from trainshort.errors import InputError
from trainshort.files import reason, sync, write_whole
from trainshort.model import TransformerLM
from trainshort.parallel import World
from trainshort.terminal import say

__all__ = [
    "Parts",
    "Snapshot",
    "State",
    "best",
    "find",
    "is_hugging_face",
    "latest",
    "load_model",
    "read_state",
    "restore",
    "save",
]

CONFIG = "config.json"
LARGE = 250 * 10**6
"""Bytes from which loading takes seconds, so that it is told."""

Parts = dict[str, dict[str, Tensor]]
"""Tensors by part (model, optimizer) and name."""


@dataclass(frozen=True)
class Snapshot:
    """What a run is made of at one moment: settings, counters, and tensors."""

    config: RunConfig
    state: State
    parts: Parts
    sharded: bool = False


def save(run: Path, snapshot: Snapshot, world: World) -> Path:
    """Add a checkpoint to a run; all ranks call this. Returns its folder."""
    folder = run / "checkpoints" / folders.name(snapshot.state.step)
    if world.first_says(folder.exists()):
        return folder  # the same step of the same run: the same content
    partial = folders.partial(folder)
    try:
        world.on_main(_guarded(folder, lambda: _begin(partial, snapshot)))
        world.together(_guarded(folder, lambda: _write(partial, snapshot, world)))
        mine: manifest.Digests = {}
        world.together(_guarded(folder, lambda: mine.update(_digests(partial, world))))
        digests = {name: value for share in world.gather_objects(mine) for name, value in share.items()}
        world.on_main(_guarded(folder, lambda: _finish(folder, digests)))
    except BaseException:
        if world.main:
            with contextlib.suppress(OSError):
                shutil.rmtree(partial)
        raise
    return folder


def _guarded(folder: Path, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, with what a disk can do to it told in words."""

    def guarded() -> None:
        try:
            work()
        except OSError as error:
            raise InputError(
                f"Cannot save {folder}: {reason(error)}. The checkpoints before it are intact; "
                "make room there, then go on by --resume."
            ) from error

    return guarded


def _begin(partial: Path, snapshot: Snapshot) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    save_config(snapshot.config, partial / CONFIG)
    write_whole(partial / STATE, snapshot.state.model_dump_json(indent=2) + "\n")


def _write(partial: Path, snapshot: Snapshot, world: World) -> None:
    for part, values in snapshot.parts.items():
        if snapshot.sharded or world.main:
            tensors.write(partial / part, values, sharded=snapshot.sharded)


def _digests(partial: Path, world: World) -> manifest.Digests:
    """sha256 of this rank's share of the files, which are brought to the disk on the way."""
    share = {}
    for name in manifest.files(partial)[world.rank :: world.size]:
        sync(partial / name)
        share[name] = manifest.digest(partial / name)
    return share


def _finish(folder: Path, digests: manifest.Digests) -> None:
    manifest.write(folders.partial(folder), digests)
    folders.publish(folder)


def restore(folder: Path, parts: Parts, *, sharded: bool = False) -> State:
    """Fill tensors in place from a checkpoint that was found whole, and return its state.

    A model that was imported has been updated by nobody here, and has no optimizer part.
    """
    state = read_state(folder)
    for part, values in parts.items():
        if state.step or (folder / part).exists():
            tensors.read(folder / part, values, sharded=sharded)
    return state


def load_model(path: Path | str, *, device: str = "cpu") -> TransformerLM:
    """The model of a run (its best checkpoint by validation loss, else its last) or of one checkpoint, ready to use.

    Nothing is loaded before every byte of the checkpoint has been verified. How far a run's model is good is said on
    standard error, where that was measured.
    """
    path = Path(path)
    folder = find(path)
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors") if file.is_file())
    if size > LARGE:
        say(f"Verifying and loading {folder} ({size / 1e9:.1f} GB).")
    if problem := manifest.damage(folder):
        raise InputError(f"{folder} is damaged: {problem}. Use another checkpoint of the run.")
    config = load_config(folder / CONFIG)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else path  # whose config.json the reader knows
    registry.require_plugins(config.plugins, str(run))
    _refuse_larger(folder, config.model)
    model = TransformerLM(config.model)
    tensors.read(folder / "model", tensors.model_tensors(model), sharded=False)
    if line := folders.extrapolation(path):
        say(f"{path}: {line}.")
    return model.to(device).eval()


def _refuse_larger(folder: Path, config: ModelConfig) -> None:
    """Stop before a model is built that is larger than the weights beside its settings."""
    stored = sum(math.prod(shape) for shape in tensors.shapes(folder / "model").values())
    if config.least_weights > stored:
        raise InputError(
            f"{folder} holds {stored:,} weights, but a model of its config.json has at least "
            f"{config.least_weights:,}. Use the config.json that belongs to it."
        )
    with torch.device("meta"):  # nothing is allocated
        wanted = tensors.model_tensors(TransformerLM(config))
    tensors.refuse_others(
        folder, tensors.shapes(folder / "model"), {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    )
