"""`words`: words between white space by falling frequency, as fairseq counts WikiText for the paper."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trainshort.data.tokenizer.base import Decoder, Ids, Tokenizer, WordDecoder, tokenizers
from trainshort.errors import InputError

MOST_WORDS = 2_000_000
"""Different words that are counted at once; beyond, the rarest are forgotten, so that memory stays bounded."""
PADDING = 8
"""Word vocabularies are filled up to a multiple of this, as fairseq does (WikiText-103: 267,737 to 267,744)."""


class _Numbers(dict[str, int]):
    """A word's number; a dictionary that knows what to say of the others is quicker than asking it for a default."""

    def __missing__(self, word: str) -> int:
        return WordTokenizer.UNKNOWN


@tokenizers.register("words")
class WordTokenizer(Tokenizer):
    """A token is a word between white space, or `</s>` at a line end, as the paper counts WikiText.

    "the cat\\n<unk> sat\\n" with words ["<s>", "<pad>", "</s>", "<unk>", "the", "sat"]:   4 3 2 3 5 2

    The numbers are those of fairseq's dictionary: four special words, then all others by falling frequency. As there, a
    carriage return ends a line, and the special words mean themselves where a text has them. Version 0.1.0 called the
    line end `<eos>` and read a lone carriage return as white space; its tokenizers are known by that, and go on so.
    """

    name = "words"
    summary = "a token is a word between white space, the most frequent ones, as the paper counts WikiText"
    sized = True
    ends_lines = True
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

    @classmethod
    def build(cls, texts: Iterable[str], vocabulary: int, size: int | None) -> "WordTokenizer":
        return count_words(texts, vocabulary)

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "WordTokenizer | None":
        if layout["model"].get("type") != "WordLevel":
            return None
        numbers = layout["model"]["vocab"]
        words = sorted(numbers, key=numbers.get)
        special = tuple(words[:4]) in (cls.SPECIAL, cls.FIRST_SPECIAL)
        return cls(words) if special and numbers[words[-1]] == len(words) - 1 else None

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
        return "".join(decoder.push(token) for token in self.checked(ids))

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


def count_words(texts: Iterable[str], vocabulary: int) -> WordTokenizer:
    """The most frequent words, ties in the order of the alphabet, as fairseq sorts them.

    "b a b <unk>" with room for 8:   <s> <pad> </s> <unk> b a madeupword0000 madeupword0001
    """
    special = WordTokenizer.SPECIAL
    if vocabulary < PADDING:
        raise InputError(f"words needs a vocabulary of at least {PADDING}, not {vocabulary}.")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
        if len(counts) > MOST_WORDS:
            counts = _without_the_rarest(counts)
    for word in special:
        counts.pop(word, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    words = [*special, *ranked][:vocabulary]
    filled = min(vocabulary, -(-len(words) // PADDING) * PADDING)
    # A text that contains such a word itself would otherwise have two numbers for it.
    made_up = (word for number in range(filled) if (word := f"madeupword{number:04d}") not in counts)
    return WordTokenizer([*words, *(next(made_up) for _ in range(filled - len(words)))])


def _without_the_rarest(counts: Counter[str]) -> Counter[str]:
    """At most half as many words: those seen once go first, then those seen twice."""
    least = 1
    while len(counts) > MOST_WORDS // 2:
        least += 1
        counts = Counter({word: count for word, count in counts.items() if count >= least})
    return counts
