"""Builds the vocabularies that are made here: byte-level BPE from a sample, words by counting all of the training text.

Both depend on the text alone. The sample is chosen by a hash of each document, so it is spread over the whole corpus
and the same however the work is divided.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from trainshort.data.decoding import byte_alphabet
from trainshort.data.document import Corpus, Document, Errors
from trainshort.data.splits import Splitter, text_hash
from trainshort.data.tokenizer import END_OF_TEXT, SavedTokenizer, Tokenizer, WordTokenizer, cut
from trainshort.errors import InputError

SAMPLE_BYTES = 1 << 25
"""BPE is trained on about this much text; more changes few merges and costs time and memory."""
PART = 4096
"""Characters given to the trainer at a time, so that its threads share a long document."""
MOST_WORDS = 2_000_000
"""Different words that are counted at once; beyond, the rarest are forgotten, so that memory stays bounded."""
PADDING = 8
"""Word vocabularies are filled up to a multiple of this, as fairseq does (WikiText-103: 267,737 to 267,744)."""


def training_sample(corpus: Corpus, splitter: Splitter, errors: Errors) -> Iterator[Document]:
    """Training documents for BPE: all of a small corpus, a spread share of a large one, the beginning of a stream."""
    share = min(1.0, SAMPLE_BYTES / corpus.size) if corpus.size and not corpus.streamed else 1.0
    taken = 0
    for document in corpus.documents(errors=errors):
        # The split looks at the high bits of the hash, the sample at the low ones: they are independent.
        if splitter.split(document) != "train" or text_hash(document.text) & 0xFFFFFFFF >= share * 2**32:
            continue
        taken += len(document.text)
        yield document
        if taken >= 2 * SAMPLE_BYTES or (share == 1.0 and taken >= SAMPLE_BYTES):
            return


def build_tokenizer(kind: str, vocabulary: int, documents: Iterable[Document]) -> Tokenizer:
    """`bpe` or `words` from training documents."""
    texts = (document.text for document in documents)
    return train_bpe(texts, vocabulary) if kind == "bpe" else count_words(texts, vocabulary)


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

    "b a b <unk>" with room for 8:   <s> <pad> <eos> <unk> b a madeupword0000 madeupword0001
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
