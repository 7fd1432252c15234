"""The rule that assigns documents to the splits train, valid and test."""

import hashlib
from dataclasses import dataclass

from trainshort.data.documents import SPLITS, Corpus, Document, Errors
from trainshort.errors import InputError

HELD_OUT_FRACTION = 0.05
"""Share of the documents in each of valid and test ..."""
HELD_OUT_BYTES = 50_000_000
"""... as long as that is no more than about this much text."""
EXACT_SPLIT_MAX_BYTES = 1 << 26
"""Corpora up to this size are read once more before, so that the shares are exact and never zero."""


@dataclass(frozen=True)
class Splitter:
    """Hashes below `test` are held out for test, those from there to `valid` for valid, in so far as they are missing.

    missing=(valid, test), test=5, valid=10:   hash 3 -> test, 7 -> valid, 12 -> train
    """

    missing: tuple[str, ...]
    test: int = 0
    valid: int = 0

    def split(self, document: Document) -> str:
        if document.split != "train" or not self.missing:
            return document.split
        number = text_hash(document.text)
        drawn = "test" if number < self.test else "valid" if number < self.valid else "train"
        return drawn if drawn in self.missing else "train"


def text_hash(text: str) -> int:
    """64 bits that depend on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def make_splitter(corpus: Corpus, errors: Errors) -> Splitter:
    """The rule for this corpus. Small corpora are read for it: the bounds are some of their sorted hashes, with a
    twentieth of the documents, and one at least, below each."""
    missing = tuple(name for name in SPLITS[1:] if name not in corpus.splits) if "train" in corpus.splits else ()
    if not missing:
        return Splitter(())
    if corpus.size is None or corpus.size > EXACT_SPLIT_MAX_BYTES:
        share = min(HELD_OUT_FRACTION, HELD_OUT_BYTES / corpus.size) if corpus.size else HELD_OUT_FRACTION
        return Splitter(missing, int(share * 2**64), int(2 * share * 2**64))
    ranked = sorted({text_hash(one.text) for one in corpus.documents(errors=errors) if one.split == "train"})
    if len(ranked) < 3:
        raise InputError(
            f"'{corpus.name}' holds {len(ranked)} different document{'' if len(ranked) == 1 else 's'}, too few to "
            "split into train, valid and test. Give more text, or files named train, valid and test."
        )
    held_out = max(1, round(HELD_OUT_FRACTION * len(ranked)))
    return Splitter(missing, ranked[held_out], ranked[2 * held_out])
