"""Builds the vocabularies that are made here: byte-level BPE from a sample, words by counting all of the training text.

Both depend on the text alone. The sample is spread evenly over the whole corpus.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from trainshort.data.decoding import byte_alphabet
from trainshort.data.document import Corpus
from trainshort.data.tokenizer import END_OF_TEXT, ByteTokenizer, SavedTokenizer, Tokenizer, WordTokenizer, cut
from trainshort.errors import InputError
from trainshort.registry import Registry

SAMPLE_BYTES = 1 << 25
"""BPE is trained on about this much text; more changes few merges and costs time and memory."""
PART = 4096
"""Characters of which a sample consists at least; also given to the trainer at a time, so that its threads share."""
MOST_WORDS = 2_000_000
"""Different words that are counted at once; beyond, the rarest are forgotten, so that memory stays bounded."""
PADDING = 8
"""Word vocabularies are filled up to a multiple of this, as fairseq does (WikiText-103: 267,737 to 267,744)."""


tokenizers: Registry[Callable[[Iterable[str], int, Corpus], Tokenizer]] = Registry("tokenizer")
"""How a tokenizer is built from training texts, the size of a vocabulary, and their corpus. It is saved as a
tokenizer.json; reading that needs no builder."""


@tokenizers.register("bytes")
def use_bytes(texts: Iterable[str], vocabulary: int, corpus: Corpus) -> Tokenizer:
    """A token is a byte of UTF-8; 256 of them."""
    return ByteTokenizer()


@tokenizers.register("bpe")
def use_bpe(texts: Iterable[str], vocabulary: int, corpus: Corpus) -> Tokenizer:
    """Byte-level sub-words, trained on a sample of the text."""
    # A stream's beginning has to do: reading all of it for a sample would download all of it twice.
    share = min(1.0, SAMPLE_BYTES / corpus.size) if corpus.size and not corpus.streamed else 1.0
    return train_bpe(sample(texts, share), vocabulary)


@tokenizers.register("words")
def use_words(texts: Iterable[str], vocabulary: int, corpus: Corpus) -> Tokenizer:
    """A token is a word between spaces, the most frequent ones, as the paper counts WikiText."""
    return count_words(texts, vocabulary)


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


def train_bpe(texts: Iterable[str], vocabulary: int) -> SavedTokenizer:
    """A byte-level BPE: any text can be encoded, and decoding gives it back exactly."""
    least = len(byte_alphabet()) + 1
    if vocabulary < least:
        raise InputError(f"bpe needs a vocabulary of at least {least} (the bytes and an end token), not {vocabulary}.")
    from tokenizers import Tokenizer as Saved
    from tokenizers import decoders, models, pre_tokenizers, trainers

    saved = Saved(models.BPE())
    saved.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    saved.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_alphabet().values()),
        show_progress=False,
    )
    saved.train_from_iterator((part for text in texts for part in cut(text, PART)), trainer)
    return SavedTokenizer(saved, "bpe")


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
