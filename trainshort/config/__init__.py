"""The settings of runs and models, the presets, and the registries of everything that is selected by name."""
