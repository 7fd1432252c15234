"""On what a model is evaluated: prepared data made with its own tokenizer, or any text, tokenized by it.

nothing           the run's own data, its validation split
a folder          prepared data (it has a meta.json)
files             plain text, whole; several are separated by the end token
anything else     a corpus by name, as `trainshort prepare` knows them; its split
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainshort.data import Prepared, open_data
from trainshort.data.corpus import find_corpus
from trainshort.data.document import splitter
from trainshort.data.meta import is_data, token_type
from trainshort.data.of_run import open_own
from trainshort.errors import InputError
from trainshort.evaluate.target import RunTarget, Target, TextTokenizer
from trainshort.files import read_text

TABLES = (".jsonl", ".parquet")
"""Files that hold records and not a text; they are read as a corpus."""


@dataclass(frozen=True)
class Text:
    """Targets, and what was counted of the text they came from."""

    name: str
    split: str | None
    tokens: np.ndarray
    words: int
    """Words between white space."""
    bytes: int
    """Bytes of UTF-8."""
    sha256: str
    tokenizer: str
    end: int | None
    """The token between documents, if there is one."""
    own: bool = False
    """Whether it is the data that the run was trained beside, and not a text that was named."""
    whole: int | None = None
    """Tokens before the text was cut; None: it was not."""

    def description(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "split": self.split,
            "sha256": self.sha256,
            "tokenizer": self.tokenizer,
            "tokens": len(self.tokens),
            "whole": self.whole or len(self.tokens),
            "own": self.own,
            "words": self.words,
            "bytes": self.bytes,
        }


def open_text(target: Target, data: Sequence[str], split: str = "valid", max_tokens: int | None = None) -> Text:
    """The text that a command line means, cut after `max_tokens` for a quick look."""
    text = _whole_text(target, data, split)
    if not len(text.tokens):
        raise InputError(f"{text.name} holds no text in its split '{split}'; choose another --data or --split.")
    largest = int(text.tokens.max())
    if largest >= target.vocabulary:
        raise InputError(
            f"{text.name} holds token {largest}, but {target.name} knows {target.vocabulary:,} types. "
            "Was it made with another tokenizer?"
        )
    if max_tokens is None or max_tokens >= len(text.tokens):
        return text
    if max_tokens < 1:
        raise InputError(f"--max-tokens must be at least 1, got {max_tokens}.")
    return cut(text, max_tokens, target.tokenizer())


def cut(text: Text, count: int, tokenizer: TextTokenizer) -> Text:
    """The first `count` tokens; their words and bytes are counted in what they spell, end tokens left out."""
    kept = np.asarray(text.tokens[:count])
    if tokenizer.ends_lines:
        pieces = [tokenizer.decode(kept)]
    else:
        ends = np.flatnonzero(kept == text.end) if text.end is not None else np.empty(0, dtype=int)
        parts = np.split(kept, ends)
        pieces = [tokenizer.decode(part[part != text.end]) for part in parts]
    return replace(
        text,
        tokens=kept,
        whole=len(text.tokens),
        words=sum(len(piece.split()) for piece in pieces),
        bytes=sum(len(piece.encode()) for piece in pieces),
        sha256=hashlib.sha256(np.ascontiguousarray(kept).tobytes()).hexdigest(),
    )


def _whole_text(target: Target, data: Sequence[str], split: str) -> Text:
    if isinstance(target, RunTarget) and (not data or list(data) == [target.config.data.corpus]):
        return replace(_from_prepared(open_own(target.run, target.config.data), split), own=True)
    if not data:
        raise InputError(
            f"{target.name} does not say which text to use. Give one: --data sotu, --data book.txt, or a folder."
        )
    paths = [Path(name).expanduser() for name in data]
    if len(data) == 1 and is_data(paths[0]):
        prepared = open_data(paths[0])
        _refuse_other_tokenizer(target, prepared)
        return _from_prepared(prepared, split)
    if all(path.is_file() and path.suffix not in TABLES for path in paths):
        return _encoded(" ".join(data), None, [_read(path) for path in paths], target.tokenizer())
    if len(data) > 1:
        missing = next((path for path in paths if not path.is_file()), paths[0])
        raise InputError(f"several --data must all be text files, and {missing} is none.")
    corpus = find_corpus(data[0])
    rule = splitter(corpus, "strict")
    documents = [document.text for document in corpus.documents() if rule.split(document) == split]
    if not documents:
        raise InputError(f"the corpus '{data[0]}' has no split '{split}'; it has {', '.join(corpus.splits)}.")
    return _encoded(data[0], split, documents, target.tokenizer())


def _from_prepared(prepared: Prepared, split: str) -> Text:
    tokens, meta = prepared.split(split), prepared.meta
    counts = meta.splits[split]
    return Text(
        meta.corpus, split, tokens, counts.words, counts.bytes, counts.sha256, tokenizer=meta.tokenizer, end=meta.end
    )


def _refuse_other_tokenizer(target: Target, prepared: Prepared) -> None:
    """Equal numbers of token types would let another tokenizer's data pass as nonsense, so the tokenizers compare."""
    theirs, ours = json.loads(prepared.tokenizer().to_json()), json.loads(target.tokenizer().to_json())
    if theirs["model"].get("vocab") != ours["model"].get("vocab"):
        raise InputError(
            f"{prepared.folder} was made with another tokenizer ('{prepared.meta.tokenizer}', "
            f"{prepared.meta.vocabulary:,} types) than {target.name} has ({target.vocabulary:,} types). "
            "Give the text itself as --data, and it is tokenized for this model."
        )


def _read(path: Path) -> str:
    return read_text(path, mend="Give a text file in UTF-8.", limit=2**36)


def _encoded(name: str, split: str | None, documents: list[str], tokenizer: TextTokenizer) -> Text:
    """Documents as tokens, the end token between two of them, unless the tokenizer ends every line by itself."""
    parts: list[np.ndarray] = []
    for index, document in enumerate(documents):
        if index and tokenizer.end is not None and not tokenizer.ends_lines:
            parts.append(np.array([tokenizer.end], dtype=np.int64))
        parts.append(tokenizer.encode(document))
    tokens = np.concatenate(parts).astype(token_type(tokenizer.vocabulary))
    return Text(
        name,
        split,
        tokens,
        words=sum(len(document.split()) for document in documents),
        bytes=sum(len(document.encode()) for document in documents),
        sha256=hashlib.sha256(tokens.tobytes()).hexdigest(),
        tokenizer=tokenizer.name,
        end=tokenizer.end,
    )
