"""Training: one loop, in `_steps`, from the first step to the last, on one process or many.

Everything that varies from step to step is a pure function of the step's number: which tokens (data/of_run.py),
which dropout (`_seed`), which learning rate (optim.py). So a run that was stopped and resumed, at any moment and
however often, ends in the same bits as one that never was, and the state beside the tensors is a few integers.
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
from trainshort.train import checkpoint, checkpoint_files, optim, parallel, run_folder
from trainshort.train.checkpoint import CheckpointData, TrainState
from trainshort.train.parallel import World
from trainshort.train.setup import TrainingContext, micro_batch_size, setup_run
from trainshort.utils.terminal import Interrupted, StopRequest, TrainingDisplay


class NotFiniteError(InputError):
    """A loss or gradient that is not a number; the step was not made."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Losses are sums and counts over the validation tokens, at the last step."""

    run: Path
    steps: int
    tokens: int
    seconds: float
    valid_nll: float | None
    valid_count: int | None
    best: Path | None
    """The checkpoint with the lowest validation loss."""


def train(
    config: RunConfig, run: Path, *, resume: bool = False, quiet: bool = False, stop: StopRequest | None = None
) -> TrainResult:
    """Train until all steps are done, and return how it ended; see docs/training.md for what `run` holds then.

    Raises `Interrupted` after a SIGTERM or Ctrl-C, when the run is saved; `resume=True` goes on from there.
    `stop` listens for them instead of a listener that is gone when this returns.
    """
    with parallel.init_distributed() as world:
        return _train(config, run, world, stop, resume=resume or parallel.restart_count() > 0, quiet=quiet)


def _train(
    config: RunConfig, run: Path, world: World, stop: StopRequest | None, *, resume: bool, quiet: bool
) -> TrainResult:
    """All of a session except joining and leaving the other ranks, which must outlive everything made here."""
    with setup_run(config, run, world, resume=resume, quiet=quiet) as (job, state):
        settings = job.config.train
        board = _tensorboard_writer(run / "tensorboard", state.step) if settings.tensorboard and world.main else None
        display = TrainingDisplay(state.step, settings.steps, quiet=quiet or not world.main, board=board)
        with stop or StopRequest() as told, display:
            state = _steps(job, state, display, told)
        best = world.broadcast_from_rank0(lambda: checkpoint.best(run))
    return TrainResult(run, state.step, state.tokens, state.seconds, state.valid_nll, state.valid_count, best)


def _tensorboard_writer(folder: Path, step: int) -> Any:
    """A TensorBoard writer that goes on after `step`, and hides what an earlier session wrote past it."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


def _steps(job: TrainingContext, state: TrainState, display: TrainingDisplay, stop: StopRequest) -> TrainState:
    """The loop: step, log, validate, save."""
    settings = job.config.train
    started = time.perf_counter() - state.seconds
    window = 0.0  # seconds of steps alone, since the last line in metrics.jsonl
    while not _is_finished(state, job.config):
        began = time.perf_counter()
        batch = job.stream.batch(state.step)
        # One exchange before the step: how many targets all ranks have together, and whether one was told to stop.
        told = job.world.all_gather([float((batch.targets != IGNORED).sum()), float(stop.number)])
        count, signal = int(sum(row[0] for row in told)), int(max(row[1] for row in told))
        if signal:
            saved = _save(job, state.model_copy(update={"seconds": time.perf_counter() - started}))
            if job.world.main:
                display.note(f"Stopped after step {state.step}. Saved {saved}; go on by --resume.")
            raise Interrupted(signal)

        nll = _accumulate(job, state.step, batch, count)
        norm = float(optim.clip_grad_norm(job.replica.model.parameters(), job.config.optim.max_grad_norm))
        nll = _check_finite_on_all_ranks(job, state.step, nll, norm)
        rate = optim.learning_rate(state.step, settings.steps, job.config.optim)
        optim.step(job.optimizer, job.replica.model.parameters(), rate)
        state = _next_state(state, nll, count)
        window += time.perf_counter() - began

        last = _is_finished(state, job.config)
        if last or state.step % settings.log_every == 0:
            state = state.model_copy(update={"seconds": time.perf_counter() - started})
            _log(job, display, _metrics_record(state, lr=rate, grad_norm=norm, window=window))
            state, window = state.model_copy(update={"window_nll": 0.0, "window_count": 0}), 0.0
        improved = False
        if last or (settings.valid_every and state.step % settings.valid_every == 0):
            state, improved = _run_validation(job, state, display)
        due = settings.save_every and (improved or state.step % settings.save_every == 0)
        if due or _is_finished(state, job.config):
            state = state.model_copy(update={"seconds": time.perf_counter() - started})
            _save(job, state)
    return state


def _is_finished(state: TrainState, config: RunConfig) -> bool:
    patience = config.train.patience
    return state.step >= config.train.steps or bool(patience and state.stale >= patience)


def _accumulate(job: TrainingContext, step: int, batch: Batch, count: int) -> float:
    """Forward and backward over this rank's sequences; returns the sum of their losses.

    Gradients end up as (sum over all ranks and micro-batches of losses) / (number of all targets): each micro-batch's
    sum is scaled by ranks / count, and the ranks' gradients are averaged.
    """
    torch.manual_seed(_step_seed(job.config.train.seed, step, job.world.rank))
    rows, size = len(batch.inputs), micro_batch_size(job.config, job.world)
    total = torch.zeros((), dtype=torch.float64, device=job.world.device)
    for start in range(0, rows, size):
        with nullcontext() if start + size >= rows else job.replica.no_sync():
            loss = _loss(job, batch, slice(start, start + size))
            (loss.total * (job.world.size / max(1, count))).backward()
        total += loss.total.detach()
    return float(total)


def _loss(job: TrainingContext, batch: Batch, rows: slice) -> Loss:
    """Some of a batch's sequences through the model."""
    arrays = (batch.inputs, batch.targets, batch.segment_ids)
    inputs, targets, segment_ids = (
        None if array is None else torch.from_numpy(array[rows]).to(job.world.device) for array in arrays
    )
    with job.autocast():
        return job.replica.forward(inputs, targets, segment_ids=segment_ids)


def _step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of one step's dropout on one rank; neighbours are unrelated."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _check_finite_on_all_ranks(job: TrainingContext, step: int, nll: float, norm: float) -> float:
    """The sum of all ranks' losses; before a step with a loss or gradient that is not finite, everybody stops."""
    losses = [row[0] for row in job.world.all_gather([nll])]
    wrong = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if not wrong and math.isfinite(norm):
        return sum(losses)
    found = f"loss is {losses[wrong[0]]} on rank {wrong[0]}" if wrong else f"gradient norm is {norm}"
    kept = job.world.broadcast_from_rank0(lambda: checkpoint.latest(job.folder.path))
    raise NotFiniteError(
        f"The {found} at step {step + 1}. That step was not made; the last good checkpoint is "
        f"{kept or 'none, since none was due yet'}. Try a lower optim.lr or a longer optim.warmup."
    )


def _next_state(state: TrainState, nll: float, count: int) -> TrainState:
    """The state one step later."""
    changes = {
        "step": state.step + 1,
        "tokens": state.tokens + count,
        "window_nll": state.window_nll + nll,
        "window_count": state.window_count + count,
        "valid_nll": None,
        "valid_count": None,
    }
    return state.model_copy(update=changes)


def _metrics_record(state: TrainState, *, lr: float, grad_norm: float, window: float) -> dict[str, Any]:
    """A line of metrics.jsonl: sums and counts since the line before, and what is convenient to look at."""
    return {
        "step": state.step,
        "nll": state.window_nll,
        "count": state.window_count,
        "loss": state.window_nll / max(1, state.window_count),
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "tokens_per_second": round(state.window_count / window, 1),
    }


def _log(job: TrainingContext, display: TrainingDisplay, record: dict[str, Any]) -> None:
    """Write a line of metrics.jsonl, then show it."""
    job.world.on_main(lambda: run_folder.append_line(job.folder.metrics, record))
    display.show(record)


def _run_validation(job: TrainingContext, state: TrainState, display: TrainingDisplay) -> tuple[TrainState, bool]:
    """The state with its validation loss, and whether that is the lowest so far."""
    nll, count = _validate(job)
    if not count:
        return state, False
    if not math.isfinite(nll):
        raise NotFiniteError(f"The validation loss is {nll} after step {state.step}; the run was stopped there.")
    loss = nll / count
    improved = state.best_loss is None or loss < state.best_loss
    changes = {"valid_nll": nll, "valid_count": count, "best_loss": loss if improved else state.best_loss}
    changes["stale"] = 0 if improved else state.stale + 1
    record = {"step": state.step, "valid_nll": nll, "valid_count": count, "valid_loss": loss}
    _log(job, display, record | {"tokens": state.tokens, "seconds": round(state.seconds, 3)})
    return state.model_copy(update=changes), improved


@torch.no_grad()
def _validate(job: TrainingContext) -> tuple[float, int]:
    """Sum of losses and number of targets over the beginning of the validation split, in blocks of train.length.

    The ranks share the batches out. All run equally many passes, since under fsdp each pass is a joint one; a rank
    that has nothing left repeats a pass and does not count it.
    """
    settings, world, targets = job.config.train, job.world, len(job.valid)
    if not targets:
        return 0.0, 0
    length = min(settings.length, targets)
    batches = list(Passes(targets, length, length).batches(length * micro_batch_size(job.config, job.world)))
    job.replica.model.eval()
    nll, count = 0.0, 0
    for first in range(0, len(batches), world.size):
        mine = first + world.rank
        batch = batches[min(mine, len(batches) - 1)]
        inputs, wanted = fill(job.valid, batch, job.stream.bos)
        if job.stream.mask is not None:  # one of the rounds of masking.py
            inputs, wanted = mask_tokens(
                wanted, evaluation_rounds([one.start for one in batch], wanted.shape[1]) == 0, job.stream.mask
            )
        loss = _loss(job, Batch(inputs, wanted, None), slice(None))
        if mine < len(batches):
            nll, count = nll + float(loss.total), count + int((wanted != IGNORED).sum())
    job.replica.model.train()
    nll, counted = world.all_reduce_sum([nll, float(count)])
    return nll, int(counted)


def _save(job: TrainingContext, state: TrainState) -> Path:
    """A checkpoint, with the metrics up to it on the disk before it; then the old ones go."""
    job.world.on_main(lambda: run_folder.sync_lines(job.folder.metrics))
    last = job.world.broadcast_from_rank0(lambda: run_folder.last_checksum(job.folder.metrics))
    state = state.model_copy(update={"metrics": last})
    snapshot = CheckpointData(job.config, state, job.checkpoint_tensors, sharded=job.replica.sharded)
    saved = checkpoint.save(job.folder.path, snapshot, job.world)
    if job.world.main:
        checkpoint_files.delete_old_checkpoints(job.folder.path, job.config.train.keep_checkpoints)
    return saved
