"""Tokenizers that can be chosen by name, and the tokenizer files of prepared datasets."""
