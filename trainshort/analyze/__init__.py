"""Why a model is good so far, or not: which context it uses, how far it looks, what each position method costs.

Reading order: base (what every analysis gets and returns, and the registry), then one file per question; session runs
them.
"""
