"""The text of an evaluation, as tokens of the evaluated model.

`open_text` accepts the values of the command-line option `--data`:

    no value          the split of the run's own data
    a folder          a dataset that `trainshort prepare` wrote with the tokenizer of the model
    text files        UTF-8 files, with an end token between two files
    another name      a corpus that `trainshort prepare` knows, or files of records
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from trainshort.data.corpora import find_corpus
from trainshort.data.dataset import PreparedDataset, is_dataset_folder, open_dataset, token_type
from trainshort.data.splits import make_splitter
from trainshort.errors import InputError
from trainshort.evaluate.targets import RunTarget, Target, TextTokenizer
from trainshort.train.run_data import open_run_data
from trainshort.utils.io import read_text

# Files with these suffixes contain records and not plain text. They are read as a corpus.
RECORD_SUFFIXES = (".jsonl", ".parquet")

# The largest text file that is accepted.
MAX_TEXT_BYTES = 2**36


@dataclass(frozen=True)
class Text:
    """A tokenized text. Every token is a target of the evaluation, which means that every token is predicted.

    Attributes:
        name: The name of the text in results.
        split: The split of a dataset or a corpus, or None for text files.
        tokens: The token ids.
        words: The number of words, which are separated by white space.
        bytes: The number of bytes in UTF-8.
        sha256: The SHA-256 of the token ids.
        tokenizer: The name of the tokenizer.
        end: The id of the token between documents, or None.
        is_run_data: Whether the text is a split of the dataset that the run was trained on.
        uncut_tokens: The number of tokens before the text was truncated, or None if it was not truncated.
    """

    name: str
    split: str | None
    tokens: Integer[np.ndarray, " tokens"]
    words: int
    bytes: int
    sha256: str
    tokenizer: str
    end: int | None
    is_run_data: bool = False
    uncut_tokens: int | None = None

    def description(self) -> dict[str, Any]:
        """Return the description of the text that is stored with results. It can be written as JSON.

        "own" says whether the text is the data of the run, and "whole" is the number of tokens before truncation.
        """
        return {
            "name": self.name,
            "split": self.split,
            "sha256": self.sha256,
            "tokenizer": self.tokenizer,
            "own": self.is_run_data,
            "words": self.words,
            "bytes": self.bytes,
            "tokens": len(self.tokens),
            "whole": self.uncut_tokens or len(self.tokens),
        }


def open_text(target: Target, data: Sequence[str], split: str = "valid", max_tokens: int | None = None) -> Text:
    """Load the text on which a model is evaluated.

    Args:
        target: The model.
        data: The values of the option `--data` (see the top of this module).
        split: The split of a dataset or a corpus. Text files have no splits.
        max_tokens: The number of tokens after which the text is truncated. None keeps all tokens.

    Returns:
        The text as tokens of the model.

    Raises:
        InputError: If there is no such text, if the text is empty, or if its tokens do not belong to the model.
    """
    text = _load_text(target, data, split)
    if len(text.tokens) == 0:
        raise InputError(f"{text.name} has no text in the split '{split}'. Choose another --data or --split.")
    largest_token = int(text.tokens.max())
    if largest_token >= target.vocab_size:
        raise InputError(
            f"{text.name} contains token id {largest_token}, but {target.name} has only {target.vocab_size:,} token "
            "types. Use a text that was tokenized for this model."
        )
    if max_tokens is None or max_tokens >= len(text.tokens):
        return text
    if max_tokens < 1:
        raise InputError(f"--max-tokens must be at least 1, got {max_tokens}.")
    return truncate(text, max_tokens, target.tokenizer())


def truncate(text: Text, num_tokens: int, tokenizer: TextTokenizer) -> Text:
    """Return the first tokens of a text. The words and bytes are counted again.

    Args:
        text: The text.
        num_tokens: The number of tokens to keep.
        tokenizer: The tokenizer that made the tokens.
    """
    tokens = np.asarray(text.tokens[:num_tokens])
    if tokenizer.ends_lines:
        # The end token stands for a line end. A line end is part of the text, so the tokens are not split.
        documents = [tokenizer.decode(tokens)]
    else:
        documents = []
        end_positions = np.flatnonzero(tokens == text.end)
        for document_tokens in np.split(tokens, end_positions):
            # `np.split` leaves the end token of a document at the start of the next part. The end token is removed,
            # because it is not text.
            text_tokens = document_tokens[document_tokens != text.end]
            documents.append(tokenizer.decode(text_tokens))
    counts = _count_text(tokens, documents)
    return replace(text, tokens=tokens, uncut_tokens=len(text.tokens), **counts)


def _count_text(tokens: Integer[np.ndarray, " tokens"], documents: list[str]) -> dict[str, Any]:
    """Return the fields of `Text` that are computed from the tokens and the documents: words, bytes and sha256."""
    return {
        "words": sum(len(document.split()) for document in documents),
        "bytes": sum(len(document.encode()) for document in documents),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }


def _load_text(target: Target, data: Sequence[str], split: str) -> Text:
    """Load all tokens of the text that the values of the option `--data` name.

    The values can be the data of the run (no value, or the name of its corpus), a dataset folder, text files, or the
    name of a corpus. They are tried in this order.

    Args:
        target: The model.
        data: The values of `--data`.
        split: The split of the data: "train", "valid" or "test". Text files have no splits.
    """
    if isinstance(target, RunTarget):
        names_corpus_of_run = list(data) == [target.config.data.corpus]
        if not data or names_corpus_of_run:
            run_dataset = open_run_data(target.run, target.config.data)
            return replace(_text_from_dataset(run_dataset, split), is_run_data=True)
    if not data:
        raise InputError(
            f"No text given, and {target.name} has no data of its own. Give a text, for example --data sotu or "
            "--data book.txt."
        )

    paths = [Path(name).expanduser() for name in data]
    if len(paths) == 1 and is_dataset_folder(paths[0]):
        dataset = open_dataset(paths[0])
        _check_same_tokenizer(target, dataset)
        return _text_from_dataset(dataset, split)
    if all(_is_text_file(path) for path in paths):
        documents = [read_text(path, hint="Give a text file in UTF-8.", limit=MAX_TEXT_BYTES) for path in paths]
        return _tokenize_documents(" ".join(data), split=None, documents=documents, tokenizer=target.tokenizer())
    if len(paths) > 1:
        missing_paths = [path for path in paths if not path.is_file()]
        wrong_path = missing_paths[0] if missing_paths else paths[0]
        raise InputError(f"Several values of --data must all be text files, but {wrong_path} is not a text file.")
    return _text_from_corpus(target, data[0], split)


def _is_text_file(path: Path) -> bool:
    """Return whether a path is a file of plain text, and not a file of records."""
    return path.is_file() and path.suffix not in RECORD_SUFFIXES


def _text_from_corpus(target: Target, name: str, split: str) -> Text:
    """Tokenize one split of a corpus that `trainshort prepare` knows by name."""
    corpus = find_corpus(name)
    splitter = make_splitter(corpus, errors="strict")  # the rule that assigns documents to train, valid or test
    documents = [document.text for document in corpus.documents() if splitter.split(document) == split]
    if not documents:
        raise InputError(f"The corpus '{name}' has no split '{split}'. Its splits are {', '.join(corpus.splits)}.")
    return _tokenize_documents(name, split, documents, target.tokenizer())


def _text_from_dataset(dataset: PreparedDataset, split: str) -> Text:
    """Return one split (train, valid or test) of a dataset that `trainshort prepare` wrote, without tokenizing it."""
    tokens = dataset.split(split)
    split_meta = dataset.meta.splits[split]
    return Text(
        name=dataset.meta.request.corpus,
        split=split,
        tokens=tokens,
        words=split_meta.words,
        bytes=split_meta.bytes,
        sha256=split_meta.sha256,
        tokenizer=dataset.meta.tokenizer,
        end=dataset.meta.end,
    )


def _check_same_tokenizer(target: Target, dataset: PreparedDataset) -> None:
    """Raise `InputError` if a dataset was not made with the tokenizer of the model.

    The vocabularies are compared, because two different tokenizers can have the same vocabulary size.
    """
    dataset_tokenizer = json.loads(dataset.tokenizer().to_json())
    model_tokenizer = json.loads(target.tokenizer().to_json())
    if dataset_tokenizer["model"].get("vocab") != model_tokenizer["model"].get("vocab"):
        raise InputError(
            f"{dataset.folder} was made with another tokenizer ('{dataset.meta.tokenizer}', "
            f"{dataset.meta.vocab_size:,} types) than the tokenizer of {target.name} ({target.vocab_size:,} types). "
            "Give the text files as --data, so that the text is tokenized for this model."
        )


def _tokenize_documents(name: str, split: str | None, documents: list[str], tokenizer: TextTokenizer) -> Text:
    """Tokenize documents and join them to one text.

    Args:
        name: The name of the text in results.
        split: The split that the documents belong to, or None.
        documents: The documents.
        tokenizer: The tokenizer. Its end token is added between two documents, unless it adds the end token after each
            line.
    """
    adds_end_tokens = tokenizer.end is not None and not tokenizer.ends_lines
    parts: list[np.ndarray] = []
    for index, document in enumerate(documents):
        is_first_document = index == 0
        if adds_end_tokens and not is_first_document:
            parts.append(np.array([tokenizer.end], dtype=np.int64))
        parts.append(tokenizer.encode(document))
    tokens = np.concatenate(parts).astype(token_type(tokenizer.vocab_size))
    return Text(
        name=name,
        split=split,
        tokens=tokens,
        tokenizer=tokenizer.name,
        end=tokenizer.end,
        **_count_text(tokens, documents),
    )
