"""Perplexity by length, window and position: how far past its training length a model is good.

Reading order: trainshort.data.passes (what a pass reads and scores), targets (what is evaluated), sweep (the
scoring), results (what is stored), evidence (what follows from it, and the run's one-line summary), session, picture.
Importing this package does not import torch: reports read results without it.
"""
