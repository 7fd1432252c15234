"""Tests of tokenizers: no text is lost, and fast encoding and incremental decoding equal the library."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders as library_decoders
from tokenizers import models, normalizers, pre_tokenizers, processors

from trainshort.data.tokenizers.base import (
    MAX_CACHED_WORDS,
    SavedTokenizer,
    Tokenizer,
    cut,
    load_tokenizer,
    save_tokenizer,
)
from trainshort.data.tokenizers.builtin import BytePairTokenizer, ByteTokenizer, WordTokenizer, sample
from trainshort.errors import InputError

TEXT = (
    "The people's house, he said, isn't   far; 1,024 steps.\n\n\tIndented é ñ 中文 🙂 text's end\r\n"
    "It's the people's  house — the people's. \u00a0 x\n"
) * 5

BPE = BytePairTokenizer.build([TEXT], 320, None)
texts = st.text(st.one_of(st.sampled_from(list(" \n\t\r\x1c\u00a0\u2003aeT'.,é中🙂1")), st.characters(codec="utf-8")))


def encode_with_library(tokenizer: SavedTokenizer, text: str) -> list[int]:
    """Return the token ids that the library computes for the complete text."""
    return tokenizer.library.encode(text, add_special_tokens=False).ids


def decode_incrementally(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Decode one token at a time."""
    decoder = tokenizer.decoder()
    pieces = [decoder.push(int(token)) for token in ids]
    return "".join(pieces) + decoder.finish()


@given(texts)
def test_bytes_and_bpe_decode_to_the_same_text(text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert decode_incrementally(tokenizer, ids) == text
        assert ids.dtype == np.int64
        assert all(0 <= token < tokenizer.vocab_size for token in ids)


@settings(max_examples=200)
@given(texts)
def test_encoding_word_by_word_equals_the_library(text: str) -> None:
    assert BPE.encode(text).tolist() == encode_with_library(BPE, text)


def test_full_word_cache_does_not_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = encode_with_library(BPE, TEXT * 30)
    monkeypatch.setattr("trainshort.data.tokenizers.base.MAX_CACHED_WORDS", 3)
    monkeypatch.setattr("trainshort.data.tokenizers.base.MAX_CACHED_WORD_CHARACTERS", 4)
    assert BPE.encode(TEXT * 30).tolist() == expected
    assert len(BPE._word_cache) <= MAX_CACHED_WORDS
    assert BPE.encode(TEXT * 30).tolist() == expected


@given(texts, st.integers(1, 20))
def test_cut_keeps_all_text_and_the_minimum_size(text: str, size: int) -> None:
    pieces = cut(text, size)
    assert "".join(pieces) == text
    assert all(len(piece) >= size for piece in pieces[:-1])
    assert all(piece[0] in " \n" for piece in pieces[1:])


def test_incremental_decoding_waits_for_complete_characters() -> None:
    decoder = ByteTokenizer().decoder()
    pieces = [decoder.push(byte) for byte in "aé🙂".encode()]
    assert pieces == ["a", "", "é", "", "", "", "🙂"]
    assert decoder.push("é".encode()[0]) == ""
    assert decoder.finish() == "\ufffd"


def test_end_token_of_bpe_is_not_read_from_text() -> None:
    text = "a <|endoftext|> b"
    assert BPE.end == 0
    assert 0 not in BPE.encode(text)
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.encode_document("a").tolist() == [*BPE.encode("a"), 0]
    assert BPE.decode([0]) == decode_incrementally(BPE, np.array([0])) == "<|endoftext|>"


def test_training_bpe_is_deterministic() -> None:
    assert (
        BytePairTokenizer.build([TEXT, "other words"], 300, None).to_json()
        == BytePairTokenizer.build([TEXT, "other words"], 300, None).to_json()
    )


def test_sample_is_spread_evenly_and_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.tokenizers.builtin.SAMPLE_PIECE_CHARACTERS", 1)
    letters = [f"{letter} x" for letter in "abcdefghij"]  # Each text is cut into two pieces.
    assert list(sample(letters, 1.0)) == [piece for letter in "abcdefghij" for piece in (letter, " x")]
    assert list(sample(["a", "b", "c", "d", "e", "f", "g", "h"], 0.4)) == ["a", "d", "f"]
    assert list(sample(["only"], 0.001)) == ["only"]


def test_sample_ends_at_its_maximum_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.tokenizers.builtin.SAMPLE_BYTES", 30)
    assert len("".join(sample(["ten chars."] * 100, 1.0))) == 30
    assert len("".join(sample(["ten chars."] * 1000, 0.5))) == 60


def test_word_vocabulary_equals_fairseq() -> None:
    tokenizer = WordTokenizer.build(["b c b <unk>\n", "a c b </s> d\n"], 100, None)
    assert tokenizer.words[:8] == ["<s>", "<pad>", "</s>", "<unk>", "b", "c", "a", "d"]
    assert tokenizer.vocab_size == 8
    tokenizer = WordTokenizer.build(["b c b <unk>\n", "a c b </s> d e\n"], 100, None)
    assert tokenizer.words[8:] == ["e", *(f"madeupword{n:04d}" for n in range(7))]
    assert WordTokenizer.build(["b c b a"], 9, None).vocab_size == 8
    assert WordTokenizer.build(["a b c d e f g h"], 9, None).words[4:] == ["a", "b", "c", "d", "e"]


def test_rare_words_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.tokenizers.builtin.MAX_COUNTED_WORDS", 10)
    texts = []
    for start in range(0, 60, 6):
        rare_words = " ".join(f"rare{number}" for number in range(start, start + 6))
        texts.append(f"{rare_words} often often")
    tokenizer = WordTokenizer.build(texts, 1000, None)
    assert tokenizer.words[4] == "often"
    assert tokenizer.vocab_size < 24


def test_words_encode_line_ends() -> None:
    tokenizer = WordTokenizer(["<s>", "<pad>", "</s>", "<unk>", "the", "sat"])
    assert tokenizer.encode("the cat\n\n<unk> sat\n").tolist() == [4, 3, 2, 2, 3, 5, 2]
    assert tokenizer.encode("the").tolist() == [4]
    assert tokenizer.encode_document("the").tolist() == tokenizer.encode_document("the\n").tolist() == [4, 2]
    assert tokenizer.decode([4, 3, 2, 2, 3, 5, 2]) == "the <unk>\n\n<unk> sat\n"


def test_words_encode_carriage_returns_and_special_words_as_fairseq() -> None:
    """fairseq opens files with universal line ends, and looks up `</s>` like any other word."""
    tokenizer = WordTokenizer(["<s>", "<pad>", "</s>", "<unk>", "a", "b"])
    assert tokenizer.encode("a\rb\r\na\n\rb").tolist() == [4, 2, 5, 2, 4, 2, 2, 5]
    assert tokenizer.encode("a </s> <s> <pad> <unk> <eos>").tolist() == [4, 2, 0, 1, 3, 3]
    assert tokenizer.encode_document("a\r").tolist() == [4, 2]


@given(st.text(st.sampled_from(list(" \n\r\tabcé中"))))
def test_library_encodes_like_saved_bytes_and_words(text: str) -> None:
    for tokenizer in (ByteTokenizer(), WordTokenizer(["<s>", "<pad>", "</s>", "<unk>", "a", "b", "ab", "é"])):
        assert LibraryTokenizer.from_str(tokenizer.to_json()).encode(text).ids == tokenizer.encode(text).tolist()


def test_saved_tokenizer_is_loaded_unchanged(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), WordTokenizer.build(["b c b a"], 10, None), BPE):
        save_tokenizer(tokenizer, tmp_path)
        for loaded in (load_tokenizer(tmp_path), load_tokenizer(tmp_path / "tokenizer.json")):
            assert type(loaded) is type(tokenizer)
            assert (loaded.name, loaded.vocab_size, loaded.end) == (tokenizer.name, tokenizer.vocab_size, tokenizer.end)
            assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Save a small WordPiece tokenizer with lower case, special tokens, truncation and padding, as BERT has."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat", ",", "é", "un", "##believ", "##able"]
    saved = LibraryTokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    saved.normalizer = normalizers.BertNormalizer()
    saved.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    saved.decoder = library_decoders.WordPiece()
    saved.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    saved.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    saved.enable_truncation(4)
    saved.enable_padding()
    path = tmp_path / "bert" / "tokenizer.json"
    path.parent.mkdir()
    saved.save(str(path))
    return path


def test_saved_tokenizer_neither_truncates_nor_adds_special_tokens(bert: Path) -> None:
    tokenizer = load_tokenizer(bert)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end) == ("bert", 13, 3)
    assert tokenizer.encode("The cats sat, the cats").tolist() == [4, 5, 6, 7, 8, 4, 5, 6]
    assert tokenizer.encode_document("cats").tolist() == [5, 6, 3]
    assert 3 not in tokenizer.encode("the [SEP]")
    assert tokenizer.decode([4, 5, 6, 7]) == "the cats sat"


def test_incremental_decoding_of_tokens_that_depend_on_neighbors(bert: Path) -> None:
    tokenizer = load_tokenizer(bert)
    ids = np.tile([4, 10, 11, 12, 5, 6, 7, 8], 40)
    assert decode_incrementally(tokenizer, ids) == tokenizer.decode(ids)


def test_tokenizer_with_the_layout_of_gpt2_is_byte_level(tmp_path: Path) -> None:
    layout = json.loads(BPE.to_json())
    last = layout["model"]["vocab"].pop("<|endoftext|>")
    layout["model"]["vocab"]["<|endoftext|>"] = len(layout["model"]["vocab"]) + 1
    for token in layout["added_tokens"]:
        token["id"] = layout["model"]["vocab"]["<|endoftext|>"]
    assert last == 0
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps(layout))
    tokenizer = load_tokenizer(path)
    assert tokenizer.name == "gpt2"
    assert tokenizer.end == tokenizer.vocab_size - 1
    assert decode_incrementally(tokenizer, tokenizer.encode(TEXT)) == TEXT


def test_loading_a_missing_or_invalid_file_raises_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.json.*bytes, words or bpe"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match=r"broken\.json"):
        load_tokenizer(tmp_path / "broken.json")


def test_decoding_an_unknown_token_raises_error(bert: Path) -> None:
    for tokenizer in (ByteTokenizer(), BPE, load_tokenizer(bert), WordTokenizer.build(["a"], 8, None)):
        with pytest.raises(InputError, match=f"Token {tokenizer.vocab_size} .*{tokenizer.vocab_size - 1}"):
            tokenizer.decode([1, tokenizer.vocab_size])


def test_too_small_vocabulary_raises_error() -> None:
    with pytest.raises(InputError, match=r"bpe .*257.*256"):
        BytePairTokenizer.build(["a"], 256, None)
    with pytest.raises(InputError, match=r"words .*8.*7"):
        WordTokenizer.build(["a"], 7, None)
