"""Encodes portions of text in several processes and gives the results back in order.

The workers are plain child processes that talk over their standard input and output. When the parent is killed their
input ends and they leave; `multiprocessing` would leave them behind, and would run a user's unguarded script again.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainshort.data.dataset import token_type
from trainshort.data.tokenizers.base import Tokenizer, load_tokenizer
from trainshort.errors import InputError


@dataclass(frozen=True)
class Chunk:
    """Some documents in a row, the unit of work; `cursor` is where the corpus goes on after them."""

    documents: list[tuple[str, str]]
    """Split and text."""
    cursor: Any
    done: int


@dataclass
class EncodedChunk:
    """One split's share of a portion."""

    tokens: bytes
    lengths: list[int]
    """Tokens of each document."""
    words: int
    bytes: int


def encode_chunk(tokenizer: Tokenizer, documents: list[tuple[str, str]]) -> dict[str, EncodedChunk]:
    """The tokens of a portion by split, in the type that goes to disk."""
    kind = np.dtype(token_type(tokenizer.vocab_size)).newbyteorder("<")
    by_split: dict[str, list[str]] = {}
    for split, text in documents:
        by_split.setdefault(split, []).append(text)
    result = {}
    for split, texts in by_split.items():
        arrays = [tokenizer.encode_document(text) for text in texts]
        result[split] = EncodedChunk(
            tokens=np.concatenate(arrays).astype(kind).tobytes(),
            lengths=[len(array) for array in arrays],
            words=sum(len(text.split()) for text in texts),
            bytes=sum(len(text.encode()) for text in texts),
        )
    return result


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """A worker for the tokenizer in `folder`."""
    paths = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    return subprocess.Popen(
        [sys.executable, "-c", "from trainshort.data.encode_workers import serve; serve()", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths)}
        # One thread each: there are as many workers as cores.
        | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )


def _ask(worker: subprocess.Popen[bytes], documents: list[tuple[str, str]]) -> dict[str, EncodedChunk]:
    """Send a worker a portion, and wait for the answer."""
    assert worker.stdin
    assert worker.stdout
    try:
        pickle.dump(documents, worker.stdin, protocol=5)
        worker.stdin.flush()
        return pickle.load(worker.stdout)
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):
        code = worker.wait()
        raise InputError(
            f"A worker process ended by itself (exit code {code}; -9 often means too little memory). "
            "Run the same command again to continue, perhaps with fewer --workers."
        ) from None


def encode(
    portions: Iterable[Chunk], folder: Path, workers: int
) -> Generator[tuple[Chunk, dict[str, EncodedChunk]], None, None]:
    """Every portion with its tokens, in order; two portions a worker are in memory at a time. With one worker the work
    is done right here."""
    if workers == 1:
        tokenizer = load_tokenizer(folder)
        yield from ((portion, encode_chunk(tokenizer, portion.documents)) for portion in portions)
        return
    processes = [_start(folder) for _ in range(workers)]
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def by_a_worker(portion: Chunk) -> dict[str, EncodedChunk]:
        process = idle.get()
        try:
            return _ask(process, portion.documents)
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(max_workers=workers)
    waiting: deque[tuple[Chunk, Future[dict[str, EncodedChunk]]]] = deque()
    try:
        for portion in portions:
            waiting.append((portion, threads.submit(by_a_worker, portion)))
            if len(waiting) >= 2 * workers:
                first, result = waiting.popleft()
                yield first, result.result()
        for portion, result in waiting:
            yield portion, result.result()
    finally:
        # First the processes: threads that wait for an answer then get an end of file, and can end too.
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()


def serve() -> None:
    """A worker's life: read portions, write their tokens, leave when the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    requests: BinaryIO = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that is printed may get among the answers
    tokenizer = load_tokenizer(Path(sys.argv[1]))
    while True:
        try:
            documents = pickle.load(requests)
            pickle.dump(encode_chunk(tokenizer, documents), answers, protocol=5)
            answers.flush()
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            os._exit(0)  # the parent is gone, and so is the pipe into which Python would still flush
