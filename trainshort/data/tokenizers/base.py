"""`Tokenizer`, the base class of all tokenizers, and functions that save and load tokenizers.

Every tokenizer is saved as a tokenizer.json in the format of the Hugging Face library `tokenizers`, so that other
programs can load it. The tokenizers `bpe`, `bytes` and `words` are in builtin.py. A plug-in adds a tokenizer with a
class that extends `Tokenizer` or `SavedTokenizer`, and the decorator `@tokenizers.register("name")`.
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
"""Token ids."""

END_OF_TEXT = "<|endoftext|>"
"""The token after each document in tokenizers of this package and of GPT-2."""

# A place in a text where it can be cut: after a character that is not white space, before a space or a line end.
_CUT_POSITION = re.compile(r"(?<=\S)(?=[ \n])")


class Decoder(Protocol):
    """Decodes tokens one at a time, for text that is shown while it is generated.

    Text is returned only in complete characters, although a character can be spread over several tokens. For example,
    "é" has the bytes 195 and 169. With the tokenizer `bytes`, `push(195)` returns "", and then `push(169)` returns "é".
    """

    def push(self, token: int) -> str:
        """Add a token, and return the text that is complete now. The text can be empty."""
        ...

    def finish(self) -> str:
        """Return the remaining text. An incomplete character is returned as U+FFFD."""
        ...


class Tokenizer(ABC):
    """Converts text to token ids and back.

    Attributes:
        name: The short name.
        summary: One line for `trainshort list tokenizers`.
        sized: Whether the vocabulary is built from the training text, with a size that the user chooses.
        ends_lines: Whether the end token stands for the end of a line. It is then part of the text.
        vocab_size: The number of token ids. All ids are smaller.
        end: The token after each document, or None. Text generation can stop at this token.
    """

    name: str
    summary: ClassVar[str]
    sized: ClassVar[bool] = False
    ends_lines: ClassVar[bool] = False
    vocab_size: int
    end: int | None

    @classmethod
    @abstractmethod
    def build(cls, texts: Iterable[str], vocab_size: int, byte_count: int | None) -> "Tokenizer":
        """Create a tokenizer.

        Args:
            texts: The training documents. Empty if `sized` is False.
            vocab_size: The requested vocabulary size. It is ignored if `sized` is False.
            byte_count: The size of the training text in bytes, or None if it is unknown.
        """

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "Tokenizer | None":
        """Return a tokenizer of this class if a tokenizer.json was saved by this class, and None otherwise.

        Args:
            layout: The content of the tokenizer.json, as parsed JSON.
            library: The same tokenizer, loaded by the library `tokenizers`.
        """
        # Subclasses override this method. By default, no file is recognized.
        return None

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Return the token ids of a text, without an end token."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. `InputError` is raised for an unknown id."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return a decoder that decodes one token at a time."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the content of a tokenizer.json in the format of the library `tokenizers`."""

    def encode_document(self, text: str) -> Ids:
        """Return the token ids of a complete document, with the end token."""
        ids = self.encode(text)
        if self.end is None:
            return ids
        return np.append(ids, self.end)

    def validate_ids(self, ids: Iterable[int]) -> list[int]:
        """Return token ids as a list of Python integers. `InputError` is raised for an unknown id."""
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InputError(
                    f"Token {token} is outside the vocabulary of {self.vocab_size} (0 to {self.vocab_size - 1}). "
                    "Decode with the tokenizer of the dataset."
                )
        return ids


def cut(text: str, min_characters: int) -> list[str]:
    """Cut a text into pieces of at least `min_characters` characters. The last piece can be shorter.

    Joined together, the pieces are the text. The text is cut before spaces and line ends that follow another character,
    so that no word is cut.

    Example:
        >>> cut("one two three", 4)
        ['one two', ' three']
    """
    pieces = []
    start = 0
    while len(text) - start > min_characters:
        match = _CUT_POSITION.search(text, start + min_characters)
        if match is None:
            break
        pieces.append(text[start : match.start()])
        start = match.start()
    pieces.append(text[start:])
    return pieces


class ByteDecoder:
    """A `Decoder` for tokens that stand for bytes of UTF-8.

    Args:
        token_bytes: A function that returns the bytes of a token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add a token, and return the text that is complete now."""
        return self._utf8_decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """Return the remaining text. An incomplete character is returned as U+FFFD."""
        return self._utf8_decoder.decode(b"", final=True)


class IncrementalDecoder:
    """A `Decoder` for tokens whose text depends on the tokens before them.

    This is the case for WordPiece, SentencePiece and words. All tokens are decoded again with each new token, and the
    text that was added is returned.

    Args:
        decode: A function that returns the text of several tokens.
    """

    # When there are more tokens than this, only the last ones are decoded from then on, so that decoding stays fast.
    MAX_TOKENS = 64
    CONTEXT_TOKENS = 16

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._returned_text = ""

    def push(self, token: int) -> str:
        """Add a token, and return the new text that is complete now. The text can be empty.

        A character whose UTF-8 bytes are not complete is decoded as U+FFFD, and is returned after later tokens.
        """
        self._tokens.append(token)
        text = self._decode(self._tokens)  # the text of all tokens, including text that was returned before
        if text.endswith("\ufffd"):
            return ""  # The last character is incomplete.
        return self._take_new_text(text)

    def finish(self) -> str:
        """Return the remaining text."""
        return self._take_new_text(self._decode(self._tokens))

    def _take_new_text(self, text: str) -> str:
        """Return the part of a decoded text that was not returned before.

        Args:
            text: The text of all tokens in `self._tokens`. Its start, `self._returned_text`, was returned before.
        """
        if not text.startswith(self._returned_text):
            return ""  # The text that was returned cannot be changed any more.
        new_text = text[len(self._returned_text) :]
        self._returned_text = text
        if len(self._tokens) > self.MAX_TOKENS:
            # Only the last tokens are decoded from now on, so that decoding stays fast.
            self._tokens = self._tokens[-self.CONTEXT_TOKENS :]
            self._returned_text = self._decode(self._tokens)
        return new_text


def byte_alphabet() -> dict[int, str]:
    """Return the character that stands for each of the 256 bytes in byte-level tokenizers such as GPT-2's.

    Printable bytes stand for themselves. All other bytes are replaced by the characters from U+0100 on.
    """
    # The printable characters of ASCII and of Latin-1, without the spaces and the invisible hyphen (173).
    printable_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable_bytes}
    other_bytes = [byte for byte in range(256) if byte not in alphabet]
    for index, byte in enumerate(other_bytes):
        alphabet[byte] = chr(256 + index)
    return alphabet


def byte_numbers() -> dict[str, int]:
    """Return the byte for which each character stands in byte-level tokenizers such as GPT-2's.

    The dictionary is the inverse of `byte_alphabet`.
    """
    return {character: byte for byte, character in byte_alphabet().items()}


# ---- tokenizers that are loaded from a tokenizer.json

TOKENIZER_FILE = "tokenizer.json"

# Tokens that mark the end of a document in known tokenizers. The first of them in a vocabulary is used.
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

_CHOOSE_TOKENIZER_HINT = "Use bytes, words or bpe, or the path of a tokenizer.json."

# The library gets texts in pieces of about this size, so that the memory stays bounded.
PIECE_CHARACTERS = 1 << 17

# Limits of the cache that holds the tokens of words. The cache uses at most about 100 MB.
MAX_CACHED_WORD_CHARACTERS = 32
MAX_CACHED_WORDS = 500_000

# A word with the white space before it, or white space at the end of the text.
_WORD = re.compile(r"\s*\S+|\s+")

# Control characters that are white space in Python, but not in the library `tokenizers`.
_SEPARATOR_CONTROLS = re.compile("[\x1c-\x1f]")


class SavedTokenizer(Tokenizer):
    """A tokenizer of the Hugging Face library `tokenizers`.

    Args:
        saved: The tokenizer of the library.
        name: The short name.

    Attributes:
        library: The tokenizer of the library.
    """

    def __init__(self, saved: Any, name: str) -> None:
        # A tokenizer.json can ask for truncation and padding. Both would change the text of a dataset.
        saved.no_truncation()
        saved.no_padding()
        # The text "<|endoftext|>" in a document is encoded like any other text, not as the special token.
        saved.encode_special_tokens = True
        self.name = name
        # Token ids can have gaps, so the vocabulary size is computed from the largest id.
        self.vocab_size = max(saved.get_vocab(with_added_tokens=True).values()) + 1
        self.end = _find_end_token(saved)
        self.library = saved
        self._word_cache: dict[str, bytes] = {}

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, byte_count: int | None) -> "SavedTokenizer":
        """Raise an error, because a tokenizer of this class is loaded from a file. Subclasses implement the method."""
        raise InputError("A saved tokenizer is loaded from a file and cannot be built.")

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether this is a byte-level BPE tokenizer like that of GPT-2, which changes no character of the text."""
        layout = json.loads(self.library.to_str())
        pre_tokenizer = layout["pre_tokenizer"] or {}
        decoder = layout["decoder"] or {}
        if pre_tokenizer.get("type") != "ByteLevel" or decoder.get("type") != "ByteLevel":
            return False
        # The word cache requires that a text is split into words as in GPT-2, and always in the same way.
        splits_words = pre_tokenizer.get("use_regex", True) and not pre_tokenizer["add_prefix_space"]
        has_normalizer = layout["normalizer"] is not None
        has_dropout = bool(layout["model"].get("dropout"))
        return bool(splits_words) and not has_normalizer and not has_dropout

    def encode(self, text: str) -> Ids:
        """Return the token ids of a text, without special tokens.

        A byte-level tokenizer such as GPT-2's encodes word by word, with a cache. For other tokenizers, a long text is
        cut into pieces between words.
        """
        # Some control characters are white space in Python, but not in the library, so words would differ.
        if self._is_byte_level and not _SEPARATOR_CONTROLS.search(text):
            return self._encode_words(text)
        token_arrays = []
        for piece in cut(text, PIECE_CHARACTERS):
            encoding = self.library.encode(piece, add_special_tokens=False)
            token_arrays.append(np.array(encoding.ids, dtype=np.int64))
        return np.concatenate(token_arrays)

    def _encode_words(self, text: str) -> Ids:
        """Encode a text word by word, and remember the tokens of each word. This is about four times as fast.

        The result is the same as for the complete text, because a byte-level tokenizer never joins a word with the
        white space after it. For example, "a b a b" has the words "a", " b", " a" and " b".
        """
        words = _WORD.findall(text)
        cache = self._word_cache  # the tokens of each word, as the bytes of an int32 array
        new_words = list(set(words).difference(cache))
        encodings = self.library.encode_batch_fast(new_words, add_special_tokens=False)
        for word, encoding in zip(new_words, encodings, strict=True):
            cache[word] = np.array(encoding.ids, dtype=np.int32).tobytes()

        # `map` and `join` are faster than a loop in Python.
        joined_tokens = b"".join(map(cache.__getitem__, words))
        # Long words are rare, so their tokens are not kept. A cache with too many words is emptied.
        for word in new_words:
            if len(word) > MAX_CACHED_WORD_CHARACTERS:
                del cache[word]
        if len(cache) > MAX_CACHED_WORDS:
            cache.clear()
        return np.frombuffer(joined_tokens, dtype=np.int32).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, including special tokens. `InputError` is raised for an unknown id."""
        return self.library.decode(self.validate_ids(ids), skip_special_tokens=False)

    def decoder(self) -> Decoder:
        """Return a decoder that decodes one token at a time.

        The tokens of a byte-level tokenizer stand for bytes, which can be decoded without the tokens before them.
        """
        if not self._is_byte_level:
            return IncrementalDecoder(self.decode)
        added_tokens = self.library.get_added_tokens_decoder()
        byte_of_character = byte_numbers()

        def token_bytes(token: int) -> bytes:
            """Return the bytes of UTF-8 that a token stands for."""
            self.validate_ids([token])
            characters = self.library.id_to_token(token) or ""  # In a byte-level tokenizer, one character per byte.
            if token in added_tokens:
                return characters.encode()  # Special tokens are stored as normal text.
            return bytes(byte_of_character[character] for character in characters)

        return ByteDecoder(token_bytes)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return self.library.to_str()


def _find_end_token(library: Any) -> int | None:
    """Return the id of the token that marks the end of a document, or None if no known end token is in the vocabulary.

    Args:
        library: The tokenizer of the library `tokenizers`.
    """
    for end_token in _END_TOKENS:  # such as "<|endoftext|>"
        token = library.token_to_id(end_token)
        if token is not None:
            return token
    return None


def save_tokenizer(tokenizer: Tokenizer, folder: Path | str) -> Path:
    """Save a tokenizer as tokenizer.json in a folder, and return the path of the file."""
    path = Path(folder) / TOKENIZER_FILE
    io.write_atomic(path, tokenizer.to_json())
    return path


def load_tokenizer(path: Path | str, name: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: A tokenizer.json, or a folder that contains a tokenizer.json, such as a dataset folder or a run folder.
        name: The short name of the tokenizer. By default, it is derived from the path.

    Raises:
        InputError: If the file does not exist or is not a tokenizer.json.
    """
    path = Path(path)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    try:
        text = io.read_text(path, hint=_CHOOSE_TOKENIZER_HINT)
    except io.MissingFileError:
        raise InputError(f"Tokenizer file not found: {path}. {_CHOOSE_TOKENIZER_HINT}") from None
    tokenizer = parse_tokenizer(text, path)
    if name is not None:
        tokenizer.name = name
    return tokenizer


def parse_tokenizer(text: str, path: Path) -> Tokenizer:
    """Create a tokenizer from the content of a tokenizer.json.

    Args:
        text: The content of the file.
        path: The path of the file, for error messages and the short name.

    Returns:
        A tokenizer of the registered class that saved the file, or a `SavedTokenizer`.

    Raises:
        InputError: If the library `tokenizers` cannot read the file.
    """
    layout = io.parse_json(text, str(path), hint=_CHOOSE_TOKENIZER_HINT)
    library = _load_library_tokenizer(text, path)
    plugins.load_plugins()
    # Classes of plug-ins come first, because they can extend a built-in class that also recognizes the file.
    tokenizer_classes = [tokenizer_class for _, tokenizer_class in tokenizers.items()]
    for tokenizer_class in reversed(tokenizer_classes):
        tokenizer = tokenizer_class.recognize(layout, library)
        if tokenizer is not None:
            return tokenizer
    return SavedTokenizer(library, tokenizer_name(path))


def _load_library_tokenizer(text: str, path: Path) -> Any:
    """Load a tokenizer.json with the library `tokenizers`. `InputError` is raised if the tokenizer cannot be used."""
    require_package("tokenizers", "Loading a tokenizer", "trainshort[train]")
    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        library = LibraryTokenizer.from_str(text)
        # U+0378 is no assigned character. The call fails if the tokenizer has no token for unknown text.
        library.encode("\u0378")
    except BaseException as error:
        # An error in the Rust code of the library (a panic) is not an `Exception`.
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError(f"Invalid tokenizer {path}: the library tokenizers cannot read the file ({error}).") from None
    return library


def tokenizer_name(path: Path) -> str:
    """Return a short name for a tokenizer file: "gpt2" for gpt2/tokenizer.json and for gpt2.json."""
    if path.name == TOKENIZER_FILE:
        return path.resolve().parent.name
    return path.stem
