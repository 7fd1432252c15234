"""Text corpora, tokenizers, prepared datasets, and the batches that training reads. This package does not import torch."""
