"""`prepare`: from a corpus to a folder of tokens.

One process reads the corpus forward and cuts it into portions; workers encode them; their tokens are appended in order.
So memory does not depend on the size of the corpus, the result does not depend on the number of workers, and a
killed preparation continues from its last note (ledger.py).
"""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainshort.config.run_config import DataConfig
from trainshort.data import dataset as layout
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import CHECKSUM_CACHE_FILE as CHECKED_FILE
from trainshort.data.dataset import (
    DataRequest,
    DatasetMeta,
    PreparedDataset,
    bin_path,
    is_dataset_folder,
    offsets_path,
    open_dataset,
)
from trainshort.data.dataset_request import check_same_request, data_folder, make_request, short_name
from trainshort.data.documents import SPLITS, Corpus, Errors
from trainshort.data.encode_workers import Chunk, encode
from trainshort.data.prepare_state import (
    DISK_FULL_HINT,
    PrepareProgress,
    PrepareState,
    TokenWriter,
    read_prepare_state,
    write_prepare_state,
)
from trainshort.data.splits import Splitter, make_splitter
from trainshort.data.tokenizers.base import TOKENIZER_FILE as TOKENIZER_FILE
from trainshort.data.tokenizers.base import Tokenizer, load_tokenizer, tokenizers
from trainshort.errors import InputError
from trainshort.utils import io
from trainshort.utils.terminal import show_spinner

PIECE_CHARACTERS = 1 << 20
COMMIT_SECONDS = 1.0
MAX_SKIPPED_NAMES = 8
"""Names of files that were not read which are shown; there can be thousands."""
MIN_BYTES_PER_WORKER = 1 << 23
"""Bytes of text below which starting another process costs more time than it saves."""


@dataclass(frozen=True)
class PrepareContext:
    """A preparation under way."""

    config: DataConfig
    corpus: Corpus
    request: DataRequest
    folder: Path
    errors: Errors
    workers: int
    progress: PrepareProgress


def prepare(
    config: DataConfig,
    *,
    progress: bool = True,
    workers: int | None = None,
    errors: Errors = "strict",
    resume: bool = True,
) -> PreparedDataset:
    """Make the data folder that `config` asks for, or open it when it is there already.

    A folder made from other settings is refused. An unfinished one is continued, or begun anew without `resume`.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}.")
    folder = data_folder(config)
    if is_dataset_folder(folder):
        return _open_same(folder, config)
    corpus = find_corpus(config.corpus)
    shown = PrepareProgress(progress)
    with show_spinner(f"asking the hub for '{corpus.name}'" if corpus.streamed and progress else None):
        _ = corpus.splits  # a hub that does not answer is told before a folder is made
    if corpus.streamed:
        shown.say(f"Reading '{corpus.name}' from the hub, as it is encoded ...")
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = cores if corpus.size is None else min(cores, max(1, corpus.size // MIN_BYTES_PER_WORKER))
    job = PrepareContext(config, corpus, make_request(config, corpus), folder, errors, workers, shown)
    with io.remove_empty_folders(folder), _readable_disk_errors(folder), io.file_lock(io.make_folder(folder)):
        if is_dataset_folder(folder):  # another process was quicker, as under torchrun
            return _open_same(folder, config)
        note = _begin(job, resume)
        with job.progress.shown():
            note = note if note.ready else _choose_splits_and_tokenizer(job, note)
            note, rate = _encode(job, note)
            prepared = _finish(job, note)
    _report(job, prepared, rate)
    return prepared


def open_or_prepare(config: DataConfig, **options: Any) -> PreparedDataset:
    """What training needs: a folder that was named as it is, else the one that the settings describe."""
    if config.folder is None:
        return prepare(config, **options)
    if config.folder.is_file():
        raise InputError(
            f"data.folder {config.folder} is a file. Turn it into tokens by `trainshort prepare {config.folder}`, and "
            "give the folder that this makes."
        )
    if not is_dataset_folder(config.folder) and not (config.folder / layout.UNFINISHED_FILE).exists():
        make = f"Make it by `trainshort prepare {config.corpus} --out {config.folder}`"
        if config.folder.is_dir() and any(config.folder.iterdir()):  # where prepare would not write
            make = "Name one that `trainshort prepare` made"
        raise InputError(
            f"data.folder {config.folder} is not a prepared data folder (it has no {layout.META_FILE}). {make}, or "
            "leave data.folder out."
        )
    return open_dataset(config.folder)


def resolve_data_config(config: DataConfig, prepared: PreparedDataset) -> DataConfig:
    """The settings with what a named folder really holds, whatever corpus and tokenizer the settings say."""
    if config.folder is None:
        return config
    held = prepared.meta.request
    return config.replace(corpus=held.corpus, tokenizer=held.tokenizer, vocab_size=held.vocab_size or config.vocab_size)


def _open_same(folder: Path, config: DataConfig) -> PreparedDataset:
    prepared = open_dataset(folder)
    check_same_request(folder, prepared.meta.request, config, "was prepared")
    return prepared


def _begin(job: PrepareContext, resume: bool) -> PrepareState:
    """The note to continue from, or a new one in an empty folder."""
    note = read_prepare_state(job.folder)
    if note is not None and note.cursor is not None:  # else it has no tokens yet, and nothing is lost
        check_same_request(job.folder, note.request, job.config, "holds an unfinished preparation")
    if note is not None and note.request == job.request and resume:
        return note
    ours = {layout.UNFINISHED_FILE, TOKENIZER_FILE, CHECKED_FILE}
    ours |= {name + io.PARTIAL for name in ours}
    ours |= {path(job.folder, split).name for split in SPLITS for path in (bin_path, offsets_path)}
    there = {path.name for path in job.folder.iterdir()}
    foreign = sorted(there - ours) if note is not None else sorted(there - {layout.UNFINISHED_FILE + io.PARTIAL})
    if foreign:
        raise InputError(
            f"{job.folder} exists and holds other files ({', '.join(foreign[:3])}). Choose another folder with --out."
        )
    for name in there:
        (job.folder / name).unlink()
    return write_prepare_state(job.folder, PrepareState(request=job.request))


def _choose_splits_and_tokenizer(job: PrepareContext, note: PrepareState) -> PrepareState:
    """The note with splits and tokenizer decided and kept; where the input does not allow it, no folder is left."""
    try:
        if not job.corpus.streamed and not any(one.text.strip() for one in job.corpus.documents(errors=job.errors)):
            raise InputError(f"'{job.corpus.name}' holds nothing but white space. Give files with text in them.")
        rule = make_splitter(job.corpus, job.errors)
        tokenizer = _tokenizer(job, rule)
        io.write_atomic(job.folder / TOKENIZER_FILE, tokenizer.to_json(), hint=DISK_FULL_HINT)
        decided = {"ready": True, "missing": rule.missing, "test_below": rule.test, "valid_below": rule.valid}
        return write_prepare_state(job.folder, note, **decided)
    except InputError:
        (job.folder / layout.UNFINISHED_FILE).unlink(missing_ok=True)
        with suppress(OSError):
            job.folder.rmdir()  # if nothing else is in it
        raise


def _tokenizer(job: PrepareContext, rule: Splitter) -> Tokenizer:
    kind = job.config.tokenizer
    if kind not in tokenizers:
        return load_tokenizer(Path(kind))
    if not tokenizers.get(kind).sized:
        return tokenizers.get(kind).build((), job.config.vocab_size, None)
    if "train" not in job.corpus.splits:
        raise InputError(
            f"'{job.corpus.name}' has no training text to build a {kind} vocabulary from. "
            "Give the tokenizer.json of the data that the model was trained on."
        )
    job.progress.stage("reading for the vocabulary", job.corpus.size)
    documents = job.progress.watch(job.corpus.documents(errors=job.errors))
    texts = (document.text for document in documents if rule.split(document) == "train")
    return tokenizers.get(kind).build(texts, job.config.vocab_size, None if job.corpus.streamed else job.corpus.size)


def _encode(job: PrepareContext, note: PrepareState) -> tuple[PrepareState, float]:
    """Append all tokens that are not there yet; the note of all, and how many bytes of text a second took."""
    tokenizer = load_tokenizer(job.folder)
    rule = Splitter(note.missing, note.test_below, note.valid_below)
    splits = tuple(name for name in SPLITS if name in job.corpus.splits or name in rule.missing)
    width = np.dtype(layout.token_type(tokenizer.vocab_size)).itemsize
    source = iter_chunks(job.corpus, rule, note.cursor, job.errors)
    started = committed = time.perf_counter()
    encoded, last = 0, (note.cursor, note.done)
    job.progress.stage("encoding", job.corpus.size, note.done)
    with closing(TokenWriter(job.folder, note, splits, width)) as writer:
        with closing(encode(source, job.folder, job.workers)) as results:
            for portion, parts in results:
                writer.append(parts)
                encoded += sum(part.bytes for part in parts.values())
                job.progress.at(portion.done)
                last = (portion.cursor, portion.done)
                if time.perf_counter() - committed > COMMIT_SECONDS:
                    writer.commit(*last)
                    committed = time.perf_counter()
        writer.commit(*last)
    return writer.note, encoded / max(time.perf_counter() - started, 1e-9)


def iter_chunks(corpus: Corpus, rule: Splitter, cursor: Any, errors: Errors) -> Iterator[Chunk]:
    """Documents in portions of about a million characters, each with its split."""
    documents: list[tuple[str, str]] = []
    length, document = 0, None
    for document in corpus.documents(cursor, errors):
        documents.append((rule.split(document), document.text))
        length += len(document.text)
        if length >= PIECE_CHARACTERS:
            yield Chunk(documents, document.cursor, document.done)
            documents, length = [], 0
    if document is not None and documents:
        yield Chunk(documents, document.cursor, document.done)


def _finish(job: PrepareContext, note: PrepareState) -> PreparedDataset:
    """Checksums, then meta.json, which makes the folder complete."""
    empty = [name for name, split in note.splits.items() if not split.tokens]
    if empty:
        documents = sum(split.documents for split in note.splits.values())
        raise InputError(
            f"'{job.corpus.name}' has {documents} documents, and none for {' and '.join(empty)}. "
            "Give more text, or files named train, valid and test."
        )
    job.progress.stage("checksums", None)
    splits = {
        name: split.replace(
            sha256=io.sha256(bin_path(job.folder, name)),
            documents_sha256=io.sha256(offsets_path(job.folder, name)),
        )
        for name, split in note.splits.items()
    }
    tokenizer = load_tokenizer(job.folder)
    meta = DatasetMeta(
        request=note.request,
        tokenizer=short_name(job.config.tokenizer),
        tokenizer_sha256=io.sha256(job.folder / TOKENIZER_FILE),
        vocab_size=tokenizer.vocab_size,
        end=tokenizer.end,
        dtype=layout.token_type(tokenizer.vocab_size),
        errors=job.errors,
        splits=splits,
    )
    io.write_with_checksum(job.folder / layout.META_FILE, meta.model_dump(mode="json"), hint=DISK_FULL_HINT)
    (job.folder / layout.UNFINISHED_FILE).unlink()
    return _open_same(job.folder, job.config)  # as it is found from now on; tells of a corpus that changed meanwhile


def _report(job: PrepareContext, prepared: PreparedDataset, rate: float) -> None:
    splits = prepared.meta.splits.values()
    size = sum(split.bytes for split in splits) / 1e6
    read = f"{sum(split.documents for split in splits):,} documents, {size:.1f} MB"
    if count := len(job.corpus.paths):
        read = f"{count:,} {'file' if count == 1 else 'files'}, {read}"
    whole, speed = time.perf_counter() - job.progress.started, f"{rate / 1e6:.1f} MB/s"
    processes = "1 process" if job.workers == 1 else f"{job.workers} processes"
    job.progress.say(f"{describe(prepared)}. Read {read} in {whole:.1f} s, encoded at {speed} by {processes}.")
    if others := job.corpus.skipped_files:
        job.progress.say(f"Passed over {len(others):,}: {_group_by_reason(others)}.")


def _group_by_reason(others: Sequence[tuple[str, str]]) -> str:
    """Names of what was not read, each reason once.

    a.gz, b.gz (an archive, unpack it first); .git (hidden)
    """
    found: dict[str, list[str]] = {}
    for name, why in others:
        found.setdefault(why, []).append(name)
    return "; ".join(
        f"{', '.join(names[:MAX_SKIPPED_NAMES])}"
        f"{f' and {len(names) - MAX_SKIPPED_NAMES:,} more' * (len(names) > MAX_SKIPPED_NAMES)}"
        f" ({why})"
        for why, names in found.items()
    )


def describe(prepared: PreparedDataset) -> str:
    """One line: folder, tokens by split, vocabulary."""
    counts = ", ".join(f"{name} {split.tokens:,}" for name, split in prepared.meta.splits.items())
    return f"{prepared.folder}: tokens {counts}; vocabulary {prepared.meta.vocab_size:,}"


@contextmanager
def _readable_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(f"The disk that holds {folder} is full. {DISK_FULL_HINT}") from None
        where = error.filename or folder
        raise InputError(
            f"Preparing {folder} stopped at {where}: {io.describe_os_error(error)}. "
            "Fix the cause and run the same command again."
        ) from None
