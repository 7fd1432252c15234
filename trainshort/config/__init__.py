"""Settings of runs and models, presets, and the tables of everything that can be chosen by name."""
