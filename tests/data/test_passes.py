"""Tests of passes: each target is scored exactly once, with the expected context, for all lengths and strides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshort.data.passes import PAPER_STEPS, Pass, Passes, fill, position_edges, read_lengths
from trainshort.errors import InputError


@st.composite
def random_passes(draw: st.DrawFn) -> Passes:
    """Draw the passes over a text of random size, with a random length and stride."""
    tokens = draw(st.integers(1, 200))
    length = draw(st.integers(1, tokens))
    stride = draw(st.integers(1, length))
    return Passes(tokens, length, stride)


def scored_targets(window: Pass) -> list[int]:
    return list(range(window.first, window.stop))


@given(random_passes())
def test_each_target_is_scored_exactly_once_and_in_order(passes: Passes):
    targets = [target for window in passes for target in scored_targets(window)]
    assert targets == list(range(passes.tokens))


@given(random_passes())
def test_each_later_pass_repeats_length_minus_stride_targets(passes: Passes):
    for index, window in enumerate(passes):
        assert 0 <= window.start <= window.first < window.stop <= passes.tokens
        assert window.read <= passes.length
        if index == 0:
            assert window == Pass(0, 0, passes.length)
        else:
            is_last = index == len(passes) - 1
            assert window.first - window.start == passes.length - passes.stride
            assert window.scored == passes.stride or is_last, "only the last pass may be shorter"


@given(random_passes())
def test_counts_and_positions_agree_with_the_passes(passes: Passes):
    windows = list(passes)
    assert len(passes) == len(windows)
    assert passes.read == sum(window.read for window in windows)
    positions = [target - window.start for window in windows for target in scored_targets(window)]
    assert passes.positions().tolist() == positions
    pass_indices = [index for index, window in enumerate(windows) for _ in scored_targets(window)]
    assert [passes.at(target) for target in range(passes.tokens)] == pass_indices


@given(random_passes(), st.integers(0, 300), st.integers(0, 5))
def test_batches_keep_the_order_and_the_token_budget(passes: Passes, budget: int, begin: int):
    batches = list(passes.batches(budget, begin))
    windows = [window for batch in batches for window in batch]
    assert windows == [passes[index] for index in range(begin, len(passes))]
    for batch in batches:
        shapes = {(window.read, window.scored) for window in batch}
        assert len(shapes) == 1
        assert len(batch) == 1 or sum(window.read for window in batch) <= budget


@given(st.integers(1, 60), st.integers(1, 60))
def test_passes_do_not_overlap_if_the_stride_equals_the_length(tokens: int, length: int):
    if length <= tokens:
        starts = [window.start for window in Passes(tokens, length, length)]
        assert starts == list(range(0, tokens, length))


def test_examples():
    assert list(Passes(10, 4, 2)) == [Pass(0, 0, 4), Pass(2, 4, 6), Pass(4, 6, 8), Pass(6, 8, 10)]
    assert list(Passes(10, 4, 4)) == [Pass(0, 0, 4), Pass(4, 4, 8), Pass(8, 8, 10)]
    assert list(Passes(6, 4, 1)) == [Pass(0, 0, 4), Pass(1, 4, 5), Pass(2, 5, 6)]
    assert list(Passes(9, 4, 3)) == [Pass(0, 0, 4), Pass(3, 4, 7), Pass(6, 7, 9)]
    assert list(Passes(3, 3, 1)) == [Pass(0, 0, 3)]
    assert Passes(10, 4, 2).positions().tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 2, 3]
    assert [len(batch) for batch in Passes(10, 4, 2).batches(8)] == [1, 2, 1]


def test_number_of_passes_equals_the_paper():
    tokens = 217_646  # the validation split of WikiText-103
    assert [len(Passes(tokens, length, length)) for length in (512, 3072, 16_024)] == [426, 71, 14]


def test_inputs_start_with_the_token_before_the_targets():
    tokens = np.array([5, 6, 7, 8, 9], dtype=np.uint16)
    inputs, targets = fill(tokens, [Pass(0, 0, 2), Pass(2, 2, 4)], bos=3)
    assert targets.tolist() == [[5, 6], [7, 8]]
    assert inputs.tolist() == [[3, 5], [6, 7]]
    assert inputs.dtype == np.int64, "torch does not support uint16 in embeddings"


def test_lengths_of_the_paper():
    lengths = read_lengths(["paper"], 512, 10)
    assert lengths[:4] == [512, 513, 522, 532]
    assert lengths[-2:] == [14_512, 15_512]
    assert {612, 712, 1512, 2512} <= set(lengths)
    assert len(lengths) == len(set(lengths)) == 35, "the rows of the paper's Table 2"


def test_lengths_on_the_command_line_are_parsed():
    assert read_lengths(["512", "128,256"], None, 10) == [128, 256, 512]
    assert read_lengths(["1x,8x"], 128, 10) == [128, 1024]
    assert read_lengths(["16_384"], None, 10) == [16_384]
    assert read_lengths(["paper"], 1024, 10) == [1024 + step for step in PAPER_STEPS]
    assert read_lengths([], 128, 600) == [128, 256, 512]


@pytest.mark.parametrize("word", ["long", "-5", "0", "1.5", "x", "12 8", "²"])
def test_invalid_length_raises_error(word: str):
    with pytest.raises(InputError, match=f"'{word}'"):
        read_lengths([word], 128, 1000)


def test_missing_lengths_raise_errors():
    with pytest.raises(InputError, match="--trained-at"):
        read_lengths(["paper"], None, 1000)
    with pytest.raises(InputError, match="--lengths"):
        read_lengths([","], 128, 1000)


@pytest.mark.parametrize(
    ("tokens", "length", "stride", "message"),
    [
        (0, 128, 128, "text has no tokens"),
        (100, 64, 0, "stride must be between 1 and the length 64, got 0"),
        (100, 64, 65, "stride must be between 1 and the length 64, got 65"),
        (100, 0, 1, "at least 1 token, got 0"),
    ],
)
def test_impossible_passes_raise_errors(tokens: int, length: int, stride: int, message: str):
    with pytest.raises(InputError, match=message):
        Passes(tokens, length, stride)


@pytest.mark.parametrize("stride", [1, 64, 128])
def test_text_shorter_than_the_length_is_one_short_pass(stride: int):
    passes = Passes(100, 128, stride)
    assert list(passes.batches(10_000)) == [[Pass(0, 0, 100)]]
    assert (len(passes), passes.read, passes.at(99)) == (1, 100, 0)


@given(st.integers(1, 20_000))
def test_position_edges_cover_all_positions(length: int):
    edges = position_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))
    assert len(edges) <= 9 + 4 * max(0, length.bit_length() - 3) + 1


def test_position_edges_examples():
    assert position_edges(20) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert position_edges(3) == [0, 1, 2, 3]
