"""Text out of tokens, one token at a time: nothing is shown before the bytes at hand make whole characters.

A character of several bytes can be spread over tokens. Decoding each token alone would print U+FFFD for every part:

    "é" as bytes, 195 169:    push(195) -> ""    push(169) -> "é"
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Decoder(Protocol):
    """Gives the text that each further token completes."""

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        ...

    def finish(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        ...


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
