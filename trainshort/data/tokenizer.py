"""Text to token numbers and back: `bytes`, `words`, `bpe`, or any saved `tokenizer.json`.

Every tokenizer is saved in the format of Hugging Face's `tokenizers`, so that other programs can load it; bytes and
words only take a quicker way to the same numbers.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from trainshort import files
from trainshort.data.decoding import ByteDecoder, Decoder, WholeDecoder, WordDecoder, byte_alphabet
from trainshort.errors import InputError

Ids = Int64[np.ndarray, " tokens"]

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

_GIVE = "Use bytes, words or bpe, or the path of a tokenizer.json."

STRETCH = 1 << 17
"""Characters given to a tokenizer at a time; a longer text is cut at a space, so that memory stays bounded."""
LONGEST_KEPT_WORD = 32
MOST_KEPT_WORDS = 500_000
"""Words whose tokens are remembered: about 100 MB at most."""
_CUT = re.compile(r"(?<=\S)(?=[ \n])")
_WORD = re.compile(r"\s*\S+|\s+")
_SEPARATOR_CONTROLS = re.compile("[\x1c-\x1f]")


class Tokenizer(ABC):
    """Encodes and decodes text; `name` says which kind it is."""

    name: str
    vocabulary: int
    """Number of token types; every token is below."""
    end: int | None
    """The token after each document, at which generation can stop."""

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

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")

    def _checked(self, ids: Iterable[int]) -> list[int]:
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise InputError(
                    f"Token {token} is outside the vocabulary of {self.vocabulary} (0 to {self.vocabulary - 1}). "
                    "Decode with the tokenizer of the data's own folder."
                )
        return ids


class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8. A document ends with byte 0, which text does not contain."""

    name = "bytes"
    vocabulary = 256
    end = 0

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self._checked(ids)).decode(errors="replace")

    def decoder(self) -> Decoder:
        return ByteDecoder(lambda token: bytes([token]))

    def to_json(self) -> str:
        from tokenizers import Tokenizer as Saved
        from tokenizers import decoders, models, pre_tokenizers

        saved = Saved(models.BPE({letter: byte for byte, letter in byte_alphabet().items()}, []))
        saved.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        saved.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        return saved.to_str()


class _Numbers(dict[str, int]):
    """A word's number; a dictionary that knows what to say of the others is quicker than asking it for a default."""

    def __missing__(self, word: str) -> int:
        return WordTokenizer.UNKNOWN


class WordTokenizer(Tokenizer):
    """A token is a word between white space, or `</s>` at a line end, as the paper counts WikiText.

    "the cat\\n<unk> sat\\n" with words ["<s>", "<pad>", "</s>", "<unk>", "the", "sat"]:   4 3 2 3 5 2

    The numbers are those of fairseq's dictionary: four special words, then all others by falling frequency. As there, a
    carriage return ends a line, and the special words mean themselves where a text has them. Version 0.1.0 called the
    line end `<eos>` and read a lone carriage return as white space; its tokenizers are known by that, and go on so.
    """

    name = "words"
    SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
    FIRST_SPECIAL = ("<s>", "<pad>", "<eos>", "<unk>")
    """Those of version 0.1.0."""
    LINE_END = 2
    UNKNOWN = 3

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.vocabulary = len(self.words)
        self.end = self.LINE_END
        self._ids = _Numbers((word, number) for number, word in enumerate(self.words))
        self._line_end = f" {self.words[self.LINE_END]} "
        self._returns = self.words[self.LINE_END] == self.SPECIAL[self.LINE_END]

    def encode(self, text: str) -> Ids:
        if self._returns and "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        words = text.replace("\n", self._line_end).split()
        return np.fromiter(map(self._ids.__getitem__, words), dtype=np.int64, count=len(words))

    def encode_document(self, text: str) -> Ids:
        """A document whose last line is finished has its end token already."""
        finished = text.endswith(("\n", "\r") if self._returns else "\n")
        return self.encode(text if finished else text + "\n")

    def decode(self, ids: Iterable[int]) -> str:
        decoder = self.decoder()
        return "".join(decoder.push(token) for token in self._checked(ids))

    def decoder(self) -> Decoder:
        return WordDecoder(self.words, self.LINE_END)

    def to_json(self) -> str:
        from tokenizers import Regex, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as Saved

        saved = Saved(models.WordLevel(dict(self._ids), unk_token=self.SPECIAL[self.UNKNOWN]))
        line = Regex("\r\n?|\n") if self._returns else "\n"
        saved.normalizer = normalizers.Replace(line, self._line_end)  # pyright: ignore[reportAttributeAccessIssue]
        saved.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
        return saved.to_str()


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
        return self.library.decode(self._checked(ids), skip_special_tokens=False)

    def decoder(self) -> Decoder:
        if not self._byte_level:
            return WholeDecoder(self.decode)
        return ByteDecoder(self._spelling)

    def _spelling(self, token: int) -> bytes:
        self._checked([token])
        word = self.library.id_to_token(token) or ""
        if token in self._added:
            return word.encode()
        return bytes(self._bytes[letter] for letter in word)

    @cached_property
    def _added(self) -> set[int]:
        return set(self.library.get_added_tokens_decoder())

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return {letter: byte for byte, letter in byte_alphabet().items()}

    def to_json(self) -> str:
        return self.library.to_str()


def cut(text: str, size: int) -> list[str]:
    """Stretches of at least `size` characters, each cut before a space or line end that follows a letter.

    "one two three", 4:   "one two", " three"
    """
    parts, start = [], 0
    while len(text) - start > size and (place := _CUT.search(text, start + size)):
        parts.append(text[start : place.start()])
        start = place.start()
    return [*parts, text[start:]]


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a prepared folder, or of a `tokenizer.json` from anywhere."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        text = files.read_text(path, mend=_GIVE)
    except files.MissingFileError:
        raise InputError(f"There is no tokenizer at {path}. {_GIVE}") from None
    return parse_tokenizer(text, path)


def parse_tokenizer(text: str, path: Path) -> Tokenizer:
    """The tokenizer that the JSON describes; bytes and words are known by their form."""
    from tokenizers import Tokenizer as Saved

    layout = files.parse_json(text, str(path), mend=_GIVE)
    try:
        saved = Saved.from_str(text)
        saved.encode("\u0378")  # no letter: a tokenizer that has no token for unknown text is told now
    except BaseException as error:  # the library raises plain Exception, and what Rust calls a panic is not even that
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError(f"{path} is not a tokenizer.json that the tokenizers library reads ({error}).") from None
    model = layout["model"]
    if model.get("type") == "BPE" and not model["merges"] and model["vocab"] == _byte_vocabulary():
        return ByteTokenizer()
    if model.get("type") == "WordLevel":
        words = sorted(model["vocab"], key=model["vocab"].get)
        special = (WordTokenizer.SPECIAL, WordTokenizer.FIRST_SPECIAL)
        if tuple(words[:4]) in special and model["vocab"][words[-1]] == len(words) - 1:
            return WordTokenizer(words)
    return SavedTokenizer(saved, "bpe" if _ours(layout) else tokenizer_name(path))


def tokenizer_name(path: Path) -> str:
    """A short name for a tokenizer file: gpt2/tokenizer.json is called gpt2."""
    return path.resolve().parent.name if path.name == FILE else path.stem


def _byte_vocabulary() -> dict[str, int]:
    return {letter: byte for byte, letter in byte_alphabet().items()}


def _ours(layout: dict[str, Any]) -> bool:
    """Whether `bpe` was trained here: the end token comes first, then the bytes."""
    vocabulary = layout["model"].get("vocab")
    return layout["model"].get("type") == "BPE" and isinstance(vocabulary, dict) and vocabulary.get(END_OF_TEXT) == 0
