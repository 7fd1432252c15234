"""SOCKET 3, text: from a corpus to batches. Torch-free.

Reading order: document.py (what a corpus yields), corpus.py (corpora by name), tokenizer/, pipeline.py (`prepare`),
meta.py (the folder it makes), of_run.py (what a run opens, reads in batches, and keeps).
"""

from trainshort.data.meta import Meta, Prepared, SplitMeta, open_data
from trainshort.data.of_run import BatchStream, open_or_prepare, really
from trainshort.data.pipeline import prepare
from trainshort.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer, tokenizers

__all__ = [
    "BatchStream",
    "Meta",
    "Prepared",
    "SplitMeta",
    "Tokenizer",
    "load_tokenizer",
    "open_data",
    "open_or_prepare",
    "prepare",
    "really",
    "save_tokenizer",
    "tokenizers",
]
