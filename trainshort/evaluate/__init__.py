"""Perplexity by length, window and position: how far past its training length a model is good.

Reading order: trainshort.passes (what a pass reads and scores), target (what is evaluated), text (on what), sweep (the
scoring), results (what is stored, and what follows from it), card (the run's one-line summary), display.
Importing this package does not import torch: reports read results without it.
"""
