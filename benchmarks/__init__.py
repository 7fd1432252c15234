"""Speed and memory, as ratios against peers in one run: `trainshort bench`. None of it is a test.

Machines are shared and noisy, so contestants take turns within one process and medians are compared, and peak memory
is measured in a process of its own for each.

Reading order: suites (what is measured), measure (how, and the whole run), one file per suite (attention with recorded
and peers, training with rig, evaluate, decode, patch, prepare), measurements (what is stored), compare (two such),
documents (tables of them).
Importing this package does not import torch: reports read results without it.
"""
