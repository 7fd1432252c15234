"""The accounting of evaluation: each target once, context as promised, for any text, length and stride."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshort.data.passes import PAPER_STEPS, Pass, Passes, fill, position_edges, read_lengths
from trainshort.errors import InputError


@st.composite
def passes(draw: st.DrawFn) -> Passes:
    tokens = draw(st.integers(1, 200))
    length = draw(st.integers(1, tokens))
    return Passes(tokens, length, draw(st.integers(1, length)))


@given(passes())
def test_each_target_is_scored_exactly_once_and_in_order(w: Passes):
    scored = [target for one in w for target in range(one.first, one.stop)]
    assert scored == list(range(w.tokens))


@given(passes())
def test_context_is_as_promised(w: Passes):
    for index, one in enumerate(w):
        assert 0 <= one.start <= one.first < one.stop <= w.tokens
        assert one.read <= w.length
        if index:
            assert one.first - one.start == w.length - w.stride, "re-reads length - stride tokens"
            assert one.scored == w.stride or index == len(w) - 1, "only the last pass may be shorter"
        else:
            assert (one.start, one.first, one.stop) == (0, 0, w.length)


@given(passes())
def test_counts_and_positions_are_those_of_the_passes(w: Passes):
    passes = list(w)
    assert len(w) == len(passes)
    assert w.read == sum(one.read for one in passes)
    assert w.positions().tolist() == [t - one.start for one in passes for t in range(one.first, one.stop)]
    assert [w.at(t) for t in range(w.tokens)] == [i for i, one in enumerate(passes) for _ in range(one.scored)]


@given(passes(), st.integers(0, 300), st.integers(0, 5))
def test_batches_keep_order_shape_and_budget(w: Passes, budget: int, begin: int):
    batches = list(w.batches(budget, begin))
    assert [one for batch in batches for one in batch] == [w[i] for i in range(begin, len(w))]
    for batch in batches:
        assert len({(one.read, one.scored) for one in batch}) == 1
        assert len(batch) == 1 or sum(one.read for one in batch) <= budget


@given(st.integers(1, 60), st.integers(1, 60))
def test_stride_equal_to_length_is_non_overlapping(tokens: int, length: int):
    if length <= tokens:
        starts = [one.start for one in Passes(tokens, length, length)]
        assert starts == list(range(0, tokens, length))


def test_golden_examples():
    assert list(Passes(10, 4, 2)) == [Pass(0, 0, 4), Pass(2, 4, 6), Pass(4, 6, 8), Pass(6, 8, 10)]
    assert list(Passes(10, 4, 4)) == [Pass(0, 0, 4), Pass(4, 4, 8), Pass(8, 8, 10)]
    assert list(Passes(6, 4, 1)) == [Pass(0, 0, 4), Pass(1, 4, 5), Pass(2, 5, 6)]
    assert list(Passes(9, 4, 3)) == [Pass(0, 0, 4), Pass(3, 4, 7), Pass(6, 7, 9)]
    assert list(Passes(3, 3, 1)) == [Pass(0, 0, 3)]
    assert Passes(10, 4, 2).positions().tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 2, 3]
    assert [len(batch) for batch in Passes(10, 4, 2).batches(8)] == [1, 2, 1]


def test_the_papers_numbers_of_blocks():
    count = 217_646  # WikiText-103's validation set
    assert [len(Passes(count, length, length)) for length in (512, 3072, 16_024)] == [426, 71, 14]


def test_inputs_begin_with_the_token_before_the_block():
    tokens = np.array([5, 6, 7, 8, 9], dtype=np.uint16)
    inputs, targets = fill(tokens, [Pass(0, 0, 2), Pass(2, 2, 4)], bos=3)
    assert targets.tolist() == [[5, 6], [7, 8]]
    assert inputs.tolist() == [[3, 5], [6, 7]]
    assert inputs.dtype == np.int64, "torch has no embedding of unsigned shorts"


def test_the_papers_grid():
    lengths = read_lengths(["paper"], 512, 10)
    assert lengths[:4] == [512, 513, 522, 532]
    assert lengths[-2:] == [14_512, 15_512]
    assert {612, 712, 1512, 2512} <= set(lengths)
    assert len(lengths) == len(set(lengths)) == 35, "the rows of the paper's Table 2"


def test_lengths_as_a_user_writes_them():
    assert read_lengths(["512", "128,256"], None, 10) == [128, 256, 512]
    assert read_lengths(["1x,8x"], 128, 10) == [128, 1024]
    assert read_lengths(["16_384"], None, 10) == [16_384]
    assert read_lengths(["paper"], 1024, 10) == [1024 + step for step in PAPER_STEPS]
    assert read_lengths([], 128, 600) == [128, 256, 512]


@pytest.mark.parametrize("word", ["long", "-5", "0", "1.5", "x", "12 8", "²"])
def test_lengths_that_are_not_numbers_are_refused(word: str):
    with pytest.raises(InputError, match=f"got '{word}'"):
        read_lengths([word], 128, 1000)


def test_an_unknown_training_length_is_asked_for():
    with pytest.raises(InputError, match="give it by --trained-at"):
        read_lengths(["paper"], None, 1000)
    with pytest.raises(InputError, match="no length was given"):
        read_lengths([","], 128, 1000)


@pytest.mark.parametrize(
    ("tokens", "length", "stride", "message"),
    [
        (0, 128, 128, "the text has no tokens"),
        (100, 64, 0, "stride must be between 1 and the length 64, got 0"),
        (100, 64, 65, "stride must be between 1 and the length 64, got 65"),
        (100, 0, 1, "at least 1 token, got 0"),
    ],
)
def test_impossible_windows_are_refused(tokens: int, length: int, stride: int, message: str):
    with pytest.raises(InputError, match=message):
        Passes(tokens, length, stride)


@pytest.mark.parametrize("stride", [1, 64, 128])
def test_a_text_shorter_than_the_length_is_one_short_pass(stride: int):
    """As in the released code, whose last block may be short and may be the only one."""
    passes = Passes(100, 128, stride)
    assert list(passes.batches(10_000)) == [[Pass(0, 0, 100)]]
    assert (len(passes), passes.read, passes.at(99)) == (1, 100, 0)


@given(st.integers(1, 20_000))
def test_position_edges_cover_every_position_once(length: int):
    edges = position_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))
    assert len(edges) <= 9 + 4 * max(0, length.bit_length() - 3) + 1


def test_position_edges_grow():
    assert position_edges(20) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert position_edges(3) == [0, 1, 2, 3]
