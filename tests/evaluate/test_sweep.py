"""Scoring: the accounting on a model computed by hand, work shared without changing a digit, failures as results."""

import math

import numpy as np
import pytest
import torch
from helpers import random_tokens, tiny_model, tiny_target

from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate import sweep as sweep_module
from trainshort.evaluate.sweep import Sweep, calibrate, count_complete_passes, measure, open_scores, score
from trainshort.evaluate.targets import ModelTarget
from trainshort.model.transformer import TransformerLM
from trainshort.utils.machine import is_out_of_memory


def losses(target, tokens, length, stride, **options) -> np.ndarray:
    return np.concatenate(list(score(target, tokens, Passes(len(tokens), length, stride), **options)))


def by_hand(model: TransformerLM, inputs: list[int], wanted: int, window: int) -> float:
    """Loss of one target after some inputs, for one layer without positions: written out, one query, plain loops."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}

    def norm(x, name):
        x = (x - x.mean()) / math.sqrt(x.var() + model.config.norm_eps)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    seen = inputs[-window:]
    rows = [weights["vocabulary.embedding.weight"][token] for token in seen]
    parts = [linear(norm(row, "layers.0.attention_norm"), "layers.0.attention.qkv").reshape(3, 4, 8) for row in rows]
    heads = []
    for head in range(4):
        scores = np.array([parts[-1][0][head] @ part[1][head] / math.sqrt(8) for part in parts])
        share = np.exp(scores - scores.max())
        share /= share.sum()
        heads.append(sum(weight * part[2][head] for weight, part in zip(share, parts, strict=True)))
    x = rows[-1] + linear(np.concatenate(heads), "layers.0.attention.out")
    wide = linear(norm(x, "layers.0.ffn_norm"), "layers.0.ffn.wide")
    x = x + linear(np.maximum(wide, 0), "layers.0.ffn.narrow")
    logits = weights["vocabulary.embedding.weight"] @ norm(x, "final_norm")
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[wanted])


def test_ten_tokens_without_positions_and_with_a_window_are_as_computed_by_hand():
    target = tiny_target("none", layers=1, window=3, activation="relu")
    tokens, bos = random_tokens(10), target.bos
    stream = [bos, *tokens.tolist()]
    for length, stride in ((10, 10), (4, 4), (4, 2), (4, 1), (5, 3)):
        expected = []
        for one in Passes(10, length, stride):
            for t in range(one.first, one.stop):
                expected.append(by_hand(target.model, stream[one.start : t + 1], int(tokens[t]), window=3))
        np.testing.assert_allclose(losses(target, tokens, length, stride), expected, rtol=1e-4, atol=1e-4)


def test_a_stride_of_one_and_a_long_enough_context_change_nothing_for_a_window_of_three():
    target = tiny_target("none", layers=1, window=3)
    tokens = random_tokens(40)
    np.testing.assert_allclose(
        losses(target, tokens, 8, 1)[8:], losses(target, tokens, 40, 40)[8:], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (7, 1)])
def test_batching_does_not_change_losses(length: int, stride: int):
    target, tokens = tiny_target(), random_tokens(50)
    one_by_one = losses(target, tokens, length, stride, batch_tokens=1)
    batched = losses(target, tokens, length, stride, batch_tokens=10_000)
    assert len(one_by_one) == 50
    np.testing.assert_allclose(batched, one_by_one, rtol=1e-4, atol=1e-5)


def test_a_stride_equal_to_the_length_is_the_non_overlapping_protocol():
    target, tokens = tiny_target(), random_tokens(50)
    blocks = []
    for start in range(0, 50, 16):
        wanted = torch.tensor(tokens[start : start + 16].astype(np.int64))
        inputs = torch.cat([torch.tensor([int(tokens[start - 1]) if start else target.bos]), wanted[:-1]])
        blocks.append(target.model.token_nll(inputs[None], wanted[None])[0])
    np.testing.assert_allclose(losses(target, tokens, 16, 16), torch.cat(blocks).numpy(), rtol=1e-4, atol=1e-5)


def test_more_context_is_really_given_by_a_smaller_stride():
    """With alibi positions the loss of a target depends on its context, so the protocols must differ after the first
    window and agree inside it."""
    target, tokens = tiny_target(), random_tokens(64)
    apart, sliding = losses(target, tokens, 16, 16), losses(target, tokens, 16, 1)
    np.testing.assert_allclose(apart[:16], sliding[:16], rtol=1e-4, atol=1e-5)
    assert np.abs(apart[16:] - sliding[16:]).max() > 1e-2


def test_a_row_holds_sums_counts_and_costs(tmp_path):
    target, tokens = tiny_target(), random_tokens(100)
    row = measure(target, Sweep(tokens, [16], stride=4), 16, tmp_path / "scores.partial")
    assert (row.status, row.tokens, row.passes, row.tokens_read) == ("scored", 100, 22, 16 * 22)
    assert row.nll == pytest.approx(float(losses(target, tokens, 16, 4).astype(np.float64).sum()), rel=1e-6)
    assert row.timed == 100
    assert row.speed is not None
    assert row.memory is None or row.memory > 10_000_000
    assert sum(count for _, _, count, _ in row.positions) == 100
    assert not (tmp_path / "scores.partial").exists(), "the losses are in the row now"


def test_what_was_scored_before_a_kill_is_not_scored_again(tmp_path, monkeypatch):
    target, tokens = tiny_target(), random_tokens(100)
    plan, path = Sweep(tokens, [16], stride=4, batch_tokens=32), tmp_path / "scores.partial"
    whole = measure(target, plan, 16, path)
    real, calls = sweep_module.score_batch, []

    def killed_after_three(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sweep_module, "score_batch", killed_after_three)
    with pytest.raises(KeyboardInterrupt):
        measure(target, plan, 16, path)
    assert path.stat().st_size == 4 * (16 + 8 + 8)
    with path.open("ab") as file:
        file.write(b"torn!")
    monkeypatch.setattr(sweep_module, "score_batch", real)
    again = measure(target, plan, 16, path)
    assert again.nll == whole.nll
    assert again.timed == 100 - 32, "time is told for what was computed in this session"


def test_a_torn_pass_is_cut_off_and_a_second_writer_refused(tmp_path):
    windows = Passes(10, 4, 2)
    assert [count_complete_passes(windows, done) for done in (0, 3, 4, 5, 6, 9, 10)] == [0, 0, 4, 4, 6, 8, 10]
    path = tmp_path / "scores.partial"
    with open_scores(path, windows) as scores:
        scores.append(np.arange(5, dtype=np.float32))
        with pytest.raises(InputError, match="Another process is computing"), open_scores(path, windows):
            pass
    with open_scores(path, windows) as scores:
        assert scores.done == 4
        assert scores.read().tolist() == [0, 1, 2, 3]


def test_learned_positions_that_end_are_a_result(tmp_path):
    target, tokens = tiny_target("learned"), random_tokens(100)
    rows = [measure(target, Sweep(tokens, [16, 17]), length, tmp_path / "scores") for length in (16, 17)]
    assert rows[0].status == "scored"
    assert rows[1].status == "cannot"
    assert rows[1].reason == "the model's positions end at 16 tokens"
    assert rows[1].perplexity == math.inf


def test_running_out_of_memory_is_a_result(tmp_path):
    """Writing out the scores of 2,000 tokens takes 4 × 2,000² × 4 bytes = 64 MB, more than the 40 MB that are given."""
    target, tokens = tiny_target("t5", backend="reference", layers=1), random_tokens(2000)
    plan = Sweep(tokens, [64, 2000], memory=0.04)
    assert measure(target, plan, 64, tmp_path / "scores").status == "scored"
    row = measure(target, plan, 2000, tmp_path / "scores")
    assert (row.status, row.reason) == ("out of memory", "0.04 GB were not enough")
    assert not (tmp_path / "scores").exists()
    roomy = Sweep(tokens, [2000], memory=4)
    assert measure(target, roomy, 2000, tmp_path / "scores").status == "scored", "the limit is lifted afterwards"


def test_a_batch_too_large_for_memory_is_halved_first(monkeypatch):
    target, tokens = tiny_target(), random_tokens(20 * 16)
    easy = losses(target, tokens, 16, 16)
    real, tried = target.token_nll, []

    def only_four_fit(inputs, targets, first):
        tried.append(len(inputs))
        if len(inputs) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return real(inputs, targets, first)

    monkeypatch.setattr(target, "token_nll", only_four_fit)
    np.testing.assert_allclose(losses(target, tokens, 16, 16, batch_tokens=16 * 16), easy, rtol=1e-4, atol=1e-5)
    assert tried == [16, 8, 4, 4, 4, 4, 4], "the size that fits is kept for the rest"


def test_other_errors_are_not_taken_for_missing_memory(tmp_path, monkeypatch):
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    target = tiny_target()

    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(target, "token_nll", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        measure(target, Sweep(random_tokens(50), [16]), 16, tmp_path / "scores")


def test_losses_that_are_not_finite_are_a_result(tmp_path):
    target = tiny_target()
    with torch.no_grad():
        target.model.final_norm.weight.fill_(math.nan)
    row = measure(target, Sweep(random_tokens(50), [16]), 16, tmp_path / "scores")
    assert row.status == "not finite"
    assert row.reason == "50 of 50 targets have a loss that is not a finite number"


def test_the_cost_grows_with_what_is_read():
    target, tokens = tiny_target(), random_tokens(2000)
    seconds = calibrate(target, Sweep(tokens, [16, 256]))
    few, many = Passes(2000, 64, 64), Passes(2000, 64, 1)
    assert 0 < seconds(few) < seconds(many)
    assert seconds(many) / seconds(few) == pytest.approx(many.read / few.read)


def test_a_model_in_memory_needs_tokens():
    with pytest.raises(InputError, match="without a tokenizer"):
        ModelTarget(tiny_model(), trained_at=16).tokenizer()
