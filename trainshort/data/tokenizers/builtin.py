"""The tokenizers that are built by name: `bpe`, `bytes` and `words`.

bpe      byte-level sub-words, trained here on a sample that is spread evenly over the whole training text
bytes    every byte of UTF-8 is a token; nothing is built and nothing is lost
words    words between white space by falling frequency, as fairseq counts WikiText for the paper
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from trainshort.data.tokenizers.base import (
    END_OF_TEXT,
    ByteDecoder,
    Decoder,
    Ids,
    IncrementalDecoder,
    SavedTokenizer,
    Tokenizer,
    byte_alphabet,
    byte_numbers,
    cut,
)
from trainshort.errors import InputError
from trainshort.utils.optional import require_package

SAMPLE_BYTES = 1 << 25
"""BPE is trained on about this much text; more changes few merges and costs time and memory."""
PART = 4096
"""Characters that a part of a sample has at least; the trainer gets it in parts, so that its threads share."""


class BytePairTokenizer(SavedTokenizer):
    """A byte-level BPE of ours: any text can be encoded, and decoding gives it back exactly."""

    sized = True

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, size: int | None) -> "BytePairTokenizer":
        least = len(byte_alphabet()) + 1
        if vocab_size < least:
            raise InputError(
                f"bpe needs a vocabulary of at least {least} (the bytes and an end token), not {vocab_size}."
            )
        require_package("tokenizers", "Training a tokenizer", "trainshort[train]")
        from tokenizers import models, trainers

        saved = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_alphabet().values()),
            show_progress=False,
        )
        # A stream's beginning has to do: reading all of it for a sample would download all of it twice.
        saved.train_from_iterator(sample(texts, min(1.0, SAMPLE_BYTES / size) if size else 1.0), trainer)
        return cls(saved, "bpe")

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "BytePairTokenizer | None":
        """The end token comes first, then the bytes."""
        numbers = layout["model"].get("vocab")
        ours = layout["model"].get("type") == "BPE" and isinstance(numbers, dict) and numbers.get(END_OF_TEXT) == 0
        return cls(library, "bpe") if ours else None


def sample(texts: Iterable[str], share: float) -> Iterator[str]:
    """A share of the texts in small parts, spread evenly; ends when it is much more than was wanted.

    Parts of equal length, share 0.4:   taken, -, -, taken, -, taken, -, -, taken ...
    """
    seen = taken = 0
    for text in texts:
        for part in cut(text, PART):
            if taken <= share * seen:
                yield part
                taken += len(part)
            seen += len(part)
        if taken >= SAMPLE_BYTES * (1 if share == 1 else 2):
            return


class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8. A document ends with byte 0, which text does not contain."""

    name = "bytes"
    vocab_size = 256
    end = 0

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, size: int | None) -> "ByteTokenizer":
        return cls()

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "ByteTokenizer | None":
        model = layout["model"]
        same = model.get("type") == "BPE" and not model["merges"] and model["vocab"] == byte_numbers()
        return cls() if same else None

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self.checked(ids)).decode(errors="replace")

    def decoder(self) -> Decoder:
        return ByteDecoder(lambda token: bytes([token]))

    def to_json(self) -> str:
        require_package("tokenizers", "Saving a tokenizer", "trainshort[train]")
        from tokenizers import models

        return _byte_level(models.BPE(byte_numbers(), [])).to_str()


def _byte_level(model: Any) -> Any:
    """The library's tokenizer around a model whose letters stand for bytes."""
    from tokenizers import Tokenizer as Saved
    from tokenizers import decoders, pre_tokenizers

    saved = Saved(model)
    saved.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    saved.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return saved


MOST_WORDS = 2_000_000
"""Different words that are counted at once; beyond, the rarest are forgotten, so that memory stays bounded."""
PADDING = 8
"""Word vocabularies are filled up to a multiple of this, as fairseq does (WikiText-103: 267,737 to 267,744)."""


class _Numbers(dict[str, int]):
    """A word's number; a dictionary that knows what to say of the others is quicker than asking it for a default."""

    def __missing__(self, word: str) -> int:
        return WordTokenizer.UNKNOWN


class WordTokenizer(Tokenizer):
    """A token is a word between white space, or `</s>` at a line end, as the paper counts WikiText.

    "the cat\\n<unk> sat\\n" with words ["<s>", "<pad>", "</s>", "<unk>", "the", "sat"]:   4 3 2 3 5 2

    The numbers are those of fairseq's dictionary: four special words, then all others by falling frequency. As there, a
    carriage return ends a line, and the special words mean themselves where a text has them.
    """

    name = "words"
    sized = True
    ends_lines = True
    SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
    LINE_END = 2
    UNKNOWN = 3

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.vocab_size = len(self.words)
        self.end = self.LINE_END
        self._ids = _Numbers((word, number) for number, word in enumerate(self.words))
        self._line_end = f" {self.words[self.LINE_END]} "

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, size: int | None) -> "WordTokenizer":
        """The most frequent words, ties in the order of the alphabet, as fairseq sorts them.

        "b a b <unk>" with room for 8:   <s> <pad> </s> <unk> b a madeupword0000 madeupword0001
        """
        if vocab_size < PADDING:
            raise InputError(f"words needs a vocabulary of at least {PADDING}, not {vocab_size}.")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
            if len(counts) > MOST_WORDS:
                counts = _drop_rare_words(counts)
        for word in cls.SPECIAL:
            counts.pop(word, None)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        words = [*cls.SPECIAL, *ranked][:vocab_size]
        filled = min(vocab_size, -(-len(words) // PADDING) * PADDING)
        # A text that contains such a word itself would otherwise have two numbers for it.
        made_up = (word for number in range(filled) if (word := f"madeupword{number:04d}") not in counts)
        return cls([*words, *(next(made_up) for _ in range(filled - len(words)))])

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "WordTokenizer | None":
        if layout["model"].get("type") != "WordLevel":
            return None
        numbers = layout["model"]["vocab"]
        words = sorted(numbers, key=numbers.get)
        special = tuple(words[:4]) == cls.SPECIAL
        return cls(words) if special and numbers[words[-1]] == len(words) - 1 else None

    def encode(self, text: str) -> Ids:
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        words = text.replace("\n", self._line_end).split()
        return np.fromiter(map(self._ids.__getitem__, words), dtype=np.int64, count=len(words))

    def encode_document(self, text: str) -> Ids:
        """A document whose last line is finished has its end token already."""
        finished = text.endswith(("\n", "\r"))
        return self.encode(text if finished else text + "\n")

    def decode(self, ids: Iterable[int]) -> str:
        words = ["\n" if token == self.LINE_END else self.words[token] for token in self.checked(ids)]
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")

    def decoder(self) -> Decoder:
        return IncrementalDecoder(self.decode)

    def to_json(self) -> str:
        require_package("tokenizers", "Saving a tokenizer", "trainshort[train]")
        from tokenizers import Regex, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as Saved

        saved = Saved(models.WordLevel(dict(self._ids), unk_token=self.SPECIAL[self.UNKNOWN]))
        line = Regex("\r\n?|\n")
        saved.normalizer = normalizers.Replace(line, self._line_end)  # pyright: ignore[reportAttributeAccessIssue]
        saved.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
        return saved.to_str()


def _drop_rare_words(counts: Counter[str]) -> Counter[str]:
    """At most half as many words: those seen once go first, then those seen twice."""
    least = 1
    while len(counts) > MOST_WORDS // 2:
        least += 1
        counts = Counter({word: count for word, count in counts.items() if count >= least})
    return counts
