"""trainshort: language models that are trained on short sequences and run on long ones."""

__version__ = "0.1.0"
