"""Train and evaluate the models of the paper's tables and figures. Work that is already done is not repeated.

- `jobs` decides which models to train and evaluate, and runs all jobs.
- `local` runs several jobs at the same time on this machine. `slurm` runs the jobs on a cluster.
- `costs` measures speed and memory. `samples` generates text.
- `plan` estimates how much time and memory the jobs need.
"""
