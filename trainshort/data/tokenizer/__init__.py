"""Text to token numbers and back: `bytes`, `words`, `bpe`, a plug-in's, or any saved `tokenizer.json`.

A kind of tokenizer is one file here (or a plug-in) with one decorator, `@tokenizers.register("name")`.
"""

from trainshort.data.tokenizer.base import END_OF_TEXT, Tokenizer, cut, tokenizers
from trainshort.data.tokenizer.bpe import BytePairTokenizer, sample, train_bpe
from trainshort.data.tokenizer.bytes import ByteTokenizer
from trainshort.data.tokenizer.saved import (
    FILE,
    SavedTokenizer,
    load_tokenizer,
    parse_tokenizer,
    save_tokenizer,
    tokenizer_name,
)
from trainshort.data.tokenizer.words import WordTokenizer, count_words

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
