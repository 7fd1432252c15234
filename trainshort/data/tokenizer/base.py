"""What a tokenizer is, and the table of those that can be built by name.

Every tokenizer is saved in the format of Hugging Face's `tokenizers`, so that other programs can load it; some only
take a quicker way to the same numbers.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64

from trainshort.data.tokenizer.decoding import Decoder
from trainshort.errors import InputError
from trainshort.registry import Registry

Ids = Int64[np.ndarray, " tokens"]

END_OF_TEXT = "<|endoftext|>"

_CUT = re.compile(r"(?<=\S)(?=[ \n])")


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
