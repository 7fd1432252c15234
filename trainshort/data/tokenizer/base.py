"""What a tokenizer is, and the table of those that can be built by name.

Every tokenizer is saved in the format of Hugging Face's `tokenizers`, so that other programs can load it; some only
take a quicker way to the same numbers.

Decoders give text out of tokens, one token at a time: nothing is shown before the bytes at hand make whole characters.
A character of several bytes can be spread over tokens. Decoding each token alone would print U+FFFD for every part:

    "é" as bytes, 195 169:    push(195) -> ""    push(169) -> "é"
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Int64

from trainshort.errors import InputError
from trainshort.registry import Registry

Ids = Int64[np.ndarray, " tokens"]

END_OF_TEXT = "<|endoftext|>"

_CUT = re.compile(r"(?<=\S)(?=[ \n])")


class Decoder(Protocol):
    """Gives the text that each further token completes."""

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        ...

    def finish(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        ...


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
    vocabulary: int
    """Number of token types; every token is below."""
    end: int | None
    """The token after each document, at which generation can stop."""

    @classmethod
    @abstractmethod
    def build(cls, texts: Iterable[str], vocabulary: int, size: int | None) -> "Tokenizer":
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
            if not 0 <= token < self.vocabulary:
                raise InputError(
                    f"Token {token} is outside the vocabulary of {self.vocabulary} (0 to {self.vocabulary - 1}). "
                    "Decode with the tokenizer of the data's own folder."
                )
        return ids


tokenizers: Registry[type[Tokenizer]] = Registry("tokenizer", needs=("build", "encode", "decode", "decoder", "to_json"))


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


class WordDecoder:
    """For tokens that are words: a space between two, a new line at the line end's token."""

    def __init__(self, words: Sequence[str], line_end: int) -> None:
        self._words = words
        self._line_end = line_end
        self._fresh = True

    def push(self, token: int) -> str:
        if token == self._line_end:
            self._fresh = True
            return "\n"
        space = "" if self._fresh else " "
        self._fresh = False
        return space + self._words[token]

    def finish(self) -> str:
        return ""


class WholeDecoder:
    """For any other tokenizer: decodes all tokens since the last safe place, and shows what has become longer.

    Some decoders (WordPiece, SentencePiece) look at neighbours, so no token has a spelling of its own.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\ufffd") or not text.startswith(self._shown):
            return ""
        return self._take(text)

    def finish(self) -> str:
        text = self._decode(self._tokens)
        return self._take(text) if text.startswith(self._shown) else ""

    def _take(self, text: str) -> str:
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
