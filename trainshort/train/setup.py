"""Build everything that the training loop needs: data, model and optimizer, and on resume the last checkpoint."""

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
from trainshort.train import checkpoint, checkpoint_files, metrics_log, optim, parallel, run_folder
from trainshort.train.checkpoint import Parts, TrainState
from trainshort.train.parallel import DistributedModel, World
from trainshort.train.run_data import copy_data_description
from trainshort.train.run_folder import RunFolder
from trainshort.utils import machine, plugins
from trainshort.utils.optional import require_package

log = logging.getLogger(__name__)

# Minimum memory of the Python objects of a transformer block, in bytes, without the weights. Models with very many tiny
# blocks need more memory for these objects than for the weights.
LAYER_OBJECT_BYTES = 2**14


@dataclass(frozen=True)
class TrainingContext:
    """Everything that the training loop needs. Only the values of the tensors change during training.

    Attributes:
        config: The settings of the run, with all values filled in.
        world: The ranks that train together.
        folder: The paths of the run folder.
        distributed_model: The model.
        optimizer: The optimizer of the model.
        batch_stream: Returns the batch of each step.
        valid_tokens: The part of the validation split that is used during training.
        autocast: Returns a context manager for forward passes, which selects the data type of the computation.
    """

    config: RunConfig
    world: World
    folder: RunFolder
    distributed_model: DistributedModel
    optimizer: torch.optim.Optimizer
    batch_stream: BatchStream
    valid_tokens: np.ndarray
    autocast: Callable[[], AbstractContextManager]

    @property
    def checkpoint_tensors(self) -> Parts:
        """Return the tensors that a checkpoint contains. They are not copies, so writing to them restores the run."""
        model = self.distributed_model.model
        return {
            "model": checkpoint.model_tensors(model),
            "optimizer": optim.state_tensors(self.optimizer, model),
        }


@contextmanager
def setup_run(
    config: RunConfig, run: Path, world: World, *, resume: bool, quiet: bool
) -> Iterator[tuple[TrainingContext, TrainState]]:
    """Context manager: prepare a training run, and lock its run folder. All ranks must call this function.

    Errors in the settings are reported before the run folder is created.

    Args:
        config: The settings of the run.
        run: The run folder.
        world: The ranks that train together.
        resume: Whether to continue an existing run.
        quiet: Whether to show no progress of the data preparation.

    Yields:
        Everything that the training loop needs, and the progress of the run.

    Raises:
        InputError: If a setting, the data or the run folder is invalid.
    """
    # The preparation of the data may take long, so the run folder and the settings are checked first.
    world.run_on_main(lambda: run_folder.check_run_path_free(run, resume=resume))
    world.run_on_main(lambda: check_resumable(config, RunFolder(run)))
    config = resolve_plugins(config, run)
    check_model_fits_memory(config.model)

    prepared = world.rank0_first("data", lambda: open_or_prepare(config.data, progress=not quiet))
    config = config.model_copy(update={"data": resolve_data_config(config.data, prepared)})
    is_imported = RunFolder(run).imported.exists()
    config = resolve_config(config, prepared.meta.vocab_size, world, allows_larger_vocab=is_imported)
    data_sha256 = prepared.meta.splits["train"].sha256
    context = build_training(config, RunFolder(run), world, prepared)

    opened_run = run_folder.open_run(run, config, resume=resume)
    # Only rank 0 opens and locks the run folder. The exit stack closes the folder when the training ends.
    with ExitStack() as exit_stack:
        world.run_on_main(lambda: exit_stack.enter_context(opened_run))
        world.run_on_main(lambda: check_same_data(context, data_sha256))
        world.run_on_main(lambda: copy_data_description(run, prepared))
        state = restore_checkpoint(context)
        world.run_on_main(lambda: record_session(context, state, data_sha256))
        yield context, state


def resolve_plugins(config: RunConfig, run: Path) -> RunConfig:
    """Return the settings with a record of all plug-ins that the run uses.

    Args:
        config: The settings of the run.
        run: The run folder, for error messages.

    Raises:
        InputError: If a plug-in of the model is missing, or the position method or the attention backend is unknown.
            The plug-in of the corpus is required only while the data is not prepared.
    """
    plugins.require_plugins(config.plugins, str(run))
    # Look up the position method and the attention backend, because `get` raises InputError for unknown names.
    methods.get(config.model.position)
    if config.model.backend != "auto":
        backends.get(config.model.backend)

    model_plugins = plugins.plugins_of([*_model_registry_entries(config), ("tokenizer", config.data.tokenizer)])
    corpus_plugins = plugins.plugins_of([("corpus", config.data.corpus)])
    records = [PluginRecord(name=plugin.name, sha256=plugin.sha256) for plugin in model_plugins]
    for plugin in corpus_plugins:
        if plugin not in model_plugins:
            # `for_data=True` marks a plug-in that only defines the corpus.
            records.append(PluginRecord(name=plugin.name, sha256=plugin.sha256, for_data=True))

    # If the data is already prepared, the plug-in of the corpus does not have to be loaded. Its old record is kept.
    recorded_names = {record.name for record in records}
    for record in config.plugins:
        if record.for_data and record.name not in recorded_names:
            records.append(record)
    return config.model_copy(update={"plugins": tuple(records)})


def _model_registry_entries(config: RunConfig) -> list[tuple[str, str]]:
    """Return the registry entries that the model uses, as pairs of the kind and the name."""
    return [("position method", config.model.position), ("attention backend", config.model.backend)]


def resolve_config(config: RunConfig, vocab_size: int, world: World, *, allows_larger_vocab: bool = False) -> RunConfig:
    """Return the settings with the vocabulary size filled in, and check that the settings fit together.

    Args:
        config: The settings of the run.
        vocab_size: The number of token types in the data.
        world: The ranks that train together.
        allows_larger_vocab: Whether the vocabulary of the model may be larger than that of the data. Imported models
            often have such a vocabulary.

    Raises:
        InputError: If settings do not fit together, or the model does not fit into memory.
    """
    if not config.model.causal:
        vocab_size += 1  # Encoders need a mask token.
    is_same_size = config.model.vocab_size in (0, vocab_size)  # 0 takes the size from the data.
    is_allowed_larger_size = allows_larger_vocab and config.model.vocab_size > vocab_size
    if not is_same_size and not is_allowed_larger_size:
        raise InputError(
            f"model.vocab_size is {config.model.vocab_size}, but the data has {vocab_size} token types. "
            "Set model.vocab_size to 0 to use the size of the data, or use the data of the model."
        )
    if config.train.tensorboard:
        require_package("tensorboard", "The setting train.tensorboard", "tensorboard")
    if config.train.batch % world.size:
        raise InputError(
            f"train.batch must be a multiple of the number of processes ({world.size}), got {config.train.batch}."
        )
    rows_per_rank = config.train.batch // world.size
    micro_batch = micro_batch_size(config, world)
    if rows_per_rank % micro_batch:
        raise InputError(
            f"train.micro_batch must divide the {rows_per_rank} sequences of each process, got {micro_batch}."
        )
    config = config.replace(model={"vocab_size": config.model.vocab_size or vocab_size})
    check_model_fits_memory(config.model)
    return config


def check_model_fits_memory(config: ModelConfig) -> None:
    """Raise `InputError` if the float32 weights of a model need more memory than this process can use.

    The check happens before the model is built.

    Args:
        config: The settings of the model.
    """
    available_bytes = machine.total_memory()
    layer_bytes = LAYER_OBJECT_BYTES * config.layers
    weight_count = config.min_parameter_count
    # `weight_count` is a lower bound so far, and a float32 weight has 4 bytes.
    may_fit = 4 * weight_count + layer_bytes <= available_bytes
    if may_fit and config.vocab_size:
        # Count the weights exactly. Tensors on the device "meta" have shapes but no memory.
        with torch.device("meta"):
            weight_count = sum(weight.numel() for weight in TransformerLM(config).parameters())
    needed_bytes = 4 * weight_count + layer_bytes
    if needed_bytes > available_bytes:
        raise InputError(
            f"A model with {config.layers:,} layers of width {config.width:,} has at least {weight_count:,} weights "
            f"and needs {needed_bytes / 1e9:,.1f} GB of memory, but only {available_bytes / 1e9:,.1f} GB exist. "
            "Choose a smaller model."
        )


def micro_batch_size(config: RunConfig, world: World) -> int:
    """Return the number of sequences in one forward pass of one process."""
    rows_per_rank = config.train.batch // world.size
    return min(config.train.micro_batch or rows_per_rank, rows_per_rank)


def build_training(config: RunConfig, folder: RunFolder, world: World, prepared: PreparedDataset) -> TrainingContext:
    """Create the batches, the model and the optimizer of a new run.

    Args:
        config: The settings of the run, see `resolve_config`.
        folder: The paths of the run folder. Nothing is written.
        world: The ranks that train together.
        prepared: The data.

    Raises:
        InputError: If the model does not support the training length, or the data is too short.
    """
    settings = config.train
    batch_stream = BatchStream(
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
    uses_bfloat16 = settings.precision == "bfloat16" and _supports_bfloat16(world)
    autocast: Callable[[], AbstractContextManager] = nullcontext
    if uses_bfloat16:
        autocast = partial(torch.autocast, world.device.type, torch.bfloat16)

    torch.manual_seed(settings.seed)
    rng_devices = [world.device] if world.device.type == "cuda" else []
    with plugins.plugin_errors(*_model_registry_entries(config)):
        model = TransformerLM(config.model).to(world.device)
        model.checkpoint_activations = settings.checkpoint_activations
        with autocast(), torch.random.fork_rng(rng_devices):
            _dry_run_forward(model, batch_stream)
    if settings.compile:
        for layer in model.layers:
            layer.compile()  # `nn.Module.compile` works in place, so the parameters keep their names.
    distributed_model = parallel.wrap_model(model, world, settings.parallel, bfloat16=uses_bfloat16)
    return TrainingContext(
        config=config,
        world=world,
        folder=folder,
        distributed_model=distributed_model,
        optimizer=optim.build(model, config.optim),
        batch_stream=batch_stream,
        valid_tokens=prepared.split("valid")[: settings.valid_tokens],
        autocast=autocast,
    )


def _supports_bfloat16(world: World) -> bool:
    """Return whether bfloat16 is faster than float32 on the device. If not, log a warning on rank 0."""
    reason = parallel.bfloat16_unsupported_reason(world.device)
    if reason is not None and world.is_main:
        log.warning(f"train.precision is bfloat16, but {reason}. Training computes in float32.")
    return reason is None


def _dry_run_forward(model: TransformerLM, batch_stream: BatchStream) -> None:
    """Run one sequence through the model, so that errors appear before a run folder is created.

    Args:
        model: The model.
        batch_stream: The batches of the training. Only the length of their sequences, and how documents are packed into
            sequences, are used.
    """
    device = next(model.parameters()).device
    tokens = torch.zeros(1, batch_stream.length, dtype=torch.long, device=device)
    segment_ids = None
    if batch_stream.packing == "documents":
        # Each token is its own document. Longer documents could exceed the position table of the model, although the
        # documents of the text are short enough.
        segment_ids = torch.arange(batch_stream.length, device=device)[None]
    model.hidden(tokens, segment_ids=segment_ids)


def restore_checkpoint(context: TrainingContext) -> TrainState:
    """Load the last valid checkpoint of the run. All ranks must call this function.

    Args:
        context: The model and the optimizer, whose tensors are filled.

    Returns:
        The progress of the run. If there is no checkpoint, the progress is that of a new run.

    Raises:
        InputError: If all checkpoints are damaged.
    """
    checkpoint_name = context.world.broadcast_from_rank0(lambda: _clean_up_interrupted_run(context.folder))
    if checkpoint_name is None:
        # The progress of a new run: all counters and sums of losses are zero.
        return TrainState(step=0, tokens=0, seconds=0.0, window_nll=0.0, window_count=0)
    checkpoint_folder = context.folder.checkpoints / checkpoint_name
    is_sharded = context.distributed_model.sharded
    state = checkpoint.restore(checkpoint_folder, context.checkpoint_tensors, sharded=is_sharded)
    optim.set_step_count(context.optimizer, state.step)
    if context.world.is_main:
        log.info(f"Continuing {context.folder.path} after step {state.step}.")
    return state


def _clean_up_interrupted_run(folder: RunFolder) -> str | None:
    """Bring a run folder into the state of its last valid checkpoint. A valid checkpoint is not damaged.

    Partial checkpoints are removed, damaged checkpoints are renamed, and later lines of metrics.jsonl are removed.

    Args:
        folder: The paths of the run folder. The caller must hold the lock of the run.

    Returns:
        The folder name of the last valid checkpoint, or None if there is no checkpoint yet.

    Raises:
        InputError: If all checkpoints are damaged.
    """
    checkpoint_files.remove_partial_checkpoints(folder.path)
    if not checkpoint_files.list_checkpoints(folder.path):
        metrics_log.truncate_metrics(folder, 0)
        return None
    latest = _find_latest_checkpoint(folder)
    checkpoint_files.quarantine_checkpoints(folder.path, latest)
    state = checkpoint.read_state(latest)
    metrics_log.truncate_metrics(folder, state.step, state.metrics)
    return latest.name


def _find_latest_checkpoint(folder: RunFolder, report: checkpoint_files.ReportFunction = log.warning) -> Path:
    """Return the last valid checkpoint of a run that has at least one checkpoint.

    Args:
        folder: The paths of the run folder.
        report: Called with a message for each damaged checkpoint that is skipped.

    Raises:
        InputError: If all checkpoints are damaged.
    """
    return checkpoint_files.find_valid_checkpoint(
        folder.path,
        checkpoint_files.latest_checkpoint,
        alternative=f", or remove {folder.checkpoints} to start from the beginning",
        report=report,
    )


def check_resumable(config: RunConfig, folder: RunFolder) -> None:
    """Raise `InputError` if a run cannot be resumed.

    A run cannot be resumed if all of its checkpoints are damaged, or if it has already done more steps than requested.

    Args:
        config: The settings with which the run is resumed.
        folder: The paths of the run folder, which may not exist yet.
    """
    if not checkpoint_files.list_checkpoints(folder.path):
        return

    def ignore(message: str) -> None:
        """Do nothing. Damaged checkpoints are reported later by `_clean_up_interrupted_run`."""

    latest = _find_latest_checkpoint(folder, report=ignore)
    steps_done = checkpoint.read_state(latest).step
    if steps_done > config.train.steps:
        raise InputError(
            f"{folder.path} has already done {steps_done:,} steps, but train.steps is {config.train.steps:,}. "
            "Increase train.steps, or choose another --out for a new run."
        )


def check_same_data(context: TrainingContext, data_sha256: str) -> None:
    """Raise `InputError` if a resumed run was trained on other data.

    Args:
        context: The run.
        data_sha256: The SHA-256 of the training split.
    """
    sessions = metrics_log.read_lines(context.folder.sessions)
    if not sessions:
        # An imported model has a checkpoint of step 0, but it was not trained here.
        imported_name = checkpoint_files.checkpoint_name(0)
        checkpoints = checkpoint_files.list_checkpoints(context.folder.path)
        was_trained = any(folder.name != imported_name for folder in checkpoints)
        if was_trained:
            raise InputError(
                f"{context.folder.sessions} is missing. The file records on which data the run was trained. Restore it "
                "from a copy, or choose another --out for a new run."
            )
        return
    stored_sha256 = str(sessions[0].get("data"))
    if stored_sha256 != data_sha256:
        raise InputError(
            f"{context.folder.path} was trained on other data: expected a train.bin with SHA-256 "
            f"{stored_sha256[:12]}..., got {data_sha256[:12]}.... Resume with the same data, or choose another --out."
        )


def record_session(context: TrainingContext, state: TrainState, data_sha256: str) -> None:
    """Append a record to sessions.jsonl: the first step, the data, the machine and the versions of packages.

    A session is one call of `train`. A run that was interrupted and resumed has several sessions. If the
    number of threads has changed since the last session, log a warning.

    Args:
        context: The run.
        state: The progress of the run.
        data_sha256: The SHA-256 of the training split.
    """
    path = context.folder.sessions
    sessions = metrics_log.read_lines(path)
    threads = torch.get_num_threads()
    previous_threads = sessions[-1].get("threads") if sessions else threads
    if previous_threads != threads:
        log.warning(
            f"The last session of this run used {previous_threads} threads, this session uses {threads}. Results will "
            f"differ by rounding. Set OMP_NUM_THREADS={previous_threads} for bit-identical results."
        )
    record = {"step": state.step, "ranks": context.world.size, "data": data_sha256}
    record |= machine.collect_provenance(threads=threads)
    metrics_log.truncate_lines(path, len(sessions))  # Removes an incomplete last line.
    metrics_log.append_line(path, record)
    metrics_log.sync_lines(path)
