"""Batches: a pure function of seed, step, rank and world; every block once per epoch; documents kept apart."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshort.data.batches import IGNORED, BatchStream
from trainshort.errors import InputError

TOKENS = np.arange(1000, dtype=np.uint16)
GOLDEN = [[41, 33, 81, 50], [109, 70, 112, 21], [119, 131, 45, 85]]
OF_0_1_0 = [[41, 33, 81, 50], [109, 70, 112, 21], [22, 13, 5, 32]]


def stream(**changes) -> BatchStream:
    settings = {"length": 7, "batch_size": 4, "seed": 3} | changes
    return BatchStream(settings.pop("tokens", TOKENS), **settings)


def test_targets_are_the_inputs_shifted_by_one() -> None:
    batch = stream().batch(5)
    assert batch.inputs.shape == batch.targets.shape == (4, 7)
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    # The tokens are their own positions, so a target is its input plus one, and blocks begin at multiples of 7.
    assert (batch.targets == batch.inputs + 1).all()
    assert (batch.targets[:, 0] % 7 == 0).all()
    assert batch.segment_ids is None


@given(st.integers(20, 60), st.integers(1, 20))
def test_every_token_is_predicted_once_an_epoch_from_the_one_before(count: int, length: int) -> None:
    """fairseq's blocks: the first token comes after BOS, the last block may be short (103,227,021 tokens: one more)."""
    one = stream(tokens=np.arange(count), length=length, batch_size=1, bos=99)
    assert one.blocks == -(-count // length)
    seen = {}
    for step in range(one.blocks):
        batch = one.batch(step)
        for before, target in zip(batch.inputs[0], batch.targets[0], strict=True):
            if target != IGNORED:
                assert before == (target - 1 if target else 99)
                seen[int(target)] = seen.get(int(target), 0) + 1
        real = int((batch.targets != IGNORED).sum())
        assert (batch.targets[0, :real] != IGNORED).all(), "what fills a short block comes after it"
    assert seen == dict.fromkeys(range(count), 1)


def test_runs_of_0_1_0_go_on_with_the_blocks_they_had() -> None:
    old = stream(drop_last=True)
    assert old.blocks == 999 // 7
    assert [old.block_numbers(step) for step in (0, 1, 1000)] == OF_0_1_0
    batch = old.batch(0)
    assert (batch.inputs[:, 0] == np.array(OF_0_1_0[0]) * 7).all()
    assert (batch.targets == batch.inputs + 1).all()


def test_every_block_comes_once_per_epoch_and_each_epoch_in_another_order() -> None:
    one = stream(batch_size=1)
    assert one.blocks == 1000 // 7 + 1
    epochs = [[one.block_numbers(step)[0] for step in range(e * one.blocks, (e + 1) * one.blocks)] for e in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(one.blocks))
        assert order != sorted(order)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_smallest_text_makes_one_block() -> None:
    batch = stream(tokens=np.arange(7), batch_size=2, bos=99).batch(9)
    assert batch.inputs.tolist() == [[99, *range(6)]] * 2
    assert batch.targets.tolist() == [list(range(7))] * 2


def test_seeds_have_orders_of_their_own() -> None:
    """grain numbers epochs by adding to the seed; seed 4 must not simply be seed 3 from its second epoch on."""
    blocks = stream().blocks
    second_epoch = [stream(batch_size=1).block_numbers(blocks + step) for step in range(20)]
    assert [stream(batch_size=1, seed=4).block_numbers(step) for step in range(20)] != second_epoch
    assert stream(seed=4).block_numbers(0) != stream().block_numbers(0)


@given(st.integers(0, 10**7), st.sampled_from([1, 2, 3, 6, 12]))
def test_ranks_share_exactly_the_batch_of_one_process(step: int, world: int) -> None:
    alone = stream(batch_size=12).batch(step)
    shares = [stream(batch_size=12, rank=rank, world=world).batch(step) for rank in range(world)]
    assert np.array_equal(np.concatenate([share.inputs for share in shares]), alone.inputs)
    assert np.array_equal(np.concatenate([share.targets for share in shares]), alone.targets)


def test_the_order_of_asking_does_not_matter() -> None:
    forward, backward = stream(), stream()
    ahead = {step: forward.batch(step).inputs.tolist() for step in range(20)}
    behind = {step: backward.batch(step).inputs.tolist() for step in reversed(range(20))}
    assert ahead == behind


def test_another_process_gets_the_same_batches() -> None:
    code = (
        "import numpy as np; from trainshort.data.batches import BatchStream; "
        "print(BatchStream(np.arange(1000), length=7, batch_size=4, seed=3).batch(1234).inputs.tolist())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(stream().batch(1234).inputs.tolist())
    assert "jax" not in shown.stderr


def test_the_order_of_a_seed_is_fixed_for_good() -> None:
    """Golden: a change here changes what every published run has read."""
    assert [stream().block_numbers(step) for step in (0, 1, 1000)] == GOLDEN


def test_documents_are_told_apart_and_nothing_is_predicted_across() -> None:
    starts = np.array([0, 10, 12, 13, 500])
    packed = stream(batch_size=1, packing="documents", documents=starts)
    for step in range(packed.blocks):
        batch = packed.batch(step)
        assert batch.segment_ids is not None
        assert batch.segment_ids.dtype == np.int32
        targets = packed.block_numbers(step)[0] * 7 + np.arange(7)
        owner = np.searchsorted(starts, np.maximum(targets - 1, 0), side="right") - 1
        assert np.array_equal(batch.segment_ids[0], owner - owner[0])
        crosses = np.isin(targets, starts[1:]) | (targets >= 1000)
        assert np.array_equal(batch.targets[0], np.where(crosses, IGNORED, targets))


def test_documents_change_no_input() -> None:
    packed = stream(packing="documents", documents=np.array([0, 10, 500]))
    assert np.array_equal(packed.batch(3).inputs, stream().batch(3).inputs)


def test_mistakes_are_told() -> None:
    with pytest.raises(
        InputError, match=r"The text has 6 tokens, but one sequence of length 7 needs 7\. Use a shorter"
    ):
        stream(tokens=np.arange(6))
    with pytest.raises(InputError, match=r"The text has 7 tokens, but one sequence of length 7 needs 8\."):
        stream(tokens=np.arange(7), drop_last=True)
    with pytest.raises(
        InputError, match=r"A batch of 4 sequences cannot be shared by 3 processes; use a multiple of 3"
    ):
        stream(world=3)
    with pytest.raises(InputError, match=r"rank must be from 0 to 1, not 2"):
        stream(rank=2, world=2)
    with pytest.raises(InputError, match=r"packing='documents' needs the document offsets"):
        stream(packing="documents")
    with pytest.raises(InputError, match=r"packing must be 'blocks' or 'documents', not 'rows'"):
        stream(packing="rows")


def test_a_token_outside_the_vocabulary_is_told_with_its_place() -> None:
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = 300
    small = stream(tokens=tokens, batch_size=14, vocab_size=300)
    with pytest.raises(InputError, match=r"Token 300 at position 50 is outside the vocabulary of 300"):
        small.batch(0)
    stream(tokens=tokens, batch_size=14, vocab_size=301).batch(0)
