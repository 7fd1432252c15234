"""Any `tokenizer.json`: how it is saved, loaded and used, whoever made it."""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainshort import files, registry
from trainshort.data.tokenizer.base import (
    END_OF_TEXT,
    ByteDecoder,
    Decoder,
    Ids,
    Tokenizer,
    WholeDecoder,
    byte_numbers,
    cut,
    tokenizers,
)
from trainshort.errors import InputError

FILE = "tokenizer.json"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_GIVE = "Use bytes, words or bpe, or the path of a tokenizer.json."

STRETCH = 1 << 17
"""Characters given to a tokenizer at a time; a longer text is cut at a space, so that memory stays bounded."""
LONGEST_KEPT_WORD = 32
MOST_KEPT_WORDS = 500_000
"""Words whose tokens are remembered: about 100 MB at most."""
_WORD = re.compile(r"\s*\S+|\s+")
_SEPARATOR_CONTROLS = re.compile("[\x1c-\x1f]")


class SavedTokenizer(Tokenizer):
    """Whatever a `tokenizer.json` describes: our BPE, GPT-2's, BERT's."""

    def __init__(self, saved: Any, name: str) -> None:
        # A file can ask for cutting and padding, and read "<|endoftext|>" in a text as the token; here text is text.
        saved.no_truncation()
        saved.no_padding()
        saved.encode_special_tokens = True
        self.name = name
        self.vocabulary = max(saved.get_vocab(with_added_tokens=True).values()) + 1
        self.end = next((token for word in _ENDS if (token := saved.token_to_id(word)) is not None), None)
        self.library = saved
        self._known: dict[str, bytes] = {}

    @classmethod
    def build(cls, texts: Iterable[str], vocabulary: int, size: int | None) -> "SavedTokenizer":
        raise InputError("A saved tokenizer is loaded, not built.")

    @cached_property
    def _byte_level(self) -> bool:
        layout = json.loads(self.library.to_str())
        before, after = layout["pre_tokenizer"] or {}, layout["decoder"] or {}
        plain = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before["add_prefix_space"]
        untouched = layout["normalizer"] is None and not layout["model"].get("dropout")
        return bool(plain) and untouched and after.get("type") == "ByteLevel"

    def encode(self, text: str) -> Ids:
        # Python counts four control characters as white space that the library does not; they are rare.
        if self._byte_level and not _SEPARATOR_CONTROLS.search(text):
            return self._encode_by_words(text)
        parts = (self.library.encode(part, add_special_tokens=False).ids for part in cut(text, STRETCH))
        return np.concatenate([np.array(part, dtype=np.int64) for part in parts])

    def _encode_by_words(self, text: str) -> Ids:
        """The same tokens, four times as fast: byte-level tokenizers never join across the start of a white space, so
        each word with the space before it is encoded once and remembered.

        "a b a b"  as  "a" " b" " a" " b"
        """
        words, known = _WORD.findall(text), self._known
        new = list(set(words).difference(known))
        for word, part in zip(new, self.library.encode_batch_fast(new, add_special_tokens=False), strict=True):
            known[word] = np.array(part.ids, dtype=np.int32).tobytes()
        joined = b"".join(map(known.__getitem__, words))
        for word in new:
            if len(word) > LONGEST_KEPT_WORD:
                del known[word]
        if len(known) > MOST_KEPT_WORDS:
            known.clear()
        return np.frombuffer(joined, dtype=np.int32).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self.library.decode(self.checked(ids), skip_special_tokens=False)

    def decoder(self) -> Decoder:
        if not self._byte_level:
            return WholeDecoder(self.decode)
        return ByteDecoder(self._spelling)

    def _spelling(self, token: int) -> bytes:
        self.checked([token])
        word = self.library.id_to_token(token) or ""
        if token in self._added:
            return word.encode()
        return bytes(self._bytes[letter] for letter in word)

    @cached_property
    def _added(self) -> set[int]:
        return set(self.library.get_added_tokens_decoder())

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return byte_numbers()

    def to_json(self) -> str:
        return self.library.to_str()


def save_tokenizer(tokenizer: Tokenizer, folder: Path | str) -> Path:
    """Write `tokenizer.json` into a folder, whole, from where `load_tokenizer` reads it."""
    path = Path(folder) / FILE
    files.write_whole(path, tokenizer.to_json())
    return path


def load_tokenizer(path: Path | str, name: str | None = None) -> Tokenizer:
    """The tokenizer of a data or run folder, or of a `tokenizer.json` from anywhere, which does not say its `name`."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        text = files.read_text(path, mend=_GIVE)
    except files.MissingFileError:
        raise InputError(f"There is no tokenizer at {path}. {_GIVE}") from None
    tokenizer = parse_tokenizer(text, path)
    tokenizer.name = name or tokenizer.name
    return tokenizer


def parse_tokenizer(text: str, path: Path) -> Tokenizer:
    """The tokenizer that the JSON describes: one of ours, known by its form, or the library's own."""
    from tokenizers import Tokenizer as Library

    layout = files.parse_json(text, str(path), mend=_GIVE)
    try:
        library = Library.from_str(text)
        library.encode("\u0378")  # no letter: a tokenizer that has no token for unknown text is told now
    except BaseException as error:  # the library raises plain Exception, and what Rust calls a panic is not even that
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError(f"{path} is not a tokenizer.json that the tokenizers library reads ({error}).") from None
    registry.load_plugins()
    kinds = reversed([kind for _, kind in tokenizers.items()])  # a plug-in's before the one it may be made from
    recognized = (kind.recognize(layout, library) for kind in kinds)
    return next((one for one in recognized if one is not None), None) or SavedTokenizer(library, tokenizer_name(path))


def tokenizer_name(path: Path) -> str:
    """A short name for a tokenizer file: gpt2/tokenizer.json is called gpt2."""
    return path.resolve().parent.name if path.name == FILE else path.stem
