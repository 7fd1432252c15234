"""The tokenizers that can be chosen by name, and functions that save and load tokenizers."""
