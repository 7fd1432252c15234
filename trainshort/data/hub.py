"""Text from the Hugging Face hub through `datasets`, streamed: nothing is downloaded that has not been read yet.

Also the mixture of several corpora by size, which is how the paper's largest training set is made of its parts.
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

from trainshort.data.documents import SPLITS, Corpus, Document, Errors, Kind, Record, group_into_documents
from trainshort.errors import InputError
from trainshort.utils.optional import require_package
from trainshort.utils.terminal import first_sentence_of

STRETCH = 1 << 16
"""Characters of a document that is gathered from rows which are single lines."""
BUILDERS = ("text", "json", "csv", "parquet")
"""Names by which `datasets` reads files from anywhere, without asking the hub."""
PATIENCE = 5.0
"""Seconds that the hub has for an answer."""
SNAPSHOT_ROWS = 1000
"""Rows between two states of the stream; resuming skips fewer rows than this."""

_SPLITS = {"train": "train", "validation": "valid", "valid": "valid", "val": "valid", "dev": "valid", "test": "test"}


@dataclass(frozen=True)
class HubCorpus:
    """A dataset by its hub name (or a local folder that `datasets` can load); the cursor is
    [split, state, rows, characters]."""

    name: str
    path: str
    config: str | None = None
    kind: Kind = "rows"
    """rows: a row is a document; lines: rows are gathered; articles: rows are WikiText's lines."""
    size: None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `datasets.load_dataset`."""
    streamed: bool = True
    paths: tuple[Path, ...] = ()
    skipped_files: tuple[tuple[str, str], ...] = ()

    @property
    def fingerprint(self) -> str:
        parts = json.dumps([self.path, self.config, self.kind, self.options], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()

    @property
    def splits(self) -> tuple[str, ...]:
        return self._found_splits

    @cached_property
    def _found_splits(self) -> tuple[str, ...]:
        return tuple(self._streams())

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        streams = self._streams()
        names = list(streams)
        first, state, skip, *rest = cursor or (names[0], None, 0)
        done = rest[0] if rest else 0
        for name in names[names.index(first) :]:
            rows = _stream_rows(self.name, streams[name], state, skip)
            for row in group_into_documents(rows, self.kind, STRETCH):
                if row.text:
                    done += len(row.text)
                    yield Document(row.text, name, [name, *row.cursor, done], done)
            state, skip = None, 0

    def _streams(self) -> dict[str, Any]:
        """The dataset's streams under our names of the splits."""
        require_package("datasets", f"Reading the dataset '{self.name}'", "trainshort[hf]")
        import datasets
        import datasets.exceptions
        import huggingface_hub

        datasets.logging.set_verbosity_error()  # retries are theirs to make, and not the user's to read
        huggingface_hub.logging.set_verbosity_error()
        nowhere = f"'{self.name}' is no file or folder here or in $TRAINSHORT_DATA, and the hub"
        download = "or download the files and give their folder."
        if not (self.path in BUILDERS or Path(self.path).exists() or is_hub_reachable()):
            raise InputError(f"{nowhere} does not answer. Check the network, {download}")
        try:
            loaded = datasets.load_dataset(self.path, self.config, streaming=True, **self.options)
        except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
            reason = first_sentence_of(error)
            raise InputError(f"{nowhere} could not serve it: {reason}. Check the name, {download}") from None
        found = {_SPLITS[name]: stream for name, stream in loaded.items() if name in _SPLITS}
        if not found:
            raise InputError(f"'{self.name}' should have a split 'train'; it has {', '.join(loaded)}.")
        return {name: found[name] for name in SPLITS if name in found}


def _stream_rows(name: str, stream: Any, state: Any, skip: int) -> Iterator[Record]:
    """Rows from a position on. A position is (state, rows after it): taking a state is costly, counting is not."""
    if state is not None:
        stream.load_state_dict(state)
    since = 0
    for record in _translate_network_errors(name, stream):
        if not isinstance(record.get("text"), str):
            raise InputError(f"'{name}' should have a column 'text' with strings; its columns are {', '.join(record)}.")
        since += 1
        if since > skip:
            yield Record(record["text"], (state, since))
        if since == SNAPSHOT_ROWS:
            state, since, skip = stream.state_dict(), 0, 0


def _translate_network_errors(name: str, stream: Any) -> Iterator[Any]:
    """The same records; a network that breaks, in whatever of many ways, is a sentence."""
    try:
        yield from stream
    except Exception as error:  # of the network, of the files, of the libraries that read them
        reason = first_sentence_of(error)
        raise InputError(f"'{name}' stopped coming from the hub ({reason}). The same command continues.") from None


def is_hub_reachable() -> bool:
    """Whether the hub can be reached, found out at once instead of in half a minute of retries."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except HTTPError:
        return True  # a refusal is an answer too
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class MixedCorpus:
    """Several corpora, mixed by size: the next document comes from the part of which the least has been read.

    Sizes 300 and 100, documents of 10: a b a a a b a a a b ... Nothing is drawn by chance, so the mixture is the same
    every time; a part that ends early leaves the rest to the others. The cursor is [cursor, bytes, ended] per part.
    """

    name: str
    parts: tuple[tuple[Corpus, int], ...]
    """Each part with its size in bytes."""

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train",)

    @property
    def streamed(self) -> bool:
        return any(part.streamed for part, _ in self.parts)

    @property
    def skipped_files(self) -> tuple[tuple[str, str], ...]:
        return tuple(one for part, _ in self.parts for one in part.skipped_files)

    @property
    def paths(self) -> tuple[Path, ...]:
        return () if self.streamed else tuple(path for part, _ in self.parts for path in part.paths)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([(part.fingerprint, size) for part, size in self.parts]).encode()).hexdigest()

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        places = [list(place) for place in cursor or [[None, 0, False]] * len(self.parts)]
        streams = [part.documents(place[0], errors) for (part, _), place in zip(self.parts, places, strict=True)]
        while unread := [index for index, place in enumerate(places) if not place[2]]:
            index = min(unread, key=lambda index: places[index][1] / self.parts[index][1])
            document = next(streams[index], None)
            if document is None:
                places[index] = [*places[index][:2], True]
                continue
            places[index] = [document.cursor, places[index][1] + len(document.text.encode()), False]
            done = sum(place[1] for place in places)
            yield Document(document.text, "train", list(places), done)
