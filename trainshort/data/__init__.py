"""Text corpora, tokenizers, prepared datasets and training batches. This package does not import torch."""
