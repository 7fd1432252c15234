"""How far a model's context matters to it, and why: which context it uses, how far it looks, what each method costs.

Reading order: lab (what every analysis gets and returns, the registry, and how they are asked), then one file per
question. An analysis from outside is registered with `trainshort.register_analysis`.
"""

from trainshort.evaluate.analyses.base import Analysis, AnalysisContext, analyses

__all__ = ["Analysis", "AnalysisContext", "analyses"]
