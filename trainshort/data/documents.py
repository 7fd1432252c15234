"""What every corpus yields: documents, each with the place where reading can go on after it.

Files, tables and hub streams all come as rows (a line, a record); a grouping makes documents of them. Each row and each
document carries a cursor, where reading goes on after it, so that a killed preparation continues where it stopped.

    rows         "a\\n" "\\n" "b\\n"       a plain text's lines
    stretches    "a\\n\\n"      "b\\n"     documents of whole paragraphs (here of at least 2 characters)

Which documents of an unsplit corpus are held out is decided by a hash of the text, the same every time. Identical
documents always fall into the same split, so that no copy of a training text is ever scored. A corpus with a `train`
but no `valid` or `test` gets what it lacks from its training documents.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Errors = Literal["strict", "replace"]
SPLITS = ("train", "valid", "test")
LONGEST_DOCUMENT = 1 << 22
"""Characters at which a run of lines without any heading is cut, so that memory stays bounded."""

HEADING = re.compile(r" = (?!= ).+(?<! =) = \n?")
"""A WikiText article's title, ` = Robert Boulter = `; sections have two equal signs, ` = = Career = = `."""


class Record(NamedTuple):
    """A line or record, and where it ends."""

    text: str
    cursor: Any
    """Where reading goes on after this one; plain JSON."""
    done: int = 0
    """Bytes of the source that have been read, for the progress bar."""


@dataclass(frozen=True)
class Document:
    """A text that belongs together, and the split it was published in ("train" where it was published in none)."""

    text: str
    split: str
    cursor: Any
    """Where the corpus goes on after this document; plain JSON."""
    done: int


class Corpus(Protocol):
    """A text that can be read from any document on, as often as needed, always in the same order.

    name          what the user called it
    size          bytes to read, or None where nobody knows
    splits        those it was published in; ("train",) when it was not split
    streamed      whether reading costs a download, so that samples are taken from the beginning
    fingerprint   changes when the text does, as far as that can be seen without reading it
    paths         the files whose content is the text; none where it is streamed
    skipped_files   what lies beside them and is not read, each with the reason
    documents     all after `cursor`; bytes that are not UTF-8 are an error or become U+FFFD
    """

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int | None: ...
    @property
    def splits(self) -> tuple[str, ...]: ...
    @property
    def streamed(self) -> bool: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def skipped_files(self) -> Sequence[tuple[str, str]]: ...
    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]: ...


Kind = Literal["whole", "stretches", "articles", "rows", "lines"]
"""What becomes a document: a file, a stretch of one, an article of WikiText's lines, a record, or records as lines."""


def group_into_documents(records: Iterator[Record], kind: Kind, size: int) -> Iterator[Record]:
    """The documents that records make; those of lines have at least `size` characters."""
    if kind == "articles":
        return articles(as_lines(records, blank=" \n"))
    return split_by_paragraphs(as_lines(records), size) if kind == "lines" else records


def split_by_paragraphs(rows: Iterable[Record], size: int) -> Iterator[Record]:
    """Documents of whole paragraphs: at least `size` characters to a blank line, twice that to any line end."""
    parts: list[Record] = []
    length = 0
    for row in rows:
        parts.append(row)
        length += len(row.text)
        if length >= 2 * size or (length >= size and not row.text.strip()):
            yield _join(parts)
            parts, length = [], 0
    if parts:
        yield _join(parts)


def articles(rows: Iterable[Record]) -> Iterator[Record]:
    """WikiText's articles: each begins with the blank line before its title (formulas can look like a title, without).

    " " " = A = " " " "text" " " " = B = " " " "more"  becomes  [" " " = A = " " " "text"], [" " " = B = " " " "more"]
    """
    parts: list[Record] = []
    length = 0
    for row in rows:
        blank_before = bool(parts) and not parts[-1].text.strip()
        body = parts[:-1] if blank_before else parts
        title = blank_before and HEADING.fullmatch(row.text)
        if body and (title or length >= LONGEST_DOCUMENT):
            yield _join(body)
            parts = parts[len(body) :]
            length = sum(len(part.text) for part in parts)
        parts.append(row)
        length += len(row.text)
    if parts:
        yield _join(parts)


def as_lines(rows: Iterable[Record], blank: str = "\n") -> Iterator[Record]:
    """Records that are lines get their line ends back; an empty one was a blank line (WikiText writes " \\n")."""
    for row in rows:
        text = row.text if row.text.endswith("\n") else row.text + "\n"
        yield Record(blank if text == "\n" else text, row.cursor, row.done)


def _join(rows: list[Record]) -> Record:
    return Record("".join(row.text for row in rows), rows[-1].cursor, rows[-1].done)
