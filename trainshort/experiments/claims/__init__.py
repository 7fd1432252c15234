"""The paper's claims, executed: each is a check over stored results, with a verdict and its reason. No torch.

Reading order: collection (run folders into memory), measured (a cell of the paper, as obtained here), verdicts (what a
claim is), extrapolation and speed_and_memory (the checks).
"""
