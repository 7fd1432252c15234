"""Evaluate a model at several input lengths, and store the losses so that a stopped evaluation can be resumed.

The text is scored in passes. A pass is one forward pass of the evaluation: it reads one window of the text, and scores
some of its tokens (see `trainshort.data.passes`). The scored tokens are called targets.

While a length is evaluated, the losses are appended to a file: one float32 per target, in the order of the text. The
file size shows how many targets are done. After an interruption, an incomplete pass at the end of the file is removed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Integer

from trainshort.data.mlm import MASK_ROUNDS, evaluation_rounds, mask_tokens
from trainshort.data.passes import Pass, Passes, fill
from trainshort.errors import InputError
from trainshort.evaluate.overrides import Override
from trainshort.evaluate.results import Evaluation, LengthScore, Status, save, summarize
from trainshort.evaluate.targets import Target
from trainshort.utils.io import file_lock, make_folder, open_file, translate_os_errors
from trainshort.utils.machine import PeakMemory, is_out_of_memory, limit_memory
from trainshort.utils.terminal import ProgressMeter

# The default number of tokens in one batch of passes.
BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Sweep:
    """The plan of an evaluation at several input lengths.

    Attributes:
        tokens: The tokens of the text. Every token is a target.
        lengths: The input lengths, sorted.
        stride: The number of targets per pass. None means that the windows do not overlap, so that each pass scores all
            tokens that it reads.
        override: A change of the trained model, or None.
        batch_tokens: The number of tokens in one batch of passes. A batch has at least one pass.
        max_gigabytes: The memory that the evaluation may use. None means all free memory.
    """

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Sequence[int]
    stride: int | None = None
    override: Override | None = None
    batch_tokens: int = BATCH_TOKENS
    max_gigabytes: float | None = None

    def passes(self, length: int) -> Passes:
        """Return the passes over the text at one input length. A pass is one forward pass over a window of the text.

        Raises:
            InputError: If the length or the stride is invalid, or if a shorter length of the plan already reads the
                complete text in one pass. A longer length would give the same result.
        """
        shorter_lengths = [other_length for other_length in self.lengths if other_length < length]
        longest_shorter_length = max(shorter_lengths, default=0)
        num_tokens = len(self.tokens)
        if longest_shorter_length >= num_tokens:
            raise InputError(
                f"Length {length:,} gives the same result as length {longest_shorter_length:,}, because the text has "
                f"only {num_tokens:,} tokens. Use a longer text, a larger --max-tokens, or leave out length {length:,}."
            )
        stride = length if self.stride is None else self.stride  # None: the windows do not overlap.
        return Passes(num_tokens, length, stride)


# ---- score the passes of one length


def score(
    target: Target,
    tokens: Integer[np.ndarray, " tokens"],
    passes: Passes,
    *,
    batch_tokens: int = BATCH_TOKENS,
    done: int = 0,
) -> Iterator[Float32[np.ndarray, " targets"]]:
    """Compute the losses of a text, batch by batch.

    If a batch does not fit into memory, the batch size is halved and the batch is computed again.

    Args:
        target: The model.
        tokens: The text.
        passes: The passes over the text.
        batch_tokens: The number of tokens in one batch.
        done: The number of targets at the start of the text that were already scored. They are skipped.

    Yields:
        The losses of the targets of one batch, in the order of the text.
    """
    if done >= passes.tokens:
        return
    next_pass = passes.at(done)  # the index of the pass that scores the next target
    while next_pass < len(passes):
        batch = next(passes.batches(batch_tokens, next_pass))
        try:
            losses = score_batch(target, tokens, batch)
        except (RuntimeError, MemoryError) as error:
            # A batch of a single pass cannot be made smaller.
            if not is_out_of_memory(error) or len(batch) == 1:
                raise
            smaller_batch_size = len(batch) // 2
            batch_tokens = passes.length * smaller_batch_size
            continue
        yield losses.flatten()
        next_pass += len(batch)


def score_batch(
    target: Target, tokens: Integer[np.ndarray, " tokens"], batch: Sequence[Pass]
) -> Float32[np.ndarray, "passes scored"]:
    """Compute the losses of all targets (tokens to predict) of one batch.

    Args:
        target: The evaluation target: the model that is evaluated.
        tokens: All tokens of the text.
        batch: The forward passes of the batch. Each pass reads one window of the text, and scores (computes the losses
            of) the last targets of the window. All passes have the same window length and the same number of targets.

    Returns:
        The losses. Each row contains the losses of the targets that one pass scores.
    """
    if target.mask is not None:  # Only encoders have a mask token.
        return score_masked_batch(target, tokens, batch)
    inputs, targets = fill(tokens, batch, target.bos)
    input_ids = torch.from_numpy(inputs).to(target.device)
    target_ids = torch.from_numpy(targets).to(target.device)
    # The first tokens of each pass are only context. Their losses are not computed.
    num_context_tokens = batch[0].first - batch[0].start
    losses = target.token_nll(input_ids, target_ids, num_context_tokens)
    return losses.float().cpu().numpy()


def score_masked_batch(
    target: Target, tokens: Integer[np.ndarray, " tokens"], batch: Sequence[Pass]
) -> Float32[np.ndarray, "passes length"]:
    """Compute the losses of an encoder for one batch.

    The batch is read `MASK_ROUNDS` times. Each round masks other tokens, so that each token is masked in exactly one
    round. The loss of a token comes from the round that masks the token.

    Args:
        target: The encoder.
        tokens: All tokens of the text.
        batch: The windows of the text that the encoder reads. They are equally long and do not overlap.

    Returns:
        The loss of each token of each pass.
    """
    assert target.mask is not None
    windows = np.stack([tokens[text_pass.start : text_pass.stop] for text_pass in batch])
    starts = [text_pass.start for text_pass in batch]
    round_of_token = evaluation_rounds(starts, windows.shape[1])
    losses = np.zeros(windows.shape, dtype=np.float32)
    for round_index in range(MASK_ROUNDS):
        is_masked = round_of_token == round_index
        inputs, targets = mask_tokens(windows, is_masked, target.mask)
        input_ids = torch.from_numpy(inputs).to(target.device)
        target_ids = torch.from_numpy(targets).to(target.device)
        round_losses = target.token_nll(input_ids, target_ids, 0)
        # The loss of a token that is not masked is 0, so the sum contains each loss once.
        losses += round_losses.float().cpu().numpy()
    return losses


def score_length(
    target: Target, plan: Sweep, length: int, path: Path, meter: ProgressMeter | None = None
) -> LengthScore:
    """Evaluate a model at one input length, or resume such an evaluation.

    The text is read in passes. A pass is one forward pass over a window of `length` tokens.

    Args:
        target: The model.
        plan: The settings of the evaluation, such as the text, the stride and the override (a change of the model).
        length: The input length.
        path: The file that stores the losses until all targets are scored. The file is deleted at the end.
        meter: A progress meter that counts the tokens that are read.

    Returns:
        The result. If the model does not support the length or runs out of memory, the status of the result says so.
    """
    passes = plan.passes(length)
    if target.max_length is not None and length > target.max_length:
        reason = f"the model supports at most {target.max_length:,} tokens"
        return _failed_row(passes, status="cannot", reason=reason)
    with open_loss_file(path, passes) as loss_file, target.for_length(plan.override, length):
        try:
            row = _score_remaining(target, plan, passes, loss_file, meter or ProgressMeter())
        except (RuntimeError, MemoryError, IndexError) as error:
            row = _row_for_error(error, target, plan, passes)
            if row is None:  # The error has nothing to do with the length or the memory.
                raise
        path.unlink(missing_ok=True)
    return row


def _row_for_error(error: Exception, target: Target, plan: Sweep, passes: Passes) -> LengthScore | None:
    """Return the result of an input length at which the model raised an error.

    The result says that there was not enough memory, or that the model does not support the length.

    Args:
        error: The error.
        target: The model.
        plan: The settings of the evaluation.
        passes: The passes (windows of the text that the model reads) at this length.

    Returns:
        The result without losses. Its status is "out of memory", or "cannot" if the model does not support the length.
        None if the error has another cause.
    """
    if is_out_of_memory(error):
        if plan.max_gigabytes is None:
            reason = "not enough memory"
        else:
            reason = f"the limit of {plan.max_gigabytes:g} GB is not enough memory"
        return _failed_row(passes, status="out of memory", reason=reason)
    # A reason is returned only if the model does not support this length.
    reason = target.length_error_reason(error, passes.length)
    if reason is not None:
        return _failed_row(passes, status="cannot", reason=reason)
    return None


def _score_remaining(
    target: Target, plan: Sweep, passes: Passes, loss_file: "LossFile", meter: ProgressMeter
) -> LengthScore:
    """Score the targets that are not in the loss file yet, and summarize the losses of all targets.

    Args:
        target: The model.
        plan: The plan of the evaluation.
        passes: The passes over the text.
        loss_file: The open file with the losses. New losses are appended.
        meter: A progress meter that counts the tokens that are read.

    Returns:
        The result. Its time covers only the targets that were scored by this call.
    """
    already_done = loss_file.done
    tokens_read_per_target = passes.read / passes.tokens
    description = f"length {passes.length:,}"
    # The targets of an interrupted evaluation count as progress.
    meter.advance(already_done * tokens_read_per_target, description)

    peak_memory = PeakMemory(target.device)
    start_time = time.perf_counter()
    with limit_memory(target.device, plan.max_gigabytes):
        for losses in score(target, plan.tokens, passes, batch_tokens=plan.batch_tokens, done=already_done):
            loss_file.append(losses)
            meter.advance(len(losses) * tokens_read_per_target, description)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    seconds = time.perf_counter() - start_time

    row = summarize(passes, loss_file.read())
    timed_targets = loss_file.done - already_done
    return row.replace(
        seconds=seconds if timed_targets > 0 else 0.0,
        timed=timed_targets,
        memory=peak_memory.bytes(),
    )


def _failed_row(passes: Passes, status: Status, reason: str) -> LengthScore:
    """Return the result of a length that could not be scored."""
    return LengthScore(length=passes.length, stride=passes.stride, status=status, reason=reason)


# ---- evaluate all lengths


def run_sweep(
    target: Target, plan: Sweep, evaluation: Evaluation, path: Path, meter: ProgressMeter | None = None
) -> Evaluation:
    """Evaluate a model at all input lengths of a plan that an evaluation does not contain yet.

    The result file is written after each length, so a stopped sweep can be resumed.

    Args:
        target: The model.
        plan: The plan of the evaluation.
        evaluation: The evaluation with the lengths that are already done.
        path: The result file.
        meter: A progress meter that counts the tokens that are read.

    Returns:
        The evaluation with all lengths of the plan.
    """
    meter = meter or ProgressMeter()
    missing_lengths = [length for length in plan.lengths if evaluation.row(length) is None]
    # The meter counts all tokens that the model will read. Overlapping windows read a token several times.
    meter.start(sum(plan.passes(length).read for length in missing_lengths))
    for number, length in enumerate(missing_lengths, start=1):
        loss_path = path.with_name(f"{path.stem}.{length}.partial")
        row = score_length(target, plan, length, loss_path, meter)
        evaluation = evaluation.with_row(row)
        save(evaluation, path)
        meter.line(f"length {length:,}: {number} of {len(missing_lengths)} done")
    return evaluation


# ---- estimate the duration of an evaluation

# The longest length that is timed for the estimate, unless all lengths are longer.
CALIBRATION_LENGTH = 4096

# The number of tokens in a timed batch. A batch has at least one pass.
CALIBRATION_TOKENS = 2048

# If the first timing of a batch takes longer than this, the batch is not timed a second time.
MAX_WARMUP_SECONDS = 1.0


def make_duration_estimate(target: Target, plan: Sweep) -> Callable[[Passes], float]:
    """Time two small batches, and return a function that estimates how long passes take.

    The time per token is modeled as a linear function of the input length. The function is fitted to the time at the
    shortest length and at the longest length up to `CALIBRATION_LENGTH`.

    Args:
        target: The model.
        plan: The plan of the evaluation.

    Returns:
        A function that returns the estimated seconds of given passes (all windows that are read at one input length).
        The estimate is 0 if no length could be timed.
    """
    timings: list[tuple[int, float]] = []  # pairs of a length and its seconds per token
    for length in _choose_timed_lengths(target, plan):
        seconds_per_token = _time_batch(target, plan, length)
        if seconds_per_token is not None:
            timings.append((length, seconds_per_token))
    if not timings:
        return lambda passes: 0.0

    short_length, short_time = timings[0]
    long_length, long_time = timings[-1]
    slope = 0.0
    if long_length > short_length:
        slope = max(0.0, (long_time - short_time) / (long_length - short_length))

    def estimate_seconds(passes: Passes) -> float:
        seconds_per_token = short_time + slope * (passes.length - short_length)
        return passes.read * max(seconds_per_token, 0.0)

    return estimate_seconds


def _choose_timed_lengths(target: Target, plan: Sweep) -> list[int]:
    """Return the lengths that are timed: the shortest length, and the longest length up to `CALIBRATION_LENGTH`.

    Lengths that the model does not support are left out. The result has at most two lengths and can be empty.
    """
    supported_lengths = sorted(plan.lengths)
    if target.max_length is not None:
        supported_lengths = [length for length in supported_lengths if length <= target.max_length]
    if not supported_lengths:
        return []

    shortest = supported_lengths[0]
    short_lengths = [length for length in supported_lengths if length <= CALIBRATION_LENGTH]
    longest = max(short_lengths, default=shortest)
    return [shortest] if longest == shortest else [shortest, longest]


def _time_batch(target: Target, plan: Sweep, length: int) -> float | None:
    """Return the seconds per token of a small batch at one input length, or None if the batch fails.

    The batch is scored twice, and the second time counts, because the first call of a model is slower.
    """
    small_batch_tokens = min(plan.batch_tokens, CALIBRATION_TOKENS)
    batches = plan.passes(length).batches(small_batch_tokens)
    # If the windows overlap, the first batch has only one pass, and the second batch is larger. The larger batch is
    # timed.
    first_batches = list(islice(batches, 2))
    batch = max(first_batches, key=_count_read_tokens)
    seconds = 0.0
    with target.for_length(plan.override, length), limit_memory(target.device, plan.max_gigabytes):
        try:
            for _ in range(2):
                start_time = time.perf_counter()
                score_batch(target, plan.tokens, batch)
                seconds = time.perf_counter() - start_time
                if seconds > MAX_WARMUP_SECONDS:
                    break  # A second call would take too long.
        except (RuntimeError, MemoryError, IndexError):
            return None  # The sweep will report the error.
    return seconds / _count_read_tokens(batch)


def _count_read_tokens(batch: Sequence[Pass]) -> int:
    """Return how many tokens the passes of a batch read together."""
    return sum(text_pass.read for text_pass in batch)


# ---- the file of losses

# Losses are stored as little-endian float32.
LOSS_DTYPE = np.dtype("<f4")


class LossFile:
    """An open file that stores the losses of one length while the length is evaluated.

    Losses that are in the file already are kept, except those of an incomplete pass at its end.

    Args:
        path: The file. It must exist and may be empty.
        passes: The passes over the text.

    Attributes:
        done: The number of targets whose losses are in the file.
    """

    def __init__(self, path: Path, passes: Passes) -> None:
        self.path = path
        open_file(path).close()  # Raises InputError if the path is not a regular file.
        self.file = path.open("a+b")
        stored_targets = path.stat().st_size // LOSS_DTYPE.itemsize
        # The losses of an incomplete last pass are removed. The pass is repeated.
        self.done = count_complete_targets(passes, stored_targets)
        self.file.truncate(self.done * LOSS_DTYPE.itemsize)

    def append(self, losses: Float32[np.ndarray, " targets"]) -> None:
        """Write the losses of the next targets to the file."""
        with translate_os_errors("write", self.path, "Free some disk space, then run the command again."):
            self.file.write(losses.astype(LOSS_DTYPE).tobytes())
            self.file.flush()
        self.done += len(losses)

    def read(self) -> Float32[np.ndarray, " targets"]:
        """Return all losses in the file."""
        self.file.seek(0)
        return np.frombuffer(self.file.read(), dtype=LOSS_DTYPE)


def count_complete_targets(passes: Passes, targets: int) -> int:
    """Return how many of the scored targets belong to passes that were scored completely.

    A pass is one forward pass over a window of the text, and scores (computes the losses of) the last targets of the
    window. If a pass was interrupted, it is repeated, and its targets do not count.

    Args:
        passes: The passes over the text.
        targets: The number of targets that were scored.

    Returns:
        The number of scored targets, without the targets of a last pass that is incomplete.

    Example:
        The passes over 10 tokens with length 4 and stride 2 score 4, 2, 2 and 2 targets.

        >>> [count_complete_targets(Passes(10, 4, 2), targets) for targets in (3, 4, 5, 10)]
        [0, 4, 4, 10]
    """
    if targets >= passes.tokens:
        return passes.tokens
    # The pass that scores the next target is not complete. All targets before this pass are.
    next_pass = passes[passes.at(targets)]
    return next_pass.first


@contextmanager
def open_loss_file(path: Path, passes: Passes) -> Iterator[LossFile]:
    """Context manager: open and lock a file that stores the losses of an unfinished evaluation.

    Args:
        path: The file. It is created if it does not exist.
        passes: The passes (windows of the text that the model reads), which determine the order of the losses.

    Raises:
        InputError: If another process uses the file, or if the path is not a regular file.
    """
    make_folder(path.parent)
    busy_message = f"Another process is computing {path}. Wait until it ends, or stop it."
    with file_lock(path, busy_message):
        loss_file = LossFile(path, passes)
        try:
            yield loss_file
        finally:
            # `append` has already reported every write error.
            with suppress(OSError):
                loss_file.file.close()
