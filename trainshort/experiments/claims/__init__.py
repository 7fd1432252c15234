"""Check the claims of the ALiBi paper against stored results. Each check returns a verdict and a reason.

- `collection` reads run folders.
- `measured` looks up measured values and compares them.
- `verdicts` defines claims, verdicts and outcomes.
- `extrapolation` and `speed_and_memory` contain the checks.

This package does not import torch.
"""
