"""The tokenizers that can be chosen by name.

- `bpe`: byte-level BPE, which is trained on a sample of the training text.
- `bytes`: A token is a byte of UTF-8.
- `words`: A token is a word between white space. The words are numbered as in fairseq, which the ALiBi paper used.
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

# BPE is trained on about this much text. More text changes few merges, and costs time and memory.
SAMPLE_BYTES = 1 << 25

# The trainer of BPE gets the sample in pieces of at least this size, so that its threads share the work.
SAMPLE_PIECE_CHARACTERS = 4096


class BytePairTokenizer(SavedTokenizer):
    """A byte-level BPE tokenizer that was trained by this package. It can encode any text without a loss."""

    sized = True

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, byte_count: int | None) -> "BytePairTokenizer":
        """Train a tokenizer.

        Args:
            texts: The training documents.
            vocab_size: The size of the vocabulary: the end token, the 256 bytes and the merges.
            byte_count: The size of the training text in bytes. If it is known, the sample is spread over the complete
                text. If it is None, the sample is the start of the text.

        Raises:
            InputError: If `vocab_size` is too small for all bytes.
        """
        min_vocab_size = len(byte_alphabet()) + 1
        if vocab_size < min_vocab_size:
            raise InputError(
                f"The tokenizer bpe requires a vocabulary of at least {min_vocab_size} (the bytes and an end token), "
                f"got {vocab_size}."
            )
        require_package("tokenizers", "Training a tokenizer", "trainshort[train]")
        from tokenizers import models, trainers

        tokenizer = _make_byte_level_tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_alphabet().values()),
            show_progress=False,
        )
        fraction = 1.0
        if byte_count:
            fraction = min(1.0, SAMPLE_BYTES / byte_count)
        tokenizer.train_from_iterator(sample(texts, fraction), trainer)
        return cls(tokenizer, "bpe")

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "BytePairTokenizer | None":
        """Return a tokenizer if a tokenizer.json was saved by this class, and None otherwise.

        A BPE tokenizer was saved by this class if its end token has the id 0.

        Args:
            layout: The content of the tokenizer.json.
            library: The same tokenizer, loaded by the library `tokenizers`.
        """
        model = layout["model"]
        vocabulary = model.get("vocab")
        if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
            return None
        if vocabulary.get(END_OF_TEXT) != 0:
            return None
        return cls(library, "bpe")


def sample(texts: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield a sample of texts in small pieces that are spread evenly over the texts.

    The sample ends early if it becomes much larger than `SAMPLE_BYTES`.

    Args:
        texts: The texts.
        fraction: The share of the characters that is yielded.

    Example:
        For a fraction of 0.4 and pieces of equal length, the pieces 0, 3, 5 and 8 of the first nine pieces (counted
        from 0) are yielded.
    """
    characters_seen = 0
    characters_taken = 0
    # A fraction below 1 was chosen such that the sample has about `SAMPLE_BYTES`. The limit is twice as large, so that
    # it is only reached if the estimated size of the text was wrong.
    max_characters = SAMPLE_BYTES if fraction == 1 else 2 * SAMPLE_BYTES
    for text in texts:
        for piece in cut(text, SAMPLE_PIECE_CHARACTERS):
            # A piece is taken whenever the taken share has fallen to `fraction`.
            if characters_taken <= fraction * characters_seen:
                yield piece
                characters_taken += len(piece)
            characters_seen += len(piece)
        if characters_taken >= max_characters:
            return


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens are the bytes of UTF-8. The end token is the byte 0, which text does not contain."""

    name = "bytes"
    vocab_size = 256
    end = 0

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, byte_count: int | None) -> "ByteTokenizer":
        """Return a new tokenizer. The arguments have no effect."""
        return cls()

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "ByteTokenizer | None":
        """Return a tokenizer if a tokenizer.json was saved by this class, and None otherwise.

        This class saves a BPE tokenizer without merges, in which the id of each token is the byte that it stands for.

        Args:
            layout: The content of the tokenizer.json.
            library: The same tokenizer, loaded by the library `tokenizers`. It is not used.
        """
        model = layout["model"]
        if model.get("type") != "BPE" or model["merges"] or model["vocab"] != byte_numbers():
            return None
        return cls()

    def encode(self, text: str) -> Ids:
        """Return the bytes of a text as token ids."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(self.validate_ids(ids)).decode(errors="replace")

    def decoder(self) -> Decoder:
        """Return a decoder that decodes one byte at a time."""
        return ByteDecoder(lambda token: bytes([token]))

    def to_json(self) -> str:
        """Return the content of a tokenizer.json: a byte-level BPE without merges."""
        require_package("tokenizers", "Saving a tokenizer", "trainshort[train]")
        from tokenizers import models

        return _make_byte_level_tokenizer(models.BPE(byte_numbers(), [])).to_str()


def _make_byte_level_tokenizer(model: Any) -> Any:
    """Create a tokenizer of the library `tokenizers` for a BPE model whose characters stand for bytes."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, pre_tokenizers

    tokenizer = LibraryTokenizer(model)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


# If more different words than this are counted, the rarest are dropped, so that the memory stays bounded.
MAX_COUNTED_WORDS = 2_000_000

# The size of a word vocabulary is filled up to a multiple of this number, as in fairseq. The vocabulary of WikiText-103
# has 267,737 words and is filled up to 267,744.
VOCAB_MULTIPLE = 8


class _WordIds(dict[str, int]):
    """A dictionary that returns the id of the unknown word for all words that it does not contain.

    `map(word_ids.__getitem__, words)` is faster than calls of `dict.get` with a default.
    """

    def __missing__(self, word: str) -> int:
        return WordTokenizer.UNKNOWN


class WordTokenizer(Tokenizer):
    """A tokenizer whose tokens are words between white space, and `</s>` at the end of each line.

    The ids are those of fairseq: four special words, then all other words by falling frequency. As in fairseq, a
    carriage return ends a line. A special word in the text is encoded as the special token.

    Args:
        words: The words of the vocabulary. The id of a word is its position.

    Example:
        >>> tokenizer = WordTokenizer(["<s>", "<pad>", "</s>", "<unk>", "the", "sat"])
        >>> tokenizer.encode("the cat\\n<unk> sat\\n").tolist()
        [4, 3, 2, 3, 5, 2]
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
        # Maps each word to its id, and unknown words to the id of `<unk>`.
        self._ids = _WordIds((word, index) for index, word in enumerate(self.words))
        # In a text, a line end is replaced by this word before the text is split at white space.
        self._line_end = f" {self.words[self.LINE_END]} "

    @classmethod
    def build(cls, texts: Iterable[str], vocab_size: int, byte_count: int | None) -> "WordTokenizer":
        """Create a vocabulary of the most frequent words. Words of equal frequency are sorted alphabetically.

        The size of the vocabulary is filled up to a multiple of `VOCAB_MULTIPLE` with words such as "madeupword0000".

        Args:
            texts: The training documents.
            vocab_size: The largest size of the vocabulary.
            byte_count: Has no effect.

        Raises:
            InputError: If `vocab_size` is too small.

        Example:
            >>> WordTokenizer.build(["b a b <unk>"], vocab_size=8, byte_count=None).words[4:]
            ['b', 'a', 'madeupword0000', 'madeupword0001']
        """
        if vocab_size < VOCAB_MULTIPLE:
            raise InputError(
                f"The tokenizer words requires a vocabulary of at least {VOCAB_MULTIPLE}, got {vocab_size}."
            )
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
            if len(counts) > MAX_COUNTED_WORDS:
                counts = _drop_rare_words(counts)
        for word in cls.SPECIAL:
            counts.pop(word, None)
        sorted_words = sorted(counts, key=lambda word: (-counts[word], word))
        words = [*cls.SPECIAL, *sorted_words][:vocab_size]

        num_multiples = -(-len(words) // VOCAB_MULTIPLE)  # division that rounds up
        rounded_up_size = num_multiples * VOCAB_MULTIPLE
        target_size = min(vocab_size, rounded_up_size)
        suffix = 0
        while len(words) < target_size:
            filler_word = f"madeupword{suffix:04d}"
            suffix += 1
            if filler_word not in counts:  # A word that the text contains must not get a second id.
                words.append(filler_word)
        return cls(words)

    @classmethod
    def recognize(cls, layout: dict[str, Any], library: Any) -> "WordTokenizer | None":
        """Return a tokenizer if a tokenizer.json has a word vocabulary with the special words of this class, else None.

        Args:
            layout: The content of the tokenizer.json.
            library: The same tokenizer, loaded by the library `tokenizers`. It is not used.
        """
        if layout["model"].get("type") != "WordLevel":
            return None
        vocabulary = layout["model"]["vocab"]
        words = sorted(vocabulary, key=vocabulary.get)  # `vocabulary` maps words to ids
        has_special_words = tuple(words[: len(cls.SPECIAL)]) == cls.SPECIAL
        if not has_special_words:
            return None
        # Without gaps between the ids, the id of each word is its position in the sorted list.
        largest_id = vocabulary[words[-1]]
        has_consecutive_ids = largest_id == len(words) - 1
        return cls(words) if has_consecutive_ids else None

    def encode(self, text: str) -> Ids:
        """Return the token ids of a text. Words that are not in the vocabulary become `<unk>`."""
        if "\r" in text:  # line ends of Windows or old Macs
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        words = text.replace("\n", self._line_end).split()
        return np.fromiter(map(self._ids.__getitem__, words), dtype=np.int64, count=len(words))

    def encode_document(self, text: str) -> Ids:
        """Return the token ids of a complete document. The line end of its last line is the end token."""
        ends_with_line_end = text.endswith(("\n", "\r"))
        return self.encode(text if ends_with_line_end else text + "\n")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, with one space between words. `InputError` is raised for an unknown id."""
        words = ["\n" if token == self.LINE_END else self.words[token] for token in self.validate_ids(ids)]
        text = " ".join(words)
        # Line ends have no spaces around them.
        return text.replace(" \n", "\n").replace("\n ", "\n")

    def decoder(self) -> Decoder:
        """Return a decoder that decodes one token at a time."""
        return IncrementalDecoder(self.decode)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json that encodes text as this class does."""
        require_package("tokenizers", "Saving a tokenizer", "trainshort[train]")
        from tokenizers import Regex, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as LibraryTokenizer

        model = models.WordLevel(dict(self._ids), unk_token=self.SPECIAL[self.UNKNOWN])
        tokenizer = LibraryTokenizer(model)
        normalizer = normalizers.Replace(Regex("\r\n?|\n"), self._line_end)
        tokenizer.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
        return tokenizer.to_str()


def _drop_rare_words(counts: Counter[str]) -> Counter[str]:
    """Drop the rarest words until at most half of `MAX_COUNTED_WORDS` words remain.

    Words that were counted once are dropped first, then words that were counted twice, and so on.
    """
    min_count = 1
    while len(counts) > MAX_COUNTED_WORDS // 2:
        min_count += 1
        counts = Counter({word: count for word, count in counts.items() if count >= min_count})
    return counts
