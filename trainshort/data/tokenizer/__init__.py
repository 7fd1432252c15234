"""Text to token numbers and back: `bytes`, `words`, `bpe`, a plug-in's, or any saved `tokenizer.json`.

A kind of tokenizer is one class, here (`built.py`) or in a plug-in, with one decorator, `@tokenizers.register("name")`.
"""

from trainshort.data.tokenizer.base import (
    END_OF_TEXT,
    FILE,
    SavedTokenizer,
    Tokenizer,
    cut,
    load_tokenizer,
    parse_tokenizer,
    save_tokenizer,
    tokenizer_name,
    tokenizers,
)
from trainshort.data.tokenizer.built import (
    BytePairTokenizer,
    ByteTokenizer,
    WordTokenizer,
    count_words,
    sample,
    train_bpe,
)

__all__ = [
    "END_OF_TEXT",
    "FILE",
    "BytePairTokenizer",
    "ByteTokenizer",
    "SavedTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "count_words",
    "cut",
    "load_tokenizer",
    "parse_tokenizer",
    "sample",
    "save_tokenizer",
    "tokenizer_name",
    "tokenizers",
    "train_bpe",
]
