"""From settings to everything the training loop works with: data, model, optimizer, and where a stopped run stood."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from trainshort.config.position_config import methods
from trainshort.config.registries import backends
from trainshort.config.run_config import ModelConfig, PluginRecord, RunConfig
from trainshort.data.batches import BatchStream
from trainshort.data.dataset import PreparedDataset
from trainshort.data.mlm import mask_token
from trainshort.data.preparation import open_or_prepare, resolve_data_config
from trainshort.errors import InputError
from trainshort.model.transformer import TransformerLM
from trainshort.train import checkpoint, checkpoint_files, optim, parallel, run_folder
from trainshort.train.checkpoint import Parts, TrainState
from trainshort.train.parallel import DistributedModel, World
from trainshort.train.run_data import copy_data_description
from trainshort.train.run_folder import RunFolder
from trainshort.utils import machine, plugins
from trainshort.utils.optional import require_package

log = logging.getLogger(__name__)

BLOCK_BYTES = 2**14
"""Memory of a transformer block beside its weights, at least: its Python objects."""


@dataclass(frozen=True)
class TrainingContext:
    """Everything the loop works with; only the tensors inside change."""

    config: RunConfig
    world: World
    folder: RunFolder
    replica: DistributedModel
    optimizer: torch.optim.Optimizer
    stream: BatchStream
    valid: np.ndarray
    """The beginning of the validation split, as much as is read during training."""
    autocast: Callable[[], AbstractContextManager]

    @property
    def checkpoint_tensors(self) -> Parts:
        """The tensors of a checkpoint."""
        return {
            "model": checkpoint.model_tensors(self.replica.model),
            "optimizer": optim.state_tensors(self.optimizer, self.replica.model),
        }


@contextmanager
def setup_run(
    config: RunConfig, run: Path, world: World, *, resume: bool, quiet: bool
) -> Iterator[tuple[TrainingContext, TrainState]]:
    """All that comes before the first step, what can be wrong with the settings before anything is written; the run is
    held against other processes until the end."""
    world.on_main(
        lambda: run_folder.check_run_path_free(run, resume=resume)
    )  # before the data's preparation is waited for
    world.on_main(lambda: check_resumable(config, RunFolder(run)))
    config = resolve_plugins(config, run)
    check_model_fits_memory(config.model)
    prepared = world.rank0_first("data", lambda: open_or_prepare(config.data, progress=not quiet))
    config = config.model_copy(update={"data": resolve_data_config(config.data, prepared)})
    config = resolve_config(config, prepared.meta.vocab_size, world, spare=RunFolder(run).imported.exists())
    data = prepared.meta.splits["train"].sha256
    job = build_training(config, RunFolder(run), world, prepared)
    opened = run_folder.open_run(run, config, resume=resume)
    with ExitStack() as held:
        world.on_main(lambda: held.enter_context(opened))
        world.on_main(lambda: check_same_data(job, data))
        world.on_main(lambda: copy_data_description(run, prepared))
        state = restore_checkpoint(job)
        world.on_main(lambda: record_session(job, state, data))
        yield job, state


def resolve_plugins(config: RunConfig, run: Path) -> RunConfig:
    """The settings with the plug-ins they need; a method or backend that nobody knows is refused here, before any work
    is done for it."""
    plugins.require_plugins(config.plugins, str(run))
    methods.get(config.model.position)
    if config.model.backend != "auto":
        backends.get(config.model.backend)
    needed = plugins.plugins_of([*_registry_names(config), ("tokenizer", config.data.tokenizer)])
    corpus = [plugin for plugin in plugins.plugins_of([("corpus", config.data.corpus)]) if plugin not in needed]
    records = [PluginRecord(name=p.name, sha256=p.sha256, for_data=p in corpus) for p in (*needed, *corpus)]
    known = {plugin.name for plugin in records}
    kept = [plugin for plugin in config.plugins if plugin.for_data and plugin.name not in known]
    return config.model_copy(update={"plugins": (*records, *kept)})


def _registry_names(config: RunConfig) -> list[tuple[str, str]]:
    """What the model itself takes from registries."""
    return [("position method", config.model.position), ("attention backend", config.model.backend)]


def resolve_config(config: RunConfig, vocab_size: int, world: World, *, spare: bool = False) -> RunConfig:
    """The settings with the vocabulary filled in; what cannot go together is refused before anything is written.

    `spare`: the model may have room for more tokens than the data has, as models from elsewhere often do.
    """
    vocab_size += 0 if config.model.causal else 1  # the mask token
    fits = config.model.vocab_size in (0, vocab_size) or (spare and config.model.vocab_size > vocab_size)
    if not fits:
        raise InputError(
            f"model.vocab_size is {config.model.vocab_size}, but the data has {vocab_size} token types. "
            "Set model.vocab_size to 0 to take it from the data, or use the data this model was made for."
        )
    if config.train.tensorboard:
        require_package("tensorboard", "The setting train.tensorboard", "tensorboard")
    if config.train.batch % world.size:
        raise InputError(
            f"train.batch {config.train.batch} cannot be shared by {world.size} processes; use a multiple of that."
        )
    size, own = micro_batch_size(config, world), config.train.batch // world.size
    if own % size:
        raise InputError(
            f"train.micro_batch {size} does not divide the {own} sequences that each of {world.size} processes has."
        )
    config = config.replace(model={"vocab_size": config.model.vocab_size or vocab_size})
    check_model_fits_memory(config.model)
    return config


def check_model_fits_memory(config: ModelConfig) -> None:
    """Stop before a model is built whose weights alone, in float32, are more memory than this process can have."""
    memory = machine.total_memory()
    weights = config.min_parameter_count
    if 4 * weights + BLOCK_BYTES * config.layers <= memory and config.vocab_size:
        with torch.device("meta"):  # nothing is allocated
            weights = sum(weight.numel() for weight in TransformerLM(config).parameters())
    needed = 4 * weights + BLOCK_BYTES * config.layers
    if needed > memory:
        raise InputError(
            f"A model of these settings ({config.layers:,} layers, width {config.width:,}) has at least {weights:,} "
            f"weights and needs {needed / 1e9:,.1f} GB; there are {memory / 1e9:,.1f} GB. "
            "Choose a smaller model."
        )


def micro_batch_size(config: RunConfig, world: World) -> int:
    """Sequences per forward pass of one process."""
    own = config.train.batch // world.size
    return min(config.train.micro_batch or own, own)


def build_training(config: RunConfig, folder: RunFolder, world: World, prepared: PreparedDataset) -> TrainingContext:
    """Data and model as they are before the first step."""
    settings = config.train
    stream = BatchStream(
        prepared.split("train"),
        length=settings.length,
        batch_size=settings.batch,
        seed=settings.seed,
        rank=world.rank,
        world=world.size,
        packing=config.data.packing,
        documents=prepared.documents("train"),
        vocab_size=config.model.vocab_size,
        bos=prepared.meta.bos,
        drop_last=config.data.drop_last,
        mask=None if config.model.causal else mask_token(config.model),
    )
    half = settings.precision == "bfloat16"
    if half and (reason := parallel.bfloat16_unsupported_reason(world.device)):
        half = False
        if world.main:
            log.warning(f"train.precision is bfloat16, but {reason}: computing in float32.")
    autocast = partial(torch.autocast, world.device.type, torch.bfloat16) if half else nullcontext
    torch.manual_seed(settings.seed)
    with plugins.plugin_errors(*_registry_names(config)):
        model = TransformerLM(config.model).to(world.device)
        model.checkpoint_activations = settings.checkpoint_activations
        with autocast(), torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
            _dry_run_forward(model, stream)
    if settings.compile:
        for layer in model.layers:  # in place, so that parameters keep their names
            layer.compile()
    replica = parallel.wrap_model(model, world, settings.parallel, half=half)
    return TrainingContext(
        config=config,
        world=world,
        folder=folder,
        replica=replica,
        optimizer=optim.build(model, config.optim),
        stream=stream,
        valid=prepared.split("valid")[: settings.valid_tokens],
        autocast=autocast,
    )


def _dry_run_forward(model: TransformerLM, stream: BatchStream) -> None:
    """Run one sequence through the model, so that errors appear before a run folder is created."""
    tokens = torch.zeros(1, stream.length, dtype=torch.long, device=next(model.parameters()).device)
    # Documents of one token each: how long the text's are is not known here, and a table of positions may be shorter.
    apart = torch.arange(stream.length, device=tokens.device)[None] if stream.packing == "documents" else None
    model.hidden(tokens, segment_ids=apart)


def restore_checkpoint(job: TrainingContext) -> TrainState:
    """Where the run stands: its last whole checkpoint, loaded, or the beginning."""
    name = job.world.broadcast_from_rank0(lambda: _clean_up_interrupted_run(job.folder))
    if name is None:
        return TrainState(step=0, tokens=0, seconds=0.0, window_nll=0.0, window_count=0)
    state = checkpoint.restore(job.folder.checkpoints / name, job.checkpoint_tensors, sharded=job.replica.sharded)
    optim.set_step_count(job.optimizer, state.step)
    if job.world.main:
        log.info(f"Going on with {job.folder.path} after step {state.step}.")
    return state


def _clean_up_interrupted_run(folder: RunFolder) -> str | None:
    """Bring a run folder that may have been left at any moment to the moment of its last whole checkpoint, and return
    its name; None when the run has none yet."""
    checkpoint_files.remove_partial_checkpoints(folder.path)
    if not checkpoint_files.list_checkpoints(folder.path):
        run_folder.truncate_metrics(folder, 0)
        return None
    latest = _latest_valid_checkpoint(folder)
    checkpoint_files.quarantine_checkpoints(folder.path, latest)
    state = checkpoint.read_state(latest)
    run_folder.truncate_metrics(folder, state.step, state.metrics)
    return latest.name


def _latest_valid_checkpoint(folder: RunFolder, say: checkpoint_files.Say = log.warning) -> Path:
    anew = f", or remove {folder.checkpoints} to start from the beginning"
    return checkpoint_files.find_valid_checkpoint(folder.path, checkpoint_files.latest, otherwise=anew, say=say)


def check_resumable(config: RunConfig, folder: RunFolder) -> None:
    """Stop, before anything is written, at a run that has no whole checkpoint left or has done more than is asked."""
    if not checkpoint_files.list_checkpoints(folder.path):
        return
    done = checkpoint.read_state(
        _latest_valid_checkpoint(folder, say=lambda line: None)
    ).step  # `_tidy` tells what is damaged
    if done > config.train.steps:
        raise InputError(
            f"{folder.path} has done {done:,} steps already, and train.steps={config.train.steps:,} asks for fewer. "
            "Ask for more, or choose another --out for a new run."
        )


def check_same_data(job: TrainingContext, data: str) -> None:
    """Stop if the run was trained on another text; `data` is the sha256 of the training split."""
    before = run_folder.read_lines(job.folder.sessions)
    trained_here = [
        folder
        for folder in checkpoint_files.list_checkpoints(job.folder.path)
        if folder.name != checkpoint_files.name(0)
    ]
    if not before and trained_here:  # a model that was imported begins at step 0, and nothing was trained on yet
        raise InputError(
            f"{job.folder.sessions} is missing, and it says on what data the run was trained. Restore it from a copy, "
            "or choose another --out for a new run."
        )
    trained = str(before[0].get("data")) if before else data
    if trained != data:
        raise InputError(
            f"{job.folder.path} was trained on other data: its train.bin had sha256 {trained[:12]}..., "
            f"the one given now has {data[:12]}.... Resume with the same data, or choose another --out."
        )


def record_session(job: TrainingContext, state: TrainState, data: str) -> None:
    """Record who trains from here on. Another number of threads is allowed, but changes the last bits."""
    before, threads = run_folder.read_lines(job.folder.sessions), torch.get_num_threads()
    used = before[-1].get("threads") if before else threads
    if used != threads:
        log.warning(
            f"This run used {used} threads and now uses {threads}; results will differ by rounding. "
            f"Set OMP_NUM_THREADS={used} for bit-identical ones."
        )
    record = {"step": state.step, "ranks": job.world.size, "data": data} | machine.collect_provenance(threads=threads)
    run_folder.truncate_lines(job.folder.sessions, len(before))  # the last line may be torn
    run_folder.append_line(job.folder.sessions, record)
    run_folder.sync_lines(job.folder.sessions)
