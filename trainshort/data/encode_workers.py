"""Encode chunks of text in several processes, and return the results in the order of the text.

The workers are plain child processes that communicate through their standard input and output. When the parent process
is killed, the input of the workers ends, and they exit. The package `multiprocessing` is not used, because its workers
would keep running, and because it would execute a user's script again that has no `if __name__ == "__main__"`.
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

# The number of chunks per worker that are in memory at the same time. The second chunk is ready when a worker is done
# with the first chunk.
CHUNKS_PER_WORKER = 2


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents that are encoded together.

    Attributes:
        documents: Pairs of the split and the text of a document.
        cursor: The cursor of the last document.
        bytes_read: How much of the corpus was read up to the last document.
    """

    documents: list[tuple[str, str]]
    cursor: Any
    bytes_read: int


@dataclass
class EncodedChunk:
    """The encoded documents of a chunk that belong to one split.

    Attributes:
        tokens: The tokens as bytes, in the type in which they are stored.
        lengths: The number of tokens of each document.
        words: The number of words in the text.
        bytes: The size of the text in bytes of UTF-8.
    """

    tokens: bytes
    lengths: list[int]
    words: int
    bytes: int


def encode_chunk(tokenizer: Tokenizer, documents: list[tuple[str, str]]) -> dict[str, EncodedChunk]:
    """Convert documents to tokens.

    Args:
        tokenizer: The tokenizer.
        documents: Pairs of the split ("train", "valid" or "test") and the text of a document.

    Returns:
        The encoded documents of each split: all tokens as bytes, the number of tokens of each document, and the number
        of words and bytes of the text.
    """
    dtype = np.dtype(token_type(tokenizer.vocab_size)).newbyteorder("<")  # for example little-endian uint16
    texts_by_split: dict[str, list[str]] = {}
    for split, text in documents:
        texts_by_split.setdefault(split, []).append(text)

    encoded = {}
    for split, texts in texts_by_split.items():
        token_arrays = [tokenizer.encode_document(text) for text in texts]
        encoded[split] = EncodedChunk(
            tokens=np.concatenate(token_arrays).astype(dtype).tobytes(),
            lengths=[len(tokens) for tokens in token_arrays],
            words=sum(len(text.split()) for text in texts),
            bytes=sum(len(text.encode()) for text in texts),
        )
    return encoded


def encode(
    chunks: Iterable[Chunk], folder: Path, workers: int
) -> Generator[tuple[Chunk, dict[str, EncodedChunk]], None, None]:
    """Encode chunks in several processes.

    Args:
        chunks: The chunks. They are read while others are encoded.
        folder: The dataset folder with the tokenizer.
        workers: The number of processes. A single worker is not a process: the work is done in this process.

    Yields:
        Each chunk with the result of `encode_chunk`, in the order of the chunks.

    Raises:
        InputError: If a worker process was killed.
    """
    if workers == 1:
        tokenizer = load_tokenizer(folder)
        for chunk in chunks:
            yield chunk, encode_chunk(tokenizer, chunk.documents)
        return

    processes = [_start_worker(folder) for _ in range(workers)]
    idle_processes: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    for process in processes:
        idle_processes.put(process)

    def encode_in_worker(chunk: Chunk) -> dict[str, EncodedChunk]:
        """Encode a chunk of documents in a worker process that is idle. If all processes are busy, wait for one."""
        process = idle_processes.get()
        try:
            return _request_encoding(process, chunk.documents)
        finally:
            idle_processes.put(process)

    # Each thread waits for one worker process.
    threads = ThreadPoolExecutor(max_workers=workers)
    pending: deque[tuple[Chunk, Future[dict[str, EncodedChunk]]]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, threads.submit(encode_in_worker, chunk)))
            if len(pending) >= CHUNKS_PER_WORKER * workers:
                oldest_chunk, future = pending.popleft()
                yield oldest_chunk, future.result()
        for chunk, future in pending:
            yield chunk, future.result()
    finally:
        # The processes are killed first. Threads that wait for a result then get an end of file and can end.
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()


def _start_worker(folder: Path) -> subprocess.Popen[bytes]:
    """Start a worker process that uses the tokenizer in a dataset folder."""
    # The folder that contains the package `trainshort`. The worker must import the same package as this process.
    package_root = str(Path(__file__).parents[2])
    import_paths = [package_root]
    if os.environ.get("PYTHONPATH"):
        import_paths.append(os.environ["PYTHONPATH"])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(import_paths),
        # Each worker uses one thread, because there is one worker per core.
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    code = "from trainshort.data.encode_workers import run_worker; run_worker()"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _request_encoding(worker: subprocess.Popen[bytes], documents: list[tuple[str, str]]) -> dict[str, EncodedChunk]:
    """Send documents to a worker process, and wait for the encoded documents.

    Args:
        worker: The process, which runs `run_worker`.
        documents: Pairs of the split ("train", "valid" or "test") and the text of a document.

    Returns:
        The encoded documents of each split.
    """
    assert worker.stdin
    assert worker.stdout
    try:
        pickle.dump(documents, worker.stdin, protocol=5)
        worker.stdin.flush()
        return pickle.load(worker.stdout)
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):
        exit_code = worker.wait()
        raise InputError(
            f"A worker process ended with the exit code {exit_code} (-9 often means that there was not enough memory). "
            "Run the same command again to continue, perhaps with fewer --workers."
        ) from None


def run_worker() -> None:
    """Run a worker process: read documents from standard input, and write the encoded documents to standard output.

    Both are exchanged as pickles. The command-line argument of the process is the dataset folder, which contains the
    tokenizer. The process exits when its input ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the parent process handles Ctrl-C.
    requests: BinaryIO = sys.stdin.buffer
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Output of libraries goes to standard error, so that it is not mixed with the results.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    tokenizer = load_tokenizer(Path(sys.argv[1]))
    while True:
        try:
            documents = pickle.load(requests)
            pickle.dump(encode_chunk(tokenizer, documents), results, protocol=5)
            results.flush()
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            # The parent process has ended. `sys.exit` would fail, because Python would flush the closed pipe.
            os._exit(0)
