"""`Document` and `Corpus`, and functions that group the lines or records of a corpus into documents.

Text files, tables and datasets of the Hugging Face Hub are read as records. A record is a line of a text file, or a row
of a table. Records are then grouped into documents. Each record and each document has a cursor: the position after it.
A preparation that was interrupted continues from the cursor of the last document that was stored.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

# What happens to bytes that are not valid UTF-8: raise an error, or replace them by U+FFFD.
Errors = Literal["strict", "replace"]

SPLITS = ("train", "valid", "test")

# A WikiText article is cut after this many characters if no heading follows, so that the memory stays bounded.
MAX_ARTICLE_CHARACTERS = 1 << 22

# The title of a WikiText article, such as " = Robert Boulter = ". Titles of sections have two equal signs on each
# side, such as " = = Career = = ", and do not match.
HEADING = re.compile(r" = (?!= ).+(?<! =) = \n?")

DocumentKind = Literal["whole", "stretches", "articles", "rows", "lines"]
"""What becomes a document.

- "whole": A file is a document.
- "stretches": A file is cut into documents of whole paragraphs.
- "articles": The records are the lines of WikiText. An article is a document.
- "rows": A record is a document.
- "lines": The records are lines. Consecutive lines are joined to documents of whole paragraphs.
"""


class Record(NamedTuple):
    """A line of a text file, a row of a table, or several of them that were joined.

    Attributes:
        text: The text of the record.
        cursor: The position after the record, as a JSON value.
        bytes_read: How much of the source was read up to the end of the record, for the progress bar.
    """

    text: str
    cursor: Any
    bytes_read: int = 0


@dataclass(frozen=True)
class Document:
    """One document of a corpus.

    Attributes:
        text: The text of the document.
        split: The split in which the document was published. It is "train" if the corpus was published without splits.
        cursor: The position in the corpus after the document, as a JSON value.
        bytes_read: How much of the corpus was read up to the end of the document, for the progress bar.
    """

    text: str
    split: str
    cursor: Any
    bytes_read: int


class Corpus(Protocol):
    """A text corpus. The documents can be read several times, from any document on, always in the same order.

    Attributes:
        name: The name or path that the user gave.
        size: The size in bytes, or None if it is unknown.
        splits: The splits in which the corpus was published. ("train",) if it was published without splits.
        streamed: Whether the corpus is downloaded while it is read. Tokenizers are then trained on its beginning.
        fingerprint: A hash that changes if the names or sizes of the files change. The files are not read.
        paths: The files that contain the text. Empty if the corpus is streamed.
        skipped_files: The files in the same folder that are not read, each with the reason.
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

    def documents(self, cursor: Any = None, errors: Errors = "strict") -> Iterator[Document]:
        """Yield all documents after a position.

        Args:
            cursor: The cursor (the position in the corpus) of the last document that was read before. None starts at
                the first document.
            errors: What happens to bytes that are not valid UTF-8: "strict" raises an error, "replace" replaces them.
        """
        ...


def group_into_documents(records: Iterator[Record], kind: DocumentKind, min_characters: int) -> Iterator[Record]:
    """Group the records of a table or a dataset into documents.

    Args:
        records: The records (texts with their position in the source) in the order of the source.
        kind: "articles" joins the records of each WikiText article, and "lines" joins records that are lines to
            documents of whole paragraphs. For all other kinds, each record is a document.
        min_characters: The smallest size of a document of the kind "lines". The last document can be smaller.

    Returns:
        One record for each document.
    """
    if kind == "articles":
        return group_into_articles(as_lines(records, blank_line=" \n"))
    if kind == "lines":
        return group_into_paragraphs(as_lines(records), min_characters)
    return records


def group_into_paragraphs(lines: Iterable[Record], min_characters: int) -> Iterator[Record]:
    """Join lines to documents of whole paragraphs.

    A document ends at the first blank line at which it has at least `min_characters` characters. A document without
    such a blank line ends at the first line end at which it has at least twice as many characters.

    Example:
        For `min_characters=2`, the lines "a", "", "b" become the documents "a\\n\\n" and "b\\n".
    """
    document_lines: list[Record] = []
    characters = 0
    for line in lines:
        document_lines.append(line)
        characters += len(line.text)
        is_blank = not line.text.strip()
        ends_paragraph = is_blank and characters >= min_characters
        if ends_paragraph or characters >= 2 * min_characters:
            yield _join_records(document_lines)
            document_lines = []
            characters = 0
    if document_lines:
        yield _join_records(document_lines)


def group_into_articles(lines: Iterable[Record]) -> Iterator[Record]:
    """Join the lines of WikiText to articles.

    A title is a line such as " = Title = ". An article starts with the blank line before its title. A line that looks
    like a title, but follows no blank line, is part of the article. Such lines are formulas. An article that is too
    long is cut.

    Example:
        The lines " ", " = A = ", " ", "text", " ", " = B = ", " ", "more" become two articles with four lines each.
    """
    article_lines: list[Record] = []
    characters = 0
    for line in lines:
        follows_blank_line = len(article_lines) > 0 and not article_lines[-1].text.strip()
        is_title = HEADING.fullmatch(line.text) is not None
        starts_article = follows_blank_line and is_title
        # The blank line before a title belongs to the next article.
        complete_lines = article_lines[:-1] if follows_blank_line else article_lines
        if complete_lines and (starts_article or characters >= MAX_ARTICLE_CHARACTERS):
            yield _join_records(complete_lines)
            article_lines = article_lines[len(complete_lines) :]
            characters = sum(len(remaining_line.text) for remaining_line in article_lines)
        article_lines.append(line)
        characters += len(line.text)
    if article_lines:
        yield _join_records(article_lines)


def as_lines(records: Iterable[Record], blank_line: str = "\n") -> Iterator[Record]:
    """Add a line end to every record that has none.

    Args:
        records: Records that are lines.
        blank_line: The text that replaces an empty record. WikiText writes blank lines as " \\n".
    """
    for record in records:
        text = record.text
        if not text.endswith("\n"):
            text += "\n"
        if text == "\n":
            text = blank_line
        yield Record(text, record.cursor, record.bytes_read)


def _join_records(records: list[Record]) -> Record:
    """Join consecutive records to one record, which has the position of the last record."""
    text = "".join(record.text for record in records)
    last_record = records[-1]
    return Record(text, last_record.cursor, last_record.bytes_read)
