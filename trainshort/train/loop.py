"""The training loop.

The batch, the seed of the dropout masks and the learning rate of a step are functions of the number of the step. So a
run that was stopped and resumed ends with the same bits as an uninterrupted run. Besides tensors, only a few numbers
are stored.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainshort.config.run_config import IGNORED, RunConfig
from trainshort.data.batches import Batch
from trainshort.data.mlm import evaluation_rounds, mask_tokens
from trainshort.data.passes import Passes, fill
from trainshort.errors import InputError
from trainshort.model.transformer import Loss
from trainshort.train import checkpoint, checkpoint_files, metrics_log, optim, parallel
from trainshort.train.checkpoint import CheckpointData, TrainState
from trainshort.train.parallel import World
from trainshort.train.setup import TrainingContext, micro_batch_size, setup_run
from trainshort.utils.terminal import Interrupted, StopRequest, TrainingDisplay


class NotFiniteError(InputError):
    """A loss or a gradient is NaN or infinite. The parameters were not updated with it."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        run: The run folder.
        steps: The number of steps.
        tokens: The number of target tokens that the model was trained on.
        seconds: The time of training, over all sessions.
        valid_nll: The sum of the validation losses at the last step, or None if there was no validation.
        valid_count: The number of targets in `valid_nll`.
        best: The checkpoint with the lowest validation loss.
    """

    run: Path
    steps: int
    tokens: int
    seconds: float
    valid_nll: float | None
    valid_count: int | None
    best: Path | None


def train(
    config: RunConfig, run: Path, *, resume: bool = False, quiet: bool = False, stop: StopRequest | None = None
) -> TrainResult:
    """Train a model and store the run in a run folder. See docs/training.md for the files in the folder.

    Args:
        config: The settings of the run.
        run: The run folder.
        resume: Whether to continue an existing run. If the run does not exist, it is started.
        quiet: Whether to show no progress.
        stop: Records signals that ask the process to stop. The default is a new `StopRequest`, which restores the
            signal handlers at the end.

    Returns:
        The result of the run.

    Raises:
        Interrupted: If the process got SIGTERM or SIGINT. The run is saved before, and can be resumed.
        InputError: If a setting, the data or the run folder is invalid.
        NotFiniteError: If a loss or a gradient is NaN or infinite.
    """
    with parallel.init_distributed() as world:
        was_restarted = parallel.restart_count() > 0
        return _train_on_ranks(config, run, world, stop, resume=resume or was_restarted, quiet=quiet)


def _train_on_ranks(
    config: RunConfig, run: Path, world: World, stop: StopRequest | None, *, resume: bool, quiet: bool
) -> TrainResult:
    """Set up a run, train it and return the result. All ranks must call this function.

    This is a separate function so that all tensors and models are freed before torch.distributed is shut down.

    Args:
        config: The settings of the run.
        run: The run folder.
        world: The ranks that train together.
        stop: Records signals that ask the process to stop. None creates a new `StopRequest`.
        resume: Whether to continue an existing run.
        quiet: Whether to show no progress.
    """
    with setup_run(config, run, world, resume=resume, quiet=quiet) as (context, state):
        settings = context.config.train
        tensorboard_writer = None
        if settings.tensorboard and world.is_main:
            tensorboard_writer = _create_tensorboard_writer(run / "tensorboard", state.step)
        display = TrainingDisplay(
            state.step, settings.steps, quiet=quiet or not world.is_main, board=tensorboard_writer
        )
        with stop or StopRequest() as stop_request, display:
            state = _run_steps(context, state, display, stop_request)
        best = world.broadcast_from_rank0(lambda: checkpoint.best_checkpoint(run))
    return TrainResult(
        run=run,
        steps=state.step,
        tokens=state.tokens,
        seconds=state.seconds,
        valid_nll=state.valid_nll,
        valid_count=state.valid_count,
        best=best,
    )


def _create_tensorboard_writer(folder: Path, step: int) -> Any:
    """Create a TensorBoard writer that hides values after `step`, which an interrupted session may have written."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


def _run_steps(
    context: TrainingContext, state: TrainState, display: TrainingDisplay, stop_request: StopRequest
) -> TrainState:
    """Run the training loop: train, log, validate and save until all steps are done.

    Args:
        context: The model, the data and the settings.
        state: The progress of the run at the start.
        display: Shows the progress.
        stop_request: Records signals that ask the process to stop.

    Returns:
        The progress of the run at the end.

    Raises:
        Interrupted: If any rank got a signal. The run is saved before.
    """
    settings = context.config.train
    model = context.distributed_model.model
    start_time = time.perf_counter() - state.seconds
    step_seconds = 0.0  # the time of training steps since the last line in metrics.jsonl

    while not _is_finished(state, context.config):
        step_start_time = time.perf_counter()
        batch = context.batch_stream.batch(state.step)
        # The ranks exchange two numbers before each step: the number of targets, and the signal that the rank got.
        own_target_count = float((batch.targets != IGNORED).sum())
        values_by_rank = context.world.all_gather([own_target_count, float(stop_request.number)])
        target_count = int(sum(rank_target_count for rank_target_count, _ in values_by_rank))
        signal_number = int(max(rank_signal_number for _, rank_signal_number in values_by_rank))
        if signal_number:  # 0 means that no rank got a signal.
            state = _with_elapsed_time(state, start_time)
            saved_folder = _save_checkpoint(context, state)
            if context.world.is_main:
                display.note(f"Stopped after step {state.step}. Saved {saved_folder}. Continue with --resume.")
            raise Interrupted(signal_number)

        nll = _accumulate_gradients(context, state.step, batch, target_count)
        grad_norm = float(optim.clip_grad_norm(model.parameters(), context.config.optim.max_grad_norm))
        nll = _check_finite_on_all_ranks(context, state.step, nll, grad_norm)
        lr = optim.learning_rate(state.step, settings.steps, context.config.optim)
        optim.step(context.optimizer, model.parameters(), lr)
        state = _next_state(state, nll, target_count)
        step_seconds += time.perf_counter() - step_start_time

        is_last_step = _is_finished(state, context.config)
        if is_last_step or state.step % settings.log_every == 0:
            state = _with_elapsed_time(state, start_time)
            _log(context, display, _metrics_record(state, lr=lr, grad_norm=grad_norm, step_seconds=step_seconds))
            state = state.model_copy(update={"window_nll": 0.0, "window_count": 0})
            step_seconds = 0.0

        has_improved = False
        if is_last_step or _is_multiple(state.step, settings.valid_every):
            state, has_improved = _run_validation(context, state, display)

        # With `save_every=0`, only the last checkpoint is saved.
        is_save_step = _is_multiple(state.step, settings.save_every) or (has_improved and settings.save_every > 0)
        # The validation may have ended the run, see `TrainConfig.patience`.
        if is_save_step or _is_finished(state, context.config):
            state = _with_elapsed_time(state, start_time)
            _save_checkpoint(context, state)
    return state


def _is_finished(state: TrainState, config: RunConfig) -> bool:
    """Return whether all steps are done, or the validation loss has not improved for `patience` validations."""
    patience = config.train.patience
    stops_early = patience > 0 and state.stale >= patience
    return state.step >= config.train.steps or stops_early


def _is_multiple(step: int, interval: int) -> bool:
    """Return whether a step is a multiple of an interval. An interval of 0 means never."""
    return interval > 0 and step % interval == 0


def _with_elapsed_time(state: TrainState, start_time: float) -> TrainState:
    """Return the state with the time since `start_time` in the field `seconds`."""
    return state.model_copy(update={"seconds": time.perf_counter() - start_time})


def _accumulate_gradients(context: TrainingContext, step: int, batch: Batch, target_count: int) -> float:
    """Compute the gradients of a batch with forward and backward passes over its micro-batches.

    The gradients are those of the mean loss over the targets of all ranks. The loss of a micro-batch is a sum over its
    targets. It is multiplied by (number of ranks) / (number of targets), because the gradients of the ranks are
    averaged.

    Args:
        context: The model and the settings.
        step: The number of the step, for the seed of the dropout masks.
        batch: The sequences of this rank (process).
        target_count: The number of targets (predicted tokens) in the batches of all ranks.

    Returns:
        The sum of the losses of this rank.
    """
    world = context.world
    torch.manual_seed(_dropout_seed(context.config.train.seed, step, world.rank))
    row_count = len(batch.inputs)
    micro_batch_rows = micro_batch_size(context.config, world)
    loss_scale = world.size / max(1, target_count)
    total_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for start in range(0, row_count, micro_batch_rows):
        is_last_micro_batch = start + micro_batch_rows >= row_count
        # Gradients are synchronized only after the last micro-batch.
        sync_context = nullcontext() if is_last_micro_batch else context.distributed_model.no_sync()
        with sync_context:
            loss = _compute_loss(context, batch, slice(start, start + micro_batch_rows))
            (loss.total * loss_scale).backward()
        total_loss += loss.total.detach()
    return float(total_loss)


def _compute_loss(context: TrainingContext, batch: Batch, rows: slice) -> Loss:
    """Compute the summed loss of some sequences of a batch.

    Args:
        context: The model and the device.
        batch: The sequences of this rank.
        rows: The sequences to use, as a range of row numbers.
    """
    device = context.world.device
    inputs = torch.from_numpy(batch.inputs[rows]).to(device)
    targets = torch.from_numpy(batch.targets[rows]).to(device)
    # The document of each token, if documents are packed into one sequence. Tokens attend to their own document only.
    segment_ids = None
    if batch.segment_ids is not None:
        segment_ids = torch.from_numpy(batch.segment_ids[rows]).to(device)
    with context.autocast():
        return context.distributed_model.forward(inputs, targets, segment_ids=segment_ids)


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of the dropout masks of one step on one rank.

    Args:
        seed: The seed of the run.
        step: The number of the step.
        rank: The number of the process.
    """
    # SeedSequence hashes its arguments, so neighboring steps and ranks get unrelated seeds.
    state = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # `torch.manual_seed` requires less than 64 bits.


def _check_finite_on_all_ranks(context: TrainingContext, step: int, nll: float, grad_norm: float) -> float:
    """Return the sum of the losses of all ranks, and check that losses and gradients are finite.

    Args:
        context: The ranks and the run folder.
        step: The number of the step.
        nll: The sum of the losses of this rank.
        grad_norm: The norm of the gradients, which is the same on all ranks.

    Raises:
        NotFiniteError: If a loss of any rank or the norm of the gradients is NaN or infinite.
    """
    # `all_gather` returns one list of values for each rank, such as [[12.5], [13.0]].
    losses = [rank_nll for (rank_nll,) in context.world.all_gather([nll])]
    bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad_ranks and math.isfinite(grad_norm):
        return sum(losses)

    if bad_ranks:
        problem = f"loss is {losses[bad_ranks[0]]} on rank {bad_ranks[0]}"
    else:
        problem = f"gradient norm is {grad_norm}"
    last_checkpoint = context.world.broadcast_from_rank0(lambda: checkpoint.latest_checkpoint(context.folder.path))
    if last_checkpoint is None:
        checkpoint_text = "There is no checkpoint yet."
    else:
        checkpoint_text = f"The last valid checkpoint is {last_checkpoint}."
    raise NotFiniteError(
        f"The {problem} at step {step + 1}. The parameters were not updated. {checkpoint_text} "
        "Try a lower optim.lr or a longer optim.warmup."
    )


def _next_state(state: TrainState, nll: float, target_count: int) -> TrainState:
    """Return the progress of the run after one more step.

    Args:
        state: The progress before the step.
        nll: The sum of the losses of the step, over all ranks.
        target_count: The number of targets of the step, over all ranks.
    """
    # "window" stands for the steps since the last line in metrics.jsonl. "valid" stands for the validation at the
    # new step, which has not run yet. An "nll" is a sum of losses, and a "count" is the number of targets in the sum.
    changes = {
        "step": state.step + 1,
        "tokens": state.tokens + target_count,
        "window_nll": state.window_nll + nll,
        "window_count": state.window_count + target_count,
        "valid_nll": None,
        "valid_count": None,
    }
    return state.model_copy(update=changes)


def _metrics_record(state: TrainState, *, lr: float, grad_norm: float, step_seconds: float) -> dict[str, Any]:
    """Return the values that are logged in one line of metrics.jsonl.

    Args:
        state: The progress of the run. Its `window_nll` is the sum of the losses since the record before, and its
            `window_count` is the number of targets in that sum.
        lr: The learning rate of the last step.
        grad_norm: The norm of the gradients in the last step, before clipping.
        step_seconds: The time of the training steps since the record before.
    """
    return {
        "step": state.step,
        "nll": state.window_nll,
        "count": state.window_count,
        "loss": state.window_nll / max(1, state.window_count),
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "tokens_per_second": round(state.window_count / step_seconds, 1),
    }


def _log(context: TrainingContext, display: TrainingDisplay, record: dict[str, Any]) -> None:
    """Append a record to metrics.jsonl and show it on the terminal. All ranks must call this function.

    Args:
        context: The ranks and the run folder.
        display: Shows the record.
        record: The values, such as the step and the loss.
    """
    context.world.run_on_main(lambda: metrics_log.append_line(context.folder.metrics, record))
    display.show(record)


def _run_validation(context: TrainingContext, state: TrainState, display: TrainingDisplay) -> tuple[TrainState, bool]:
    """Compute the validation loss and log it.

    Args:
        context: The model and the validation data.
        state: The progress of the run.
        display: Shows the loss.

    Returns:
        The state with the validation loss, and whether the loss is the lowest so far.

    Raises:
        NotFiniteError: If the validation loss is NaN or infinite.
    """
    nll, count = _compute_validation_loss(context)
    if count == 0:
        return state, False
    if not math.isfinite(nll):
        raise NotFiniteError(f"The validation loss is {nll} after step {state.step}. The run was stopped.")

    loss = nll / count
    has_improved = state.best_loss is None or loss < state.best_loss
    changes = {
        "valid_nll": nll,
        "valid_count": count,
        "best_loss": loss if has_improved else state.best_loss,
        "stale": 0 if has_improved else state.stale + 1,
    }
    record = {
        "step": state.step,
        "valid_nll": nll,
        "valid_count": count,
        "valid_loss": loss,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
    }
    _log(context, display, record)
    return state.model_copy(update=changes), has_improved


@torch.no_grad()
def _compute_validation_loss(context: TrainingContext) -> tuple[float, int]:
    """Compute the loss on the validation tokens, in blocks of the training length that do not overlap.

    The ranks share the batches. All ranks must do the same number of forward passes, because sharded models synchronize
    their weights in each pass. A rank without a batch repeats the last batch and does not count its loss.

    Returns:
        The sum of the losses and the number of targets, over all ranks.
    """
    world = context.world
    token_count = len(context.valid_tokens)
    if token_count == 0:
        return 0.0, 0
    length = min(context.config.train.length, token_count)
    batch_tokens = length * micro_batch_size(context.config, world)
    batches = list(Passes(token_count, length, length).batches(batch_tokens))
    model = context.distributed_model.model
    mask_id = context.batch_stream.mask

    model.eval()
    nll = 0.0
    count = 0
    for first_index in range(0, len(batches), world.size):
        own_index = first_index + world.rank
        has_batch = own_index < len(batches)
        passes = batches[own_index] if has_batch else batches[-1]
        inputs, targets = fill(context.valid_tokens, passes, context.batch_stream.bos)
        if mask_id is not None:
            # An encoder predicts masked tokens. The first round of the evaluation masks is used.
            block_starts = [evaluation_pass.start for evaluation_pass in passes]
            is_masked = evaluation_rounds(block_starts, targets.shape[1]) == 0
            inputs, targets = mask_tokens(targets, is_masked, mask_id)
        loss = _compute_loss(context, Batch(inputs, targets, None), slice(None))
        if has_batch:
            nll += float(loss.total)
            count += int((targets != IGNORED).sum())
    model.train()
    total_nll, total_count = world.all_reduce_sum([nll, float(count)])
    return total_nll, int(total_count)


def _save_checkpoint(context: TrainingContext, state: TrainState) -> Path:
    """Save a checkpoint, and delete old checkpoints. All ranks must call this function.

    metrics.jsonl is flushed to the disk before the checkpoint is saved. So the log never ends before a checkpoint.

    Args:
        context: The model, the optimizer and the run folder.
        state: The progress of the run.

    Returns:
        The checkpoint folder.
    """
    world = context.world  # the ranks (processes) that train together
    metrics_path = context.folder.metrics
    world.run_on_main(lambda: metrics_log.sync_lines(metrics_path))
    last_checksum = world.broadcast_from_rank0(lambda: metrics_log.read_last_checksum(metrics_path))
    state = state.model_copy(update={"metrics": last_checksum})
    data = CheckpointData(
        config=context.config,
        state=state,
        parts=context.checkpoint_tensors,
        sharded=context.distributed_model.sharded,
    )
    saved_folder = checkpoint.save(context.folder.path, data, world)
    if world.is_main:
        checkpoint_files.delete_old_checkpoints(context.folder.path, context.config.train.keep_checkpoints)
    return saved_folder
