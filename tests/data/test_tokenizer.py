"""Tokenizers: nothing is lost, the quick ways equal the library's, decoding token by token equals decoding at once."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Saved
from tokenizers import decoders as library_decoders
from tokenizers import models, normalizers, pre_tokenizers, processors

from trainshort.data.tokenizers.base import (
    MOST_KEPT_WORDS,
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


def plain(tokenizer: SavedTokenizer, text: str) -> list[int]:
    """What the library says about the whole text at once."""
    return tokenizer.library.encode(text, add_special_tokens=False).ids


def piece_by_piece(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    decoder = tokenizer.decoder()
    return "".join(decoder.push(int(token)) for token in ids) + decoder.finish()


@given(texts)
def test_bytes_and_bpe_lose_nothing(text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert piece_by_piece(tokenizer, ids) == text
        assert ids.dtype == np.int64
        assert all(0 <= token < tokenizer.vocab_size for token in ids)


@settings(max_examples=200)
@given(texts)
def test_words_remembered_give_the_tokens_of_the_whole_text(text: str) -> None:
    assert BPE.encode(text).tolist() == plain(BPE, text)


def test_a_long_text_and_a_full_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(BPE, TEXT * 30)
    monkeypatch.setattr("trainshort.data.tokenizers.base.MOST_KEPT_WORDS", 3)
    monkeypatch.setattr("trainshort.data.tokenizers.base.LONGEST_KEPT_WORD", 4)
    assert BPE.encode(TEXT * 30).tolist() == expected
    assert len(BPE._known) <= MOST_KEPT_WORDS
    assert BPE.encode(TEXT * 30).tolist() == expected


@given(texts, st.integers(1, 20))
def test_cut_stretches_are_the_text_and_long_enough(text: str, size: int) -> None:
    parts = cut(text, size)
    assert "".join(parts) == text
    assert all(len(part) >= size for part in parts[:-1])
    assert all(part[0] in " \n" for part in parts[1:])


def test_decoding_token_by_token_waits_for_whole_characters() -> None:
    decoder = ByteTokenizer().decoder()
    shown = [decoder.push(byte) for byte in "aé🙂".encode()]
    assert shown == ["a", "", "é", "", "", "", "🙂"]
    assert decoder.push("é".encode()[0]) == ""
    assert decoder.finish() == "\ufffd"


def test_bpe_ends_documents_and_reads_its_end_token_in_a_text_as_text() -> None:
    text = "a <|endoftext|> b"
    assert BPE.end == 0
    assert 0 not in BPE.encode(text)
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.encode_document("a").tolist() == [*BPE.encode("a"), 0]
    assert BPE.decode([0]) == piece_by_piece(BPE, np.array([0])) == "<|endoftext|>"


def test_bpe_is_the_same_whatever_the_order_of_threads() -> None:
    assert (
        BytePairTokenizer.build([TEXT, "other words"], 300, None).to_json()
        == BytePairTokenizer.build([TEXT, "other words"], 300, None).to_json()
    )


def test_a_sample_is_spread_evenly_and_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.tokenizers.builtin.PART", 1)
    letters = [f"{letter} x" for letter in "abcdefghij"]  # two parts of one and two characters
    assert list(sample(letters, 1.0)) == [part for letter in "abcdefghij" for part in (letter, " x")]
    assert list(sample(["a", "b", "c", "d", "e", "f", "g", "h"], 0.4)) == ["a", "d", "f"]
    assert list(sample(["only"], 0.001)) == ["only"]


def test_a_sample_ends_when_it_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.tokenizers.builtin.SAMPLE_BYTES", 30)
    assert len("".join(sample(["ten chars."] * 100, 1.0))) == 30
    assert len("".join(sample(["ten chars."] * 1000, 0.5))) == 60


def test_words_are_counted_sorted_and_padded_as_fairseq_does() -> None:
    tokenizer = WordTokenizer.build(["b c b <unk>\n", "a c b </s> d\n"], 100, None)
    assert tokenizer.words[:8] == ["<s>", "<pad>", "</s>", "<unk>", "b", "c", "a", "d"]
    assert tokenizer.vocab_size == 8
    tokenizer = WordTokenizer.build(["b c b <unk>\n", "a c b </s> d e\n"], 100, None)
    assert tokenizer.words[8:] == ["e", *(f"madeupword{n:04d}" for n in range(7))]
    assert WordTokenizer.build(["b c b a"], 9, None).vocab_size == 8
    assert WordTokenizer.build(["a b c d e f g h"], 9, None).words[4:] == ["a", "b", "c", "d", "e"]


def test_words_that_are_too_many_lose_the_rarest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.data.tokenizers.builtin.MOST_WORDS", 10)
    text = [" ".join(f"rare{n}" for n in range(start, start + 6)) + " often often" for start in range(0, 60, 6)]
    tokenizer = WordTokenizer.build(text, 1000, None)
    assert tokenizer.words[4] == "often"
    assert tokenizer.vocab_size < 24


def test_words_count_a_line_end_per_line() -> None:
    tokenizer = WordTokenizer(["<s>", "<pad>", "</s>", "<unk>", "the", "sat"])
    assert tokenizer.encode("the cat\n\n<unk> sat\n").tolist() == [4, 3, 2, 2, 3, 5, 2]
    assert tokenizer.encode("the").tolist() == [4]
    assert tokenizer.encode_document("the").tolist() == tokenizer.encode_document("the\n").tolist() == [4, 2]
    assert tokenizer.decode([4, 3, 2, 2, 3, 5, 2]) == "the <unk>\n\n<unk> sat\n"


def test_words_read_carriage_returns_and_the_special_words_as_fairseq_does() -> None:
    """It opens files with universal line ends, and looks up `</s>` like any other word."""
    tokenizer = WordTokenizer(["<s>", "<pad>", "</s>", "<unk>", "a", "b"])
    assert tokenizer.encode("a\rb\r\na\n\rb").tolist() == [4, 2, 5, 2, 4, 2, 2, 5]
    assert tokenizer.encode("a </s> <s> <pad> <unk> <eos>").tolist() == [4, 2, 0, 1, 3, 3]
    assert tokenizer.encode_document("a\r").tolist() == [4, 2]


@given(st.text(st.sampled_from(list(" \n\r\tabcé中"))))
def test_saved_bytes_and_words_are_the_same_for_the_library(text: str) -> None:
    for tokenizer in (ByteTokenizer(), WordTokenizer(["<s>", "<pad>", "</s>", "<unk>", "a", "b", "ab", "é"])):
        assert Saved.from_str(tokenizer.to_json()).encode(text).ids == tokenizer.encode(text).tolist()


def test_saving_and_loading_gives_the_same_tokenizer(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), WordTokenizer.build(["b c b a"], 10, None), BPE):
        save_tokenizer(tokenizer, tmp_path)
        for loaded in (load_tokenizer(tmp_path), load_tokenizer(tmp_path / "tokenizer.json")):
            assert type(loaded) is type(tokenizer)
            assert (loaded.name, loaded.vocab_size, loaded.end) == (tokenizer.name, tokenizer.vocab_size, tokenizer.end)
            assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A small WordPiece tokenizer as BERT's is saved: lower case, special tokens around, cut to 4 tokens, padded."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat", ",", "é", "un", "##believ", "##able"]
    saved = Saved(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
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


def test_a_saved_tokenizer_encodes_all_of_the_text_and_nothing_else(bert: Path) -> None:
    tokenizer = load_tokenizer(bert)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end) == ("bert", 13, 3)
    assert tokenizer.encode("The cats sat, the cats").tolist() == [4, 5, 6, 7, 8, 4, 5, 6]
    assert tokenizer.encode_document("cats").tolist() == [5, 6, 3]
    assert 3 not in tokenizer.encode("the [SEP]")
    assert tokenizer.decode([4, 5, 6, 7]) == "the cats sat"


def test_tokens_that_depend_on_neighbours_are_shown_as_they_are_settled(bert: Path) -> None:
    tokenizer = load_tokenizer(bert)
    ids = np.tile([4, 10, 11, 12, 5, 6, 7, 8], 40)
    decoder = tokenizer.decoder()
    shown = "".join(decoder.push(int(token)) for token in ids) + decoder.finish()
    assert shown == tokenizer.decode(ids)


def test_gpt2_layout_is_byte_level(tmp_path: Path) -> None:
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
    assert piece_by_piece(tokenizer, tokenizer.encode(TEXT)) == TEXT


def test_mistakes_are_told(tmp_path: Path, bert: Path) -> None:
    with pytest.raises(InputError, match=r"There is no tokenizer at .*missing.json. Use bytes, words or bpe"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match=r"broken.json is not a tokenizer.json that the tokenizers library reads"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(InputError, match=r"Token 256 is outside the vocabulary of 256 \(0 to 255\)"):
        ByteTokenizer().decode([1, 256])
    for tokenizer in (BPE, load_tokenizer(bert), WordTokenizer.build(["a"], 8, None)):
        with pytest.raises(InputError, match=f"Token {tokenizer.vocab_size} is outside"):
            tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(InputError, match="bpe needs a vocabulary of at least 257"):
        BytePairTokenizer.build(["a"], 256, None)
    with pytest.raises(InputError, match="words needs a vocabulary of at least 8"):
        WordTokenizer.build(["a"], 7, None)
