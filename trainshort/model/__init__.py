"""The Transformer language model, its position methods and its key-value caches."""
