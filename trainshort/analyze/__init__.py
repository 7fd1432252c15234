"""How far a model's context matters to it, and why: which context it uses, how far it looks, what each method costs.

Reading order: lab (what every analysis gets and returns, the registry, and how they are asked), then one file per
question. An analysis from outside registers itself in `analyses`, as the ones here do.
"""

from trainshort.analyze.lab import Analysis, Lab, analyses

# Registration order is the order in which they are asked: the quick ones first, what takes minutes last.
from trainshort.analyze import reach, slopes, far_context, recall, early_tokens, cost  # isort: skip

__all__ = ["Analysis", "Lab", "analyses", "cost", "early_tokens", "far_context", "reach", "recall", "slopes"]
