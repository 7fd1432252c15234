"""SOCKET 3, text: from a corpus to batches. Torch-free.

Reading order: document.py (what a corpus yields), corpus.py (corpora by name), tokenizer/, pipeline.py (`prepare`),
meta.py (the folder it makes), of_run.py (what a run opens, reads in batches, and keeps).
"""

from trainshort.data.meta import DatasetMeta, PreparedDataset, SplitMeta, open_dataset
from trainshort.data.of_run import BatchStream, open_or_prepare, resolve_data_config
from trainshort.data.pipeline import prepare
from trainshort.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer, tokenizers

__all__ = [
    "BatchStream",
    "DatasetMeta",
    "PreparedDataset",
    "SplitMeta",
    "Tokenizer",
    "load_tokenizer",
    "open_dataset",
    "open_or_prepare",
    "prepare",
    "resolve_data_config",
    "save_tokenizer",
    "tokenizers",
]
