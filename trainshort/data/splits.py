"""Which documents of an unsplit corpus are held out: decided by a hash of the text, the same every time.

Identical documents always fall into the same split, so that no copy of a training text is ever scored. A corpus with a
`train` but no `valid` or `test` gets what it lacks from its training documents.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from trainshort.data.document import SPLITS, Corpus, Document, Errors
from trainshort.errors import InputError

HELD_OUT = 0.05
"""Share of the documents in each of valid and test ..."""
HELD_OUT_BYTES = 50_000_000
"""... as long as that is no more than about this much text."""
SMALL = 1 << 26
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
        if number < self.test:
            return "test" if "test" in self.missing else "train"
        if number < self.valid:
            return "valid" if "valid" in self.missing else "train"
        return "train"


def text_hash(text: str) -> int:
    """64 bits that depend on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def splitter(corpus: Corpus, errors: Errors) -> Splitter:
    """The rule for this corpus; small corpora are read for it."""
    missing = tuple(name for name in SPLITS[1:] if name not in corpus.splits) if "train" in corpus.splits else ()
    if not missing:
        return Splitter(())
    if corpus.size is not None and corpus.size <= SMALL:
        hashes = (text_hash(document.text) for document in corpus.documents(errors=errors) if document.split == "train")
        return _exact(corpus.name, missing, hashes)
    share = min(HELD_OUT, HELD_OUT_BYTES / corpus.size) if corpus.size else HELD_OUT
    return Splitter(missing, int(share * 2**64), int(2 * share * 2**64))


def _exact(name: str, missing: tuple[str, ...], hashes: Iterable[int]) -> Splitter:
    """Bounds between the sorted hashes: a twentieth of the documents below each, and one at least."""
    ranked = sorted(set(hashes))
    if len(ranked) < 3:
        raise InputError(
            f"'{name}' holds {len(ranked)} different document{'' if len(ranked) == 1 else 's'}, too few to split into "
            "train, valid and test. "
            "Give more text, or files named train, valid and test."
        )
    share = max(1, round(HELD_OUT * len(ranked)))
    return Splitter(missing, ranked[share], ranked[2 * share])
