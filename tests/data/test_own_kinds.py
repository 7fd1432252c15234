"""Tests of a corpus and a tokenizer that a plug-in registers."""

import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import models

from trainshort.data.dataset import open_dataset
from trainshort.data.tokenizers.base import SavedTokenizer, load_tokenizer, save_tokenizer
from trainshort.data.tokenizers.builtin import ByteTokenizer, WordTokenizer

PLUGIN = '''
from pathlib import Path
from trainshort.data.corpora import corpora
from trainshort.data.text_files import file_corpus
from trainshort.data.tokenizers.base import tokenizers
from trainshort.data.tokenizers.builtin import WordTokenizer

@corpora.register("poems")
def poems():
    """Three hundred short poems."""
    return file_corpus("poems", [Path(__file__).with_name("poems.txt")])

@tokenizers.register("shouted")
class Shouted(WordTokenizer):
    """Words in capitals."""

    name = "shouted"
    summary = "words in capitals"

    @classmethod
    def build(cls, texts, vocab_size, byte_count):
        return super().build((text.upper() for text in texts), vocab_size, byte_count)

    @classmethod
    def recognize(cls, layout, library):
        words = layout["model"]["vocab"]
        return cls(sorted(words, key=words.get)) if "ROSE" in words else None

    def encode(self, text):
        return super().encode(text.upper())
'''


def run_trainshort(*words: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command of trainshort in a folder, in a new process."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "trainshort", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_plugin_corpus_and_tokenizer_are_used_by_all_workers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    (tmp_path / "poems.txt").write_text("".join(f"A rose is a rose {number % 7}.\n\n" for number in range(300)))
    command = ("prepare", "poems", "--tokenizer", "shouted", "--vocab-size", "16")
    for workers in ("1", "2"):
        options = ("--workers", workers, "--out", workers, "--plugin", "own.py")
        process = run_trainshort(*command, *options, folder=tmp_path)
        assert process.returncode == 0, process.stderr
    assert (tmp_path / "1" / "train.bin").read_bytes() == (tmp_path / "2" / "train.bin").read_bytes()

    dataset = open_dataset(tmp_path / "1")
    assert WordTokenizer.UNKNOWN not in dataset.split("train"), "all words are in the vocabulary of capital letters"
    meta = dataset.meta
    assert (meta.request.corpus, meta.tokenizer, meta.request.vocab_size) == ("poems", "shouted", 16)


def test_plugin_entries_are_unknown_without_the_plugin(tmp_path: Path) -> None:
    process = run_trainshort("prepare", "poems", "--tokenizer", "shouted", "--vocab-size", "16", folder=tmp_path)
    assert process.returncode == 2
    assert "'poems'" in process.stderr
    process = run_trainshort("list", "tokenizers", folder=tmp_path)
    assert [line.split()[0] for line in process.stdout.splitlines()] == ["bpe", "bytes", "words"]


def test_tokenizer_is_saved_to_and_loaded_from_any_folder(tmp_path: Path) -> None:
    assert save_tokenizer(ByteTokenizer(), tmp_path) == tmp_path / "tokenizer.json"
    loaded = load_tokenizer(tmp_path)
    assert (type(loaded), loaded.name) == (ByteTokenizer, "bytes")
    path = tmp_path / "gpt2" / "tokenizer.json"
    path.parent.mkdir()
    library = Library(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    save_tokenizer(SavedTokenizer(library, "gpt2"), path.parent)
    assert load_tokenizer(path).name == "gpt2"
    assert load_tokenizer(path, name="chosen").name == "chosen"
