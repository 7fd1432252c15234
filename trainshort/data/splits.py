"""The rule that assigns the documents of a corpus to the splits train, valid and test.

A corpus that was published with a train split, but without a valid or test split, gets the missing splits from its
training documents. A hash of the text selects the documents, so the selection is always the same. Identical documents
are always assigned to the same split. No copy of a training document is therefore evaluated.
"""

import hashlib
from dataclasses import dataclass

from trainshort.data.documents import SPLITS, Corpus, Document, Errors
from trainshort.errors import InputError

# The share of the documents that is used for validation. The same share is used for testing.
HELD_OUT_FRACTION = 0.05

# For a large corpus, the share is reduced such that each of the two splits has about this many bytes.
HELD_OUT_BYTES = 50_000_000

# Corpora up to this size are read once before the preparation, so that the shares are exact and not zero.
EXACT_SPLIT_MAX_BYTES = 1 << 26

# Hashes of documents are below this number.
HASH_LIMIT = 2**64


@dataclass(frozen=True)
class Splitter:
    """Assigns documents to splits by a hash of their text.

    Attributes:
        missing: The splits that the corpus lacks: "valid", "test", both or none.
        test_below: Documents with a hash below this number belong to test, if test is missing.
        valid_below: Documents with a hash from `test_below` to this number belong to valid, if valid is missing.

    Example:
        Splitter(missing=("valid", "test"), test_below=5, valid_below=10) assigns a document with the hash 3 to test,
        with the hash 7 to valid and with the hash 12 to train.
    """

    missing: tuple[str, ...]
    test_below: int = 0
    valid_below: int = 0

    def split(self, document: Document) -> str:
        """Return the split of a document: "train", "valid" or "test".

        Splits that the corpus lacks (`missing`) are made from training documents. The hash of its text decides whether
        a training document moves to such a split, so a document always gets the same split.
        """
        if document.split != "train" or not self.missing:
            return document.split
        document_hash = hash_text(document.text)
        if document_hash < self.test_below:
            split = "test"
        elif document_hash < self.valid_below:
            split = "valid"
        else:
            split = "train"
        return split if split in self.missing else "train"


def hash_text(text: str) -> int:
    """Return a hash of a text with 64 bits. The hash is the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def make_splitter(corpus: Corpus, errors: Errors) -> Splitter:
    """Create the rule that assigns the documents of a corpus to splits.

    A small corpus is read completely. The bounds of the rule are then chosen from the sorted hashes of its documents,
    so that valid and test get 5 % of the documents, and at least one document each.

    Args:
        corpus: The corpus.
        errors: What happens to bytes that are not valid UTF-8.

    Returns:
        The rule. It changes nothing for a corpus that has all splits, or that has no training documents.

    Raises:
        InputError: If the corpus has fewer than three different documents.
    """
    if "train" not in corpus.splits:
        return Splitter(())
    missing = tuple(split for split in ("valid", "test") if split not in corpus.splits)
    if not missing:
        return Splitter(())

    if corpus.size is None or corpus.size > EXACT_SPLIT_MAX_BYTES:
        fraction = HELD_OUT_FRACTION
        if corpus.size:
            fraction = min(HELD_OUT_FRACTION, HELD_OUT_BYTES / corpus.size)
        # Hashes are distributed evenly, so this share of the documents has a hash below this share of the limit.
        return Splitter(missing, test_below=int(fraction * HASH_LIMIT), valid_below=int(2 * fraction * HASH_LIMIT))

    hashes = {hash_text(document.text) for document in corpus.documents(errors=errors) if document.split == "train"}
    if len(hashes) < len(SPLITS):
        count = "1 different document" if len(hashes) == 1 else f"{len(hashes)} different documents"
        raise InputError(
            f"'{corpus.name}' holds {count}, too few to split into train, valid and test. "
            "Give more text, or files named train, valid and test."
        )
    sorted_hashes = sorted(hashes)
    held_out = max(1, round(HELD_OUT_FRACTION * len(sorted_hashes)))
    return Splitter(missing, test_below=sorted_hashes[held_out], valid_below=sorted_hashes[2 * held_out])
