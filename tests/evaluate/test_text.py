"""Tests of the text of an evaluation: the tokens that `--data` means, and their number of words and bytes."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from helpers import make_run, prose, save_hugging_face

from trainshort.config.run_config import DataConfig, ModelConfig
from trainshort.data.preparation import prepare
from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.errors import InputError
from trainshort.evaluate.targets import ModelTarget, RunTarget, Target, open_target
from trainshort.evaluate.text import open_text
from trainshort.model.transformer import TransformerLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def run(folder: Path) -> RunTarget:
    """A run with a byte tokenizer."""
    target = open_target(str(make_run(folder)))
    assert isinstance(target, RunTarget)
    return target


@pytest.fixture(scope="module")
def hf_model(folder: Path) -> Target:
    """A Hugging Face model whose tokens are the bytes plus 2."""
    save_hugging_face(folder / "llama", "llama")
    return open_target(str(folder / "llama"))


def write_text_files(folder: Path, texts: dict[str, str]) -> list[str]:
    """Write text files and return their paths. The keys of `texts` are the file names without the suffix."""
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        paths.append(str(path))
    return paths


def test_default_text_is_the_validation_split_of_the_run(run: RunTarget, folder: Path):
    text = open_text(run, ())
    description = text.description()
    validation_file = folder / "tiny-data" / "valid.bin"
    assert description["split"] == "valid"
    assert description["tokens"] == len(text.tokens) == validation_file.stat().st_size
    assert description["sha256"] == hashlib.sha256(validation_file.read_bytes()).hexdigest()
    assert description["own"] is True
    text_by_corpus_name = open_text(run, (run.config.data.corpus,))
    assert text_by_corpus_name.description() == description


def test_damaged_data_is_rejected(tmp_path):
    target = open_target(str(make_run(tmp_path)))
    validation_file = tmp_path / "tiny-data" / "valid.bin"
    validation_file.write_bytes(bytes(validation_file.stat().st_size))
    with pytest.raises(InputError, match=r"valid\.bin is damaged"):
        open_text(target, ())


def test_text_file_is_read_completely_without_extra_tokens(run: RunTarget, tmp_path):
    (path,) = write_text_files(tmp_path, {"story": "Ein Bär schläft.\nZwei."})
    text = open_text(run, (path,))
    content = Path(path).read_bytes()
    assert bytes(text.tokens.tolist()) == content
    assert (text.words, text.bytes, text.split) == (4, len(content), None)


def test_text_files_are_separated_by_the_end_token(run: RunTarget, tmp_path):
    paths = write_text_files(tmp_path, {"a": "aaa", "b": "bbb"})
    text = open_text(run, paths)
    assert bytes(text.tokens.tolist()) == b"aaa\0bbb"
    assert (text.words, text.bytes) == (2, 6)


def test_word_tokenizer_adds_no_end_token_between_files(tmp_path):
    """The end token of a word tokenizer stands for the end of a line. It does not depend on the tokenizer's name."""
    tokenizer = WordTokenizer.build(["a b c a b a"], 8, None)
    tokenizer.name = "mine"
    target = ModelTarget(TransformerLM(ModelConfig(vocab_size=8, layers=1, width=8, heads=2)), trained_at=8)
    target.tokenizer = lambda: tokenizer
    paths = write_text_files(tmp_path, {"one": "a b\nc\n", "two": "a b\nc\n"})
    text = open_text(target, paths)
    assert text.tokens.tolist() == [*tokenizer.encode("a b\nc\n")] * 2
    truncated_text = open_text(target, paths, max_tokens=5)
    assert (truncated_text.words, truncated_text.bytes) == (3, len("a b\nc\n")), "the ends of lines are counted"


def test_hugging_face_model_uses_its_own_tokenizer(hf_model: Target, tmp_path):
    paths = write_text_files(tmp_path, {"a": "aé\n"})
    text = open_text(hf_model, paths)
    assert text.tokens.tolist() == [byte + 2 for byte in "aé\n".encode()]


def test_corpus_by_name_has_the_same_splits_as_a_dataset(hf_model: Target, run: RunTarget):
    corpus_pattern = run.config.data.corpus.replace("tiny.txt", "tiny.t*t")
    corpus_text = open_text(hf_model, (corpus_pattern,), "valid")
    dataset_text = open_text(run, ())
    assert (corpus_text.words, corpus_text.bytes) == (dataset_text.words, dataset_text.bytes)
    # A dataset has an end token after the last document. A corpus has end tokens only between documents.
    assert len(corpus_text.tokens) == len(dataset_text.tokens) - 1


def test_words_and_bytes_of_truncated_text_are_counted_again(run: RunTarget, tmp_path):
    paths = write_text_files(tmp_path, {"a": "one two three four"})
    text = open_text(run, paths, max_tokens=9)
    assert bytes(text.tokens.tolist()) == b"one two t"
    assert (text.words, text.bytes) == (3, 9)
    assert (text.description()["tokens"], text.description()["whole"]) == (9, 18)
    complete_text = open_text(run, paths, max_tokens=1000)
    assert len(complete_text.tokens) == 18


def test_end_tokens_are_not_counted_as_text(run: RunTarget, tmp_path):
    paths = write_text_files(tmp_path, {"a": "aaa", "b": "bbb"})
    text = open_text(run, paths, max_tokens=5)
    assert len(text.tokens) == 5
    assert (text.words, text.bytes) == (2, 4)


def test_word_tokens_are_words_and_ends_of_lines(tmp_path):
    """As in WikiText, each word and each end of a line is a token. Words are counted without the ends of lines."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(prose(300))
    config = DataConfig(corpus=str(corpus), tokenizer="words", vocab_size=100, folder=tmp_path / "d")
    dataset = prepare(config, progress=False)
    tokenizer = dataset.tokenizer()
    assert tokenizer.encode("a cat\n\nsat\n").tolist().count(tokenizer.end) == 3
    for split in ("valid", "test"):
        split_meta = dataset.meta.splits[split]
        num_line_ends = int((np.asarray(dataset.split(split)) == tokenizer.end).sum())
        assert split_meta.tokens == split_meta.words + num_line_ends


def test_dataset_of_another_tokenizer_is_rejected(run: RunTarget, hf_model: Target, folder: Path, tmp_path):
    config = DataConfig(corpus=str(folder / "tiny.txt"), tokenizer="bpe", vocab_size=300, folder=tmp_path / "bpe")
    prepare(config, progress=False)
    for target in (run, hf_model):
        with pytest.raises(InputError, match=r"another tokenizer \('bpe', 300 types\)"):
            open_text(target, (str(tmp_path / "bpe"),))
    dataset = prepare(config.replace(tokenizer="bytes", folder=tmp_path / "bytes"), progress=False)
    assert len(open_text(run, (str(tmp_path / "bytes"),)).tokens) == dataset.meta.splits["valid"].tokens


def test_dataset_with_the_tokenizer_of_the_model_is_accepted(hf_model: Target, folder: Path, tmp_path):
    tokenizer_path = tmp_path / "tokenizer.json"
    tokenizer_path.write_text(hf_model.tokenizer().to_json())
    config = DataConfig(corpus=str(folder / "tiny.txt"), tokenizer=str(tokenizer_path), folder=tmp_path / "d")
    dataset = prepare(config, progress=False)
    assert len(open_text(hf_model, (str(tmp_path / "d"),)).tokens) == dataset.meta.splits["valid"].tokens


def test_invalid_texts_are_rejected(run: RunTarget, hf_model: Target, tmp_path):
    with pytest.raises(InputError, match="--data"):
        open_text(hf_model, ())
    with pytest.raises(InputError, match=r"'dev'.* train, valid, test"):
        open_text(run, (), "dev")
    with pytest.raises(InputError, match="--max-tokens must be at least 1, got 0"):
        open_text(run, (), max_tokens=0)
    with pytest.raises(InputError, match="nothing-here"):
        open_text(run, ("nothing-here",))
    (text_path,) = write_text_files(tmp_path, {"a": "x"})
    with pytest.raises(InputError, match="sotu is not a text file"):
        open_text(run, (text_path, "sotu"))
    (empty_path,) = write_text_files(tmp_path, {"empty": ""})
    with pytest.raises(InputError, match=r"empty\.txt"):
        open_text(run, (empty_path,))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="UTF-8"):
        open_text(run, (str(tmp_path / "latin.txt"),))
