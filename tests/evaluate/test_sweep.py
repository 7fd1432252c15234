"""Tests of the scoring of a text: correct losses, batching, resumption, and lengths without a result."""

import math

import numpy as np
import pytest
import torch
from helpers import random_tokens, tiny_model, tiny_target

from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate import sweep as sweep_module
from trainshort.evaluate.sweep import (
    Sweep,
    count_complete_targets,
    make_duration_estimate,
    open_loss_file,
    score,
    score_length,
)
from trainshort.evaluate.targets import ModelTarget
from trainshort.model.transformer import TransformerLM
from trainshort.utils.machine import is_out_of_memory

OUT_OF_MEMORY_MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"


def compute_losses(target, tokens, length, stride, **options) -> np.ndarray:
    """Return the losses of all tokens of a text."""
    return np.concatenate(list(score(target, tokens, Passes(len(tokens), length, stride), **options)))


def compute_loss_by_hand(model: TransformerLM, inputs: list[int], next_token: int, window: int) -> float:
    """Return the loss of one token, computed with NumPy for the last query of a model with one layer.

    Args:
        model: A model with one layer, without positions, and with a sliding window.
        inputs: The tokens before the predicted token.
        next_token: The predicted token.
        window: The length of the sliding window.
    """
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}

    def norm(x, name):
        x = (x - x.mean()) / math.sqrt(x.var() + model.config.norm_eps)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    embeddings = [weights["vocabulary.embedding.weight"][token] for token in inputs[-window:]]
    qkv = []  # q, k and v of each token, with 4 heads of width 8
    for embedding in embeddings:
        normed = norm(embedding, "layers.0.attention_norm")
        qkv.append(linear(normed, "layers.0.attention.qkv").reshape(3, 4, 8))

    head_outputs = []
    for head in range(4):
        query = qkv[-1][0][head]
        scores = np.array([query @ token_qkv[1][head] / math.sqrt(8) for token_qkv in qkv])
        attention = np.exp(scores - scores.max())
        attention /= attention.sum()
        head_outputs.append(sum(weight * token_qkv[2][head] for weight, token_qkv in zip(attention, qkv, strict=True)))
    x = embeddings[-1] + linear(np.concatenate(head_outputs), "layers.0.attention.out")
    ffn_hidden = linear(norm(x, "layers.0.ffn_norm"), "layers.0.ffn.wide")
    x = x + linear(np.maximum(ffn_hidden, 0), "layers.0.ffn.narrow")
    logits = weights["vocabulary.embedding.weight"] @ norm(x, "final_norm")
    log_sum = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
    return float(log_sum - logits[next_token])


def test_losses_equal_losses_computed_by_hand():
    target = tiny_target("none", layers=1, window=3, activation="relu")
    tokens = random_tokens(10)
    stream = [target.bos, *tokens.tolist()]
    for length, stride in ((10, 10), (4, 4), (4, 2), (4, 1), (5, 3)):
        expected = []
        for text_pass in Passes(10, length, stride):
            for position in range(text_pass.first, text_pass.stop):
                inputs = stream[text_pass.start : position + 1]
                expected.append(compute_loss_by_hand(target.model, inputs, int(tokens[position]), window=3))
        losses = compute_losses(target, tokens, length, stride)
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4)


def test_losses_of_a_windowed_model_do_not_depend_on_longer_context():
    """The sliding window of the model has 3 tokens, so a context of 8 tokens is as good as a context of 40 tokens."""
    target = tiny_target("none", layers=1, window=3)
    tokens = random_tokens(40)
    losses = compute_losses(target, tokens, 8, 1)
    long_context_losses = compute_losses(target, tokens, 40, 40)
    np.testing.assert_allclose(losses[8:], long_context_losses[8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (7, 1)])
def test_batching_does_not_change_losses(length: int, stride: int):
    target = tiny_target()
    tokens = random_tokens(50)
    unbatched_losses = compute_losses(target, tokens, length, stride, batch_tokens=1)
    batched_losses = compute_losses(target, tokens, length, stride, batch_tokens=10_000)
    assert len(unbatched_losses) == 50
    np.testing.assert_allclose(batched_losses, unbatched_losses, rtol=1e-4, atol=1e-5)


def test_stride_equal_to_length_scores_windows_without_overlap():
    target = tiny_target()
    tokens = random_tokens(50)
    expected = []
    for start in range(0, 50, 16):
        targets = torch.tensor(tokens[start : start + 16].astype(np.int64))
        token_before = int(tokens[start - 1]) if start else target.bos
        inputs = torch.cat([torch.tensor([token_before]), targets[:-1]])
        expected.append(target.model.token_nll(inputs[None], targets[None])[0])
    losses = compute_losses(target, tokens, 16, 16)
    np.testing.assert_allclose(losses, torch.cat(expected).numpy(), rtol=1e-4, atol=1e-5)


def test_smaller_stride_gives_more_context():
    """With ALiBi, losses depend on the context. Both strides agree in the first window, and differ after it."""
    target = tiny_target()
    tokens = random_tokens(64)
    losses = compute_losses(target, tokens, 16, 16)
    stride_1_losses = compute_losses(target, tokens, 16, 1)
    np.testing.assert_allclose(losses[:16], stride_1_losses[:16], rtol=1e-4, atol=1e-5)
    assert np.abs(losses[16:] - stride_1_losses[16:]).max() > 1e-2


def test_row_has_sums_counts_and_costs(tmp_path):
    target = tiny_target()
    tokens = random_tokens(100)
    row = score_length(target, Sweep(tokens, [16], stride=4), 16, tmp_path / "losses.partial")
    assert (row.status, row.tokens, row.passes, row.tokens_read) == ("scored", 100, 22, 16 * 22)
    expected_nll = float(compute_losses(target, tokens, 16, 4).astype(np.float64).sum())
    assert row.nll == pytest.approx(expected_nll, rel=1e-6)
    assert row.timed == 100
    assert row.speed is not None
    assert row.memory is None or row.memory > 10_000_000
    assert sum(count for _, _, count, _ in row.positions) == 100
    assert not (tmp_path / "losses.partial").exists()


def test_killed_evaluation_resumes(tmp_path, monkeypatch):
    target = tiny_target()
    tokens = random_tokens(100)
    plan = Sweep(tokens, [16], stride=4, batch_tokens=32)
    path = tmp_path / "losses.partial"
    uninterrupted_row = score_length(target, plan, 16, path)
    original_score_batch = sweep_module.score_batch
    num_calls = 0

    def fail_at_fourth_call(*arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise KeyboardInterrupt
        return original_score_batch(*arguments)

    monkeypatch.setattr(sweep_module, "score_batch", fail_at_fourth_call)
    with pytest.raises(KeyboardInterrupt):
        score_length(target, plan, 16, path)
    assert path.stat().st_size == 4 * (16 + 8 + 8)
    with path.open("ab") as file:
        file.write(b"damage")  # as if the process was killed while it wrote to the file
    monkeypatch.setattr(sweep_module, "score_batch", original_score_batch)
    resumed_row = score_length(target, plan, 16, path)
    assert resumed_row.nll == uninterrupted_row.nll
    assert resumed_row.timed == 100 - 32, "only targets of this session are timed"


def test_incomplete_pass_is_removed_from_loss_file(tmp_path):
    passes = Passes(10, 4, 2)
    assert [count_complete_targets(passes, done) for done in (0, 3, 4, 5, 6, 9, 10)] == [0, 0, 4, 4, 6, 8, 10]
    path = tmp_path / "losses.partial"
    with open_loss_file(path, passes) as loss_file:
        loss_file.append(np.arange(5, dtype=np.float32))
    with open_loss_file(path, passes) as loss_file:
        assert loss_file.done == 4
        assert loss_file.read().tolist() == [0, 1, 2, 3]


def test_loss_file_is_locked(tmp_path):
    passes = Passes(10, 4, 2)
    path = tmp_path / "losses.partial"
    with (
        open_loss_file(path, passes),
        pytest.raises(InputError, match="Another process"),
        open_loss_file(path, passes),
    ):
        pass


def test_length_beyond_position_table_is_a_result(tmp_path):
    target = tiny_target("learned")
    plan = Sweep(random_tokens(100), [16, 17])
    row_at_limit, row_beyond_limit = [score_length(target, plan, length, tmp_path / "losses") for length in (16, 17)]
    assert row_at_limit.status == "scored"
    assert row_beyond_limit.status == "cannot"
    assert "16 tokens" in (row_beyond_limit.reason or "")
    assert row_beyond_limit.perplexity == math.inf


def test_missing_memory_is_a_result(tmp_path):
    """The attention scores of 2,000 tokens need 4 heads x 2,000 x 2,000 x 4 bytes = 64 MB. The limit is 40 MB."""
    target = tiny_target("t5", backend="reference", layers=1)
    tokens = random_tokens(2000)
    plan = Sweep(tokens, [64, 2000], max_gigabytes=0.04)
    assert score_length(target, plan, 64, tmp_path / "losses").status == "scored"
    row = score_length(target, plan, 2000, tmp_path / "losses")
    assert row.status == "out of memory"
    assert "0.04 GB" in (row.reason or "")
    assert not (tmp_path / "losses").exists()
    plan_with_memory = Sweep(tokens, [2000], max_gigabytes=4)
    row = score_length(target, plan_with_memory, 2000, tmp_path / "losses")
    assert row.status == "scored", "the first limit no longer applies"


def test_batch_is_halved_if_memory_is_missing(monkeypatch):
    target = tiny_target()
    tokens = random_tokens(20 * 16)
    expected = compute_losses(target, tokens, 16, 16)
    original_token_nll = target.token_nll
    tried_batch_sizes = []

    def fail_for_large_batches(inputs, targets, first):
        tried_batch_sizes.append(len(inputs))
        if len(inputs) > 4:
            raise RuntimeError(OUT_OF_MEMORY_MESSAGE)
        return original_token_nll(inputs, targets, first)

    monkeypatch.setattr(target, "token_nll", fail_for_large_batches)
    losses = compute_losses(target, tokens, 16, 16, batch_tokens=16 * 16)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    assert tried_batch_sizes == [16, 8, 4, 4, 4, 4, 4], "the batch size that fits is kept"


def test_other_errors_are_not_treated_as_missing_memory(tmp_path, monkeypatch):
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert is_out_of_memory(RuntimeError(OUT_OF_MEMORY_MESSAGE))
    target = tiny_target()

    def fail(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(target, "token_nll", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        score_length(target, Sweep(random_tokens(50), [16]), 16, tmp_path / "losses")


def test_losses_that_are_not_finite_are_a_result(tmp_path):
    target = tiny_target()
    with torch.no_grad():
        target.model.final_norm.weight.fill_(math.nan)
    row = score_length(target, Sweep(random_tokens(50), [16]), 16, tmp_path / "losses")
    assert row.status == "not finite"
    assert (row.reason or "").startswith("50 of 50 targets")


def test_estimated_duration_is_proportional_to_tokens_read():
    estimate_seconds = make_duration_estimate(tiny_target(), Sweep(random_tokens(2000), [16, 256]))
    few_passes = Passes(2000, 64, 64)
    many_passes = Passes(2000, 64, 1)
    assert 0 < estimate_seconds(few_passes) < estimate_seconds(many_passes)
    ratio = estimate_seconds(many_passes) / estimate_seconds(few_passes)
    assert ratio == pytest.approx(many_passes.read / few_passes.read)


def test_model_in_memory_has_no_tokenizer():
    with pytest.raises(InputError, match="no tokenizer"):
        ModelTarget(tiny_model(), trained_at=16).tokenizer()
