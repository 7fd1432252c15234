"""Evaluate language models at input lengths beyond their training length.

- `targets` and `text` load the model and the text.
- `sweep` computes the losses at several input lengths, and `overrides` changes how a model uses positions.
- `results` stores the losses, and computes perplexities and confidence intervals.
- `significance` draws conclusions, and `plot` draws figures.
- `evaluation` runs `trainshort evaluate`, and `analyses` runs `trainshort analyze`.

Importing this package does not import torch, because reports read results without torch.
"""
