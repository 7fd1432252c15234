"""A corpus and a tokenizer from outside the package: one file, one decorator each, and every worker knows them."""

import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import models

from trainshort.data.dataset import open_dataset
from trainshort.data.tokenizers.base import SavedTokenizer, load_tokenizer, save_tokenizer
from trainshort.data.tokenizers.builtin import ByteTokenizer, WordTokenizer

OWN = '''
from pathlib import Path
from trainshort.data.corpus import corpora
from trainshort.data.text_files import file_corpus
from trainshort.data.tokenizer import tokenizers
from trainshort.data.tokenizer.built import WordTokenizer

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
    def build(cls, texts, vocab_size, size):
        return super().build((text.upper() for text in texts), vocab_size, size)

    @classmethod
    def recognize(cls, layout, library):
        words = layout["model"]["vocab"]
        return cls(sorted(words, key=words.get)) if "ROSE" in words else None

    def encode(self, text):
        return super().encode(text.upper())
'''


def trainshort(*words: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "trainshort", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_corpus_and_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "poems.txt").write_text("".join(f"A rose is a rose {n % 7}.\n\n" for n in range(300)))
    plugin = ("--plugin", "own.py")
    made = ("prepare", "poems", "--tokenizer", "shouted", "--vocab-size", "16")
    for workers in ("1", "2"):
        done = trainshort(*made, "--workers", workers, "--out", workers, *plugin, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1" / "train.bin").read_bytes() == (tmp_path / "2" / "train.bin").read_bytes()
    data = open_dataset(tmp_path / "1")
    assert WordTokenizer.UNKNOWN not in data.split("train"), "every word was read in capitals"
    meta = data.meta
    assert (meta.request.corpus, meta.tokenizer, meta.request.vocab_size) == ("poems", "shouted", 16)
    unknown = trainshort(*made, folder=tmp_path)
    assert unknown.returncode == 2
    assert "'poems' is neither a known corpus nor a file or folder" in unknown.stderr
    listed = trainshort("list", "tokenizers", folder=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["bpe", "bytes", "words"]


def test_a_tokenizer_is_saved_to_and_loaded_from_any_folder(tmp_path: Path) -> None:
    assert save_tokenizer(ByteTokenizer(), tmp_path) == tmp_path / "tokenizer.json"
    loaded = load_tokenizer(tmp_path)
    assert (type(loaded), loaded.name) == (ByteTokenizer, "bytes")
    other = Path(tmp_path / "gpt2" / "tokenizer.json")
    other.parent.mkdir()
    library = Library(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    save_tokenizer(SavedTokenizer(library, "gpt2"), other.parent)
    assert load_tokenizer(other).name == "gpt2"
    assert load_tokenizer(other, name="its own name").name == "its own name"
