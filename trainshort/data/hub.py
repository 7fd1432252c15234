"""`HubCorpus`, a dataset of the Hugging Face Hub that is streamed, and `MixedCorpus`, a mixture of several corpora.

A streamed dataset is downloaded while it is read. It is not stored on the disk.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from trainshort.data.documents import SPLITS, Corpus, Document, DocumentKind, Errors, Record, group_into_documents
from trainshort.errors import InputError
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import first_sentence_of

# The smallest size of a document that is joined from rows, if each row of the dataset is a line.
MIN_DOCUMENT_CHARACTERS = 1 << 16

# Names that `datasets.load_dataset` accepts for files of these formats. The hub is not contacted for them.
FILE_BUILDERS = ("text", "json", "csv", "parquet")

# How long to wait for an answer of the hub.
HUB_TIMEOUT_SECONDS = 5.0

# The state of a stream is stored after this many rows. A resumed stream reads at most this many rows twice.
SNAPSHOT_ROWS = 1000

# Names of splits on the hub, and the names of this package.
_SPLIT_NAMES = {
    "train": "train",
    "validation": "valid",
    "valid": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}


@dataclass(frozen=True)
class HubCorpus:
    """A `Corpus` that is streamed from the Hugging Face Hub.

    The cursor of a document is a list of four values: the split, the state of the stream at its last snapshot, the
    number of rows since the snapshot, and the number of characters that were read.

    Attributes:
        name: The name that the user gave.
        path: The name of the dataset, such as "Salesforce/wikitext", or a local folder.
        config: The configuration of the dataset, such as "wikitext-2-v1", or None.
        kind: What becomes a document: "rows", "lines" or "articles".
        size: None, because the size of a streamed dataset is unknown.
        options: Further arguments of `datasets.load_dataset`.
        streamed: True.
        paths: Empty, because there are no files on the disk.
        skipped_files: Empty.
    """

    name: str
    path: str
    config: str | None = None
    kind: DocumentKind = "rows"
    size: None = None
    options: dict[str, Any] = field(default_factory=dict)
    streamed: bool = True
    paths: tuple[Path, ...] = ()
    skipped_files: tuple[tuple[str, str], ...] = ()

    @property
    def fingerprint(self) -> str:
        """A hash of the name and the options of the dataset. The text is not part of the hash."""
        description = json.dumps([self.path, self.config, self.kind, self.options], sort_keys=True)
        return hashlib.sha256(description.encode()).hexdigest()

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the dataset. The first access contacts the hub."""
        return self._cached_splits

    @cached_property
    def _cached_splits(self) -> tuple[str, ...]:
        return tuple(self._load_streams())

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        """Yield all documents after a position.

        Args:
            cursor: The cursor of the last document that was read before: its split, the state of the stream, the number
                of rows after this state, and the number of characters up to the document. None starts at the first
                split.
            errors: Has no effect, because the Hugging Face Hub serves decoded text.
        """
        streams = self._load_streams()
        splits = list(streams)
        if cursor is None:
            first_split = splits[0]
            state = None  # the state of the stream of the first split
            skipped_rows = 0
            characters_read = 0
        else:
            first_split, state, skipped_rows = cursor[:3]
            characters_read = cursor[3] if len(cursor) > 3 else 0

        for split in splits[splits.index(first_split) :]:
            rows = _stream_rows(self.name, streams[split], state, skipped_rows)
            for record in group_into_documents(rows, self.kind, MIN_DOCUMENT_CHARACTERS):
                if record.text:
                    characters_read += len(record.text)
                    document_cursor = [split, *record.cursor, characters_read]
                    yield Document(record.text, split, document_cursor, characters_read)
            # All later splits are read from the start.
            state = None
            skipped_rows = 0

    def _load_streams(self) -> dict[str, Any]:
        """Return the streams of the dataset by split, in the order train, valid, test.

        Raises:
            InputError: If the hub cannot be reached, or has no such dataset, or if the dataset has no known split.
        """
        require_package("datasets", f"Reading the dataset '{self.name}'", "trainshort[hf]")
        import datasets
        import datasets.exceptions
        import huggingface_hub

        # The libraries log each retry. The user does not need these messages.
        datasets.logging.set_verbosity_error()
        huggingface_hub.logging.set_verbosity_error()

        not_local = f"'{self.name}' is not a local file or folder, and not in $TRAINSHORT_DATA"
        advice = "or download the files and give their folder."
        is_local = self.path in FILE_BUILDERS or Path(self.path).exists()
        if not is_local and not is_hub_reachable():
            raise InputError(f"{not_local}, and the hub cannot be reached. Check the network, {advice}")
        try:
            dataset = datasets.load_dataset(self.path, self.config, streaming=True, **self.options)
        except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
            reason = first_sentence_of(error)
            raise InputError(
                f"{not_local}, and loading it from the hub failed: {reason}. Check the name, {advice}"
            ) from None

        streams = {}
        for hub_split, stream in dataset.items():
            if hub_split in _SPLIT_NAMES:
                streams[_SPLIT_NAMES[hub_split]] = stream
        if not streams:
            raise InputError(f"'{self.name}': expected a split 'train', got the splits {', '.join(dataset)}.")
        return {split: streams[split] for split in SPLITS if split in streams}


def _stream_rows(name: str, stream: Any, state: Any, skipped_rows: int) -> Iterator[Record]:
    """Yield the rows of a stream after a position.

    A position (cursor) is a pair: a state of the stream, and the number of rows that were read since the stream had
    this state. The state is read only after every `SNAPSHOT_ROWS` rows, because reading the state of a stream is slow.

    Args:
        name: The name of the corpus, for error messages.
        stream: The streamed split of a Hugging Face dataset.
        state: The state from which the stream continues, or None for the start.
        skipped_rows: How many rows after the state are not yielded, because they were read before.
    """
    if state is not None:
        stream.load_state_dict(state)
    rows_since_state = 0
    for row in _translate_network_errors(name, stream):
        if not isinstance(row.get("text"), str):
            raise InputError(f"'{name}': expected a column 'text' with strings, got the columns {', '.join(row)}.")
        rows_since_state += 1
        if rows_since_state > skipped_rows:
            yield Record(row["text"], (state, rows_since_state))
        if rows_since_state == SNAPSHOT_ROWS:
            state = stream.state_dict()
            rows_since_state = 0
            skipped_rows = 0


def _translate_network_errors(name: str, stream: Any) -> Iterator[Any]:
    """Yield the rows of a stream. Raise `InputError` if the stream fails, for example because of the network."""
    try:
        yield from stream
    except Exception as error:  # The libraries that read the stream raise many types of errors.
        reason = first_sentence_of(error)
        raise InputError(
            f"Streaming '{name}' from the hub failed ({reason}). Run the same command again to continue."
        ) from None


def is_hub_reachable() -> bool:
    """Return whether the Hugging Face Hub can be reached.

    The Hugging Face libraries would retry for half a minute. This function waits at most `HUB_TIMEOUT_SECONDS`.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        request = Request(constants.ENDPOINT, method="HEAD")
        urlopen(request, timeout=HUB_TIMEOUT_SECONDS).close()
    except HTTPError:
        return True  # The hub was reached, although it refused the request.
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class MixedCorpus:
    """A `Corpus` that mixes several corpora in proportion to their sizes.

    The next document always comes from the part of which the smallest fraction was read. The order is therefore always
    the same. When a part has no more documents, the other parts continue. With the sizes 300 and 100 and documents of
    equal size, the parts a and b are read in the order a b a a a b a a a b.

    The cursor of a document is a list with three values for each part: the cursor in the part, the number of bytes that
    were read, and whether the part has ended.

    Attributes:
        name: The name of the mixture.
        parts: Pairs of a corpus and its size in bytes.
    """

    name: str
    parts: tuple[tuple[Corpus, int], ...]

    @property
    def size(self) -> int:
        """The size of all parts in bytes."""
        return sum(size for _, size in self.parts)

    @property
    def splits(self) -> tuple[str, ...]:
        """("train",), because all documents of a mixture count as training documents."""
        return ("train",)

    @property
    def streamed(self) -> bool:
        """Whether a part is streamed from the hub."""
        return any(corpus.streamed for corpus, _ in self.parts)

    @property
    def skipped_files(self) -> tuple[tuple[str, str], ...]:
        """The files that the parts do not read, each with the reason."""
        return tuple(skipped for corpus, _ in self.parts for skipped in corpus.skipped_files)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of all parts of a mixed corpus. Empty if a part is streamed from the Hugging Face Hub."""
        if self.streamed:
            return ()
        return tuple(path for corpus, _ in self.parts for path in corpus.paths)

    @property
    def fingerprint(self) -> str:
        """A hash of the fingerprints and the sizes of the parts."""
        description = [(corpus.fingerprint, size) for corpus, size in self.parts]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        """Yield all documents after a position.

        Args:
            cursor: The cursor of the last document that was read before. None starts at the first document.
            errors: What happens to bytes that are not valid UTF-8.
        """
        sizes = [size for _, size in self.parts]
        if cursor is None:
            positions = [_PartPosition() for _ in self.parts]
        else:
            positions = [_PartPosition(*values) for values in cursor]
        streams = []
        for (corpus, _), position in zip(self.parts, positions, strict=True):
            streams.append(corpus.documents(position.cursor, errors))

        def fraction_read(index: int) -> float:
            """Return how much of a part was read, as a share of the size of the part."""
            return positions[index].bytes_read / sizes[index]

        while True:
            unfinished = [index for index, position in enumerate(positions) if not position.has_ended]
            if not unfinished:
                return
            index = min(unfinished, key=fraction_read)
            position = positions[index]
            document = next(streams[index], None)
            if document is None:
                position.has_ended = True
                continue
            position.cursor = document.cursor
            position.bytes_read += len(document.text.encode())
            mixed_cursor = [position.to_list() for position in positions]
            total_bytes_read = sum(position.bytes_read for position in positions)
            yield Document(document.text, "train", mixed_cursor, total_bytes_read)


@dataclass
class _PartPosition:
    """How far a part of a mixture was read.

    Attributes:
        cursor: The cursor of the last document of the part, or None if no document was read.
        bytes_read: The size of the documents that were read, in bytes of UTF-8.
        has_ended: Whether the part has no more documents.
    """

    cursor: Any = None
    bytes_read: int = 0
    has_ended: bool = False

    def to_list(self) -> list[Any]:
        """Return the position as a JSON value for the cursor of the mixture."""
        return [self.cursor, self.bytes_read, self.has_ended]
