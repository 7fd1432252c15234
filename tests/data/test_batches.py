"""Tests of training batches: they depend only on seed, step, rank and world, and contain every block once per epoch."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshort.data.batches import IGNORED, BatchStream
from trainshort.errors import InputError

TOKENS = np.arange(1000, dtype=np.uint16)
# The block numbers of the steps 0, 1 and 1000, as they were when the shuffling was introduced.
GOLDEN = [[41, 33, 81, 50], [109, 70, 112, 21], [119, 131, 45, 85]]
DROP_LAST_GOLDEN = [[41, 33, 81, 50], [109, 70, 112, 21], [22, 13, 5, 32]]


def stream(**changes) -> BatchStream:
    """Return a stream over 1,000 tokens. The tokens are their own positions."""
    settings = {"length": 7, "batch_size": 4, "seed": 3} | changes
    return BatchStream(settings.pop("tokens", TOKENS), **settings)


def test_targets_are_the_inputs_shifted_by_one() -> None:
    batch = stream().batch(5)
    assert batch.inputs.shape == batch.targets.shape == (4, 7)
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    # Tokens are their own positions. A target is therefore its input plus one, and blocks start at multiples of 7.
    assert (batch.targets == batch.inputs + 1).all()
    assert (batch.targets[:, 0] % 7 == 0).all()
    assert batch.segment_ids is None


@given(st.integers(20, 60), st.integers(1, 20))
def test_every_token_is_predicted_once_per_epoch_from_its_predecessor(count: int, length: int) -> None:
    """As in fairseq, the first token follows BOS, and the last block may be shorter."""
    batches = stream(tokens=np.arange(count), length=length, batch_size=1, bos=99)
    assert batches.blocks == -(-count // length)
    predictions = {}
    for step in range(batches.blocks):
        batch = batches.batch(step)
        for token_before, target in zip(batch.inputs[0], batch.targets[0], strict=True):
            if target != IGNORED:
                assert token_before == (target - 1 if target else 99)
                predictions[int(target)] = predictions.get(int(target), 0) + 1
        predicted = int((batch.targets != IGNORED).sum())
        assert (batch.targets[0, :predicted] != IGNORED).all(), "padding must follow the tokens of a short block"
    assert predictions == dict.fromkeys(range(count), 1)


def test_block_order_with_drop_last_never_changes() -> None:
    dropping = stream(drop_last=True)
    assert dropping.blocks == 999 // 7
    assert [dropping.block_numbers(step) for step in (0, 1, 1000)] == DROP_LAST_GOLDEN
    batch = dropping.batch(0)
    assert (batch.inputs[:, 0] == np.array(DROP_LAST_GOLDEN[0]) * 7).all()
    assert (batch.targets == batch.inputs + 1).all()


def test_each_epoch_contains_all_blocks_in_a_new_order() -> None:
    batches = stream(batch_size=1)
    assert batches.blocks == 1000 // 7 + 1
    steps = range(3 * batches.blocks)
    numbers = [batches.block_numbers(step)[0] for step in steps]
    epochs = [numbers[start : start + batches.blocks] for start in range(0, len(numbers), batches.blocks)]
    for order in epochs:
        assert sorted(order) == list(range(batches.blocks))
        assert order != sorted(order)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_smallest_text_has_one_block() -> None:
    batch = stream(tokens=np.arange(7), batch_size=2, bos=99).batch(9)
    assert batch.inputs.tolist() == [[99, *range(6)]] * 2
    assert batch.targets.tolist() == [list(range(7))] * 2


def test_consecutive_seeds_share_no_order() -> None:
    """grain adds the number of the epoch to the seed. Seed 4 must not continue like the second epoch of seed 3."""
    blocks = stream().blocks
    second_epoch = [stream(batch_size=1).block_numbers(blocks + step) for step in range(20)]
    assert [stream(batch_size=1, seed=4).block_numbers(step) for step in range(20)] != second_epoch
    assert stream(seed=4).block_numbers(0) != stream().block_numbers(0)


@given(st.integers(0, 10**7), st.sampled_from([1, 2, 3, 6, 12]))
def test_ranks_together_get_the_batch_of_a_single_process(step: int, world: int) -> None:
    single_process = stream(batch_size=12).batch(step)
    shares = [stream(batch_size=12, rank=rank, world=world).batch(step) for rank in range(world)]
    assert np.array_equal(np.concatenate([share.inputs for share in shares]), single_process.inputs)
    assert np.array_equal(np.concatenate([share.targets for share in shares]), single_process.targets)


def test_batches_do_not_depend_on_earlier_calls() -> None:
    forward, backward = stream(), stream()
    ascending = {step: forward.batch(step).inputs.tolist() for step in range(20)}
    descending = {step: backward.batch(step).inputs.tolist() for step in reversed(range(20))}
    assert ascending == descending


def test_new_process_gets_the_same_batches() -> None:
    code = (
        "import numpy as np; from trainshort.data.batches import BatchStream; "
        "print(BatchStream(np.arange(1000), length=7, batch_size=4, seed=3).batch(1234).inputs.tolist())"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == str(stream().batch(1234).inputs.tolist())
    assert "jax" not in process.stderr


def test_block_order_of_a_seed_never_changes() -> None:
    """A different order would change all published results."""
    assert [stream().block_numbers(step) for step in (0, 1, 1000)] == GOLDEN


def test_packed_documents_have_segment_ids_and_are_not_predicted_from_each_other() -> None:
    starts = np.array([0, 10, 12, 13, 500])
    packed = stream(batch_size=1, packing="documents", documents=starts)
    for step in range(packed.blocks):
        batch = packed.batch(step)
        assert batch.segment_ids is not None
        assert batch.segment_ids.dtype == np.int32
        targets = packed.block_numbers(step)[0] * 7 + np.arange(7)
        document_numbers = np.searchsorted(starts, np.maximum(targets - 1, 0), side="right") - 1
        assert np.array_equal(batch.segment_ids[0], document_numbers - document_numbers[0])
        is_ignored = np.isin(targets, starts[1:]) | (targets >= 1000)
        assert np.array_equal(batch.targets[0], np.where(is_ignored, IGNORED, targets))


def test_packing_documents_does_not_change_inputs() -> None:
    packed = stream(packing="documents", documents=np.array([0, 10, 500]))
    assert np.array_equal(packed.batch(3).inputs, stream().batch(3).inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.arange(6)}, r"6 tokens.* length 7 needs 7"),
        ({"tokens": np.arange(7), "drop_last": True}, r"7 tokens.* length 7 needs 8"),
        ({"world": 3}, r"batch size 4 .* 3 processes"),
        ({"rank": 2, "world": 2}, r"rank must be from 0 to 1, got 2"),
        ({"packing": "documents"}, r"packing='documents' .*offsets"),
        ({"packing": "rows"}, r"packing .*'rows'"),
    ],
)
def test_invalid_arguments_raise_errors(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        stream(**changes)


def test_error_names_token_outside_vocabulary_and_its_position() -> None:
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = 300
    small = stream(tokens=tokens, batch_size=14, vocab_size=300)
    with pytest.raises(InputError, match=r"Token 300 at position 50 is outside the vocabulary of 300"):
        small.batch(0)
    stream(tokens=tokens, batch_size=14, vocab_size=301).batch(0)
