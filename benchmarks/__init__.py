"""Speed and memory, as ratios against peers in one run. `make bench` runs them all; none of them is a test.

Machines are shared and noisy, so contestants take turns within one process and medians are compared, and peak memory
is measured in a process of its own for each.
"""
