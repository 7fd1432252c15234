"""Analyses of trained models: which context a model uses, how far it looks, and what position methods cost.

`base` contains the types `Analysis` and `AnalysisContext`, and runs `trainshort analyze`. Every other module contains
one analysis. `trainshort.register_analysis` adds an analysis of your own.
"""

from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, analyses

__all__ = ["Analysis", "AnalysisContext", "analyses"]
