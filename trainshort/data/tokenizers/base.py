"""Text to token numbers and back: what a tokenizer is, the table of those that can be built by name, and how any is
saved and loaded. `bytes`, `words` and `bpe` are in built.py; a kind of one's own is one class with one decorator.

Every tokenizer is saved in the format of Hugging Face's `tokenizers`, so that other programs can load it; some only
take a quicker way to the same numbers.

Decoders give text out of tokens, one token at a time: nothing is shown before the bytes at hand make whole characters.
A character of several bytes can be spread over tokens. Decoding each token alone would print U+FFFD for every part:

    "é" as bytes, 195 169:    push(195) -> ""    push(169) -> "é"
"""

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Int64

from trainshort.config.registries import tokenizers
from trainshort.errors import InputError
from trainshort.utils import io, plugins
from trainshort.utils.optional import require_package

Ids = Int64[np.ndarray, " tokens"]

END_OF_TEXT = "<|endoftext|>"

_CUT = re.compile(r"(?<=\S)(?=[ \n])")


class Decoder(Protocol):
    """`push` gives the text that a further token completes, perhaps none; `finish` what is left at the end, where an
    unfinished character becomes U+FFFD."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Tokenizer(ABC):
    """Encodes and decodes text; `name` says which kind it is.

    A kind of one's own is one class in one file, `@tokenizers.register("mine")`. It is saved as a `tokenizer.json` of
    the tokenizers library (`to_json`) and read back by `recognize`, or, without one, by that library itself.
    """

    name: str
    summary: ClassVar[str]
    """A line for `trainshort list tokenizers`."""
    sized: ClassVar[bool] = False
    """Whether its vocabulary is built from the training text, to a size that is asked for."""
    ends_lines: ClassVar[bool] = False
    """Whether the end token stands for a line end, which the text really has."""
    vocab_size: int
    """Number of token types; every token is below."""
    end: int | None
    """The token after each document, at which generation can stop."""

    @classmethod
    @abstractmethod
    def build(cls, texts: Iterable[str], vocab_size: int, size: int | None) -> "Tokenizer":
        """Make one, where it is `sized` from the training texts, of which there are `size` bytes (None: unknown)."""

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "Tokenizer | None":
        """The tokenizer that a `tokenizer.json` is, as JSON and as the library loads it, if it is one of these."""
        return None

    @abstractmethod
    def encode(self, text: str) -> Ids: ...

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...

    @abstractmethod
    def decoder(self) -> Decoder:
        """Decodes token by token, for text that is shown while it is made."""

    @abstractmethod
    def to_json(self) -> str: ...

    def encode_document(self, text: str) -> Ids:
        """A whole document: its text, then the end token."""
        ids = self.encode(text)
        return ids if self.end is None else np.append(ids, self.end)

    def checked(self, ids: Iterable[int]) -> list[int]:
        """The same tokens as a list, all of them known."""
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InputError(
                    f"Token {token} is outside the vocabulary of {self.vocab_size} (0 to {self.vocab_size - 1}). "
                    "Decode with the tokenizer of the data's own folder."
                )
        return ids


def cut(text: str, size: int) -> list[str]:
    """Stretches of at least `size` characters, each cut before a space or line end that follows a letter.

    "one two three", 4:   "one two", " three"
    """
    parts, start = [], 0
    while len(text) - start > size and (place := _CUT.search(text, start + size)):
        parts.append(text[start : place.start()])
        start = place.start()
    return [*parts, text[start:]]


class ByteDecoder:
    """For tokens that are strings of bytes."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._spell(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class IncrementalDecoder:
    """For any other tokenizer: decodes all tokens since the last safe place, and shows what has become longer.

    Some tokenizers (WordPiece, SentencePiece, words) look at neighbours, so no token has a spelling of its own.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._tokens))

    def _take(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._shown = text
        # Decoding stays quick on long texts: start again from one token, whose own text is then known.
        if len(self._tokens) > 64:
            self._tokens = self._tokens[-16:]
            self._shown = self._decode(self._tokens)
        return new


def byte_alphabet() -> dict[int, str]:
    """The printable characters by which byte-level tokenizers (GPT-2's and ours) write the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + rank) for rank, byte in enumerate(list(others))}


def byte_numbers() -> dict[str, int]:
    """The same, the other way."""
    return {letter: byte for byte, letter in byte_alphabet().items()}


# ---- any `tokenizer.json`: how it is saved, loaded and used, whoever made it

TOKENIZER_FILE = "tokenizer.json"
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
        self.vocab_size = max(saved.get_vocab(with_added_tokens=True).values()) + 1
        self.end = next((token for word in _ENDS if (token := saved.token_to_id(word)) is not None), None)
        self.library = saved
        self._known: dict[str, bytes] = {}

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, size: int | None) -> "SavedTokenizer":
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
            return IncrementalDecoder(self.decode)
        added, numbers = self.library.get_added_tokens_decoder(), byte_numbers()

        def spell(token: int) -> bytes:
            self.checked([token])
            word = self.library.id_to_token(token) or ""
            return word.encode() if token in added else bytes(numbers[letter] for letter in word)

        return ByteDecoder(spell)

    def to_json(self) -> str:
        return self.library.to_str()


def save_tokenizer(tokenizer: Tokenizer, folder: Path | str) -> Path:
    """Write `tokenizer.json` into a folder, whole, from where `load_tokenizer` reads it."""
    path = Path(folder) / TOKENIZER_FILE
    io.write_atomic(path, tokenizer.to_json())
    return path


def load_tokenizer(path: Path | str, name: str | None = None) -> Tokenizer:
    """The tokenizer of a data or run folder, or of a `tokenizer.json` from anywhere, which does not say its `name`."""
    path = Path(path)
    path = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        text = io.read_text(path, hint=_GIVE)
    except io.MissingFileError:
        raise InputError(f"There is no tokenizer at {path}. {_GIVE}") from None
    tokenizer = parse_tokenizer(text, path)
    tokenizer.name = name or tokenizer.name
    return tokenizer


def parse_tokenizer(text: str, path: Path) -> Tokenizer:
    """The tokenizer that the JSON describes: one of ours, known by its form, or the library's own."""
    require_package("tokenizers", "Loading a tokenizer", "trainshort[train]")
    from tokenizers import Tokenizer as Library

    layout = io.parse_json(text, str(path), hint=_GIVE)
    try:
        library = Library.from_str(text)
        library.encode("\u0378")  # no letter: a tokenizer that has no token for unknown text is told now
    except BaseException as error:  # the library raises plain Exception, and what Rust calls a panic is not even that
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError(f"{path} is not a tokenizer.json that the tokenizers library reads ({error}).") from None
    plugins.load_plugins()
    kinds = reversed([kind for _, kind in tokenizers.items()])  # a plug-in's before the one it may be made from
    recognized = (kind.recognize(layout, library) for kind in kinds)
    return next((one for one in recognized if one is not None), None) or SavedTokenizer(library, tokenizer_name(path))


def tokenizer_name(path: Path) -> str:
    """A short name for a tokenizer file: gpt2/tokenizer.json is called gpt2."""
    return path.resolve().parent.name if path.name == TOKENIZER_FILE else path.stem
