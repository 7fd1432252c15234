"""Which tokens a command line means, and how many words and bytes they are."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from helpers import make_run, prose, save_hugging_face

from trainshort.config.run_config import DataConfig, ModelConfig
from trainshort.data.preparation import prepare
from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.errors import InputError
from trainshort.evaluate.targets import ModelTarget, RunTarget, open_target
from trainshort.evaluate.text import open_text
from trainshort.model.transformer import TransformerLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def run(folder: Path) -> RunTarget:
    target = open_target(str(make_run(folder)))
    assert isinstance(target, RunTarget)
    return target


@pytest.fixture(scope="module")
def model(folder: Path):
    save_hugging_face(folder / "llama", "llama")
    return open_target(str(folder / "llama"))


def test_by_default_a_run_is_evaluated_on_its_own_validation_text(run: RunTarget, folder: Path):
    text = open_text(run, ())
    described = text.description()
    assert described["split"] == "valid"
    assert described["tokens"] == len(text.tokens) == (folder / "tiny-data" / "valid.bin").stat().st_size
    assert described["sha256"] == hashlib.sha256((folder / "tiny-data" / "valid.bin").read_bytes()).hexdigest()
    by_name = open_text(run, (run.config.data.corpus,))
    assert by_name.description() == described, "the run's corpus by its name is the run's data"


def test_damaged_tokens_are_never_scored_under_the_old_checksum(tmp_path):
    target = open_target(str(make_run(tmp_path)))
    valid = tmp_path / "tiny-data" / "valid.bin"
    valid.write_bytes(bytes(valid.stat().st_size))
    with pytest.raises(InputError, match=r"valid\.bin is damaged or belongs to another preparation"):
        open_text(target, ())


def test_a_plain_file_is_read_whole_and_nothing_is_added(run: RunTarget, tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("Ein Bär schläft.\nZwei.", encoding="utf-8")
    text = open_text(run, (str(path),))
    assert bytes(text.tokens.tolist()) == path.read_bytes()
    assert (text.words, text.bytes, text.split) == (4, len(path.read_bytes()), None)


def test_several_files_are_separated_by_the_end_token(run: RunTarget, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    text = open_text(run, (str(tmp_path / "a.txt"), str(tmp_path / "b.txt")))
    assert bytes(text.tokens.tolist()) == b"aaa\0bbb"
    assert (text.words, text.bytes) == (2, 6)


def test_words_end_their_lines_whatever_they_are_called(tmp_path):
    """A word tokenizer that came as a file has the file's name; its end token is a line end, which the text has."""
    words = WordTokenizer.build(["a b c a b a"], 8, None)
    words.name = "mine"
    target = ModelTarget(TransformerLM(ModelConfig(vocab_size=8, layers=1, width=8, heads=2)), trained_at=8)
    target.tokenizer = lambda: words
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("a b\nc\n")
    files = [str(tmp_path / f"{name}.txt") for name in ("one", "two")]
    text = open_text(target, files)
    assert text.tokens.tolist() == [*words.encode("a b\nc\n")] * 2, "no end token between the files"
    cut = open_text(target, files, max_tokens=5)
    assert (cut.words, cut.bytes) == (3, len("a b\nc\n")), "its line ends are the text's own"


def test_a_hugging_face_model_reads_with_its_own_tokenizer(model, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("aé\n", encoding="utf-8")
    text = open_text(model, (str(path),))
    assert text.tokens.tolist() == [byte + 2 for byte in "aé\n".encode()]


def test_a_corpus_by_name_has_its_splits(model, run: RunTarget):
    valid = open_text(model, (run.config.data.corpus.replace("tiny.txt", "tiny.t*t"),), "valid")
    ours = open_text(run, ())
    assert (valid.words, valid.bytes) == (ours.words, ours.bytes), "the same documents are held out"
    assert len(valid.tokens) == len(ours.tokens) - 1, "an end token between documents, none after the last"


def test_a_quick_look_is_the_beginning_and_its_words_and_bytes_are_counted(run: RunTarget, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two three four")
    text = open_text(run, (str(path),), max_tokens=9)
    assert bytes(text.tokens.tolist()) == b"one two t"
    assert (text.words, text.bytes) == (3, 9)
    whole = open_text(run, (str(path),), max_tokens=1000)
    assert len(whole.tokens) == 18


def test_end_tokens_are_not_counted_as_text(run: RunTarget, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    text = open_text(run, (str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), max_tokens=5)
    assert len(text.tokens) == 5
    assert (text.words, text.bytes) == (2, 4)


def test_word_tokens_count_line_ends(tmp_path):
    """WikiText's way: a token per word and one per line end, empty lines included; words are counted without them."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(prose(300))
    prepared = prepare(
        DataConfig(corpus=str(corpus), tokenizer="words", vocab_size=100, folder=tmp_path / "d"), progress=False
    )
    tokenizer = prepared.tokenizer()
    assert tokenizer.encode("a cat\n\nsat\n").tolist().count(tokenizer.end) == 3
    for split in ("valid", "test"):
        counts = prepared.meta.splits[split]
        ends = int((np.asarray(prepared.split(split)) == tokenizer.end).sum())
        assert counts.tokens == counts.words + ends


def test_data_of_another_tokenizer_is_refused(run: RunTarget, model, folder: Path, tmp_path):
    corpus = folder / "tiny.txt"
    other = DataConfig(corpus=str(corpus), tokenizer="bpe", vocab_size=300, folder=tmp_path / "bpe")
    prepare(other, progress=False)
    for target in (run, model):
        with pytest.raises(InputError, match=r"was made with another tokenizer \('bpe', 300 types\)"):
            open_text(target, (str(tmp_path / "bpe"),))
    same = prepare(other.replace(tokenizer="bytes", folder=tmp_path / "bytes"), progress=False)
    assert len(open_text(run, (str(tmp_path / "bytes"),)).tokens) == same.meta.splits["valid"].tokens


def test_prepared_data_with_a_models_own_tokenizer_is_taken(model, folder: Path, tmp_path):
    (tmp_path / "tokenizer.json").write_text(model.tokenizer().to_json())
    data = DataConfig(
        corpus=str(folder / "tiny.txt"), tokenizer=str(tmp_path / "tokenizer.json"), folder=tmp_path / "d"
    )
    prepared = prepare(data, progress=False)
    assert len(open_text(model, (str(tmp_path / "d"),)).tokens) == prepared.meta.splits["valid"].tokens


def test_mistakes_are_told_in_words(run: RunTarget, model, tmp_path):
    with pytest.raises(InputError, match="does not say which text to use"):
        open_text(model, ())
    with pytest.raises(InputError, match="has no split 'dev'; it has train, valid, test"):
        open_text(run, (), "dev")
    with pytest.raises(InputError, match="--max-tokens must be at least 1, got 0"):
        open_text(run, (), max_tokens=0)
    with pytest.raises(InputError, match="neither a known corpus nor a file"):
        open_text(run, ("nothing-here",))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="must all be text files, and sotu is none"):
        open_text(run, (str(tmp_path / "a.txt"), "sotu"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="holds no text"):
        open_text(run, (str(tmp_path / "empty.txt"),))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        open_text(run, (str(tmp_path / "latin.txt"),))
