"""`bpe`: byte-level sub-words, trained here on a sample that is spread evenly over the whole training text."""

from collections.abc import Iterable, Iterator
from typing import Any

from trainshort.data.tokenizer.base import END_OF_TEXT, byte_alphabet, cut, tokenizers
from trainshort.data.tokenizer.saved import SavedTokenizer
from trainshort.errors import InputError

SAMPLE_BYTES = 1 << 25
"""BPE is trained on about this much text; more changes few merges and costs time and memory."""
PART = 4096
"""Characters of which a sample consists at least; also given to the trainer at a time, so that its threads share."""


@tokenizers.register("bpe")
class BytePairTokenizer(SavedTokenizer):
    """A byte-level BPE of ours: any text can be encoded, and decoding gives it back exactly."""

    summary = "byte-level sub-words, trained on a sample of the text"
    sized = True

    @classmethod
    def build(cls, texts: Iterable[str], vocabulary: int, size: int | None) -> "BytePairTokenizer":
        # A stream's beginning has to do: reading all of it for a sample would download all of it twice.
        share = min(1.0, SAMPLE_BYTES / size) if size else 1.0
        return train_bpe(sample(texts, share), vocabulary)

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


def train_bpe(texts: Iterable[str], vocabulary: int) -> BytePairTokenizer:
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
    return BytePairTokenizer(saved, "bpe")
