"""Prepare a dataset: encode the documents of a corpus, and store the tokens in a folder.

One process reads the corpus and cuts it into chunks. Worker processes encode the chunks, and the tokens are appended in
the order of the text. The memory does not depend on the size of the corpus, and the result does not depend on the
number of workers. A preparation that was killed continues from its stored state (prepare_state.py).
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
from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import (
    CHECKSUM_CACHE_FILE,
    META_FILE,
    UNFINISHED_FILE,
    DataRequest,
    DatasetMeta,
    PreparedDataset,
    SplitMeta,
    bin_path,
    is_dataset_folder,
    offsets_path,
    open_dataset,
    token_type,
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

# A chunk, the unit of work of a worker, has at least this many characters.
CHUNK_CHARACTERS = 1 << 20

# The state is stored at most once in this time.
COMMIT_SECONDS = 1.0

# The number of skipped files that are named for each reason. There can be thousands of them.
MAX_SKIPPED_NAMES = 8

# For less text per worker, starting a process takes longer than the encoding.
MIN_BYTES_PER_WORKER = 1 << 23


@dataclass(frozen=True)
class PrepareContext:
    """What all steps of a preparation need.

    Attributes:
        config: The settings of the dataset.
        corpus: The corpus that is encoded.
        request: The description of the request, which is stored in the folder.
        folder: The folder of the dataset.
        errors: What happens to bytes that are not valid UTF-8.
        workers: The number of processes that encode.
        progress: The progress bar and messages.
    """

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
    """Prepare the dataset that the settings describe, or open the dataset if it was prepared before.

    Args:
        config: The settings of the dataset.
        progress: Whether to show the progress.
        workers: The number of processes that encode. By default, one process per core, and fewer for a small corpus.
        errors: What happens to bytes that are not valid UTF-8.
        resume: Whether to continue a preparation that was interrupted. If False, the preparation starts again.

    Returns:
        The open dataset.

    Raises:
        InputError: If the corpus or the tokenizer cannot be used, if the folder was prepared with other settings or
            holds other files, or if the files cannot be written.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}.")
    folder = data_folder(config)
    if is_dataset_folder(folder):
        return _open_checked(folder, config)

    corpus = find_corpus(config.corpus)
    prepare_progress = PrepareProgress(progress)
    shows_spinner = corpus.streamed and progress
    spinner_text = f"asking the hub for '{corpus.name}'" if shows_spinner else None
    with show_spinner(spinner_text):
        # The splits of a streamed corpus are requested from the hub. An error must occur before a folder is created.
        _ = corpus.splits
    if corpus.streamed:
        prepare_progress.say(f"Streaming '{corpus.name}' from the hub while it is encoded ...")
    context = PrepareContext(
        config=config,
        corpus=corpus,
        request=make_request(config, corpus),
        folder=folder,
        errors=errors,
        workers=workers or _default_workers(corpus),
        progress=prepare_progress,
    )
    with (
        io.remove_empty_folders(folder),
        _translate_disk_errors(folder),
        io.file_lock(io.make_folder(folder)),
    ):
        # Under torchrun, another process may have prepared the dataset while this process waited for the lock.
        if is_dataset_folder(folder):
            return _open_checked(folder, config)
        state = _load_or_create_state(context, resume)
        with prepare_progress.show_bar():
            if not state.ready:
                state = _choose_splits_and_tokenizer(context, state)
            state, bytes_per_second = _encode_corpus(context, state)
            prepared = _finish(context, state)
    _report(context, prepared, bytes_per_second)
    return prepared


def _default_workers(corpus: Corpus) -> int:
    """Return the number of processes that encode a corpus: one per core, and fewer for a small corpus."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    if corpus.size is None:
        return cores
    useful_workers = max(1, corpus.size // MIN_BYTES_PER_WORKER)
    return min(cores, useful_workers)


def open_or_prepare(config: DataConfig, **options: Any) -> PreparedDataset:
    """Return the dataset for a training run. A prepared dataset consists of the tokens of a corpus in a folder.

    If the setting `data.folder` names a folder, the folder must contain a prepared dataset, and the settings of the
    corpus and the tokenizer are ignored. Otherwise the dataset is prepared if necessary.

    Args:
        config: The settings of the dataset.
        options: Further arguments of `prepare`. They are not used if `data.folder` names a folder.

    Raises:
        InputError: If `data.folder` is not a prepared dataset, or if the dataset cannot be prepared.
    """
    folder = config.folder
    if folder is None:
        return prepare(config, **options)
    if folder.is_file():
        raise InputError(
            f"data.folder {folder} is a file, but must be a folder. Prepare the file with "
            f"`trainshort prepare {folder}`, and give the folder that this command creates."
        )
    is_prepared = is_dataset_folder(folder) or (folder / UNFINISHED_FILE).exists()
    if not is_prepared:
        is_empty = not folder.is_dir() or not any(folder.iterdir())
        if is_empty:
            advice = f"Prepare the data with `trainshort prepare {config.corpus} --out {folder}`"
        else:
            advice = "Give a folder that `trainshort prepare` created"
        raise InputError(
            f"data.folder {folder} is not a dataset folder (it has no {META_FILE}). {advice}, or omit data.folder."
        )
    return open_dataset(folder)


def resolve_data_config(config: DataConfig, prepared: PreparedDataset) -> DataConfig:
    """Return the settings that describe a prepared dataset.

    If the user named a prepared folder with `data.folder`, the settings of the corpus and the tokenizer are replaced by
    the settings with which the folder was prepared.
    """
    if config.folder is None:
        return config
    request = prepared.meta.request
    return config.replace(
        corpus=request.corpus,
        tokenizer=request.tokenizer,
        vocab_size=request.vocab_size or config.vocab_size,  # The request is None for a fixed vocabulary.
    )


def _open_checked(folder: Path, config: DataConfig) -> PreparedDataset:
    """Open a dataset. `InputError` is raised if it was prepared with other settings."""
    prepared = open_dataset(folder)
    check_same_request(folder, prepared.meta.request, config, "was prepared")
    return prepared


def _load_or_create_state(context: PrepareContext, resume: bool) -> PrepareState:
    """Return the stored state of an interrupted preparation, or create a new state.

    The stored state is returned if it belongs to the same request and `resume` is True. Otherwise the files of the
    interrupted preparation are deleted, and a new state is stored.

    Raises:
        InputError: If the folder holds other files, or an interrupted preparation with other settings.
    """
    state = read_prepare_state(context.folder)
    # A state without a cursor (a position in the text) belongs to a preparation that has not written any tokens.
    # Such a preparation is replaced without an error.
    if state is not None and state.cursor is not None:
        check_same_request(context.folder, state.request, context.config, "holds an unfinished preparation")
    if state is not None and state.request == context.request and resume:
        return state

    existing_files = {path.name for path in context.folder.iterdir()}
    if state is None:
        replaceable_files = {UNFINISHED_FILE + io.PARTIAL}
    else:
        replaceable_files = _files_of_preparation(context.folder)
    other_files = sorted(existing_files - replaceable_files)
    if other_files:
        raise InputError(
            f"{context.folder} exists and holds other files ({', '.join(other_files[:3])}). "
            "Choose another folder with --out."
        )
    for name in existing_files:
        (context.folder / name).unlink()
    return write_prepare_state(context.folder, PrepareState(request=context.request))


def _files_of_preparation(folder: Path) -> set[str]:
    """Return the names of all files that an interrupted preparation of a dataset can leave in a folder."""
    # These files are first written under a name with the suffix `io.PARTIAL`, and then renamed.
    atomic_files = {UNFINISHED_FILE, TOKENIZER_FILE, CHECKSUM_CACHE_FILE}
    names = set(atomic_files)
    names.update(name + io.PARTIAL for name in atomic_files)
    for split in SPLITS:
        names.add(bin_path(folder, split).name)  # the tokens
        names.add(offsets_path(folder, split).name)  # the position of the first token of each document
    return names


def _choose_splits_and_tokenizer(context: PrepareContext, state: PrepareState) -> PrepareState:
    """Choose the rule that assigns documents to splits, train or load the tokenizer, and store both.

    The splits are "train", "valid" and "test". If the corpus or the tokenizer cannot be used, the folder is removed.

    Returns:
        The new state.

    Raises:
        InputError: If the corpus or the tokenizer cannot be used.
    """
    try:
        if not context.corpus.streamed:
            _require_text(context)
        splitter = make_splitter(context.corpus, context.errors)
        tokenizer = _make_tokenizer(context, splitter)
        io.write_atomic(context.folder / TOKENIZER_FILE, tokenizer.to_json(), hint=DISK_FULL_HINT)
        return write_prepare_state(
            context.folder,
            state,
            ready=True,  # The splits and the tokenizer are chosen.
            missing=splitter.missing,
            # A document goes to test or valid if the hash of its text is below these bounds.
            test_below=splitter.test_below,
            valid_below=splitter.valid_below,
        )
    except InputError:
        (context.folder / UNFINISHED_FILE).unlink(missing_ok=True)
        with suppress(OSError):
            context.folder.rmdir()  # Other files in the folder are kept, because `rmdir` fails if the folder has any.
        raise


def _require_text(context: PrepareContext) -> None:
    """Raise `InputError` if all documents of the corpus are empty."""
    for document in context.corpus.documents(errors=context.errors):
        if document.text.strip():
            return
    raise InputError(f"'{context.corpus.name}' contains only white space. Give files with text in them.")


def _make_tokenizer(context: PrepareContext, splitter: Splitter) -> Tokenizer:
    """Return the tokenizer that the settings name. A tokenizer with a chosen vocabulary size is trained on the text.

    Args:
        context: The settings and the corpus.
        splitter: The rule that assigns documents to the splits "train", "valid" and "test". A tokenizer is trained on
            training documents only.
    """
    name = context.config.tokenizer
    vocab_size = context.config.vocab_size
    corpus = context.corpus
    if name not in tokenizers:
        return load_tokenizer(Path(name))
    tokenizer_class = tokenizers.get(name)
    if not tokenizer_class.sized:  # The vocabulary size is fixed, so no training is needed.
        return tokenizer_class.build((), vocab_size, None)
    if "train" not in corpus.splits:
        raise InputError(
            f"'{corpus.name}' has no training text to build a vocabulary for the tokenizer {name}. "
            "Give the tokenizer.json of the data that the model was trained on."
        )
    context.progress.start_stage("reading for the vocabulary", corpus.size)
    documents = context.progress.track(corpus.documents(errors=context.errors))
    training_texts = (document.text for document in documents if splitter.split(document) == "train")
    # A streamed corpus is not sampled evenly, because the complete corpus would have to be downloaded twice.
    byte_count = None if corpus.streamed else corpus.size
    return tokenizer_class.build(training_texts, vocab_size, byte_count)


def _encode_corpus(context: PrepareContext, state: PrepareState) -> tuple[PrepareState, float]:
    """Encode all documents that are not encoded yet, and store their tokens.

    Args:
        context: The corpus and the folder.
        state: The state from which the encoding continues.

    Returns:
        The final state, and the speed in bytes of text per second.
    """
    tokenizer = load_tokenizer(context.folder)
    splitter = Splitter(state.missing, state.test_below, state.valid_below)
    splits = tuple(name for name in SPLITS if name in context.corpus.splits or name in splitter.missing)
    token_bytes = np.dtype(token_type(tokenizer.vocab_size)).itemsize
    chunks = iter_chunks(context.corpus, splitter, state.cursor, context.errors)

    start_time = time.perf_counter()
    last_commit_time = start_time
    encoded_bytes = 0
    cursor = state.cursor
    bytes_read = state.done
    context.progress.start_stage("encoding", context.corpus.size, state.done)
    with (
        closing(TokenWriter(context.folder, state, splits, token_bytes)) as writer,
        closing(encode(chunks, context.folder, context.workers)) as results,
    ):
        for chunk, encoded in results:
            writer.append(encoded)
            encoded_bytes += sum(encoded_split.bytes for encoded_split in encoded.values())
            cursor = chunk.cursor
            bytes_read = chunk.bytes_read
            context.progress.update(bytes_read)
            if time.perf_counter() - last_commit_time > COMMIT_SECONDS:
                writer.commit(cursor, bytes_read)
                last_commit_time = time.perf_counter()
        writer.commit(cursor, bytes_read)
    seconds = time.perf_counter() - start_time
    return writer.state, encoded_bytes / max(seconds, 1e-9)


def iter_chunks(corpus: Corpus, splitter: Splitter, cursor: Any, errors: Errors) -> Iterator[Chunk]:
    """Yield the documents of a corpus in chunks of at least `CHUNK_CHARACTERS` characters. The last can be smaller.

    A chunk consists of pairs (split, text), and the cursor (position in the corpus) after its last document.

    Args:
        corpus: The corpus.
        splitter: The rule that assigns documents to the splits "train", "valid" and "test".
        cursor: The cursor of the last document that was read before. None starts at the first document.
        errors: What happens to bytes that are not valid UTF-8.
    """
    documents: list[tuple[str, str]] = []
    characters = 0
    last_document = None
    for document in corpus.documents(cursor, errors):
        last_document = document
        documents.append((splitter.split(document), document.text))
        characters += len(document.text)
        if characters >= CHUNK_CHARACTERS:
            yield Chunk(documents, document.cursor, document.bytes_read)
            documents = []
            characters = 0
    if last_document is not None and documents:
        yield Chunk(documents, last_document.cursor, last_document.bytes_read)


def _finish(context: PrepareContext, state: PrepareState) -> PreparedDataset:
    """Compute the checksums and write meta.json, which marks the dataset folder as complete.

    Args:
        context: The settings, the folder and the corpus.
        state: The state of the preparation, with the number of tokens and documents in each split.

    Returns:
        The open dataset.

    Raises:
        InputError: If a split has no tokens, or if the corpus has changed during the preparation.
    """
    _require_tokens(context, state)
    context.progress.start_stage("checksums", None)
    splits = {}
    for name, split in state.splits.items():
        splits[name] = split.replace(
            sha256=io.sha256(bin_path(context.folder, name)),
            documents_sha256=io.sha256(offsets_path(context.folder, name)),
        )
    tokenizer = load_tokenizer(context.folder)
    meta = DatasetMeta(
        request=state.request,
        tokenizer=short_name(context.config.tokenizer),
        tokenizer_sha256=io.sha256(context.folder / TOKENIZER_FILE),
        vocab_size=tokenizer.vocab_size,
        end=tokenizer.end,
        dtype=token_type(tokenizer.vocab_size),
        errors=context.errors,
        splits=splits,
    )
    io.write_with_checksum(context.folder / META_FILE, meta.model_dump(mode="json"), hint=DISK_FULL_HINT)
    (context.folder / UNFINISHED_FILE).unlink()
    # The check raises an error if the files of the corpus have changed during the preparation.
    return _open_checked(context.folder, context.config)


def _require_tokens(context: PrepareContext, state: PrepareState) -> None:
    """Raise `InputError` if a split (train, valid or test) has no tokens."""
    empty_splits = [name for name, split in state.splits.items() if split.tokens == 0]
    if empty_splits:
        document_count = sum(split.documents for split in state.splits.values())
        raise InputError(
            f"'{context.corpus.name}' has {document_count} documents, but none for {' and '.join(empty_splits)}. "
            "Give more text, or files named train, valid and test."
        )


def _report(context: PrepareContext, prepared: PreparedDataset, bytes_per_second: float) -> None:
    """Print what was prepared, how long the preparation took, and which files were skipped."""
    source = _describe_source(context, list(prepared.meta.splits.values()))
    seconds = time.perf_counter() - context.progress.start_time
    speed = f"{bytes_per_second / 1e6:.1f} MB/s"
    processes = "1 process" if context.workers == 1 else f"{context.workers} processes"
    context.progress.say(
        f"{describe(prepared)}. Read {source} in {seconds:.1f} s, encoded at {speed} with {processes}."
    )
    skipped_files = context.corpus.skipped_files
    if skipped_files:
        context.progress.say(f"Skipped {len(skipped_files):,}: {_group_by_reason(skipped_files)}.")


def _describe_source(context: PrepareContext, splits: list[SplitMeta]) -> str:
    """Describe what was read: "2 files, 1,234 documents, 5.6 MB". A streamed corpus has no files.

    Args:
        context: The settings and the corpus.
        splits: The counts of documents and bytes in each split of the dataset (train, valid and test).
    """
    megabytes = sum(split.bytes for split in splits) / 1e6
    documents = sum(split.documents for split in splits)
    description = f"{documents:,} documents, {megabytes:.1f} MB"
    file_count = len(context.corpus.paths)
    if file_count == 1:
        description = f"1 file, {description}"
    elif file_count > 1:
        description = f"{file_count:,} files, {description}"
    return description


def _group_by_reason(skipped_files: Sequence[tuple[str, str]]) -> str:
    """Describe skipped files such that each reason appears once.

    Args:
        skipped_files: Pairs of the name of a file and the reason.

    Returns:
        A text such as "a.gz, b.gz (an archive, unpack it first); .git (hidden)".
    """
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in skipped_files:
        names_by_reason.setdefault(reason, []).append(name)

    groups = []
    for reason, names in names_by_reason.items():
        group = ", ".join(names[:MAX_SKIPPED_NAMES])
        if len(names) > MAX_SKIPPED_NAMES:
            group += f" and {len(names) - MAX_SKIPPED_NAMES:,} more"
        groups.append(f"{group} ({reason})")
    return "; ".join(groups)


def describe(prepared: PreparedDataset) -> str:
    """Describe a dataset in one line: its folder, the number of tokens of each split, and the vocabulary size."""
    counts = ", ".join(f"{name} {split.tokens:,}" for name, split in prepared.meta.splits.items())
    return f"{prepared.folder}: tokens {counts}; vocabulary {prepared.meta.vocab_size:,}"


@contextmanager
def _translate_disk_errors(folder: Path) -> Iterator[None]:
    """Context manager: raise every `OSError` of the block as an `InputError` that says how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputError(f"The disk that holds {folder} is full. {DISK_FULL_HINT}") from None
        path = error.filename or folder
        raise InputError(
            f"The preparation of {folder} failed at {path}: {io.describe_os_error(error)}. "
            "Correct the cause, and run the same command again."
        ) from None
