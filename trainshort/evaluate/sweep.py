"""The scoring itself: passes in batches through the model, length after length, into rows of sums.

Losses are float32 as the model gives them; every sum of them is float64. What cannot be measured at a length (a table
that ends, memory that does not suffice) becomes a row that says so, and the sweep goes on.

Losses are on disk as they come, so that a killed evaluation goes on where it stopped. Passes score targets in order, so
the file is nothing but one float32 per target, appended batch by batch; how far it got is its size. A batch that was
torn by the kill is cut off at the last whole pass.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from trainshort.data.mlm import MASK_ROUNDS, evaluation_rounds, mask_tokens
from trainshort.data.passes import Pass, Passes, fill
from trainshort.errors import InputError
from trainshort.evaluate.overrides import Override
from trainshort.evaluate.results import Evaluation, LengthScore, save, summarize
from trainshort.evaluate.targets import Target
from trainshort.utils.io import file_lock, make_folder, open_file, translate_os_errors
from trainshort.utils.machine import PeakMemory, is_out_of_memory, limit_memory
from trainshort.utils.terminal import ProgressMeter

BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Sweep:
    """What to measure, on which tokens."""

    tokens: np.ndarray
    lengths: Sequence[int]
    stride: int | None = None
    """Targets per pass; None: as many as the length, which is the non-overlapping protocol."""
    change: Override | None = None
    batch_tokens: int = BATCH_TOKENS
    """Tokens read at once, if several passes fit in them."""
    memory: float | None = None
    """Gigabytes that may be taken; None: what is free."""

    def passes(self, length: int) -> Passes:
        shorter = max((other for other in self.lengths if other < length), default=0)
        if shorter >= len(self.tokens):  # of the lengths that reach the end of the text, one says it all
            raise InputError(
                f"the text has {len(self.tokens):,} tokens, so length {length:,} would read what {shorter:,} reads; "
                "use a longer text, a shorter length, or more --max-tokens."
            )
        return Passes(len(self.tokens), length, length if self.stride is None else self.stride)


def score(
    target: Target, tokens: np.ndarray, passes: Passes, *, batch_tokens: int = BATCH_TOKENS, done: int = 0
) -> Iterator[np.ndarray]:
    """Losses of all targets after the first `done`, in their order, batch by batch.

    A batch that does not fit in memory is tried again with half as many passes before the error is passed on.
    """
    position = passes.at(done) if done < passes.tokens else len(passes)
    while position < len(passes):
        batch = next(passes.batches(batch_tokens, position))
        try:
            losses = score_batch(target, tokens, batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(batch) == 1:
                raise
            batch_tokens = passes.length * (len(batch) // 2)
            continue
        yield losses.flatten()
        position += len(batch)


def score_batch(target: Target, tokens: np.ndarray, batch: Sequence[Pass]) -> np.ndarray:
    """Losses of what each pass of a batch scores, (passes, scored)."""
    if target.mask is not None:
        return score_masked(target, tokens, batch)
    inputs, targets = (torch.from_numpy(x).to(target.device) for x in fill(tokens, batch, target.bos))
    first = batch[0].first - batch[0].start
    return target.token_nll(inputs, targets, first).float().cpu().numpy()


def score_masked(target: Target, tokens: np.ndarray, batch: Sequence[Pass]) -> np.ndarray:
    """Losses of an encoder: of each token in the round that hides it."""
    assert target.mask is not None
    whole = np.stack([tokens[one.start : one.stop] for one in batch])
    rounds = evaluation_rounds([one.start for one in batch], whole.shape[1])
    losses = np.zeros(whole.shape, dtype=np.float32)
    for number in range(MASK_ROUNDS):
        inputs, wanted = (
            torch.from_numpy(x).to(target.device) for x in mask_tokens(whole, rounds == number, target.mask)
        )
        losses += target.token_nll(inputs, wanted, 0).float().cpu().numpy()  # 0 for what is not hidden
    return losses


def measure(target: Target, plan: Sweep, length: int, path: Path, meter: ProgressMeter | None = None) -> LengthScore:
    """One length of a plan as a row. Losses are kept in the file `path` until all are there; the meter counts the
    tokens that are read for them."""
    passes = plan.passes(length)
    if target.max_length is not None and length > target.max_length:
        return _failed_row(passes, "cannot", f"the model's positions end at {target.max_length:,} tokens")
    with open_scores(path, passes) as scores, target.for_length(plan.change, length):
        try:
            row = _score_all(target, plan, passes, scores, meter or ProgressMeter())
        except (RuntimeError, MemoryError, IndexError) as error:
            if is_out_of_memory(error):
                told = "memory ran out" if plan.memory is None else f"{plan.memory:g} GB were not enough"
                row = _failed_row(passes, "out of memory", told)
            elif reason := target.length_error_reason(error, length):
                row = _failed_row(passes, "cannot", reason)
            else:
                raise
        path.unlink(missing_ok=True)
    return row


def _score_all(target: Target, plan: Sweep, passes: Passes, scores: "Scores", meter: ProgressMeter) -> LengthScore:
    before, read_each, what = scores.done, passes.read / passes.tokens, f"length {passes.length:,}"
    meter.advance(before * read_each, what)
    peak = PeakMemory(target.device)
    began = time.perf_counter()
    with limit_memory(target.device, plan.memory):
        for losses in score(target, plan.tokens, passes, batch_tokens=plan.batch_tokens, done=before):
            scores.append(losses)
            meter.advance(len(losses) * read_each, what)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    seconds = time.perf_counter() - began
    row = summarize(passes, scores.read())
    timed = scores.done - before
    return row.replace(seconds=seconds if timed else 0.0, timed=timed, memory=peak.bytes())


def _failed_row(passes: Passes, status: str, reason: str) -> LengthScore:
    return LengthScore.parse({"length": passes.length, "stride": passes.stride, "status": status, "reason": reason})


def sweep(
    target: Target, plan: Sweep, evaluation: Evaluation, path: Path, meter: ProgressMeter | None = None
) -> Evaluation:
    """The evaluation with all lengths of a plan that it does not hold yet, shortest first; the file at `path` is
    rewritten after each."""
    meter = meter or ProgressMeter()
    todo = [length for length in plan.lengths if evaluation.row(length) is None]
    meter.start(sum(plan.passes(length).read for length in todo))
    for number, length in enumerate(todo, start=1):
        scores = path.with_name(f"{path.stem}.{length}.partial")
        evaluation = evaluation.with_row(measure(target, plan, length, scores, meter))
        save(evaluation, path)
        meter.line(f"length {length:,}: {number} of {len(todo)} done")
    return evaluation


CALIBRATION_LENGTH = 4096
CALIBRATION_TOKENS = 2048
"""Tokens read to find out how long the rest will take, where one window is not longer than that."""


def calibrate(target: Target, plan: Sweep) -> Callable[[Passes], float]:
    """How long passes will take, from the time of two small batches: seconds per token = a + b · length.

    Timed at the shortest length and at the longest up to CALIBRATION_LENGTH; b stays 0 when there is one length only.
    """
    usable = sorted(length for length in plan.lengths if target.max_length is None or length <= target.max_length)
    small = [length for length in usable if length <= CALIBRATION_LENGTH] or usable[:1]
    timed = [(length, _seconds_per_token(target, plan, length)) for length in sorted({*small[:1], *small[-1:]})]
    times = [(length, seconds) for length, seconds in timed if seconds is not None]
    if not times:
        return lambda passes: 0.0
    (short, quick), (long, slow) = times[0], times[-1]
    slope = max(0.0, (slow - quick) / (long - short)) if long > short else 0.0
    return lambda passes: passes.read * max(quick + slope * (passes.length - short), 0.0)


def _seconds_per_token(target: Target, plan: Sweep, length: int) -> float | None:
    """Time of a small batch, after a first run that warms up unless that took long already; None where it fails, as the
    sweep will."""
    batches = plan.passes(length).batches(min(plan.batch_tokens, CALIBRATION_TOKENS))
    batch = max(islice(batches, 2), key=lambda one: sum(p.read for p in one))  # the first may be one pass alone
    seconds = 0.0
    with target.for_length(plan.change, length), limit_memory(target.device, plan.memory):
        try:
            for _ in range(2):
                began = time.perf_counter()
                score_batch(target, plan.tokens, batch)
                seconds = time.perf_counter() - began
                if seconds > 1:
                    break
        except (RuntimeError, MemoryError, IndexError):
            return None
    return seconds / sum(one.read for one in batch)


# ---- losses on disk

KIND = np.dtype("<f4")


class Scores:
    """An open file of losses. `done` targets are in it."""

    def __init__(self, path: Path, passes: Passes) -> None:
        self.path = path
        open_file(path).close()  # whatever is not a regular file is told
        self.file = path.open("a+b")
        self.done = count_complete_passes(passes, path.stat().st_size // KIND.itemsize)
        self.file.truncate(self.done * KIND.itemsize)

    def append(self, losses: np.ndarray) -> None:
        with translate_os_errors("write", self.path, "Make room there, then run it again."):
            self.file.write(losses.astype(KIND).tobytes())
            self.file.flush()
        self.done += len(losses)

    def read(self) -> np.ndarray:
        self.file.seek(0)
        return np.frombuffer(self.file.read(), dtype=KIND)


def count_complete_passes(passes: Passes, targets: int) -> int:
    """The most targets, up to this many, that whole passes score.

    ten tokens, length 4, stride 2:   3 → 0    4 → 4    5 → 4    10 → 10
    """
    if targets >= passes.tokens:
        return passes.tokens
    return passes[passes.at(targets)].first


@contextmanager
def open_scores(path: Path, passes: Passes) -> Iterator[Scores]:
    make_folder(path.parent)
    with file_lock(path, f"Another process is computing {path}. Wait for it, or stop it first."):
        scores = Scores(path, passes)
        try:
            yield scores
        finally:
            with suppress(OSError):  # what could not be written was told by append
                scores.file.close()
