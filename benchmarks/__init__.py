"""Measure the speed and the memory of trainshort against other implementations.

The benchmarks are part of a source checkout and are not installed. Run them from the folder of the checkout:

    python -m benchmarks                    # the same as `trainshort bench`
    python -m benchmarks.tune_laptop        # the same as `trainshort tune`
    python -m benchmarks.update_docs        # write the stored results into the documents
    python -m benchmarks.plot_biases        # draw docs/biases*.png

Other programs may disturb the times on a shared machine. So all implementations run once per round, and the medians of
the rounds are compared. Peak memory is measured in a new process for each implementation.

- `suites` lists the benchmarks and their settings. `run` runs them and stores the results.
- `attention`, `training`, `evaluate`, `decode`, `patch` and `prepare` contain one suite each.
- `inputs` provides queries, keys and values. `peers` provides the other implementations of attention.
- `compare` compares two stored results.

Importing this package does not import torch.
"""
